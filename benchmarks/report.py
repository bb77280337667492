"""Results as Markdown: tables to print, a whole report, and tables kept up to date inside other documents.

Knows result files and layout. Does not measure or decide anything: every number is read from a result.
"""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import serving_report
from .methods import DESCRIPTIONS, PLAIN
from .records import ResultError, read_result
from .summary import speedup_over
from .tables import NOTHING, mebibytes, number, share, spread, table

Result = dict[str, Any]
Figures = dict[str, Any]

LOOKUP = "stock-lookup"

# whom our methods are compared with, and how they are called there
RIVALS = {
    LOOKUP: "prompt lookup",
    "eagle2": "EAGLE-2",
    "eagle": "EAGLE's chain",
    "medusa": "Medusa",
    "glide": "GLIDE",
    "assistant": "the independent model",
}
# like against like: trees with trees, chains with chains, and first the drafter that was trained as they were
LIKE = {"eagle2": ("moa-tree",)} | dict.fromkeys(("eagle", "medusa", "glide", "assistant"), ("moa-equal", "moa"))


# -- one comparison ----------------------------------------------------------------------------------------------------


def suites(result: Result) -> dict[str, dict[str, dict[str, Figures]]]:
    """Per suite its tasks' figures, by method."""
    found: dict[str, dict[str, dict[str, Figures]]] = {}
    for group, figures in result["summary"].items():
        suite, _, task = group.partition("/")
        if task:
            found.setdefault(suite, {})[task] = figures
    return found


def settings_text(result: Result) -> str:
    """What was measured, where, and with what."""
    options, session = result["options"], result["sessions"][-1]
    machine = session["machine"]
    sampling = "greedy" if options["temperature"] == 0 else f"sampling at temperature {options['temperature']:g}"
    count = options["per_task"]
    amount = "all questions" if count is None else f"{count} question{'s'[: count > 1]} per task"
    revisions = ", ".join(sorted({(entry["git_revision"] or "unknown")[:12] for entry in result["sessions"]}))
    versions = session["versions"]
    lines = [
        f"{options['target']}, {options['dtype']}, {sampling}, up to {options['max_new_tokens']} new tokens, "
        f"{amount}, median of {options['repetitions']} (range in brackets), batch 1.",
        f"{machine['gpu'] or machine['processor']}, {options['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, revision {revisions}, "
        f"{session['started'][:10]}.",
    ]
    skipped = [f"{entry['key']} ({entry['skipped']})" for entry in result["questions"] if "skipped" in entry]
    if skipped:
        lines.append(f"Skipped: {'; '.join(skipped)}.")
    if not result["complete"]:
        lines.append(f"**Not complete**: {len(result['questions'])} of {result['questions_chosen']} questions.")
    others = [name for name, entry in result["data"].items() if not entry["as_published"]]
    if others:
        lines.append(f"**Not the published questions**: {', '.join(others)}.")
    if any(not figures["recount_agrees"] for group in result["summary"].values() for figures in group.values()):
        lines.append("**The recount from the traces disagrees with the count of the target's calls.**")
    return "\n".join(lines)


def engine_settings_text(result: Result) -> str:
    """As `settings_text`, for a record of the engine."""
    options, session = result["options"], result["sessions"][-1]
    machine, versions = session["machine"], session["versions"]
    return (
        f"{options['target']}, greedy, up to {options['max_new_tokens']} new tokens, {options['threads']} threads of "
        f"{machine['gpu'] or machine['processor']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, revision {(session['git_revision'] or 'unknown')[:12]}, "
        f"{session['started'][:10]}."
    )


def speedup_table(result: Result) -> str:
    """Speedup over plain decoding and tau, task by task, as the paper prints them."""
    parts = []
    for suite, tasks in suites(result).items():
        whole = result["summary"][suite]
        rows = []
        for name in result["methods"]:
            cells = [f"{tasks[task][name]['speedup'][0]:.2f}x / {number(tasks[task][name]['tau'])}" for task in tasks]
            rows.append([name, *cells, f"{spread(whole[name]['speedup'], unit='x')} / {number(whole[name]['tau'])}"])
        parts.append(
            table([f"{suite}: speedup / tokens per target call", *tasks, "mean over tasks / all rounds"], rows)
        )
    return "\n\n".join(parts)


