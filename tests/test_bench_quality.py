"""The tasks' own metrics, against values known from elsewhere, and the process that programs are run in."""

import gzip
import json
import time
from pathlib import Path

import pytest

from moa_spec.benchmarks import datasets, quality, sandbox
from moa_spec.benchmarks.datasets import DataNotFoundError, MalformedDataError, Question
from moa_spec.benchmarks.quality import Problem, final_number
from moa_spec.benchmarks.records import FORMAT, read_result
from moa_spec.benchmarks.report import quality_table
from moa_spec.cli import main


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 3 = 8, so #### 1,008", 1008),
        ("#### -7\nThat is it, 3 times.", -7),
        ("He pays $400.50 for it.", 400.5),
        ("First 3, then 12.", 12),
        ("the answer is 0.50", 0.5),
        ("10 apples ####", 10),
        ("none", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_known_values() -> None:
    assert quality.exact_match(["so 18.", "20", "no idea"], ["x #### 18", "#### 21", "#### 3"]) == pytest.approx(1 / 3)
    # ROUGE paper (Lin 2004), section 3: "police kill the gunman" against "police killed the gunman" has ROUGE-L 3/4,
    # and 1 with stemming
    assert quality.rouge_l(["police kill the gunman"], ["police killed the gunman"]) == 1.0
    assert quality.rouge_l(["police shot the gunman"], ["police killed the gunman"]) == pytest.approx(0.75)
    same = ["The quick brown fox jumps over the lazy dog."]
    assert quality.bleu(same, same) == pytest.approx(100)
    assert quality.chrf(same, same) == pytest.approx(100)
    # four of five words, three of four pairs, two of three triples, one of two quadruples; as long as the reference
    assert quality.bleu(["a b c d x"], ["a b c d e"]) == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # character n-grams of "abcd" against "abce": 3 of 4, 2 of 3, 1 of 2, 0 of 1
    assert quality.chrf(["abcd"], ["abce"]) == pytest.approx(100 * (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4)


# -- programs ----------------------------------------------------------------------------------------------------------

PROBLEM = Problem(
    "from typing import List\n\ndef total(numbers: List[int]) -> int:\n    'Adds them up.'\n",
    "total",
    "def check(candidate):\n    assert candidate([1, 2, 3]) == 6\n",
)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("    return sum(numbers)\n", "passed"),
        ("Sure:\n```python\ndef total(numbers: List[int]):\n    return sum(numbers)\n```\nIt adds.", "passed"),
        ("```\n    return sum(numbers)\n```", "passed"),
        ("```python\ndef total(numbers):\n    return sum(numbers)\n", "passed"),  # cut off after the code
        ("```python\ndef total(numbers):\n    return 0\n```", "failed"),
        ("I cannot do that.", "failed"),
    ],
)
def test_code_is_found_in_an_answer(answer: str, verdict: str) -> None:
    assert sandbox.run(PROBLEM.program(answer)).verdict == verdict


@pytest.mark.parametrize(
    ("program", "verdict", "detail"),
    [
        ("x = 1", "passed", ""),
        ("open('note', 'w').write('here is fine')", "passed", ""),
        ("while True: pass", "timed out", "stopped after 1 s"),
        ("while True:\n try:\n  while True: pass\n except BaseException: pass", "timed out", "stopped after 1 s"),
        ("import os; os.abort()", "crashed", "SIGABRT"),
        ("x = [0] * 10**9", "failed", "MemoryError"),
        ("import sys; sys.exit(0)", "failed", "left early"),
        ("import os; os._exit(0)", "failed", "left early"),
        ("def f(:", "failed", "SyntaxError"),
        ("input()", "failed", "EOFError"),
        ("import socket; socket.socket()", "failed", "not allowed"),
        ("import subprocess; subprocess.run(['true'])", "failed", "not allowed"),
        ("import os; os.fork()", "failed", "not allowed"),
        ("open('/tmp/x', 'a')", "failed", "not allowed"),
        ("import os; os.remove('/etc/hostname')", "failed", "not allowed"),
    ],
)
def test_the_sandbox_stops_what_it_should(program: str, verdict: str, detail: str) -> None:
    began = time.monotonic()
    outcome = sandbox.run(program, seconds=1)
    assert outcome.verdict == verdict, outcome
    assert detail in outcome.detail
    assert time.monotonic() - began < 20


def test_output_is_not_kept_without_end() -> None:
    outcome = sandbox.run("while True: print('x' * 10_000)", seconds=10)
    assert outcome.verdict in ("failed", "crashed")  # a file may not grow beyond a mebibyte
    assert len(outcome.detail) <= 200


def test_problems_are_read_and_matched(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="moa bench fetch"):
        quality.read_problems(tmp_path)
    path = tmp_path / datasets.HUMAN_EVAL
    path.parent.mkdir()
    path.write_bytes(b"not gzip")
    with pytest.raises(MalformedDataError, match="not HumanEval's"):
        quality.read_problems(tmp_path)
    row = {"task_id": "x", "prompt": PROBLEM.prompt, "entry_point": "total", "test": PROBLEM.test}
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    problems = quality.read_problems(tmp_path)
    question = Question("moa_bench", "humaneval", 0, "code", ("Complete the code I provided.\n" + PROBLEM.prompt,))
    assert quality.problem_of(question, problems) == PROBLEM
    with pytest.raises(MalformedDataError, match=r"humaneval/1 is none"):
        quality.problem_of(Question("moa_bench", "humaneval", 1, "code", ("Complete: def other()",)), problems)


