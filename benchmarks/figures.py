"""Results as pictures. Needs matplotlib, from the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import serving_report
from .methods import PLAIN
from .report import Result, suites

# told apart by shape and hatching as well as by colour
_MARKERS = "osD^vPX*"
_HATCHES = ["", "//", "..", "\\\\", "xx", "--", "++", "oo"]


def draw(result: Result, folder: str | Path, name: str) -> list[Path]:
    """Draws what the result has: speedup by task and acceptance by depth for each suite, or an engine's probes.

    Returns:
        The files written, `NAME-*.png`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if "engine" in result:
        return _draw_engine(result, folder, name)
    if serving_report.kind(result) == "load":
        return [lines(serving_report.curves(result), "seconds", "memory, MiB", "", folder / f"{name}-memory.png")]
    if serving_report.kind(result):
        return [bars(*drawing, folder / f"{name}-{what}.png") for what, *drawing in serving_report.drawings(result)]
    written = []
    for suite, tasks in suites(result).items():
        whole = result["summary"][suite]
        methods = [method for method in result["methods"] if method != PLAIN]
        figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
        groups = [*tasks, "mean"]
        width = 0.8 / max(1, len(methods))
        for i, method in enumerate(methods):
            speeds = [figures[method]["speedup"] for figures in (*tasks.values(), whole)]
            places = [group + (i - (len(methods) - 1) / 2) * width for group in range(len(groups))]
            medians = [speed[0] for speed in speeds]
            reach = [[speed[0] - speed[1] for speed in speeds], [speed[2] - speed[0] for speed in speeds]]
            axes.bar(places, medians, width, yerr=reach, label=method, hatch=_HATCHES[i % len(_HATCHES)], alpha=0.85)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(groups)), groups, rotation=15)
        axes.set_ylabel("speedup over plain decoding")
        axes.set_title(f"{suite}, {result['options']['dtype']}, T = {result['options']['temperature']:g}")
        axes.legend(ncols=4, fontsize="small")
        written.append(_save(figure, folder / f"{name}-{suite}-speedup.png"))

        curves = {method: list(enumerate(whole[method]["conditional_acceptance"], start=1)) for method in methods}
        written.append(
            lines(
                {method: curve[:12] for method, curve in curves.items() if curve},
                "depth of the draft",
                "P(accepted this deep | accepted one less)",
                suite,
                folder / f"{name}-{suite}-acceptance.png",
            )
        )
    return written


_SPEEDUP = "decode speedup over plain decoding"


def _draw_engine(result: Result, folder: Path, name: str) -> list[Path]:
    """Speed against draft length and against context length, verify cost against size, a line per dtype."""
    probes = {dtype: part["probes"] for dtype, part in result["engine"].items()}

    def points(values: dict[str, float | None]) -> list[tuple[float, float]]:
        return [(float(x), y) for x, y in values.items() if y is not None]

    by_context = {
        f"{dtype} {method}": points({n: figures[method]["decode_speedup"] for n, figures in p["context"].items()})
        for dtype, p in probes.items()
        for method in ("moa", "moa-auto")
    }
    drawings = (
        ("draft-length", {d: points(p["draft_lengths"]) for d, p in probes.items()}, "drafts per round", _SPEEDUP),
        ("context", by_context, "tokens of prompt", _SPEEDUP),
        ("verify-cost", {d: points(p["verify_cost"]) for d, p in probes.items()}, "tokens per pass, k", "v(k)"),
    )
    return [lines(curves, x, y, "", folder / f"{name}-{what}.png") for what, curves, x, y in drawings]


def lines(curves: dict[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, title: str, path: Path) -> Path:
    """One line per name through its (x, y) points."""
    figure, axes = _pyplot().subplots(figsize=(6, 3.6), layout="constrained")
    curves = {name: points for name, points in curves.items() if points}
    for i, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker=_MARKERS[i % len(_MARKERS)], label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    if curves:
        axes.legend(fontsize="small")
    return _save(figure, path)


Interval = tuple[float, float, float]  # a figure and the ends of its interval


def bars(groups: Sequence[str], series: dict[str, Sequence[Interval | None]], y_label: str, path: Path) -> Path:
    """Bars side by side in every group, one per name, with their intervals where these are not empty."""
    figure, axes = _pyplot().subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.8 / max(1, len(series))
    for i, (label, values) in enumerate(series.items()):
        known = [(group, value) for group, value in enumerate(values) if value is not None]
        places = [group + (i - (len(series) - 1) / 2) * width for group, _ in known]
        heights = [value[0] for _, value in known]
        reach = [[value[0] - value[1] for _, value in known], [value[2] - value[0] for _, value in known]]
        errors = reach if any(map(any, reach)) else None
        axes.bar(places, heights, width, yerr=errors, label=label, hatch=_HATCHES[i % len(_HATCHES)], alpha=0.85)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(y_label)
    axes.legend(ncols=4, fontsize="small")
    return _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Figures need matplotlib: pip install 'moa-spec[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, format="png", dpi=130, metadata={"Software": None})
    beside.replace(path)
    _pyplot().close(figure)
    return path
