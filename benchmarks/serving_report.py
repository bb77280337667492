"""Records of client and server as Markdown and as what a figure needs: over a line, offline, under load."""

from collections.abc import Callable, Iterator
from typing import Any

from .tables import NOTHING, number, share, table

Result = dict[str, Any]
KINDS = ("link",)


def kind(result: Result) -> str | None:
    """Which of these records a result is; None: another."""
    return next((name for name in KINDS if name in result), None)


def settings_text(result: Result) -> str:
    """What was measured, where, and with what."""
    options, session = result["options"], result["sessions"][-1]
    machine, versions = session["machine"], session["versions"]
    what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items() if _telling(name, value))
    revisions = ", ".join(sorted({(entry["git_revision"] or "unknown")[:12] for entry in result["sessions"]}))
    return (
        f"{what}.\n{machine['gpu'] or machine['processor']}, {machine['cores']} cores, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, revision {revisions}, {session['started'][:10]}."
    )


def _telling(name: str, value: Any) -> bool:
    return not name.endswith("sha256") and name != "methods" and value is not None and not isinstance(value, list)


# -- over a line -------------------------------------------------------------------------------------------------------


def link_table(result: Result) -> str:
    """Every method over every profile."""
    header = [
        "line", "method", "tokens/s", "after the first", "first token", "target calls per 100 tokens",
        "bytes/token up", "down", "after the first up", "down", "written offline (withdrawn)", "exact",
    ]  # fmt: skip
    rows = []
    for profile, methods in result["link"].items():
        for name, figures in methods.items():
            offline = f"{figures['offline']} ({figures['withdrawn']})" if figures["offline"] else NOTHING
            rows.append(
                [
                    profile,
                    name,
                    number(figures["tokens_per_second"], 1),
                    number(figures["decode_tokens_per_second"], 1),
                    f"{1000 * figures['first_token_seconds']:.0f} ms",
                    number(figures["calls_per_100_tokens"], 1),
                    *(
                        number(figures[name], 0)
                        for name in ("bytes_up", "bytes_down", "bytes_up_later", "bytes_down_later")
                    ),
                    offline,
                    share(figures["exact"]),
                ]
            )
    return table(header, rows)


def methods_text(result: Result) -> str:
    """What the rows are."""
    return "\n".join(f"- `{name}`: {text}" for name, text in result["options"]["methods"].items())


LINK_LEGEND = (
    "Tokens per second are all tokens over all seconds, reading the prompt included; the next column leaves out what "
    "comes before the first token. A target call is a round after the prompt was read. Bytes are the line's, handshake "
    "and prompt included; then those after the first token was there (at clients that draft: after the prompt's memory "
    "was). `exact`: share of texts that are plain decoding's, token for token."
)


# -- all of them -------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Result], str]] = {
    "serving-settings": settings_text,
    "serving-methods": methods_text,
    "link": link_table,
}


def report(result: Result) -> str:
    """One record."""
    parts = {"link": [link_table(result), LINK_LEGEND]}[kind(result) or ""]
    return "\n\n".join([settings_text(result), *parts, methods_text(result)])


def drawings(result: Result) -> Iterator[tuple[str, list[str], dict[str, list[Any]], str]]:
    """Name, groups, bars by method, and label of each figure."""
    link = result["link"]
    methods = list(dict.fromkeys(name for figures in link.values() for name in figures))
    for what, label in (("tokens_per_second", "tokens/s"), ("calls_per_100_tokens", "target calls per 100 tokens")):
        series = {}
        for name in methods:
            values = [figures.get(name, {}).get(what) for figures in link.values()]
            if any(value is not None for value in values):
                series[name] = [None if value is None else (value,) * 3 for value in values]
        yield what.replace("_", "-"), list(link), series, label
