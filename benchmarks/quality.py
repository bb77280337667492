"""Whether answers are any good: what a task's own metric says of every method's answers, side by side.

A lossless method cannot change quality, so this is a check from outside that it has not: in float32 the figures of all
methods must be the same. Knows metrics and how a task's answer is read out of a text. Does not know how texts were
written.

The metrics of `evaluate` are scripts that it downloads when they are used. Where one wraps a library (ROUGE, BLEU,
chrF) that library is called here; the others are a few lines.
"""

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from . import sandbox
from .datasets import HUMAN_EVAL, DataNotFoundError, MalformedDataError, Question
from .methods import PLAIN

# -- numbers -----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """The number after the last "####", as GSM8K marks its answers; without that mark the last number of the text."""
    marked = text.rsplit("####", 1)
    for part in reversed(marked) if len(marked) > 1 else marked:
        found = _NUMBER.findall(part)
        if found:
            number = found[0] if part is marked[-1] and len(marked) > 1 else found[-1]
            return Decimal(number.replace(",", "").replace("$", ""))
    return None


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers whose final number is the reference's."""
    right = [final_number(a) is not None and final_number(a) == final_number(r) for a, r in _pairs(answers, references)]
    return sum(right) / len(right)


# -- texts -------------------------------------------------------------------------------------------------------------


def rouge_l(answers: Sequence[str], references: Sequence[str]) -> float:
    """Mean ROUGE-L F1, words stemmed, as `evaluate`'s "rouge" with `use_stemmer`."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [scorer.score(reference, answer)["rougeL"].fmeasure for answer, reference in _pairs(answers, references)]
    return sum(scores) / len(scores)


def bleu(answers: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100, as `evaluate`'s "sacrebleu"."""
    from sacrebleu import corpus_bleu

    return corpus_bleu(list(answers), [list(references)]).score


