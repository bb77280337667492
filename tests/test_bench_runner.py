"""The harness itself: what it reports on a mock target is what arithmetic says, and a killed run goes on."""

import json
from pathlib import Path

import pytest
import torch
from bench_mock import (
    ACCEPTED,
    CYCLE,
    DRAFT,
    PREFILL,
    STEP,
    VERIFY,
    FakeClock,
    MockTokenizer,
    mock_methods,
    mock_question,
    mock_target,
)
from tiny import prompt, tiny_target

from moa_spec.benchmarks import measure, runner
from moa_spec.benchmarks.measure import Answer, explain_difference
from moa_spec.benchmarks.methods import Method
from moa_spec.benchmarks.records import ResultError, ResultFile, read_result
from moa_spec.benchmarks.runner import Comparison
from moa_spec.benchmarks.summary import speedup_over, summarise

CYCLES = 3
TOKENS = 1 + CYCLES * CYCLE  # the prefill's token, then whole cycles of the script
ROUNDS = CYCLES * len(ACCEPTED)


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    clock = FakeClock()
    target = mock_target(clock)
    methods = mock_methods(target, clock, TOKENS, monkeypatch)
    return Comparison(target, MockTokenizer(), methods, TOKENS, repetitions=2, clock=clock)


def test_figures_are_what_arithmetic_says(comparison: Comparison) -> None:
    questions = [comparison.measure(mock_question(n, task), n) for n, task in enumerate(["qa", "qa", "rag"])]
    summary = summarise(questions, ["plain", "moa"])
    assert list(summary) == ["spec_bench/qa", "spec_bench/rag", "spec_bench"]
    plain_seconds = PREFILL + (TOKENS - 1) * STEP
    moa_seconds = PREFILL + ROUNDS * (DRAFT + VERIFY)
    tau = (TOKENS - 1) / ROUNDS
    levels = (CYCLES * CYCLE - 1) / ROUNDS  # all right tokens and a wrong one each; the last has no room left
    for group in summary.values():
        plain, moa = group["plain"], group["moa"]
        assert plain["tau"] == plain["acceptance_length"] == 1.0
        assert plain["histogram"] == {1: (TOKENS - 1) * plain["answers"]}
        assert plain["conditional_acceptance"] == []
        assert plain["speedup"] == plain["decode_speedup"] == [1.0, 1.0, 1.0]
        assert plain["verify_cost"] == 1.0
        assert plain["tokens_per_second"] == pytest.approx([TOKENS / plain_seconds] * 3)

        assert moa["tau"] == pytest.approx(tau)
        assert moa["acceptance_length"] == pytest.approx(tau)
        assert moa["histogram"] == {n + 1: CYCLES * moa["answers"] for n in sorted(ACCEPTED)}
        assert moa["conditional_acceptance"] == pytest.approx([2 / 3, 1 / 2, 1.0])
        assert moa["speedup"] == pytest.approx([plain_seconds / moa_seconds] * 3)
        assert moa["decode_speedup"] == pytest.approx([(TOKENS - 1) * STEP / (ROUNDS * (DRAFT + VERIFY))] * 3)
        assert moa["first_token_seconds"] == pytest.approx([PREFILL] * 3)
        assert moa["verify_cost"] == pytest.approx(VERIFY / STEP)
        assert moa["draft_levels"] == pytest.approx(levels)
        assert moa["draft_cost"] == pytest.approx(DRAFT / levels / STEP)
        assert moa["predicted_speedup"] == pytest.approx(moa["decode_speedup"][0])  # nothing else takes time here
        assert moa["other_cost"] == pytest.approx(0.0, abs=1e-9)
        assert moa["identical_rate"] == 1.0
        assert moa["recounted"] == moa["answers"]
        assert moa["recount_agrees"]
    assert summary["spec_bench"]["moa"]["questions"] == 3
    assert speedup_over(questions, "plain", "moa", "spec_bench") == pytest.approx([moa_seconds / plain_seconds] * 3)