def detail_table(result: Result) -> str:
    """What users feel, and what the speedup is made of."""
    header = [
        "", "end-to-end", "decode-only", "predicted", "AL", "v", "c", "gamma", "other", "tokens/s", "first token",
        "identical", "near ties", "peak memory",
    ]  # fmt: skip
    parts = []
    for suite in suites(result):
        rows = []
        for name, figures in result["summary"][suite].items():
            first = figures["first_token_seconds"]
            ties = figures["differences"]
            rows.append(
                [
                    name,
                    spread(figures["speedup"], unit="x"),
                    spread(figures["decode_speedup"], unit="x"),
                    number(figures["predicted_speedup"], unit="x"),
                    number(figures["acceptance_length"]),
                    number(figures["verify_cost"]),
                    number(figures["draft_cost"], 3),
                    number(figures["draft_levels"]),
                    number(figures["other_cost"]),
                    number(figures["tokens_per_second"][0], 1),
                    NOTHING if first is None else f"{1000 * first[0]:.0f} ms",
                    share(figures["identical_rate"]),
                    f"{figures['near_ties']} of {ties}" if ties else NOTHING,
                    mebibytes(figures["peak_memory"]),
                ]
            )
        parts.append(table([suite, *header[1:]], rows))
    return "\n\n".join(parts)


def acceptance_table(result: Result) -> str:
    """Conditional acceptance by depth, and how many rounds gave how many tokens."""
    parts = []
    for suite in suites(result):
        drafting = {name: f for name, f in result["summary"][suite].items() if name != PLAIN}
        depth = max((len(figures["conditional_acceptance"]) for figures in drafting.values()), default=0)
        depth = min(depth, 8)
        rows = []
        for name, figures in drafting.items():
            rates = [share(rate) for rate in figures["conditional_acceptance"][:depth]]
            counts = {int(length): count for length, count in figures["histogram"].items()}
            total = sum(counts.values())
            longer = sum(count for length, count in counts.items() if length > 6)
            shares = [share(counts.get(length, 0) / total) if total else NOTHING for length in range(1, 7)]
            rows.append(
                [
                    name,
                    *rates,
                    *([NOTHING] * (depth - len(rates))),
                    *shares,
                    share(longer / total) if total else NOTHING,
                ]
            )
        header = [
            suite,
            *(f"depth {level}" for level in range(1, depth + 1)),
            *(f"rounds of {n}" for n in range(1, 7)),
            "more",
        ]
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def losses_text(result: Result) -> str:
    """Where a method is slower than plain decoding, and where ours is slower than another in the same run."""
    lines = []
    for suite, tasks in suites(result).items():
        for name in result["methods"]:
            if name == PLAIN:
                continue
            slow = [(task, figures[name]["speedup"][0]) for task, figures in tasks.items()]
            slow = [(task, value) for task, value in slow if value < 1]
            if slow:
                listed = ", ".join(f"{task} {value:.2f}x" for task, value in slow)
                lines.append(f"- {suite}, {name}: slower than plain decoding on {listed}.")
            for other in RIVALS if name.startswith("moa") else ():
                if other not in result["methods"]:
                    continue
                behind = [
                    f"{task} {figures[name]['speedup'][0]:.2f}x against {figures[other]['speedup'][0]:.2f}x"
                    for task, figures in tasks.items()
                    if figures[name]["speedup"][0] < figures[other]["speedup"][0]
                ]
                if behind:
                    lines.append(f"- {suite}, {name}: behind {RIVALS[other]} on {', '.join(behind)}.")
    return "\n".join(lines) or "No method is slower than plain decoding on any task, and none of ours behind another."


def baselines_text(result: Result) -> str:
    """MoA against the other trained drafters, like against like."""
    lines = []
    for suite in suites(result):
        figures = result["summary"][suite]
        for other, alike in LIKE.items():
            for ours in [name for name in alike if {name, other} <= figures.keys()]:
                taus = [figures[name]["tau"] for name in (ours, other)]
                over = speedup_over(result["questions"], ours, other, suite)
                lines.append(
                    f"- {suite}, {ours} against {other}: {taus[0]:.2f} against {taus[1]:.2f} tokens per target call "
                    f"({100 * (taus[0] / taus[1] - 1):+.1f}%), {spread(over, unit='x')} its speed."
                )
    return "\n".join(lines) or NOTHING


