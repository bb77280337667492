"""Markdown tables and how numbers stand in them."""

from collections.abc import Iterable

NOTHING = "-"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    header = list(header)
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:.{digits}f}{unit}"


def spread(values: list[float] | None, digits: int = 2, unit: str = "") -> str:
    """The median, and the range where there is one."""
    if values is None:
        return NOTHING
    median, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low} to {high})"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.1f}%".replace("100.0%", "100%")


def mebibytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 2**20:.0f} MiB"