def test_recount_from_the_trace_is_independent(comparison: Comparison) -> None:
    entry = comparison.measure(mock_question(0))
    answer = Answer.from_dict(entry["turns"][0]["answers"]["moa"][0])
    assert answer.rounds == answer.traced_rounds == [n + 1 for n in ACCEPTED] * CYCLES
    wrong = answer.to_dict() | {"traced_rounds": [1] * ROUNDS}
    entry["turns"][0]["answers"]["moa"][0] = json.loads(json.dumps(wrong))
    assert not summarise([entry], ["moa"])["spec_bench/qa"]["moa"]["recount_agrees"]


def test_turns_follow_plain_decodings_answers(comparison: Comparison) -> None:
    entry = comparison.measure(mock_question(4, "mt_bench", turns=2))
    first, second = entry["turns"]
    assert first["prompt_tokens"] == 12
    assert second["prompt_tokens"] == 12 + TOKENS + 12
    assert first["answers"]["plain"][0]["token_ids"] == first["answers"]["moa"][1]["token_ids"]
    assert not summarise([entry], ["moa"])["spec_bench"]["moa"]["differences"]


def test_everybody_begins_in_turn(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = comparison._answer

    def noting(method: Method, *args: object) -> Answer:
        order.append(method.name)
        return original(method, *args)

    monkeypatch.setattr(comparison, "_answer", noting)
    comparison.measure(mock_question(0), index=0)
    comparison.measure(mock_question(1), index=1)
    assert order == ["plain", "moa", "moa", "plain", "moa", "plain", "plain", "moa"]


def test_sampling_has_no_identical_rate(comparison: Comparison) -> None:
    comparison.temperature = 1.0
    comparison.shared |= runner.sampling_keywords(1.0)
    comparison.methods = comparison.methods[:1]
    entry = comparison.measure(mock_question(0))
    first, again = (given["token_ids"] for given in entry["turns"][0]["answers"]["plain"])
    assert first != again  # every repetition has its own seed
    assert entry == {**comparison.measure(mock_question(0)), "turns": entry["turns"]}
    assert summarise([entry], ["plain"])["spec_bench"]["plain"]["identical_rate"] is None


def test_what_does_not_fit_is_skipped_by_name(comparison: Comparison) -> None:
    comparison.max_new_tokens = 250
    entry = comparison.measure(mock_question(0))
    assert "turn 1 has 12 tokens" in entry["skipped"]
    assert "256" in entry["skipped"]
    comparison.max_new_tokens = TOKENS
    questions = [entry, comparison.measure(mock_question(1))]
    assert summarise(questions, ["plain"])["spec_bench"]["plain"]["questions"] == 1


def test_a_failing_method_is_named(comparison: Comparison) -> None:
    comparison.methods.append(Method("assistant", {"num_beams": -1}))
    with pytest.raises(RuntimeError, match="The method assistant failed"):
        comparison.measure(mock_question(0))


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_difference_is_explained_by_the_targets_own_scores() -> None:
    target = tiny_target()
    ids = prompt(9)
    plain = target.generate(ids, do_sample=False, max_new_tokens=6)[0, 9:].tolist()
    logits = target(torch.cat([ids, torch.tensor([plain[:4]])], dim=1)).logits[0, -1].detach()
    best = logits.topk(2)
    second = int(best.indices[1])
    difference = explain_difference(target, ids, plain, [*plain[:4], second, 9], 4)
    assert (difference.plain, difference.other, difference.among_best) == (plain[4], second, True)
    assert difference.gap == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-4)
    assert not difference.near_tie  # float32 rounds far finer
    ended = explain_difference(target, ids, plain, plain[:4], 4)
    assert (ended.other, ended.among_best) == (-1, False)