def lookup_text(result: Result) -> str:
    """MoA against prompt lookup in the same run."""
    lines = []
    for suite in suites(result):
        for name in result["methods"]:
            if name.startswith("moa") and LOOKUP in result["methods"]:
                over = speedup_over(result["questions"], name, LOOKUP, suite)
                lines.append(f"- {suite}, {name}: {spread(over, unit='x')} over transformers' prompt lookup.")
    return "\n".join(lines) or NOTHING


def methods_table(result: Result) -> str:
    """What the rows are."""
    rows = [
        [name, DESCRIPTIONS.get(name, ""), f"{method['parameters'] / 1e6:.1f} M" if method["parameters"] else NOTHING]
        for name, method in result["methods"].items()
    ]
    return table(["method", "what", "parameters"], rows)


# -- the engine --------------------------------------------------------------------------------------------------------


def goals_table(result: Result) -> str:
    """What was to be reached, in each dtype."""
    verdict = {True: "yes", False: "**no**", None: "not measured"}
    rows = [
        [entry["goal"], dtype, entry["limit"], number(entry["measured"], 3), verdict[entry["met"]]]
        for dtype, part in engine_parts(result).items()
        for entry in part["goals"]
    ]
    return table(["goal", "dtype", "limit", "measured", "met"], rows)


def engine_parts(result: Result) -> dict[str, Any]:
    """Per dtype its goals and probes.

    Raises:
        ResultError: the result is not one of `moa bench engine`.
    """
    if "engine" not in result:
        raise ResultError("This result is a comparison, not one of `moa bench engine`")
    return result["engine"]


def probes_table(result: Result) -> str:
    """What one round costs, and what that does to speed."""
    parts = engine_parts(result)
    rows: dict[str, list[str]] = {}
    for part in parts.values():
        probes = part["probes"]
        entries: dict[str, str] = {
            "one-token pass, 400 tokens of context": number(1000 * probes["pass_seconds"]["1"], 1, " ms")
        }
        entries |= {f"v({size})": number(cost) for size, cost in probes["verify_cost"].items() if size != "1"}
        for name in ("verify", "draft", "draft_cost", "observe", "bookkeeping", "plain_bookkeeping", "prompt", "tau"):
            entries[f"chain of 5, per round: {name}"] = number(probes["round"].get(name), 3)
        entries |= {f"chain of {n}: decode speedup": number(s) for n, s in probes["draft_lengths"].items()}
        for length, figures in probes["context"].items():
            for method in ("moa", "moa-auto"):
                entries[f"{length} tokens of prompt, {method}: decode speedup"] = number(
                    figures[method]["decode_speedup"]
                )
                entries[f"{length} tokens of prompt, {method}: end-to-end"] = number(figures[method]["speedup"])
        for name in ("target_weights", "target_cache", "drafter_weights", "drafter_cache"):
            entries[f"memory at {probes['memory']['prompt_tokens']} tokens: {name}"] = mebibytes(probes["memory"][name])
        batch = probes["batch"]
        entries[f"batch of {batch['rows']}: plain, total tokens/s"] = number(batch["plain_tokens_per_second"], 1)
        entries[f"batch of {batch['rows']}: moa-auto, total tokens/s"] = number(batch["tokens_per_second"], 1)
        entries[f"batch of {batch['rows']}: rows identical to plain's"] = str(batch["identical_rows"])
        for name, value in entries.items():
            rows.setdefault(name, []).append(value)
    return table(["probe (times in one-token passes)", *parts], [[name, *values] for name, values in rows.items()])


