"""The benchmark's results as HTML, read from its files.

Knows the files that `moa bench` writes: runs over question sets, the engine's probes, client and server over a line and
offline. Does not measure anything, and says so where there are no results.
"""

import html
import json
from pathlib import Path
from typing import Any

from .charts import draw_groups

_NOTHING = "-"
_DEEPEST = 8  # drafted tokens that the acceptance figure goes down to


def results_html(folder: Path) -> str:
    """Tables and figures of each result in a folder, with what was measured where."""
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        return (
            '<div class="moa"><p>There are no benchmark results in this installation. '
            f"<code>moa bench run --output {html.escape(str(Path(folder.parent.name) / folder.name))}/NAME.json</code> "
            "measures and writes them.</p></div>"
        )
    return f'<div class="moa">{"".join(_file(path) for path in files)}</div>'


def _file(path: Path) -> str:
    title = f"<h3>{html.escape(path.stem)}</h3>"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return title + _settings(result) + _body(result)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return title + "<p>This file is not a result of <code>moa bench</code>, or is damaged.</p>"


def _body(result: dict[str, Any]) -> str:
    if "engine" in result:
        return _goals(result)
    if "link" in result:
        return _link(result["link"])
    if "offline" in result:
        return _offline(result["offline"])
    return _suites(result)


def _settings(result: dict[str, Any]) -> str:
    """What was measured where; records of one kind have options that others lack."""
    options, session = result["options"], result["sessions"][-1]
    machine = session["machine"]
    words = [str(options["target"])]
    if "dtype" in options:
        words.append(str(options["dtype"]))
    if "temperature" in options:
        words.append("greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}")
    if "per_task" in options:
        count = options["per_task"]
        words.append("all questions" if count is None else f"{count} question{'s'[: count > 1]} per task")
    words.append(f"{machine['gpu'] or machine['processor']}, {options.get('threads') or machine['cores']} threads")
    words.append(f"revision {(session['git_revision'] or 'unknown')[:12]}, {session['started'][:10]}")
    warning = "" if result.get("complete", True) else " <strong>Not complete.</strong>"
    return f"<p>{html.escape(', '.join(words))}.{warning}</p>"


# -- runs over question sets -------------------------------------------------------------------------------------------


def _suites(result: dict[str, Any]) -> str:
    summary = result["summary"]
    return "".join(_suite(suite, summary) for suite in summary if "/" not in suite)


def _suite(suite: str, summary: dict[str, Any]) -> str:
    tasks = {name.split("/")[1]: summary[name] for name in summary if name.startswith(f"{suite}/")}
    whole = summary[suite]
    header = [suite, "speedup", "tokens per target call", "identical", *tasks]
    rows = []
    for method, figures in whole.items():
        identical = figures["identical_rate"]
        cells = [
            _range(figures["speedup"]),
            _number(figures["tau"]),
            _NOTHING if identical is None else f"{identical:.1%}",
            *(f"{_times(task[method]['speedup'])} / {_number(task[method]['tau'])}" for task in tasks.values()),
        ]
        rows.append((method, cells))
    # plain decoding, which has 1 everywhere, is the line that the bars are seen against
    drafting = {name: figures for name, figures in whole.items() if figures["conditional_acceptance"]}
    speeds: dict[str, list[float | None]] = {
        name: [*(_middle(task[name]["speedup"]) for task in tasks.values()), _middle(whole[name]["speedup"])]
        for name in drafting
    }
    accepted: dict[str, list[float | None]] = {
        name: list(figures["conditional_acceptance"][:_DEEPEST]) for name, figures in drafting.items()
    }
    depth = max((len(rates) for rates in accepted.values()), default=0)
    caption = "Under each task: speedup over plain decoding / tokens per target call. Speedup: median (range)."
    return (
        _table(header, rows, caption)
        + draw_groups(f"{suite}: speedup over plain decoding", [*tasks, "all"], speeds, mark=1.0)
        + draw_groups(
            f"{suite}: share of drafts accepted, by depth, of those whose forerunners were",
            [str(level) for level in range(1, depth + 1)],
            accepted,
            percent=True,
        )
    )


def _goals(result: dict[str, Any]) -> str:
    rows = [
        (f"{entry['goal']} ({dtype})", [str(entry["limit"]), _number(entry["measured"], 3), _met(entry["met"])])
        for dtype, part in result["engine"].items()
        for entry in part["goals"]
    ]
    return _table(["goal", "limit", "measured", "met"], rows)


# -- client and server -------------------------------------------------------------------------------------------------


def _link(profiles: dict[str, Any]) -> str:
    """Every method over every line."""
    header = ["line and method", "tokens/s", "first token", "target calls per 100 tokens", "bytes/token up", "down"]
    rows = []
    for profile, methods in profiles.items():
        for name, figures in methods.items():
            cells = [
                _number(figures["tokens_per_second"], 1),
                f"{1000 * figures['first_token_seconds']:.0f} ms",
                *(_number(figures[what], 1) for what in ("calls_per_100_tokens", "bytes_up", "bytes_down")),
                _NOTHING if figures["exact"] is None else f"{figures['exact']:.1%}",
            ]
            rows.append((f"{profile}, {name}", cells))
    names = list(dict.fromkeys(name for methods in profiles.values() for name in methods))
    drawn = ""
    for what, title in (
        ("tokens_per_second", "Tokens per second, by line"),
        ("calls_per_100_tokens", "Target calls per 100 tokens, by line"),
    ):
        series = {name: [methods.get(name, {}).get(what) for methods in profiles.values()] for name in names}
        drawn += draw_groups(title, list(profiles), series)
    return _table([*header, "exact"], rows) + drawn


def _offline(cuts: dict[str, Any]) -> str:
    """Every way of writing on alone, by where the line was cut."""
    header = ["cut after, written by", "kept by the target", "tokens to the first divergence", "repetition"]
    rows = []
    for cut, part in cuts.items():
        for name, figures in part["writers"].items():
            cells = [
                _range(figures["kept_share"], "{:.1%}"),
                _range(figures["kept"], "{:.1f}"),
                _range(figures["repetition"], "{:.0%}"),
            ]
            rows.append((f"{cut}, {name}", cells))
    names = list(dict.fromkeys(name for part in cuts.values() for name in part["writers"]))
    series: dict[str, list[float | None]] = {
        name: [_middle(part["writers"][name]["kept"]) if name in part["writers"] else None for part in cuts.values()]
        for name in names
    }
    return _table(header, rows, "Means (95% intervals).") + draw_groups(
        "Tokens written alone until the first that the target would not have written", list(cuts), series
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(header: list[str], rows: list[tuple[str, list[str]]], caption: str = "") -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    words = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (
        '<div class="moa-scroll" tabindex="0" role="group" aria-label="Table, scrolls sideways">'
        f'<table class="moa-figures">{words}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _middle(values: list[float] | None) -> float | None:
    return None if values is None else values[0]


def _times(speedup: list[float] | None) -> str:
    return _NOTHING if speedup is None else f"{speedup[0]:.2f}x"


def _range(values: list[float] | None, how: str = "{:.2f}x") -> str:
    """A median or mean, and its interval."""
    return _NOTHING if values is None else "{} ({} to {})".format(*(how.format(value) for value in values))


def _number(value: float | None, digits: int = 2) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _met(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not measured"}[value]
