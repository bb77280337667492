"""Whatever happens to line or server: what is final is a prefix of the greedy answer, and nothing comes twice."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from serving_tools import IDS, Lab, World, guess_well, nothing_left
from tiny import prompt
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

from moa_spec.generation import Verified
from moa_spec.serving.client_generation import ClientGeneration
from moa_spec.serving.connection import Connection
from moa_spec.serving.decoding import MemoryRecord
from moa_spec.serving.events import Finished, Kept, LineState, Progress, Token, Transcript, Withdrawn
from moa_spec.serving.line import Address, Failed, Line, ServerUnavailable, Trying
from moa_spec.serving.link import CUTS, Link
from moa_spec.serving.messages import Committed, Message, Welcome
from moa_spec.serving.server import MoAServer, serve_in_thread
from moa_spec.serving.sessions import Limits

TOKENS = 60


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture
def lab(world: World) -> Iterator[Lab]:
    lab = Lab(world)
    yield lab
    lab.close()


def check(generation: ClientGeneration, answer: list[int], happen: Callable[[int], None]) -> Transcript:
    """Reads the events, lets things happen after each, and holds the text against the answer all the time."""
    transcript = Transcript()
    settled = 0
    for number, event in enumerate(generation):
        transcript.add(event)
        final = [
            token for token, state in zip(transcript.tokens, transcript.states, strict=True) if state == "verified"
        ]
        assert final == answer[: len(final)]
        assert transcript.states[: len(final)] == ["verified"] * len(final), "provisional tokens are at the end"
        assert len(final) >= settled, "what was final stays"
        settled = len(final)
        happen(number)
        assert number < 5000
    return transcript


def test_a_server_that_is_going_down_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([500, 503, 404])

    def dial(address: Address, session: str) -> None:
        raise InvalidStatus(Response(next(statuses), "", Headers(), b""))

    monkeypatch.setattr(Address, "dial", dial)
    line = Line(Address("ws://127.0.0.1:1"), lambda: SimpleNamespace(session="x"))
    arrived = [line.arrived.get(timeout=20) for _ in range(3)]
    assert [type(what) for what in arrived] == [Trying, Trying, Failed]
    assert "404" in str(arrived[2].error)
    assert next(statuses, None) is None


FAULTS = [
    *CUTS,
    "request lost",
    "reply lost",
    "restart",
    "eviction",
    "reply lost and eviction",
    "reply lost and restart",
]


def strike(lab: Lab, fault: str) -> None:
    """Lets a fault happen, and an end to it a moment later."""
    link = lab.link
    if fault == "restart":
        lab.restart()
    elif fault == "eviction":
        lab.evict()
        link.cut("rst")
    elif fault == "request lost":
        link.cut("blackhole-up")
        lab.later(0.2, lambda: (link.cut("rst"), link.restore()))
    elif fault.startswith("reply lost"):
        link.cut("blackhole-down")

        def end() -> None:
            link.cut("rst")
            if fault.endswith("eviction"):
                lab.evict()
            if fault.endswith("restart"):
                lab.restart()
            link.restore()

        lab.later(0.2, end)
    else:
        link.cut(fault)
        lab.later(0.6, link.restore)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault(lab: Lab, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = lab.world.answer(length=TOKENS)
    guess_well(monkeypatch, IDS[0].tolist() + answer, 0.7)
    struck = False

    def happen(number: int) -> None:
        nonlocal struck
        if not struck and len(generation.final) > 20 + IDS.shape[1]:
            struck = True
            strike(lab, fault)

    generation = lab.generate(max_new_tokens=TOKENS)
    transcript = check(generation, answer, happen)
    assert transcript.tokens == answer
    assert struck


@pytest.mark.parametrize("seed", range(6))
def test_faults_in_random_order(lab: Lab, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    answer = lab.world.answer(length=TOKENS)
    guess_well(monkeypatch, IDS[0].tolist() + answer, chance.choice([0.3, 0.8, 1.0]), seed)
    strikes = sorted(chance.sample(range(1, 70), 4), reverse=True)

    def happen(number: int) -> None:
        if strikes and number >= strikes[-1]:
            strikes.pop()
            strike(lab, chance.choice(FAULTS))

    transcript = check(lab.generate(max_new_tokens=TOKENS, patience=30.0), answer, happen)
    assert transcript.tokens == answer
    lab.settle()
    lab.link.restore()
    lab.evict()  # what a last cut may have left for its grace
    assert nothing_left(lab.server)


@pytest.mark.parametrize("cut_at", [0, 10])
def test_offline_text_is_provisional_then_revised(lab: Lab, cut_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = lab.world.answer(length=TOKENS)
    guess_well(monkeypatch, IDS[0].tolist() + answer, 0.6)
    events = []

    def happen(number: int) -> None:
        states = [event.state for event in events if isinstance(event, LineState)]
        if "offline" not in states and len(generation.final) - IDS.shape[1] > cut_at and generation.connection:
            lab.link.cut("refused")
        if sum(isinstance(e, Token) and e.state == "provisional" for e in events) == 12:
            lab.link.restore()

    generation = lab.generate(max_new_tokens=TOKENS)

    def noted() -> Iterator[object]:
        for event in generation:
            events.append(event)
            yield event

    transcript = Transcript()
    for number, event in enumerate(noted()):
        transcript.add(event)
        happen(number)
    assert transcript.tokens == answer
    assert [e.state for e in events if isinstance(e, LineState)] == ["connecting", "connected", "offline", "connected"]
    assert any(isinstance(event, Withdrawn) for event in events)
    assert events[-1] == Finished("length", True)
    assert lab.server.metrics.sessions_resumed == 1, "the cache was still there"
    assert lab.server.metrics.sessions_rebuilt == 0


@pytest.mark.parametrize("restart", [False, True])
def test_keep_lets_offline_tokens_stand(lab: Lab, restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = lab.world.answer(length=TOKENS)
    guess_well(monkeypatch, IDS[0].tolist() + answer, 0.3)
    generation = lab.generate(max_new_tokens=TOKENS, policy="keep")
    transcript, events, offline = Transcript(), [], []
    for event in generation:
        events.append(event)
        transcript.add(event)
        if len(transcript.tokens) == 15 and not offline:
            lab.link.cut("refused")
        if isinstance(event, Token) and event.state == "provisional":
            offline.append(event.token)
            if len(offline) == 10:
                if restart:
                    lab.restart()
                lab.link.restore()
    assert not any(isinstance(event, Withdrawn) for event in events)
    kept = [event for event in events if isinstance(event, Kept)]
    assert len(kept) == 1
    assert events[-1] == Finished("length", False)
    start = len(transcript.states) - transcript.states[::-1].index("kept")
    prefix = IDS[0].tolist() + transcript.tokens[:start]
    # what follows the kept tokens is the target's greedy continuation of them
    after = lab.world.answer(torch.tensor([prefix]), TOKENS - start) if start < TOKENS else []
    assert transcript.tokens[start:] == after
    assert set(offline) <= set(transcript.tokens)


def test_cut_while_the_prompts_memory_is_on_its_way(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_spec.serving.connection.MAX_CHUNK", 2000)
    ids = prompt(80)
    generation = lab.client().generate(ids, max_new_tokens=20)
    cut = False
    transcript = Transcript()
    for event in generation:
        transcript.add(event)
        if isinstance(event, Token) and not cut:
            cut = True
            lab.link.cut("refused")
            lab.later(0.3, lab.link.restore)
    assert transcript.tokens == lab.world.answer(ids, 20)


def test_no_server_is_a_clear_error_or_offline(world: World) -> None:
    client = world.client("ws://127.0.0.1:9", connect_timeout=0.5)
    with pytest.raises(ServerUnavailable, match="moa serve"):
        list(client.generate(IDS, max_new_tokens=5))
    transcript = Transcript()
    events = []
    for event in client.generate(IDS, max_new_tokens=5, start_offline=True, patience=0.1):
        transcript.add(event)
        events.append(event)
    assert transcript.states == ["provisional"] * 5
    assert events[-1] == Finished("offline", False)


def test_stop_ends_a_text_anywhere(lab: Lab) -> None:
    generation = lab.generate(max_new_tokens=TOKENS)
    transcript = Transcript()
    for event in generation:
        transcript.add(event)
        if len(transcript.tokens) == 5:
            lab.link.cut("blackhole")
            lab.later(0.2, generation.stop)
    assert event == Finished("stopped", transcript.states == ["verified"] * len(transcript.states))
    assert len(transcript.tokens) < TOKENS or lab.timers


def test_a_reader_that_goes_away_frees_the_session(lab: Lab) -> None:
    for event in lab.generate(max_new_tokens=TOKENS):
        if isinstance(event, Token):
            break
    assert nothing_left(lab.server)


def test_dead_clients_are_dropped_after_their_grace(world: World) -> None:
    limits = Limits(grace_seconds=0.3, heartbeat_seconds=0.1, drain_seconds=0.05)
    with world.serving(limits) as (server, url), Link("127.0.0.1", int(url.rsplit(":", 1)[1])) as link:
        generation = world.client(f"ws://127.0.0.1:{link.port}", cut_after=0.4).generate(IDS, max_new_tokens=30)
        events = iter(generation)
        while not isinstance(next(events), Token):
            pass
        link.cut("refused")
        time.sleep(0.1)
        assert len(server.sessions) == 1
        assert nothing_left(server)
        link.restore()
        for _ in events:
            pass
        assert generation.final[IDS.shape[1] :] == world.answer(length=30)
        assert server.metrics.sessions_rebuilt == 1


@pytest.mark.parametrize("seed", range(4))
def test_kept_tokens_stand_through_more_faults(lab: Lab, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy "keep", cut again and again, also while the kept tokens are on their way: nothing is ever withdrawn."""
    chance = random.Random(seed)
    guess_well(monkeypatch, IDS[0].tolist() + lab.world.answer(length=TOKENS), 0.5, seed)
    generation = lab.generate(max_new_tokens=TOKENS, policy="keep", patience=30.0)
    transcript, offline = Transcript(), {}
    strikes = sorted(chance.sample(range(3, 60), 4), reverse=True)
    for number, event in enumerate(generation):
        assert not isinstance(event, Withdrawn)
        transcript.add(event)
        if isinstance(event, Token) and event.state == "provisional":
            offline[event.position] = event.token
        if strikes and number >= strikes[-1]:
            strikes.pop()
            strike(lab, chance.choice(FAULTS))
    assert len(transcript.tokens) == TOKENS
    assert all(transcript.tokens[position] == token for position, token in offline.items())
    assert generation.final[IDS.shape[1] :] == transcript.tokens
    assert isinstance(event, Finished)
    assert event.exact == ("kept" not in transcript.states)
    # every token that is called the target's is its greedy choice after all that stands before it
    with torch.no_grad():
        choices = lab.world.target(torch.tensor([generation.final])).logits[0].argmax(-1).tolist()
    for index, (token, state) in enumerate(zip(transcript.tokens, transcript.states, strict=True)):
        if state == "verified":
            assert token == choices[IDS.shape[1] - 1 + index]


