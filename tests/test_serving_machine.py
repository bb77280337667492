"""Everything that can go wrong between client and server, in any order.

Hypothesis drives the real client and the real server on tiny models: the line is cut, single messages get lost, come
twice, late or from a connection that is over, the server is restarted or forgets the text, the reader cancels, a second
client reads from the same server. After every step: what is called the target's is the target's (when sampling, among
the tokens that it may draw), and nothing is committed twice. In the end: the text is complete, and nobody holds a
session, a token or a thread any more.

More examples, and others in every run: MOA_MACHINE_EXAMPLES=500.
"""

import asyncio
import functools
import os
import queue
import sys
import threading
import time
from collections import Counter, deque
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from serving_tools import IDS, Lab, World, guess_well, nothing_left

from moa_spec.serving.client_generation import ClientGeneration
from moa_spec.serving.client_memory import RemoteMemory
from moa_spec.serving.decoding import RemoteText
from moa_spec.serving.events import Confirmed, Event, Finished, Kept, Token, Transcript, Withdrawn
from moa_spec.serving.link import CUTS, Cut
from moa_spec.serving.messages import (
    Adopt,
    Bye,
    Committed,
    Hello,
    Memory,
    Sampling,
    Verify,
    Welcome,
    Working,
    decode_from_client,
    decode_from_server,
)
from moa_spec.serving.sessions import Limits

TOKENS = 60
SEED = 2
EVENTS = st.integers(2, 12)  # that are read after something has happened
PROMPT = IDS[0].tolist()
TOP_K = 3  # that sampling draws from; the greedy answer is one of these texts, so that drafts of it are often right
# short enough for a lost goodbye to cost a moment only, and for texts to be forgotten while their clients are away
LIMITS = Limits(
    grace_seconds=0.6, heartbeat_seconds=0.1, drain_seconds=0.05, retry_seconds=0.1, hello_seconds=1, idle_seconds=3
)
NAMES = {
    Hello: "hello", Verify: "request", Adopt: "request", Bye: "bye", Welcome: "welcome", Committed: "reply",
    Memory: "memory", Working: "working",
}  # fmt: skip
# "late" within what the client waits for, "too late" beyond; "replayed" comes again after the next message; "held"
# comes when its client has connected anew
SECONDS = {"late": 0.1, "too late": 0.4}


