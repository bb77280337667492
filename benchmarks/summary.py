"""What a run says: the figures of every method for every task, from the answers that were kept.

Knows how answers are grouped and which of the `metrics` becomes which column. Does not know models, files or layout.

Groups are "SUITE/TASK", and "SUITE" for all of its tasks. Every speed is computed per repetition first and then given
as [median, lowest, highest] over the repetitions. Of a suite, speeds and rates are the mean over its tasks; counts
(tau, the histogram) are taken over all of its rounds.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import metrics
from .measure import Answer
from .methods import PLAIN
from .metrics import Spread

Questions = Sequence[dict[str, Any]]


def summarise(questions: Questions, methods: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by group and method. Questions that were skipped are left out.

    A method's figures:
        questions, answers: how many there were; an answer is one turn in one repetition.
        speedup, decode_speedup: over plain decoding; end to end, and without the prefill.
        tokens_per_second, first_token_seconds: mean over questions.
        tau, acceptance_length: micro and macro mean of tokens per round.
        conditional_acceptance, histogram: by depth; by round length.
        verify_cost, draft_cost, draft_levels: v, c and gamma; the latter two None for methods without a trace.
        predicted_speedup: what they promise for `decode_speedup`; None likewise.
        other_cost: what is neither pass nor draft, per round, over a plain target pass.
        identical_rate: share of greedy answers equal to plain decoding's; None when sampling.
        near_ties, differences: how many of the others part at a near tie, and how many there are.
        recounted, recount_agrees: answers whose rounds were counted twice, and whether both counts agree.
        peak_memory: bytes.
    """
    questions = [entry for entry in questions if "skipped" not in entry]
    methods = list(methods)
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for suite, tasks in _groups(questions).items():
        of_tasks = {}
        for task, entries in tasks.items():
            of_tasks[task] = {name: _figures(entries, name) for name in methods}
            summary[f"{suite}/{task}"] = of_tasks[task]
        everything = [entry for entries in tasks.values() for entry in entries]
        summary[suite] = {
            name: _figures(everything, name)
            | {
                column: speed_over_tasks(tasks.values(), name, column)
                for column in ("speedup", "decode_speedup", "tokens_per_second", "first_token_seconds")
            }
            for name in methods
        }
    return summary


def _groups(questions: Questions) -> dict[str, dict[str, list[dict[str, Any]]]]:
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for entry in questions:
        suite, task, _ = entry["key"].split("/")
        groups.setdefault(suite, {}).setdefault(task, []).append(entry)
    return groups


def answers_of(entry: dict[str, Any], method: str, repetition: int) -> list[Answer]:
    """One question's answers, turn by turn."""
    return [Answer.from_dict(turn["answers"][method][repetition]) for turn in entry["turns"]]


def _repetitions(entries: Questions) -> int:
    return min(len(given) for entry in entries for turn in entry["turns"] for given in turn["answers"].values())


# -- speeds ------------------------------------------------------------------------------------------------------------


def end_to_end_rate(answers: Sequence[Answer]) -> float | None:
    """New tokens per second of a question, over all of its turns, prefill included."""
    return sum(len(a.token_ids) for a in answers) / sum(a.seconds for a in answers)


def decode_rate(answers: Sequence[Answer]) -> float | None:
    """The same without the prefills and the tokens they yielded; None when nothing was decoded after them."""
    tokens = sum(sum(a.rounds) for a in answers)
    return tokens / sum(a.decode_seconds for a in answers) if tokens else None


def _first_token(answers: Sequence[Answer]) -> float | None:
    return statistics.fmean(a.first_token_seconds for a in answers)


_SPEEDS: dict[str, tuple[Callable[[Sequence[Answer]], float | None], bool]] = {  # and whether it is over plain's
    "speedup": (end_to_end_rate, True),
    "decode_speedup": (decode_rate, True),
    "tokens_per_second": (end_to_end_rate, False),
    "first_token_seconds": (_first_token, False),
}


def speed_of_question(
    entry: dict[str, Any], method: str, column: str, repetition: int, baseline: str = PLAIN
) -> float | None:
    """One question in one repetition; "speedup" and "decode_speedup" are over the baseline in the same repetition."""
    measure, compared = _SPEEDS[column]
    value = measure(answers_of(entry, method, repetition))
    if not compared or value is None:
        return value
    other = measure(answers_of(entry, baseline, repetition))
    return None if other is None else value / other


