"""The sessions of a server: how many there may be, how many tokens they may hold, and when they are dropped.

Used from the event loop only, so nothing here waits. Knows nothing of connections but that one may belong to a session.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .decoding import RemoteText
from .messages import Committed, Hello


@dataclass(frozen=True)
class Limits:
    """What a server allows.

    Attributes:
        sessions: open at the same time, those that wait for their client to come back included.
        kv_tokens: tokens in the caches of all sessions; each reserves what its text can grow to.
        idle_seconds: a connected client that asks for nothing this long is sent away.
        grace_seconds: a text whose client is gone is kept this long; dropped earlier when others need the room.
        nodes: of one draft.
        hello_seconds: for the first message.
        heartbeat_seconds: between signs of life while the target works.
        drain_seconds: that texts in progress have at shutdown.
        retry_seconds: what a refused client is told to wait.
    """

    sessions: int = 64
    kv_tokens: int = 65536
    idle_seconds: float = 300.0
    grace_seconds: float = 60.0
    nodes: int = 64
    hello_seconds: float = 10.0
    heartbeat_seconds: float = 1.0
    drain_seconds: float = 20.0
    retry_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, not {value!r}")


class NoRoom(Exception):
    """The server is full; try again later."""


@dataclass(eq=False)
class Session:
    """One generation. `connection` is None while its client is away, since `left_at`."""

    name: str
    principal: str
    hello: Hello
    text: RemoteText
    number: int
    ready: bool = False  # the text has been read
    steps: Iterator[int] | None = None  # of the reading, once it has begun
    round: int = 0
    reply: Committed | None = None  # to the last round
    reply_held: int = 0  # what the client held before it
    counted_calls: int = 0
    connection: Any = None
    left_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one round at a time
    dropped: bool = False

    @property
    def kv_tokens(self) -> int:
        return self.hello.prompt + self.hello.max_new_tokens

    def can_resume(self, hello: Hello) -> bool:
        """Whether this text is the one that a client wants to go on with."""
        count = len(hello.tokens)
        same, mine = ((h.prompt, h.max_new_tokens, h.eos, h.sampling, h.memory == "none") for h in (hello, self.hello))
        begun = self.ready or count == len(self.text.tokens)  # a text half read must be the same
        return begun and same == mine and self.text.tokens[:count] == hello.tokens


class Sessions:
    """All sessions, and places promised to connections that have none yet."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._sessions: dict[str, Session] = {}
        self.places = 0
        self.evicted = 0
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterable[Session]:
        return iter(list(self._sessions.values()))

    @property
    def kv_tokens(self) -> int:
        """Reserved by all sessions."""
        return sum(session.kv_tokens for session in self._sessions.values())

    def take_place(self) -> None:
        """Promises room for one more session; `give_place` or `open` ends the promise.

        Raises:
            NoRoom: there are as many as there may be, and all have their clients.
        """
        while len(self) + self.places >= self.limits.sessions:
            self._evict_one()
        self.places += 1

    def give_place(self) -> None:
        self.places -= 1

    def find(self, name: str | None, principal: str) -> Session | None:
        """A session by its name; other people's do not exist."""
        session = self._sessions.get(name or "")
        return session if session is not None and session.principal == principal else None

    def open(self, principal: str, hello: Hello, text: RemoteText) -> Session:
        """A new session in a place taken before.

        Raises:
            NoRoom: the caches of others take up the budget. The place stays taken.
        """
        while self.kv_tokens + hello.prompt + hello.max_new_tokens > self.limits.kv_tokens:
            self._evict_one()
        self._numbers += 1
        session = Session(secrets.token_urlsafe(24), principal, hello, text, self._numbers)
        self._sessions[session.name] = session
        self.places -= 1
        return session

    def drop(self, session: Session) -> None:
        """Frees everything of a session."""
        session.dropped = True
        self._sessions.pop(session.name, None)

    def leave(self, session: Session, connection: Any) -> None:
        """The client of a session is gone; another connection may have taken over already."""
        if session.connection is connection:
            session.connection = None
            session.left_at = time.monotonic()

    def sweep(self) -> None:
        """Drops sessions whose clients have been gone for too long."""
        limit = time.monotonic() - self.limits.grace_seconds
        for session in self._away():
            if session.left_at < limit:
                self.drop(session)

    def _away(self) -> list[Session]:
        """Those without a client and without work in progress, the longest gone first."""
        away = [s for s in self._sessions.values() if s.connection is None and not s.lock.locked()]
        return sorted(away, key=lambda session: session.left_at)

    def _evict_one(self) -> None:
        away = self._away()
        if not away:
            raise NoRoom
        self.evicted += 1
        self.drop(away[0])