class Frames:
    """What happens to single messages at the server's door, which `Link`, a line of bytes, cannot do.

    Attributes:
        fates: what is to happen to the next message of a name.
        exact: every committed token must be of `answer`, the greedy text.
        wrong: commits that should not have been.
        happened: how often.
    """

    def __init__(self, answer: list[int], exact: bool, happened: Counter[str]):
        self.answer, self.exact, self.happened = answer, exact, happened
        self.fates: list[tuple[str, str]] = []
        self.wrong: list[Committed] = []
        self.hellos = 0
        self.free = False  # nothing is held any more
        self._rounds: dict[tuple[str, int], Committed] = {}

    def __call__(self, app: Any) -> Any:
        """The application with this around it."""

        async def around(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "websocket":
                await app(scope, receive, send)
                return
            again: deque[Any] = deque()  # copies to be delivered
            replay: list[Any] = []  # copies to be delivered after the next message
            greeted = False

            async def take() -> Any:
                if again:
                    return again.popleft()
                while True:
                    event = await receive()
                    if event["type"] != "websocket.receive":
                        return event
                    name = NAMES[type(decode_from_client(event["bytes"]))]
                    hellos = self.hellos
                    again.extend(replay)
                    replay.clear()
                    fate = await self._meet(name)
                    if fate == "lost":
                        continue
                    if fate == "held":
                        deadline = time.monotonic() + 2
                        while self.hellos == hellos and not self.free and time.monotonic() < deadline:
                            await asyncio.sleep(0.01)
                    (again if fate == "twice" else replay if fate == "replayed" else []).append(event)
                    self.hellos += name == "hello"
                    return event

            async def give(event: Any) -> None:
                nonlocal greeted
                if event["type"] != "websocket.send":
                    await send(event)
                    return
                message = decode_from_server(event["bytes"])
                if isinstance(message, Committed):
                    self._check(message, greeted)
                    greeted = True
                fate = await self._meet(NAMES.get(type(message), "refused"))
                for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
                    await send(event)

            await app(scope, take, give)

        return around

    async def _meet(self, name: str) -> str:
        fates = self.fates
        for index, (subject, fate) in enumerate(fates):
            if subject == name:
                del fates[index]
                self.happened[f"{name} {fate}"] += 1
                await asyncio.sleep(SECONDS.get(fate, 0))
                return fate
        return "fine"

    def _check(self, reply: Committed, greeted: bool) -> None:
        """A round has one answer for ever; the answer to hello has the number of a round but is none."""
        end = reply.base + len(reply.tokens)
        if self.exact and reply.tokens != self.answer[reply.base : end]:
            self.wrong.append(reply)
        if greeted and self._rounds.setdefault((reply.session, reply.round), reply) != reply:
            self.wrong.append(reply)


class Reader(threading.Thread):
    """Reads one text, as many events as it may."""

    def __init__(self, generation: ClientGeneration, account: "Account"):
        super().__init__(name="moa-reader", daemon=True)
        self.generation, self.account = generation, account
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.may = threading.Semaphore(0)
        self.leaves = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            events = iter(self.generation)
            while not self.leaves:
                self.may.acquire()
                event = None if self.leaves else next(events, None)
                if event is None:
                    break
                self.events.put(event)
            events.close()  # type: ignore[attr-defined]
        except BaseException as error:
            self.error = error

    def leave(self) -> None:
        """As a reader does that breaks out of its loop."""
        self.leaves = True
        self.may.release()


class Account:
    """What the reader was told, held against what the target says.

    Args:
        policy: what becomes of tokens that the target would not have written.
        top_k: tokens of the highest logits that it may write; 1 is greedy.
    """

    def __init__(self, world: World, answer: list[int], policy: str, top_k: int):
        self.world, self.answer, self.top_k = world, answer, top_k
        self.never = Kept if policy == "revise" else Withdrawn
        self.exact = policy == "revise" and top_k == 1
        self.transcript = Transcript()
        self.settled = 0  # tokens that must not change any more, nor come again
        self.checked = 0
        self.finished: Finished | None = None

    def add(self, event: Event) -> None:
        assert self.finished is None, f"{event} after the end"
        assert not isinstance(event, self.never)
        self.transcript.add(event)
        if isinstance(event, Token) and event.state == "provisional":
            return
        if isinstance(event, (Token, Confirmed, Kept, Withdrawn)):
            assert event.position == self.settled, f"{event}, where {self.settled} tokens are settled"
        if isinstance(event, Token):
            self.settled += 1
        elif isinstance(event, (Confirmed, Kept)):
            self.settled += event.count
        elif isinstance(event, Finished):
            self.finished = event

    def check(self) -> None:
        """Every token that is called the target's is what it may write after all that stands before it."""
        tokens, states = self.transcript.tokens, self.transcript.states
        assert "provisional" not in states[: self.settled]
        if self.exact:
            assert tokens[: self.settled] == self.answer[: self.settled]
        if self.checked < self.settled:
            with torch.no_grad():
                text = torch.tensor([PROMPT + tokens[: self.settled]])
                choices = self.world.target(text).logits[0, len(PROMPT) - 1 :].topk(self.top_k).indices.tolist()
            for index in range(self.checked, self.settled):
                assert states[index] == "kept" or tokens[index] in choices[index]
            self.checked = self.settled

    def check_end(self, length: int, eos: list[int]) -> None:
        """`length` tokens, or up to the first of `eos`."""
        assert self.finished is not None
        tokens, states = self.transcript.tokens, self.transcript.states
        assert "provisional" not in states
        assert self.finished.exact == ("kept" not in states)
        if self.finished.reason == "eos":
            assert tokens[-1] in eos
        else:
            assert self.finished.reason == "length"
            assert len(tokens) == length
        if self.exact:
            ends = [index + 1 for index, token in enumerate(self.answer[:length]) if token in eos]
            assert tokens == self.answer[: min(ends, default=length)]


@functools.cache
def world(layers: int) -> World:
    return World(target_layer_inference=layers)


@functools.cache
def greedy(layers: int) -> list[int]:
    return world(layers).answer(length=TOKENS + 1)


class Machine(RuleBasedStateMachine):
    happened: ClassVar[Counter[str]] = Counter()  # over all examples
    failures: ClassVar[list[Exception]] = []

    @initialize(
        layers=st.integers(0, 1),
        policy=st.sampled_from(["revise", "keep"]),
        offline=st.sampled_from([True, True, True, False]),
        accuracy=st.sampled_from([0.5, 0.7, 0.9]),
        memory=st.sampled_from(["float32", "int8", "none"]),
        draft_policy=st.sampled_from(["fixed", "auto"]),
        ends_at=st.sampled_from([None, 40]),
        top_k=st.sampled_from([1, 1, TOP_K]),
    )
    def set_up(
        self,
        layers: int,
        policy: str,
        offline: bool,
        accuracy: float,
        memory: str,
        draft_policy: str,
        ends_at: int | None,
        top_k: int,
    ) -> None:
        self.threads = set(threading.enumerate())
        self.world, self.answer, self.memory, self.top_k = world(layers), greedy(layers), memory, top_k
        self.exact = policy == "revise" and top_k == 1
        self.eos = [] if ends_at is None else [self.answer[ends_at]]
        self.options = {"policy": policy, "offline": offline, "draft_policy": draft_policy, "eos_token_ids": self.eos}
        if top_k > 1:
            self.options |= {"temperature": 1.0, "top_k": top_k, "seed": SEED}
            self.happened["sampled"] += 1
        self.patches = pytest.MonkeyPatch()
        guess_well(self.patches, PROMPT + self.answer, accuracy)
        self._watch_memory()
        self.patches.setattr("moa_spec.serving.line.FIRST_WAIT", 0.05)
        self.patches.setattr("moa_spec.serving.line.LONGEST_WAIT", 0.3)
        self.frames = Frames(PROMPT + self.answer, self.exact, self.happened)
        self.lab = Lab(self.world, LIMITS, self.frames)
        self.reader = self._begin(f"ws://127.0.0.1:{self.lab.link.port}")
        self.other: Reader | None = None

    def _watch_memory(self) -> None:
        original = RemoteMemory.take
        self.taken: list[tuple[RemoteMemory, int, list[torch.Tensor]]] = []

        def take(memory: RemoteMemory, tokens: list[int], vectors: list[torch.Tensor]) -> None:
            self.taken.append((memory, memory.held, vectors))
            original(memory, tokens, vectors)

        self.patches.setattr(RemoteMemory, "take", take)

    def _begin(self, url: str) -> Reader:
        client = self.world.client(url, memory=self.memory, cut_after=0.2, connect_timeout=60.0)
        generation = client.generate(IDS, max_new_tokens=TOKENS, num_assistant_tokens=4, patience=60.0, **self.options)
        return Reader(generation, Account(self.world, self.answer, self.options["policy"], self.top_k))

    @property
    def readers(self) -> list[Reader]:
        return [self.reader] if self.other is None else [self.reader, self.other]

    def _hear(self, reader: Reader, seconds: float, events: int = 10_000) -> None:
        """Takes in what the reader is told, so many events, while it comes or until time is up."""
        deadline = time.monotonic() + seconds
        while events and (time.monotonic() < deadline) and (reader.is_alive() or not reader.events.empty()):
            try:
                event = reader.events.get(timeout=0.02)
            except queue.Empty:
                continue
            events -= 1
            self.happened[type(event).__name__] += 1
            reader.account.add(event)

    # -- what may happen -----------------------------------------------------------------------------------------------

    def _read(self, events: int) -> None:
        self.reader.may.release(events)
        self._hear(self.reader, 0.4, events)

    @rule(
        fates=st.lists(
            st.sampled_from(["twice", "lost", "held", "replayed", "late", "too late"]), min_size=1, max_size=3
        ),
        events=EVENTS,
    )
    def ask(self, fates: list[str], events: int) -> None:
        """The next rounds' requests."""
        self.frames.fates += [("request", fate) for fate in fates]
        self._read(events)

    @rule(
        name=st.sampled_from(["reply", "memory"]),
        fates=st.lists(st.sampled_from(["lost", "twice", "too late", "late"]), min_size=1, max_size=3),
        events=EVENTS,
    )
    def answer(self, name: str, fates: list[str], events: int) -> None:
        self.frames.fates += [(name, fate) for fate in fates]
        self._read(events)

    @rule(
        message=st.sampled_from(
            [
                *(("hello", fate) for fate in ("lost", "too late", "held")),
                *(("welcome", fate) for fate in ("lost", "twice", "too late")),
            ]
        ),
        events=EVENTS,
    )
    def greet(self, message: tuple[str, str], events: int) -> None:
        """On a new connection. Hello comes once: a second one is refused for good, as the protocol says."""
        self.frames.fates.append(message)
        self.lab.link.cut("rst")
        self._read(events)

    @rule(kind=st.sampled_from(CUTS), alone=EVENTS, events=EVENTS)
    def cut(self, kind: Cut, alone: int, events: int) -> None:
        """Cut for a while, in which the client writes alone."""
        self._cut(kind, alone)
        self.lab.link.restore()
        self._read(events)

    @rule(kind=st.sampled_from(CUTS), events=EVENTS)
    def cut_for_longer(self, kind: Cut, events: int) -> None:
        """Something else restores it."""
        self._cut(kind, events)

    def _cut(self, kind: Cut, events: int) -> None:
        self.happened[kind] += 1
        self.lab.link.cut(kind)
        self._read(events)

    @rule(how=st.sampled_from(["restart", "crash", "eviction", "eviction and cut"]), events=EVENTS)
    def forget(self, how: str, events: int) -> None:
        """The server does not know the text any more."""
        self.happened[how] += 1
        if how == "crash":  # nobody hears a farewell
            self.lab.link.cut("refused")
        if how == "eviction and cut":
            self.lab.link.cut("rst")
        if how.startswith("eviction"):
            self.lab.evict()
        else:
            self.frames.free = True  # what waits at the door goes down with the server
            self.lab.restart()
            self.frames.free = False
            self.lab.link.restore()
        self._read(events)

    @rule(events=EVENTS)
    def beside(self, events: int) -> None:
        """A second client reads its text, over a line that nobody cuts, from the server that has all the troubles."""
        self.happened["beside"] += 1
        if self.other is None:
            self.other = self._begin(self.lab.url)
        self.other.may.release(events)
        self._hear(self.other, 0.4, events)

    @rule(
        how=st.sampled_from(["stop", "leave"]),
        goodbye=st.sampled_from(["fine", "lost", "twice", "too late"]),
        events=EVENTS,
    )
    def cancel(self, how: str, goodbye: str, events: int) -> None:
        """The reader has enough, and begins another text."""
        self.happened[how] += 1
        self.frames.fates.append(("bye", goodbye))
        self._cancel(how)
        self.reader = self._begin(f"ws://127.0.0.1:{self.lab.link.port}")
        self._read(events)

    def _cancel(self, how: str) -> None:
        reader = self.reader
        if how == "leave":
            reader.leave()
            reader.join(0.5)  # a reader can leave between events only
        if reader.is_alive():
            reader.generation.stop()
            reader.may.release(10_000)
        self._hear(reader, 10)
        reader.join(5)
        assert not reader.is_alive(), "a text that was cancelled ends"
        self.honest()
        finished = reader.account.finished
        if finished is not None:
            assert finished.exact == (set(reader.account.transcript.states) <= {"verified"})
        self._check_memory(reader)

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def honest(self) -> None:
        for reader in self.readers:
            while not reader.events.empty():
                reader.account.add(reader.events.get())
            if reader.error is not None:
                raise reader.error
            reader.account.check()
        assert not self.frames.wrong
        if self.exact:
            for session in self.lab.server.sessions:
                tokens = list(session.text.tokens)
                assert tokens == (PROMPT + self.answer)[: len(tokens)]

    def _check_memory(self, reader: Reader) -> None:
        """The client drafts from memory of its own text, every token's once."""
        text, mine = reader.generation.final, reader.generation.memory
        taken = [(start, vectors) for memory, start, vectors in self.taken if memory is mine]
        assert [start for start, _ in taken] == [sum(len(v[0]) for _, v in taken[:n]) for n in range(len(taken))]
        if self.memory != "float32" or not taken:
            return
        alone = RemoteText(self.world.target, self.world.drafter, text, len(text) + 1, [], Sampling(), 0)
        for _ in alone.read():
            pass
        for start, vectors in taken:
            for told, true in zip(vectors, alone.vectors(start, start + len(vectors[0])), strict=True):
                torch.testing.assert_close(told, true.to(told.dtype), rtol=1e-3, atol=1e-3)

    def teardown(self) -> None:
        failure = sys.exception()  # of a rule; it would be hidden by what the end finds
        try:
            if failure is None:
                self._finish()
        except Exception as error:
            failure = error
            raise
        finally:
            if isinstance(failure, Exception):
                self.failures.append(failure)
            for reader in self.readers:
                reader.generation.stop()
                reader.may.release(10_000)
                reader.join(5)
            self.lab.close()
            self.patches.undo()
        self._check_threads()

    def _finish(self) -> None:
        """Nothing more goes wrong, and the texts are read to their ends."""
        self.frames.fates, self.frames.free = [], True
        self.lab.link.restore()
        for reader in self.readers:
            reader.may.release(10_000)
        for reader in self.readers:
            self._hear(reader, 30)
            reader.join(5)
            assert not reader.is_alive(), "the line is back, so the text ends"
        self.honest()
        for reader in self.readers:
            reader.account.check_end(TOKENS, self.eos)
            assert reader.generation.final == PROMPT + reader.account.transcript.tokens
            self._check_memory(reader)
        assert nothing_left(self.lab.server)
        for server in self.lab.servers:
            assert not {"error", "invalid", "version", "drafter"} & set(server.metrics.refused)
            for name in ("sessions_resumed", "sessions_rebuilt", "rounds_repeated"):
                self.happened[name] += getattr(server.metrics, name)

    def _check_threads(self) -> None:
        deadline = time.monotonic() + 5
        while left := set(threading.enumerate()) - self.threads:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.01)


def test_whatever_happens() -> None:
    examples = int(os.environ.get("MOA_MACHINE_EXAMPLES", "0"))
    if not examples:
        seed(SEED)(Machine)
    bounds = settings(
        max_examples=examples or 16,
        stateful_step_count=12,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # when a fault strikes is a matter of time, so that smaller examples say little
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    try:
        run_state_machine_as_test(Machine, settings=bounds)
    except Flaky as error:  # the steps that failed did not fail again, for the same reason
        raise Machine.failures[0] from error
    needed = {"sessions_resumed", "sessions_rebuilt", "rounds_repeated", "Confirmed", "Withdrawn", "Kept"}
    needed |= {"sampled", "beside"}
    assert needed <= (+Machine.happened).keys(), f"this tested little: {Machine.happened}"
