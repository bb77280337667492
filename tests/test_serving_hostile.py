"""Clients that do what the protocol forbids, at random and all at once, and one that behaves among them.

Whatever they send, nobody is told a token that the target would not have written, nothing of theirs stays behind, the
server never fails, and the one that behaves gets its texts.
"""

import contextlib
import random
import threading
import time

from serving_tools import IDS, World, nothing_left, read
from tiny import VOCAB
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from moa_spec.serving.auth import Tokens
from moa_spec.serving.identity import drafter_identity
from moa_spec.serving.messages import (
    PATH,
    SESSION_HEADER,
    VERSION,
    Bye,
    Committed,
    Hello,
    PrefixDigest,
    Refused,
    Verify,
    Welcome,
    decode_from_server,
    encode,
)
from moa_spec.serving.server import MoAServer
from moa_spec.serving.sessions import Limits

SECONDS, LENGTH = 4.0, 30
PROMPT = IDS[0].tolist()
TOKENS = {"a" * 20: "alice", "b" * 20: "bob"}
LIMITS = Limits(
    sessions=5, kv_tokens=250, grace_seconds=0.5, idle_seconds=2, hello_seconds=1, heartbeat_seconds=0.1,
    drain_seconds=0.2, retry_seconds=0.1,
)  # fmt: skip


class Attacker:
    """Talks to a server until time is up. `wrong` notes every token that is not the target's."""

    def __init__(self, world: World, url: str, answer: list[int], seed: int):
        self.world, self.url, self.answer, self.chance = world, url, answer, random.Random(seed)
        self.names: list[str] = []
        self.talks = 0
        self.wrong: list[list[int]] = []

    def run(self) -> None:
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            with contextlib.suppress(WebSocketException, OSError):
                self._talk()

    def _talk(self) -> None:
        chance = self.chance
        headers = {"Authorization": f"Bearer {chance.choice(list(TOKENS))}"}
        if self.names and chance.random() < 0.4:
            headers[SESSION_HEADER] = chance.choice(self.names)
        with connect(self.url + PATH, additional_headers=headers, compression=None, proxy=None) as connection:
            self.talks += 1
            text = PROMPT + self.answer[: chance.randint(0, 12)]
            session = chance.choice(self.names) if self.names and chance.random() < 0.5 else None
            form = chance.choice(["int8", "float32", "none"])
            identity = drafter_identity(self.world.drafter)
            hello = Hello(VERSION, identity, form, text, len(PROMPT), LENGTH, session=session)
            frame = encode(hello)
            connection.send(frame[: chance.randint(0, len(frame))] if chance.random() < 0.1 else frame)
            for _ in range(chance.randint(0, 20)):
                message = decode_from_server(connection.recv(timeout=1))
                if isinstance(message, Refused):
                    return
                if isinstance(message, Welcome):
                    session = message.session
                    self.names = [*self.names[-9:], session]
                elif isinstance(message, Committed):
                    text = text[: message.base] + message.tokens
                    if text[len(PROMPT) :] != self.answer[: len(text) - len(PROMPT)]:
                        self.wrong.append(text)
                    self._go_on(connection, str(session), message.round, text)

    def _go_on(self, connection: ClientConnection, session: str, number: int, text: list[int]) -> None:
        """The next round: as it should be, or not."""
        chance, prefix = self.chance, PrefixDigest(text).digest()
        future = self.answer[len(text) - len(PROMPT) :][: chance.randint(0, 5)]
        fine = Verify(session, number + 1, len(text), prefix, future)
        guess = [chance.randrange(VOCAB) for _ in range(4)]
        kind = chance.choice(["fine"] * 6 + ["tree", "round", "session", "twice", "noise", "bye", "gone"])
        if kind in ("fine", "twice"):
            for _ in range(1 + (kind == "twice")):
                connection.send(encode(fine))
        elif kind == "tree":  # two children of one parent may be the same, which is forbidden
            connection.send(encode(Verify(session, number + 1, len(text), prefix, guess, [-1, 0, 0, 1])))
        elif kind == "round":
            connection.send(encode(Verify(session, chance.randrange(5), len(text), prefix, future)))
        elif kind == "session":
            connection.send(encode(Verify(chance.choice(self.names), number + 1, len(text), prefix, future)))
        elif kind == "noise":
            connection.send(chance.randbytes(50))
        elif kind == "bye":
            connection.send(encode(Bye(session)))
        else:
            connection.socket.shutdown(2)


def test_one_that_behaves_among_many_that_do_not() -> None:
    world = World()
    answer = world.answer(length=LENGTH)
    with world.serving(LIMITS, tokens=Tokens(TOKENS)) as (server, url):
        attackers = [Attacker(world, url, answer, seed) for seed in range(4)]
        threads = [threading.Thread(target=attacker.run) for attacker in attackers]
        for thread in threads:
            thread.start()
        texts = 0
        while any(thread.is_alive() for thread in threads):
            client = world.client(url, token="a" * 20, cut_after=5.0, connect_timeout=30.0)
            assert read(client.generate(IDS, max_new_tokens=LENGTH))[0].tokens == answer
            texts += 1
        assert [attacker.wrong for attacker in attackers] == [[]] * 4
        assert all(attacker.talks for attacker in attackers)
        assert texts
        assert nothing_left(server)
        assert_saw_everything(server)


def assert_saw_everything(server: MoAServer) -> None:
    """The attack was one: broken messages, stolen sessions, repeated rounds, and no room."""
    assert {"invalid", "session", "503"} <= set(server.metrics.refused)
    assert server.metrics.rounds_repeated
