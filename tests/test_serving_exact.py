"""Over a whole line the text is the target's, token by token, whatever the drafter, memory's format and options."""

import random
import threading
from typing import Any

import pytest
import torch
from serving_tools import IDS, LENGTH, World, guess_well, nothing_left, read
from tiny import VOCAB, prompt

import moa_spec
from moa_spec.generation import Draft, DraftPlan, record_trace
from moa_spec.generation.moa_source import MoASession
from moa_spec.serving.client import MoAClient
from moa_spec.serving.client_memory import RemoteMemory
from moa_spec.serving.decoding import RemoteText
from moa_spec.serving.events import Finished
from moa_spec.serving.memory_codec import MemoryCodec, vector_widths
from moa_spec.serving.messages import Sampling
from moa_spec.serving.sessions import Limits
from moa_spec.serving.together import verify_together


@pytest.fixture(scope="module")
def world() -> World:
    return World()


DRAFTERS: list[dict[str, Any]] = [
    {},
    {"target_layer_inference": 1},
    {"target_layer_inference": 2, "layer_self_attention_layers": [0, 2]},
    {"memory_hidden_state": "add", "draft_vocab_size": 30},
    {"memory_hidden_state": "entry", "head_norm": True, "target_layer_inference": 1},
    {"memory_hidden_state": "add", "newest_memory": True},
    {"memory_hidden_state": "add", "layer_self_attention_layers": []},
]