# -- a result ----------------------------------------------------------------------------------------------------------


class Texts:
    """A tokenizer whose ids are indices of whole texts."""

    texts = ("6 times 7 is 42.", "41", "    return sum(numbers)", "    import os; os.abort()", "The cat sat.")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.texts[i] for i in ids)


def _result(moa: dict[str, list[int]]) -> tuple[dict, dict[str, Question]]:
    plain = {"spec_bench/math_reasoning/1": [0], "moa_bench/humaneval/2": [2], "spec_bench/translation/3": [4]}
    references = {"1": "#### 42", "2": "", "3": "The cat sat."}
    questions = {}
    entries = []
    for key, ids in plain.items():
        suite, task, number = key.split("/")
        text = "Complete the code I provided.\n" + PROBLEM.prompt
        questions[key] = Question(suite, task, int(number), task, (text,), (references[number],))
        answers = {"plain": [{"token_ids": ids}], "moa": [{"token_ids": moa.get(key, ids)}]}
        entries.append({"key": key, "turns": [{"answers": answers}]})
    entries += [{"key": "spec_bench/qa/4", "turns": []}, {"key": "moa_bench/gsm8k/5", "skipped": "too long"}]
    return {"questions": entries, "methods": {"plain": {}, "moa": {}}, "options": {"max_new_tokens": 1}}, questions


def test_methods_are_assessed_side_by_side() -> None:
    problems = {PROBLEM.prompt.strip(): PROBLEM}
    result, questions = _result({})
    assessed = quality.assess(result, questions, Texts(), problems)
    assert list(assessed) == ["spec_bench/math_reasoning", "moa_bench/humaneval", "spec_bench/translation"]
    assert assessed["moa_bench/humaneval"]["metrics"] == {"pass@1": {"plain": 1.0, "moa": 1.0}}
    assert assessed["spec_bench/math_reasoning"]["metrics"] == {"exact match": {"plain": 1.0, "moa": 1.0}}
    assert assessed["spec_bench/translation"]["cut"] == {"plain": 1, "moa": 1}
    assert quality.differing(assessed) == []
    table = quality_table(result | {"quality": assessed})
    assert "| moa_bench/humaneval: pass@1 | 1 | 1 | 1.000 | 1.000 |" in table

    result, questions = _result({"spec_bench/math_reasoning/1": [1], "moa_bench/humaneval/2": [3]})
    assessed = quality.assess(result, questions, Texts(), problems)
    assert quality.differing(assessed) == [
        "spec_bench/math_reasoning, exact match, moa",
        "moa_bench/humaneval, pass@1, moa",
    ]
    table = quality_table(result | {"quality": assessed})
    assert "- moa_bench/humaneval/2, moa: crashed, ended by SIGABRT" in table
    del questions["spec_bench/translation/3"]
    with pytest.raises(MalformedDataError, match="no question spec_bench/translation/3"):
        quality.assess(result, questions, Texts(), problems)


def test_the_command_keeps_its_figures_and_fails_where_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moa_spec.targets.load_target", lambda name: (None, Texts()))
    data = tmp_path / "data"
    (data / "spec_bench").mkdir(parents=True)
    line = {"question_id": 1, "category": "math_reasoning", "turns": ["6 * 7?"], "reference": ["#### 42"]}
    (data / "spec_bench" / "question.jsonl").write_text(json.dumps(line))
    path = tmp_path / "result.json"

    def written(moa: list[int], dtype: str = "float32") -> Path:
        answers = {"plain": [{"token_ids": [0]}], "moa": [{"token_ids": moa}]}
        result = {
            "format": FORMAT,
            "options": {"dtype": dtype, "temperature": 0.0, "max_new_tokens": 9},
            "methods": {"plain": {}, "moa": {}},
            "data": datasets.checksums(["spec_bench"], data),
            "questions": [{"key": "spec_bench/math_reasoning/1", "turns": [{"answers": answers}]}],
        }
        path.write_text(json.dumps(result))
        return path

    command = ["bench", "quality", str(path), "--data", str(data)]
    written([0])
    assert main(command) == 0
    assert "| spec_bench/math_reasoning: exact match | 1 | 0 | 1.000 | 1.000 |" in capsys.readouterr().out
    assert read_result(path)["quality"]["spec_bench/math_reasoning"]["answers"] == 1
    written([1])
    assert main(command) == 1
    assert "differs from plain decoding in float32: spec_bench/math_reasoning" in capsys.readouterr().err
    written([1], "bfloat16")
    assert main(command) == 0
    (data / "spec_bench" / "question.jsonl").write_text(json.dumps(line | {"reference": ["#### 41"]}))
    assert main(command) != 0
    assert "was made with another spec_bench/question.jsonl" in capsys.readouterr().err