def test_differences_are_reported(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    original = runner.answer

    def spoiling(target: object, input_ids: object, keywords: dict, *args: object) -> Answer:
        given = original(target, input_ids, keywords, *args)
        if "assistant_model" in keywords:
            given.token_ids[5] = (given.token_ids[5] + 1) % 64
        return given

    monkeypatch.setattr(runner, "answer", spoiling)
    figures = summarise([comparison.measure(mock_question(0))], ["plain", "moa"])["spec_bench"]
    assert figures["moa"]["identical_rate"] == 0.0
    assert figures["moa"]["differences"] == 1
    assert figures["plain"]["identical_rate"] == 1.0


# -- files -------------------------------------------------------------------------------------------------------------

OPTIONS = {"per_task": 2, "max_new_tokens": TOKENS, "seed": 0}


def test_a_killed_run_goes_on(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [mock_question(n) for n in range(4)]
    whole = ResultFile(tmp_path / "whole.json", OPTIONS)
    whole.begin({"started": "then"})
    assert comparison.run(questions, whole, progress=False)

    original, measured = comparison.measure, []

    def killed_at_the_third(question: object, index: int) -> dict:
        measured.append(index)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return original(question, index)

    monkeypatch.setattr(comparison, "measure", killed_at_the_third)
    path = tmp_path / "killed.json"
    killed = ResultFile(path, OPTIONS)
    killed.begin({"started": "then"})
    with pytest.raises(KeyboardInterrupt):
        comparison.run(questions, killed, progress=False)
    assert not path.exists()
    with open(killed.partial, "a") as file:
        file.write('{"question": {"key": "cut sho')  # killed while writing

    resumed = ResultFile(path, OPTIONS)
    assert [entry["key"] for entry in resumed.questions] == [q.key for q in questions[:2]]
    resumed.begin({"started": "later"})
    assert comparison.run(questions, resumed, progress=False)
    assert measured == [0, 1, 2, 2, 3]
    result = resumed.finish(complete=True)
    assert read_result(path) == json.loads(json.dumps(result))
    assert [session["started"] for session in result["sessions"]] == ["then", "later"]
    assert not resumed.partial.exists()

    def without_memory(entries: list) -> list:
        for entry in entries:
            for turn in entry["turns"]:
                for given in turn["answers"].values():
                    for answer in given:
                        answer["peak_memory"] = None
                        for name in ("seconds", "first_token_seconds", "pass_seconds", "draft_seconds"):
                            answer[name] = answer[name] and round(answer[name], 6)  # the mock clock runs on
        return entries

    assert without_memory(result["questions"]) == without_memory(whole.questions)


def test_a_result_can_be_extended_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    first = ResultFile(path, OPTIONS)
    first.begin({})
    first.add({"key": "a"})
    first.finish()
    for more in (9, None):
        assert ResultFile(path, OPTIONS | {"per_task": more}).questions == [{"key": "a"}]
    with pytest.raises(ResultError, match="already has 2 questions per task, more than 1"):
        ResultFile(path, OPTIONS | {"per_task": 1})
    with pytest.raises(ResultError, match=r"max_new_tokens = 22, now it is 23.*--overwrite"):
        ResultFile(path, OPTIONS | {"max_new_tokens": 23})
    with pytest.raises(ResultError, match="threads = nothing, now it is 2"):
        ResultFile(path, OPTIONS | {"threads": 2})
    assert ResultFile(path, OPTIONS | {"threads": 2}, overwrite=True).questions == []
    assert path.exists()  # until the new one is written


def test_a_partial_result_of_other_options_is_left_alone(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "result.json", OPTIONS)
    first.begin({})
    first.add({"key": "a"})
    with pytest.raises(ResultError, match="seed = 0, now it is 1"):
        ResultFile(tmp_path / "result.json", OPTIONS | {"seed": 1})
    assert ResultFile(tmp_path / "result.json", OPTIONS).questions == [{"key": "a"}]
    first.partial.write_text(first.partial.read_text() + "nonsense\n")
    with pytest.raises(ResultError, match="line 4 is damaged"):
        ResultFile(tmp_path / "result.json", OPTIONS)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 99}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ResultError, match=r"no result|not a result"):
        read_result(path)


def test_a_time_limit_ends_between_questions(comparison: Comparison, tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "result.json", OPTIONS)
    assert not comparison.run([mock_question(0)], results, time_limit=0.0, progress=False)
    assert results.questions == []


def test_peak_memory_of_a_run_alone() -> None:
    def use(size: int) -> int | None:
        peak = measure.PeakMemory(torch.device("cpu"))
        torch.ones(size, dtype=torch.uint8).sum()
        return peak.peak()

    large, small = use(120 * 2**20), use(2**20)
    if large is None or small is None:
        pytest.skip("this system keeps no mark of its peak memory that can be reset")
    assert large - small > 90 * 2**20