@pytest.mark.parametrize("options", DRAFTERS)
def test_client_drafts_what_a_drafter_beside_the_target_drafts(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round, trees and all: both halves apart propose the same as both together."""
    world = World(**options)
    proposed: list[list[int]] = []
    original = MoASession.draft

    def noted(session: MoASession, plan: DraftPlan) -> Any:
        drafts = original(session, plan)
        proposed.append(drafts[0].tokens)
        return drafts

    monkeypatch.setattr(MoASession, "draft", noted)
    moa_spec.attach(world.target, world.drafter)
    fixed = {"num_assistant_tokens": 3, "draft_breadth": 2, "draft_nodes": 6, "draft_policy": "fixed"}
    with record_trace() as trace:
        ids = world.target.generate(IDS, max_new_tokens=12, do_sample=False, assistant_model=world.drafter, **fixed)
    together, proposed[:] = list(proposed), []
    moa_spec.detach(world.target)
    with world.serving() as (_, url):
        generation = world.client(url).generate(IDS, max_new_tokens=12, prompt_lookup_num_tokens=0, **fixed)
        transcript, _ = read(generation)
    assert transcript.tokens == ids[0, IDS.shape[1] :].tolist()
    assert generation.target_calls == trace.target_calls - 1  # without the prefill
    shared = min(len(together), len(proposed))
    assert shared >= 3
    # towards the end of the text a client does not draft what would not fit
    assert proposed[: shared - 3] == together[: shared - 3]


@pytest.mark.parametrize("memory", ["int8", "bfloat16", "float32", "none"])
@pytest.mark.parametrize("breadth", [1, 3])
def test_text_is_the_targets(world: World, memory: str, breadth: int) -> None:
    with world.serving() as (server, url):
        generation = world.client(url, memory=memory).generate(IDS, max_new_tokens=LENGTH, draft_breadth=breadth)
        transcript, events = read(generation)
        assert nothing_left(server)
    assert transcript.tokens == world.answer()
    assert set(transcript.states) == {"verified"}
    assert events[-1] == Finished("length", True)


@pytest.mark.parametrize("seed", range(4))
def test_good_drafts_save_calls_and_change_nothing(world: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    r = random.Random(seed)
    ids = prompt(r.choice([1, 2, 30, 70]), seed)
    call: dict[str, Any] = {"eos_token_id": r.sample(range(3, VOCAB), 2)} if seed % 2 else {}
    penalty = r.choice([1.0, 1.3])
    answer = world.answer(ids, repetition_penalty=penalty, **call)
    guess_well(monkeypatch, ids[0].tolist() + answer, r.choice([0.5, 0.9, 1.0]), seed)
    with world.serving() as (_, url):
        generation = world.client(url).generate(
            ids,
            max_new_tokens=LENGTH,
            repetition_penalty=penalty,
            eos_token_ids=call.get("eos_token_id", []),
            draft_breadth=r.choice([1, 2]),
        )
        transcript, events = read(generation)
    assert transcript.tokens == answer
    assert generation.target_calls < 0.8 * LENGTH
    assert events[-1].reason == ("eos" if call and answer[-1] in call["eos_token_id"] else "length")


def test_one_token(world: World) -> None:
    with world.serving() as (_, url):
        transcript, _ = read(world.client(url).generate(IDS, max_new_tokens=1))
    assert transcript.tokens == world.answer(length=1)


def test_long_prompts_are_read_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_spec.serving.decoding.READ_AT_ONCE", 16)
    monkeypatch.setattr("moa_spec.serving.connection.MAX_CHUNK", 4000)
    ids = prompt(100)
    with world.serving() as (_, url):
        generation = world.client(url).generate(ids, max_new_tokens=20)
        transcript, events = read(generation)
    assert transcript.tokens == world.answer(ids, 20)
    done = [event.done for event in events if type(event).__name__ == "Progress"]
    assert done == [16, 32, 48, 64, 80, 96, 100]


def test_memory_of_long_prompts_comes_while_they_are_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moa_spec.serving.decoding.READ_AT_ONCE", 16)
    monkeypatch.setattr("moa_spec.serving.connection.EARLY_BYTES", 1 << 30)
    ids = prompt(100)
    arrived: list[tuple[int, int]] = []
    original = MoAClient.new_memory

    def noting(client: MoAClient) -> Any:
        memory = original(client)
        take = memory.take

        def taking(tokens: list[int], vectors: Any) -> None:
            arrived.append((memory.held, len(tokens)))
            take(tokens, vectors)

        memory.take = taking
        return memory

    with world.serving() as (_, url):
        client = world.client(url)
        client.level_seconds()  # whose own memory is not to be noted
        monkeypatch.setattr(MoAClient, "new_memory", noting)
        transcript, _ = read(client.generate(ids, max_new_tokens=20))
    assert transcript.tokens == world.answer(ids, 20)
    assert arrived[:7] == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16), (80, 16), (96, 4)]


def test_sampling_is_reproducible_and_has_the_targets_distribution(world: World) -> None:
    """The first two tokens' frequencies against the exact probabilities, chi-squared, with drafts in between."""
    sampling = Sampling(temperature=1.5, top_k=3, seed=5)
    ids = IDS[0].tolist()

    def write(seed: int) -> tuple[int, int]:
        text = RemoteText(world.target, world.drafter, ids, len(ids) + 3, [], sampling, seed)
        for _ in text.read():
            pass
        # a draft that always guesses the same must not make that token likelier
        text.verify(Draft([7, 11, 13], [-1, -1, -1], [0.0] * 3, ["drafter"] * 3))
        return text.tokens[len(ids)], text.tokens[len(ids) + 1]

    with torch.no_grad():

        def probabilities(tokens: list[int]) -> torch.Tensor:
            logits = world.target(torch.tensor([tokens])).logits[0, -1] / 1.5
            return logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf).softmax(-1)

        first = probabilities(ids)
        expected = {}
        for token in first.nonzero().flatten().tolist():
            for other, p in enumerate((first[token] * probabilities([*ids, token])).tolist()):
                if p > 0:
                    expected[(token, other)] = p
    draws = 200
    counts: dict[tuple[int, int], int] = {}
    for seed in range(draws):
        pair = write(seed)
        counts[pair] = counts.get(pair, 0) + 1
    assert set(counts) <= set(expected)
    likely = {pair: p for pair, p in expected.items() if p * draws >= 5}
    rest = draws * (1 - sum(likely.values()))
    chi = sum((counts.get(pair, 0) - draws * p) ** 2 / (draws * p) for pair, p in likely.items())
    if rest > 1:
        chi += (draws - sum(counts.get(pair, 0) for pair in likely) - rest) ** 2 / rest
    # mean k, variance 2k: five standard deviations
    assert chi < len(likely) + 5 * (2 * len(likely)) ** 0.5
    with world.serving() as (_, url):
        client = world.client(url)
        texts = [
            read(client.generate(IDS, max_new_tokens=20, temperature=1.0, seed=seed))[0].tokens for seed in (3, 3, 4)
        ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("form", ["int8", "bfloat16", "float32"])
def test_memory_survives_the_wire(form: str) -> None:
    widths = [6, 10]
    codec = MemoryCodec(widths, form)
    vectors = [torch.randn(5, width) * 10.0 ** torch.arange(-2, 3)[:, None] for width in widths]
    vectors[0][2] = 0
    data = codec.encode(vectors)
    assert len(data) == 5 * codec.token_bytes
    for before, after in zip(vectors, codec.decode(data, 5), strict=True):
        largest = before.abs().amax(dim=1, keepdim=True)
        tolerance = {"int8": largest / 254, "bfloat16": before.abs() / 256, "float32": torch.zeros(1)}[form]
        assert ((before - after).abs() <= tolerance + 1e-12).all()
    for broken, count in ((data[:-1], 5), (data, 4), (b"", 0), (data, -5)):
        with pytest.raises(ValueError, match="memory of"):
            codec.decode(broken, count)
    with pytest.raises(ValueError, match="finite"):
        codec.decode(b"\xff" * codec.token_bytes if form != "int8" else b"\xff\xff\xff\x7f" * 6, 1)


def test_several_clients_at_once(world: World) -> None:
    texts = [(prompt(5 + 3 * i, seed=i), 24) for i in range(6)]
    wanted = [world.answer(ids, length) for ids, length in texts]
    results: dict[int, list[int]] = {}
    with world.serving(Limits(sessions=8, kv_tokens=600, heartbeat_seconds=0.2, drain_seconds=0.2)) as (server, url):
        client: MoAClient = world.client(url, cut_after=5.0)

        def write(index: int) -> None:
            ids, length = texts[index]
            results[index] = read(client.generate(ids, max_new_tokens=length))[0].tokens

        threads = [threading.Thread(target=write, args=(index,)) for index in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [results.get(index) for index in range(len(texts))] == wanted
        assert nothing_left(server)
    assert server.metrics.tokens_committed == 6 * 24


def test_drafts_need_memory_of_the_right_size(world: World) -> None:
    memory = RemoteMemory(world.alone)
    widths = vector_widths(world.alone.config)
    memory.take([5, 6], [torch.randn(2, width) for width in widths])
    assert memory.held == 2
    with pytest.raises(RuntimeError):
        memory.take([7], [torch.randn(1, widths[0] + 1)])


@pytest.mark.parametrize("options", [{}, {"memory_hidden_state": "add", "target_layer_inference": 1}])
def test_texts_judged_together_are_those_judged_apart(options: dict[str, Any]) -> None:
    """Texts of several lengths, drafts good and bad, chains and trees, texts that end: one pass for all of them gives
    every text what a pass of its own gives it, memory included."""
    world = World(**options)
    chance = random.Random(0)
    lengths = [3, 40, 17, 9]

    def texts() -> list[RemoteText]:
        made = []
        for seed, length in enumerate(lengths):
            ids = prompt(length, seed)[0].tolist()
            drafter = None if seed == 3 else world.drafter  # and one that wants no memory
            sampling = Sampling(temperature=0.8, seed=7) if seed == 2 else Sampling()
            made.append(RemoteText(world.target, drafter, ids, length + 16 + seed, [], sampling, 5))
            list(made[-1].read())
        return made

    together, apart = texts(), texts()
    answers = [world.answer(prompt(length, seed), 24) for seed, length in enumerate(lengths)]
    while any(not text.finished for text in together):
        going = [i for i, text in enumerate(together) if not text.finished]
        drafts = []
        for i in going:
            written = len(together[i].tokens) - lengths[i]
            future = answers[i][written : written + chance.randrange(5)]
            draft = Draft.chain([t if chance.random() < 0.8 else chance.randrange(VOCAB) for t in future])
            if len(draft) > 1 and chance.random() < 0.5:
                draft.append((draft.tokens[1] + 1) % VOCAB, 0, -1.0, "drafter")
            drafts.append(draft)
        accepted = verify_together(world.target, [together[i] for i in going], drafts)
        assert accepted == [apart[i].verify(draft) for i, draft in zip(going, drafts, strict=True)]
        assert [text.tokens for text in together] == [text.tokens for text in apart]
    for i in (0, 1, 3):
        assert together[i].tokens[lengths[i] :] == answers[i][: 16 + i]
    for mine, theirs in zip(together[:3], apart[:3], strict=True):
        for a, b in zip(mine.vectors(0, mine.record.length), theirs.vectors(0, mine.record.length), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