def chrf(answers: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF, 0 to 100, as `evaluate`'s "chrf"."""
    from sacrebleu import corpus_chrf

    return corpus_chrf(list(answers), [list(references)]).score


def _pairs(answers: Sequence[str], references: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(answers, references, strict=True))


# -- programs ----------------------------------------------------------------------------------------------------------

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """A problem of HumanEval (arXiv 2107.03374): the code to be completed, what it must define, and its tests."""

    prompt: str
    entry_point: str
    test: str

    def program(self, answer: str) -> str:
        """What is run: the code in an answer, then the tests.

        A chat model answers with a block of code, or goes on where the prompt ends. Code that does not define the
        function is taken for the rest of the prompt.
        """
        block = _FENCED.search(answer)
        code = block.group(1) if block else answer
        if not re.search(rf"^\s*def {re.escape(self.entry_point)}\b", code, re.MULTILINE):
            code = self.prompt + code
        imports = "\n".join(line for line in self.prompt.splitlines() if line.startswith(("import ", "from ")))
        return f"{imports}\n{code}\n{self.test}\ncheck({self.entry_point})\n"


def read_problems(folder: str | Path) -> dict[str, Problem]:
    """The problems of HumanEval by what a question of the paper's set says.

    Raises:
        DataNotFoundError: the file is missing.
        MalformedDataError: it is not HumanEval's.
    """
    path = Path(folder) / HUMAN_EVAL
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
            problems = [Problem(row["prompt"], row["entry_point"], row["test"]) for row in rows]
    except FileNotFoundError:
        raise DataNotFoundError(
            f"{path} is missing, which has the tests of HumanEval: run `moa bench fetch`, or put it there"
        ) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise MalformedDataError(f"{path} is not HumanEval's problems: {error!r}") from None
    return {problem.prompt.strip(): problem for problem in problems}


def problem_of(question: Question, problems: Mapping[str, Problem]) -> Problem:
    """
    Raises:
        MalformedDataError: no problem has the question's code.
    """
    code = question.turns[0].partition("I provided.")[2].strip()
    if code not in problems:
        raise MalformedDataError(f"{question.key} is none of HumanEval's problems")
    return problems[code]


# -- a result ----------------------------------------------------------------------------------------------------------

# the metrics of a task, and the digits they are shown with
METRICS: dict[str, dict[str, Callable[[Sequence[str], Sequence[str]], float]]] = {
    "spec_bench/translation": {"BLEU": bleu, "chrF": chrf},
    "spec_bench/summarization": {"ROUGE-L": rouge_l},
    "spec_bench/math_reasoning": {"exact match": exact_match},
    "moa_bench/gsm8k": {"exact match": exact_match},
    "moa_bench/sum": {"ROUGE-L": rouge_l},
}
PROGRAMS = "moa_bench/humaneval"


def assess(
    result: Mapping[str, Any],
    questions: Mapping[str, Question],
    tokenizer: PreTrainedTokenizerBase,
    problems: Mapping[str, Problem] | None = None,
    told: Callable[[str], None] = lambda message: None,
) -> dict[str, dict[str, Any]]:
    """The quality of a comparison's answers (the first repetition's, first turns), task by task.

    Args:
        result: as read from its file.
        questions: by key; those of the result must be among them.
        problems: of HumanEval, when the result has such questions.
        told: hears what is being done.

    Returns:
        By task: `answers` (how many), `cut` (by method, how many were as long as allowed), `metrics`: by name, by
        method, and `stopped`: programs that were stopped or took their process down, with their question and method.

    Raises:
        MalformedDataError: the questions are not those that the result was made with.
    """
    tasks: dict[str, list[tuple[Question, dict[str, list[int]]]]] = {}
    for entry in result["questions"]:
        task = entry["key"].rpartition("/")[0]
        if "skipped" in entry or task not in (*METRICS, PROGRAMS):
            continue
        if entry["key"] not in questions:
            raise MalformedDataError(f"There is no question {entry['key']} in the data, and the result has one")
        given = {name: answers[0]["token_ids"] for name, answers in entry["turns"][0]["answers"].items()}
        tasks.setdefault(task, []).append((questions[entry["key"]], given))
    found = {}
    for task, entries in tasks.items():
        told(task)
        longest = result["options"]["max_new_tokens"]
        texts = {
            name: [tokenizer.decode(given[name], skip_special_tokens=True) for _, given in entries]
            for name in result["methods"]
        }
        metrics: dict[str, dict[str, float]] = {}
        stopped: list[str] = []
        if task == PROGRAMS:
            posed = [(question.key, problem_of(question, problems or {})) for question, _ in entries]
            metrics["pass@1"], stopped = _pass_rates(texts, posed)
        else:
            references = [question.reference[0] for question, _ in entries]
            for metric, measure in METRICS[task].items():
                metrics[metric] = {name: measure(written, references) for name, written in texts.items()}
        found[task] = {
            "answers": len(entries),
            "cut": {name: sum(len(given[name]) >= longest for _, given in entries) for name in texts},
            "metrics": metrics,
            "stopped": stopped,
        }
    return found


def _pass_rates(
    texts: Mapping[str, Sequence[str]], posed: Sequence[tuple[str, Problem]]
) -> tuple[dict[str, float], list[str]]:
    """Share of answers that pass their problem's tests, and the programs that had to be stopped or crashed. Methods
    mostly give the same program; it is run once."""
    outcomes: dict[str, sandbox.Outcome] = {}
    rates, stopped = {}, []
    for name, written in texts.items():
        passed = 0
        for (key, problem), text in zip(posed, written, strict=True):
            program = problem.program(text)
            if program not in outcomes:
                outcomes[program] = sandbox.run(program)
            outcome = outcomes[program]
            passed += outcome.verdict == "passed"
            if outcome.verdict in ("timed out", "crashed"):
                stopped.append(f"{key}, {name}: {outcome.verdict}, {outcome.detail}")
        rates[name] = passed / len(posed)
    return rates, stopped


def differing(quality: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where a method's figure is not plain decoding's: "task, metric, method"."""
    return [
        f"{task}, {metric}, {name}"
        for task, entry in quality.items()
        for metric, by_method in entry["metrics"].items()
        for name, value in by_method.items()
        if value != by_method[PLAIN]
    ]
