"""The probes and goals: on a tiny target with a clock of its own, what they find is known."""

import json
from types import SimpleNamespace

import pytest
import torch
from bench_mock import DRAFT, STEP, VERIFY, FakeClock, mock_target
from tiny import prompt, tiny_drafter

from moa_spec.benchmarks import goals, probes
from moa_spec.benchmarks.measure import explain_difference
from moa_spec.benchmarks.methods import OPTIONS, OWN_DRAFTER, Method, check_names, prepare, untrained_like
from moa_spec.generation import attach
from moa_spec.generation.moa_source import MoASession
from moa_spec.modeling_moa import MoADrafterForCausalLM


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("moa_spec.generation.loop.time", SimpleNamespace(perf_counter=clock))
    return clock


def test_pass_seconds_are_those_of_the_target(clock: FakeClock) -> None:
    target = mock_target(clock)
    assert probes.pass_seconds(target, prompt(20), (1, 4, 8), repetitions=2, clock=clock) == {
        1: STEP,
        4: VERIFY,
        8: VERIFY,
    }


def test_parts_of_a_round(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = mock_target(clock)
    drafter = tiny_drafter(target)
    attach(target, drafter)
    original, observe = MoASession.draft, MoASession.observe

    def drafting(self: MoASession, plan: object) -> object:
        clock.now += DRAFT
        return original(self, plan)

    def observing(self: MoASession, verified: object) -> None:
        clock.now += 0.25
        observe(self, verified)

    monkeypatch.setattr(MoASession, "draft", drafting)
    monkeypatch.setattr(MoASession, "observe", observing)
    parts = probes.round_parts(target, drafter, [prompt(20)], 12, repetitions=1, clock=clock)
    assert parts["plain_step_seconds"] == STEP
    assert parts["draft"] == pytest.approx(DRAFT)
    assert parts["prompt"] == pytest.approx(0.25)
    assert parts["bookkeeping"] == pytest.approx(0.0, abs=1e-9)
    assert parts["plain_bookkeeping"] == pytest.approx(0.0, abs=1e-9)
    assert 0.1 <= parts["draft_cost"] <= DRAFT  # five levels a round, fewer near the end
    assert 0.0 < parts["observe"] < 0.25  # every round but the first takes its predecessor's tokens in


def test_memory_counts_what_the_drafter_adds(clock: FakeClock) -> None:
    target = mock_target(clock)
    drafter = tiny_drafter(target)
    attach(target, drafter)
    found = probes.memory(target, drafter, prompt(50), clock)
    config = target.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // 4) * 4
    assert per_token * 50 <= found["target_cache"] <= per_token * 60
    assert found["drafter_weights"] == sum(p.nbytes for p in drafter.parameters())
    own = drafter.config
    groups = own.self_attention_num_key_value_heads + own.cross_attention_num_key_value_heads
    assert found["drafter_cache"] >= 2 * groups * own.head_dim * 4 * 50
    assert found["added"] == pytest.approx(
        (found["drafter_weights"] + found["drafter_cache"]) / (found["target_weights"] + found["target_cache"])
    )


def test_a_batch_counts_no_padding(clock: FakeClock) -> None:
    target = mock_target(clock)
    drafter = tiny_drafter(target)
    attach(target, drafter)
    prompts = [prompt(12, seed=1), prompt(15, seed=2)]
    target.generation_config.eos_token_id = int(target.generate(prompts[0], max_new_tokens=3, do_sample=False)[0, -1])
    found = probes.batch(target, Method("moa", dict(OPTIONS["moa"]), drafter), prompts, 8, 1, clock)
    assert (found["rows"], found["identical_rows"]) == (2, 2)
    assert found["speedup"] == pytest.approx(found["tokens_per_second"] / found["plain_tokens_per_second"])
    assert probes._until_end([5, 2, 0, 0], {2}) == [5, 2]
    assert probes._until_end([5, 6], {2}) == [5, 6]


def test_long_prompts_are_as_long_as_asked_and_distinct() -> None:
    class Characters:
        """A tokenizer with a token per character."""

        chat_template = None

        def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> object:
            ids = [ord(c) for c in text]
            return SimpleNamespace(input_ids=torch.tensor([ids])) if return_tensors else {"input_ids": ids}

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(map(chr, ids))

    texts = [f"Text number {n} is about something else." for n in range(5)]
    first = probes.prompt_of_length(texts, 400, Characters())
    assert first.shape == (1, 400)
    assert not torch.equal(first, probes.prompt_of_length(texts, 400, Characters(), first=2))
    with pytest.raises(ValueError, match="needs texts"):
        probes.prompt_of_length([], 400, Characters())


class Letters:
    """A tokenizer of a few dozen letters."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True, return_tensors: str | None = None) -> object:
        ids = [3 + ord(letter) % 50 for letter in text]
        return SimpleNamespace(input_ids=torch.tensor([ids])) if return_tensors else {"input_ids": ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(64 + token) for token in ids)


def test_all_probes_and_a_run_that_goes_on(clock: FakeClock) -> None:
    target = mock_target(clock)
    drafter = tiny_drafter(target)
    attach(target, drafter)
    methods = {name: Method(name, OPTIONS[name], drafter) for name in ("moa", "moa-auto")}
    amount = probes.Amount(prompts=1, max_new_tokens=6, repetitions=1, contexts=(60, 90))
    short = ["Why do leaves turn red?", "Name a river in Europe.", "What is a verb?", "Count to ten slowly."]
    kept: dict[str, object] = {}
    arguments = (target, Letters(), methods, short, ["One text.", "Another text."], amount, clock)
    record = probes.probe(*arguments, keep=kept.__setitem__)
    assert set(record["context"]) == {"60", "90"}
    assert record["context"]["60"]["prompt_tokens"] == [60]
    assert record["verify_cost"]["8"] == VERIFY
    assert record["batch"]["rows"] == record["batch"]["identical_rows"] == 4

    before = clock.now
    assert probes.probe(*arguments, done=json.loads(json.dumps(kept))) == json.loads(json.dumps(record))
    assert clock.now == before  # nothing was measured again
    del kept["batch"]
    again: list[str] = []
    probes.probe(*arguments, done=kept, keep=lambda name, measured: again.append(name))
    assert again == ["batch"]
    with pytest.raises(ValueError, match="different numbers"):
        probes.Amount(contexts=(400, 400))


def test_three_tokens_may_be_the_two_best() -> None:
    """In bf16 equal logits are common; which of them is taken depends on rounding."""

    class Tied:
        dtype = torch.bfloat16

        def __call__(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> object:
            logits = torch.zeros(1, 1, 10)
            logits[0, 0, [3, 5, 7]] = 8.0
            return SimpleNamespace(logits=logits)

    for mine, theirs, tie in ((3, 5, True), (5, 7, True), (7, 3, True), (3, 4, False), (3, -1, False)):
        other = [1] if theirs < 0 else [1, theirs]
        difference = explain_difference(Tied(), prompt(4), [1, mine], other, 1)
        assert (difference.gap, difference.near_tie) == (0.0, tie)


def test_an_untrained_drafter_is_like_the_trained_one_but_for_its_weights(clock: FakeClock) -> None:
    target = mock_target(clock)
    drafter = tiny_drafter(target, draft_vocab_size=16)
    drafter.draft_vocab_ids.copy_(torch.arange(3, 51, 3))
    attach(target, drafter)
    state = torch.random.get_rng_state()
    untrained = untrained_like(drafter, target, seed=0)
    assert torch.equal(state, torch.random.get_rng_state())
    assert isinstance(untrained, MoADrafterForCausalLM)
    assert torch.equal(untrained.draft_vocab_ids, drafter.draft_vocab_ids)
    assert sum(p.numel() for p in untrained.parameters()) == sum(p.numel() for p in drafter.parameters())
    assert not torch.equal(untrained.Ekv2E.weight, drafter.Ekv2E.weight)


def test_every_method_decodes_what_plain_decoding_does(clock: FakeClock, tmp_path: object) -> None:
    target = mock_target(clock)
    tiny_drafter(target).save_pretrained(tmp_path)
    target.save_pretrained(tmp_path / "assistant")
    methods = prepare(
        [name for name in OPTIONS if name not in OWN_DRAFTER], target, tmp_path, str(tmp_path / "assistant")
    )
    ids = prompt(14)
    written = {
        m.name: target.generate(ids, do_sample=False, max_new_tokens=20, **m.keywords())[0].tolist() for m in methods
    }
    assert len(written) == 8
    assert all(tokens == written["plain"] for tokens in written.values())


def test_methods_need_their_models(clock: FakeClock) -> None:
    target = mock_target(clock)
    assert [m.name for m in prepare(["plain", "stock-lookup", "lookup"], target)] == ["plain", "stock-lookup", "lookup"]
    with pytest.raises(ValueError, match="need a drafter"):
        prepare(["plain", "moa"], target)
    with pytest.raises(ValueError, match="--assistant"):
        check_names(["plain", "assistant"], None)


def test_goals_are_judged_by_their_limits() -> None:
    figures = {"speedup": [1.9, 1.8, 2.0]}
    slow = {"speedup": [0.97, 0.9, 1.0]}
    summary = {
        "spec_bench/qa": {"moa-auto": slow, "untrained": slow},
        "spec_bench": {"moa-auto": figures, "untrained": slow},
    }
    answers = {"rounds": [1], "token_ids": [1, 2], "first_token_seconds": 1.0, "pass_seconds": 1.0, "recounted": False}
    answers |= {"traced_rounds": None}
    turn = {
        "answers": {
            "moa-auto": [answers | {"seconds": 2.0}],
            "stock-lookup": [answers | {"seconds": 3.0}],
            "lookup": [answers | {"seconds": 2.2}],
        }
    }
    comparison = {"summary": summary, "questions": [{"key": "spec_bench/qa/1", "turns": [turn]}]}
    record = {
        "round": {"bookkeeping": 0.05, "draft_cost": 0.2},
        "context": {"400": {"moa-auto": {"decode_speedup": 2.0}}, "4000": {"moa-auto": {"decode_speedup": 1.8}}},
        "memory": {"added": 0.08},
        "batch": {"speedup": 1.2},
    }
    found = {entry["goal"]: (entry["measured"], entry["met"]) for entry in goals.check(comparison, record)}
    assert found["speedup, mean over Spec-Bench tasks"] == (1.9, True)
    assert found["speedup over transformers' prompt lookup"] == (pytest.approx(1.5), True)
    assert found["speedup over our lookup"] == (pytest.approx(1.1), False)
    assert found["speedup on the worst task (qa)"] == (0.97, False)
    assert found["speedup with an untrained drafter"] == (0.97, True)
    assert found["draft cost c per level"] == (0.2, False)
    assert found["decode speedup kept from 400 to 4000 tokens of prompt"] == (0.9, True)
    assert found["total tokens/s of a batch of 4, over plain"] == (1.2, False)
    json.dumps(goals.check(comparison, record))
