"""A client's line to its server: dials in the background, again and again, until the text is caught up with.

Everything that arrives goes into a queue, so that whoever reads it can do something else meanwhile. Knows the order of
messages at the beginning of a connection; not what they mean for a text.
"""

import contextlib
import queue
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from .auth import is_loopback
from .messages import (
    PATH,
    SESSION_HEADER,
    Committed,
    Hello,
    Memory,
    ProtocolError,
    Refused,
    Welcome,
    Working,
    decode_from_server,
    encode,
)

LONGEST_FRAME = 64 * 1024 * 1024
FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0


class ServerUnavailable(ConnectionError):
    """There is no server, or it has no room."""


class ServerRefused(RuntimeError):
    """The server will not serve this client, however often it asks."""


@dataclass(frozen=True)
class Address:
    """Where the server is and how to show who one is.

    Args:
        url: "ws://" or "wss://", host and port.
        token: bearer token.
        ca_file: certificates to trust instead of the system's.
        allow_insecure: send the token without TLS to another machine.
        cut_after: seconds of silence after which a line counts as cut.

    Raises:
        ValueError: this is no such address, or the token would travel in the clear.
        FileNotFoundError: there is no such ca_file.
    """

    url: str
    token: str | None = None
    ca_file: str | None = None
    allow_insecure: bool = False
    cut_after: float = 3.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ValueError(f"A server's address looks like wss://host:port, not {self.url!r}")
        if self.token and parts.scheme == "ws" and not is_loopback(parts.hostname) and not self.allow_insecure:
            raise ValueError("The token would travel in the clear: use wss://, or allow it with allow_insecure=True")
        self.context()

    def context(self) -> ssl.SSLContext | None:
        if urlsplit(self.url).scheme == "ws":
            return None
        return ssl.create_default_context(cafile=self.ca_file)

    def dial(self, session: str | None) -> ClientConnection:
        """
        Raises:
            OSError, TimeoutError, WebSocketException: as it happens.
        """
        headers = {} if session is None else {SESSION_HEADER: session}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        near = is_loopback(urlsplit(self.url).hostname or "")
        connection = connect(
            self.url.rstrip("/") + PATH,
            additional_headers=headers,
            ssl=self.context(),
            compression=None,
            max_size=LONGEST_FRAME,
            open_timeout=max(self.cut_after, 1.0),
            close_timeout=1.0,
            proxy=None if near else True,
        )
        return connection.__enter__()  # closed by whoever has it in the end; a `with` block would be left too early


@dataclass(frozen=True)
class Ready:
    """The connection has caught up with the text and waits for the next round."""

    connection: ClientConnection


@dataclass(frozen=True)
class Trying:
    """An attempt failed; another follows."""

    error: Exception


@dataclass(frozen=True)
class Failed:
    """The server refused; nothing follows."""

    error: ServerRefused


Said = Welcome | Working | Committed | Memory
Arrived = Said | Ready | Trying | Failed


# What a server, or a proxy before it, answers while it is busy or going down (500: it stopped in the middle of the
# handshake); it may be back. Anything else is its last word.
PASSING = (429, 500, 502, 503, 504)


class Line:
    """Dials until it is `Ready`, has `Failed` or is given up. One thread, one connection in the end.

    Args:
        hello: what to say first, as of the moment of saying it.

    Attributes:
        welcome_seconds: from hello to welcome: the line's round trip, before any of the target's work.
    """

    def __init__(self, address: Address, hello: Callable[[], Hello]):
        self.address, self.hello = address, hello
        self.arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self.welcome_seconds = 0.0
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._connection: ClientConnection | None = None
        self._thread = threading.Thread(target=self._run, name="moa-line", daemon=True)
        self._thread.start()

    def give_up(self, farewell: bytes | None = None) -> None:
        """Stops dialling; what is half open is closed, after a last message if there is one to be said."""
        self._given_up.set()
        with self._lock:
            if self._connection is not None:
                if farewell is not None:
                    with contextlib.suppress(OSError, WebSocketException):
                        self._connection.send(farewell)
                abandon(self._connection)

    def _run(self) -> None:
        wait = FIRST_WAIT
        while not self._given_up.is_set():
            hint: float | None = None
            error: Exception
            try:
                connection = self._open()
                try:
                    self._catch_up(connection)
                except BaseException:
                    abandon(connection)
                    raise
                with self._lock:
                    if self._given_up.is_set():
                        abandon(connection)
                    else:
                        self._connection = None  # the reader's from here on
                        self.arrived.put(Ready(connection))
                return
            except Refusal as refusal:
                if refusal.final:
                    self.arrived.put(Failed(ServerRefused(str(refusal))))
                    return
                hint, error = refusal.retry_after, refusal
            except (OSError, TimeoutError, WebSocketException, ProtocolError) as failure:
                error = failure
            if self._given_up.is_set():
                return
            self.arrived.put(Trying(error))
            self._given_up.wait(max(hint or 0.0, wait * random.uniform(0.5, 1.0)))
            wait = min(2 * wait, LONGEST_WAIT)

    def _open(self) -> ClientConnection:
        try:
            connection = self.address.dial(self.hello().session)
        except InvalidStatus as error:
            status, body = error.response.status_code, (error.response.body or b"").decode("utf-8", "replace").strip()
            message = f"the server answered {status}" + (f": {body[:200]}" if body else "")
            if status in PASSING:
                raise Refusal(message, False, _seconds(error.response.headers.get("Retry-After"))) from error
            raise Refusal(message, True) from error
        except InvalidURI as error:
            raise Refusal(str(error), True) from error
        except InvalidHandshake as error:
            raise ConnectionError(f"no such server there: {error}") from error
        with self._lock:
            self._connection = connection
            if self._given_up.is_set():
                abandon(connection)
        return connection

    def _catch_up(self, connection: ClientConnection) -> None:
        hello = self.hello()
        began = time.monotonic()
        connection.send(encode(hello))
        message = receive(connection, self.address.cut_after)
        if not isinstance(message, Welcome):
            raise ProtocolError("the server's first message is no welcome")
        self.welcome_seconds = time.monotonic() - began
        self.arrived.put(message)
        held, wanted = hello.held, None
        while wanted is None or held < wanted:
            message = receive(connection, self.address.cut_after)
            self.arrived.put(message)
            if isinstance(message, Committed):
                wanted = message.held
            elif isinstance(message, Memory):
                held = message.start + message.count


def receive(connection: ClientConnection, seconds: float) -> Said:
    """The next message.

    Raises:
        TimeoutError: none came in time.
        ProtocolError: it is none.
        ConnectionClosed: the line is cut.
        Refusal: the server says why it ends the connection.
    """
    try:
        frame = connection.recv(timeout=seconds)
    except TimeoutError:
        raise TimeoutError(f"nothing came for {seconds:.1f} s") from None
    message = decode_from_server(frame)
    if isinstance(message, Refused):
        final = message.reason in ("version", "drafter", "invalid")
        raise Refusal(message.message, final, message.retry_after)
    return message


class Refusal(ConnectionError):
    def __init__(self, message: str, final: bool, retry_after: float | None = None):
        super().__init__(message)
        self.final, self.retry_after = final, retry_after


def abandon(connection: ClientConnection) -> None:
    """Closes at once, without the farewell that a dead line would make us wait for."""
    with contextlib.suppress(OSError):
        connection.socket.shutdown(socket.SHUT_RDWR)


def _seconds(header: str | None) -> float | None:
    try:
        return min(max(float(header or ""), 0.0), 3600.0)
    except ValueError:
        return None