def quality_table(result: Result) -> str:
    """The tasks' own metrics of every method's answers, side by side."""
    if "quality" not in result:
        raise ResultError("The answers of this result have not been assessed: run `moa bench quality` on it")
    rows = []
    for task, entry in result["quality"].items():
        cut = entry["cut"][PLAIN]
        rows += [
            [
                f"{task}: {metric}",
                str(entry["answers"]),
                str(cut),
                *(number(by_method[m], 3) for m in result["methods"]),
            ]
            for metric, by_method in entry["metrics"].items()
        ]
    stopped = [f"- {line}" for entry in result["quality"].values() for line in entry["stopped"]]
    programs = ["", "Programs that were stopped or crashed, counted as failed:", "", *stopped] if stopped else []
    return "\n".join([table(["task: metric", "answers", "cut off", *result["methods"]], rows), *programs])


SECTIONS: dict[str, Callable[[Result], str]] = {
    **serving_report.SECTIONS,
    "goals": goals_table,
    "probes": probes_table,
    "settings": settings_text,
    "methods": methods_table,
    "speedup": speedup_table,
    "details": detail_table,
    "acceptance": acceptance_table,
    "lookup": lookup_text,
    "baselines": baselines_text,
    "losses": losses_text,
    "quality": quality_table,
}

_LEGEND = (
    "Speedup is wall-clock tokens per second over plain decoding's, per question, then averaged. v is the time of a "
    'round\'s target pass over a one-token pass, c that of a draft step, gamma the draft steps per round; "predicted" '
    'is tau / (v + gamma c), to be compared with decode-only; "other" is the rest of a round in one-token passes. AL '
    'is the mean over answers. "identical" is the share of answers equal to plain greedy decoding\'s; of the others, '
    '"near ties" part where the target\'s two best logits lie within rounding of the dtype. Peak memory is the '
    "process's, which holds the models of all methods."
)


def report(results: dict[str, Result]) -> str:
    """A document on one or more results, by title."""
    parts = ["# Benchmark"]
    for title, result in results.items():
        if "engine" in result:
            parts += [f"## {title}", engine_settings_text(result), goals_table(result), probes_table(result)]
            continue
        if serving_report.kind(result):
            parts += [f"## {title}", serving_report.report(result)]
            continue
        parts += [
            f"## {title}",
            settings_text(result),
            speedup_table(result),
            detail_table(result),
            _LEGEND,
            acceptance_table(result),
            "### Where it loses",
            losses_text(result),
            "### Against prompt lookup",
            lookup_text(result),
            *(["### Against other trained drafters", text] if (text := baselines_text(result)) != NOTHING else []),
            *(["### Quality", quality_table(result)] if "quality" in result else []),
            "### Methods",
            methods_table(result),
        ]
    return "\n\n".join(parts) + "\n"


# -- inside other documents --------------------------------------------------------------------------------------------

_MARKED = re.compile(r"^(<!-- bench (\S+) (\S+) -->\n)(.*?)^(<!-- /bench -->)$", re.DOTALL | re.MULTILINE)
_OPENING = re.compile(r"^<!-- bench ", re.MULTILINE)


def fill(path: str | Path) -> int:
    """Renews what stands between the markers of a document; returns how many there were.

    A marker is `<!-- bench SECTION RESULT -->` on a line of its own, up to `<!-- /bench -->`. SECTION is one of
    `SECTIONS`, RESULT a result file, named from the document's folder.

    Raises:
        ResultError: a marker that cannot be understood, or a result that cannot be read; nothing is changed then.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultError(f"There is no document {path}") from None

    def renewed(match: re.Match[str]) -> str:
        opening, section, result, _, closing = match.groups()
        if section not in SECTIONS:
            raise ResultError(f"{path}: there is no section {section!r}; there are {', '.join(SECTIONS)}")
        content = SECTIONS[section](read_result(path.parent / result))
        return f"{opening}{content}\n{closing}"

    filled, count = _MARKED.subn(renewed, text)
    if count != len(_OPENING.findall(text)):
        raise ResultError(
            f"{path}: a marker is not of the form <!-- bench SECTION RESULT --> ... <!-- /bench -->, each on its line"
        )
    if filled != text:
        write_text(path, filled)
    return count


def write_text(path: str | Path, text: str) -> None:
    """Writes beside and renames."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as beside:
        try:
            beside.write(text)
            beside.close()
            os.chmod(beside.name, path.stat().st_mode if path.exists() else 0o644)
            os.replace(beside.name, path)
        finally:
            Path(beside.name).unlink(missing_ok=True)