def test_a_cut_while_the_prompt_is_read_costs_nothing_that_was_read(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_spec.serving.decoding.READ_AT_ONCE", 8)
    ids = prompt(80)
    read_at: list[int] = []
    original = MemoryRecord.observe

    def slowly(record: MemoryRecord, verified: Verified) -> None:
        time.sleep(0.02)
        read_at.append(record.length)
        original(record, verified)

    monkeypatch.setattr(MemoryRecord, "observe", slowly)
    transcript, cuts = Transcript(), 0
    for event in lab.client().generate(ids, max_new_tokens=10, offline=False):
        transcript.add(event)
        if isinstance(event, Progress) and event.done >= 24 * (cuts + 1) and cuts < 2:
            cuts += 1
            lab.link.cut("rst")
    assert cuts == 2
    assert transcript.tokens == lab.world.answer(ids, 10)
    assert read_at[:10] == list(range(0, 80, 8)), "every part of the prompt was read once"
    assert lab.server.metrics.sessions_resumed == 2
    assert nothing_left(lab.server)


@pytest.mark.parametrize("left_out", [Welcome, Committed])
def test_a_server_that_leaves_out_a_message_is_a_cut_line(
    lab: Lab, left_out: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its welcome there is nothing to ask for; without the first token there is memory of all tokens."""
    original, missing = Connection._send, [left_out]

    async def send(connection: Connection, message: Message) -> None:
        if missing and isinstance(message, missing[0]):
            missing.clear()
        else:
            await original(connection, message)

    monkeypatch.setattr(Connection, "_send", send)
    transcript = check(lab.generate(max_new_tokens=20), lab.world.answer(length=20), lambda number: None)
    assert transcript.tokens == lab.world.answer(length=20)
    assert not missing


def test_servers_send_clients_away_when_their_time_is_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is longer than the drain goes on offline, and the server says why instead of failing."""
    original = MemoryRecord.observe

    def slowly(record: MemoryRecord, verified: Verified) -> None:
        time.sleep(0.1)
        original(record, verified)

    monkeypatch.setattr(MemoryRecord, "observe", slowly)
    server = MoAServer(world.target, world.drafter, Limits(drain_seconds=0.1, heartbeat_seconds=0.1))
    stack = contextlib.ExitStack()
    client = world.client(stack.enter_context(serve_in_thread(server)))
    states, written = [], 0
    for event in client.generate(IDS, max_new_tokens=200, patience=0.2):
        states += [event] if isinstance(event, LineState) else []
        written += isinstance(event, Token)
        if written == 5:
            threading.Thread(target=stack.close).start()
            written += 1
    assert "shutting down" in next(state.detail for state in states if state.state == "offline")
    assert event == Finished("offline", False)
