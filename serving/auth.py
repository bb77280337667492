"""Who may use a server: bearer tokens from a file, and where a server may listen without any."""

import hashlib
import hmac
import ipaddress
from pathlib import Path

SHORTEST_TOKEN = 16
ANYONE = "anyone"  # the principal of a server without tokens


class Tokens:
    """Bearer tokens and the names of those who hold them.

    The file has one `name token` per line; empty lines and lines that begin with # are left out. Only hashes stay in
    memory, and a token is compared with all of them in constant time.
    """

    def __init__(self, names: dict[str, str]):
        """`names`: name by token."""
        self._names = {hashlib.sha256(token.encode()).digest(): name for token, name in names.items()}

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokens":
        """
        Raises:
            OSError: the file cannot be read.
            ValueError: a line is not a name and a token, a token is short or there twice, or there is none.
        """
        names: dict[str, str] = {}
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            parts = line.split()
            if len(parts) != 2:
                raise ValueError(f"{path}, line {number}: a line is a name, a space and a token")
            name, token = parts
            if len(token) < SHORTEST_TOKEN:
                raise ValueError(
                    f"{path}, line {number}: the token of {name} has fewer than {SHORTEST_TOKEN} characters; make one "
                    'with python -c "import secrets; print(secrets.token_urlsafe())"'
                )
            if token in names:
                raise ValueError(f"{path}, line {number}: {name} has the token of {names[token]}")
            names[token] = name
        if not names:
            raise ValueError(f"{path} holds no token: write lines of a name, a space and a token")
        return cls(names)

    def principal(self, authorization: str | None) -> str | None:
        """The name behind an Authorization header, or None."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, name in self._names.items():  # all of them, so that time says nothing
            if hmac.compare_digest(known, digest):
                found = name
        return found if scheme.lower() == "bearer" else None


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(host: str, tokens: Tokens | None) -> None:
    """
    Raises:
        ValueError: others could reach this address, and there are no tokens.
    """
    if tokens is None and not is_loopback(host):
        raise ValueError(
            f"Without tokens a server listens on this machine only, and {host!r} can be reached from others: pass "
            "--token-file, or leave --host out"
        )
