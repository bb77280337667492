"""The benchmark's results, read from its files.

Knows the result files of `moa bench run` (their summary) and how they become tables. Does not measure anything, and
says so where there are no results.
"""

import html
import json
from pathlib import Path
from typing import Any

import gradio as gr

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def add_results_tab(app: gr.Blocks, folder: Path) -> None:
    """The tab's contents, inside the current Gradio context. Files are read each time the page is loaded."""
    tables = gr.HTML(label="Benchmark results")
    app.load(lambda: results_html(folder), None, tables, queue=False, show_progress="hidden", api_visibility="private")


def results_html(folder: Path) -> str:
    """A table for each result in a folder, with what was measured where."""
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
        if "engine" in result:
            return title + _goals(result)
        return title + _settings(result) + _suites(result)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return title + "<p>This file is not a result of <code>moa bench</code>, or is damaged.</p>"


def _settings(result: dict[str, Any]) -> str:
    options, session = result["options"], result["sessions"][-1]
    machine = session["machine"]
    sampling = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    words = (
        f"{options['target']}, {options['dtype']}, {sampling}, {machine['gpu'] or machine['processor']}, "
        f"{options['threads']} threads, revision {(session['git_revision'] or 'unknown')[:12]}, "
        f"{session['started'][:10]}."
    )
    warning = "" if result["complete"] else " <strong>Not complete.</strong>"
    return f"<p>{html.escape(words)}{warning}</p>"


def _suites(result: dict[str, Any]) -> str:
    summary = result["summary"]
    parts = []
    for suite in (name for name in summary if "/" not in name):
        tasks = [name for name in summary if name.startswith(f"{suite}/")]
        header = [suite, "speedup", "tokens per target call", "identical", *(task.split("/")[1] for task in tasks)]
        rows = []
        for method, figures in summary[suite].items():
            identical = figures["identical_rate"]
            cells = [
                _times(figures["speedup"]),
                f"{figures['tau']:.2f}" if figures["tau"] is not None else "-",
                f"{identical:.1%}" if identical is not None else "-",
                *(_times(summary[task][method]["speedup"]) for task in tasks),
            ]
            rows.append((method, cells))
        parts.append(_table(header, rows))
    return "".join(parts)


def _goals(result: dict[str, Any]) -> str:
    rows = [
        (f"{entry['goal']} ({dtype})", [str(entry["limit"]), _value(entry["measured"]), _met(entry["met"])])
        for dtype, part in result["engine"].items()
        for entry in part["goals"]
    ]
    return _table(["goal", "limit", "measured", "met"], rows)


def _table(header: list[str], rows: list[tuple[str, list[str]]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return (
        f'<div class="moa-scroll"><table class="moa-figures"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _times(speedup: list[float] | None) -> str:
    return "-" if speedup is None else f"{speedup[0]:.2f}x"


def _value(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def _met(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not measured"}[value]