def speed_over_tasks(tasks: Iterable[Questions], method: str, column: str, baseline: str = PLAIN) -> list[float] | None:
    """Mean over the questions of each task, then over the tasks; [median, lowest, highest] over the repetitions."""
    tasks = list(tasks)
    values = []
    for repetition in range(min(_repetitions(entries) for entries in tasks)):
        of_tasks = [
            metrics.mean(speed_of_question(entry, method, column, repetition, baseline) for entry in entries)
            for entries in tasks
        ]
        value = metrics.mean(of_tasks)
        if value is not None:
            values.append(value)
    return Spread.of(values).to_list() if values else None


def speedup_over(questions: Questions, method: str, baseline: str, suite: str) -> list[float] | None:
    """End-to-end speedup of one method over another in a suite."""
    tasks = _groups([entry for entry in questions if "skipped" not in entry])[suite]
    return speed_over_tasks(tasks.values(), method, "speedup", baseline)


# -- everything of one group -------------------------------------------------------------------------------------------


def _figures(entries: Questions, method: str) -> dict[str, Any]:
    repetitions = range(_repetitions(entries))
    answers = [a for entry in entries for r in repetitions for a in answers_of(entry, method, r)]
    plain = [a for entry in entries for r in repetitions for a in answers_of(entry, PLAIN, r)]
    rounds = [a.rounds for a in answers]
    figures: dict[str, Any] = {"questions": len(entries), "answers": len(answers)}
    figures |= {column: speed_over_tasks([entries], method, column) for column in _SPEEDS}
    figures |= {
        "tau": metrics.mean_accepted_tokens(rounds),
        "acceptance_length": metrics.acceptance_length(rounds),
        "conditional_acceptance": metrics.conditional_acceptance(rounds),
        "histogram": metrics.acceptance_histogram(rounds),
    }
    figures |= _costs(answers, plain)
    figures |= _agreement(entries, method)
    peaks = [a.peak_memory for a in answers]
    figures |= {
        "recounted": sum(a.traced_rounds is not None for a in answers),
        "recount_agrees": all(a.recount_agrees for a in answers),
        "peak_memory": None if None in peaks else max(peak for peak in peaks if peak is not None),
    }
    return figures


def _costs(answers: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, float | None]:
    """v, c, gamma, the predicted speedup, and the rest of a round; all in passes of plain decoding."""
    none = dict.fromkeys(("verify_cost", "draft_cost", "draft_levels", "predicted_speedup", "other_cost"))
    count, plain_count = sum(len(a.rounds) for a in answers), sum(len(a.rounds) for a in plain)
    if not count or not plain_count:
        return none
    step = sum(a.pass_seconds for a in plain) / plain_count
    verify = sum(a.pass_seconds for a in answers) / count / step
    drafted = [a.draft_seconds for a in answers]
    if any(seconds is None for seconds in drafted):
        return none | {"verify_cost": verify}
    draft = sum(seconds or 0.0 for seconds in drafted) / count / step  # gamma * c
    levels = sum(a.draft_levels or 0 for a in answers) / count
    decode = sum(a.decode_seconds for a in answers) / count / step
    tau = metrics.mean_accepted_tokens([a.rounds for a in answers])
    assert tau is not None
    return {
        "verify_cost": verify,
        "draft_cost": draft / levels if levels else None,
        "draft_levels": levels,
        # lookup drafts without levels; its time counts all the same
        "predicted_speedup": metrics.predicted_speedup(tau, verify, levels or 1.0, draft / (levels or 1.0)),
        "other_cost": decode - verify - draft,
    }


def _agreement(entries: Questions, method: str) -> dict[str, Any]:
    turns = [turn for entry in entries for turn in entry["turns"]]
    if any(turn["differences"] is None for turn in turns):
        return dict.fromkeys(("identical_rate", "differences", "near_ties", "largest_gap"))
    differences = [turn["differences"][method] for turn in turns if method in turn["differences"]]
    return {
        "identical_rate": metrics.identical_rate([method not in turn["differences"] for turn in turns]),
        "differences": len(differences),
        "near_ties": sum(difference["near_tie"] for difference in differences),
        "largest_gap": max((difference["gap"] for difference in differences), default=None),
    }
