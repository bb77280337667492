"""Records of client and server as Markdown and as what a figure needs: over a line, offline, under load."""

from collections.abc import Callable, Iterator
from typing import Any

from .tables import NOTHING, number, share, table

Result = dict[str, Any]
KINDS = ("link", "offline", "load")


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


# -- offline -----------------------------------------------------------------------------------------------------------


def offline_table(result: Result) -> str:
    """Every writer after every cut, with 95% intervals."""
    header = [
        "cut after", "writer", "kept by the target", "tokens to the first divergence", "regret, nats/token",
        "repetition", "ROUGE-L", "code that parses",
    ]  # fmt: skip
    rows = []
    for cut, part in result["offline"].items():
        for name, figures in part["writers"].items():
            rows.append(
                [
                    f"{cut} ({part['prompts']} prompts)",
                    name,
                    interval(figures["kept_share"], 1, 100, "%"),
                    interval(figures["kept"], 1),
                    interval(figures["regret"], 2),
                    interval(figures["repetition"], 0, 100, "%"),
                    interval(figures["rouge_l"], 2),
                    interval(figures["parses"], 0, 100, "%"),
                ]
            )
    return table(header, rows)


def ahead_table(result: Result) -> str:
    """What MoA is ahead of each other writer, prompt by prompt."""
    rows = []
    for cut, part in result["offline"].items():
        for name, figures in part["ahead"].items():
            shares, lengths = figures["kept_share"], figures["kept"]
            rows.append([cut, name, interval(shares, 1, 100, "%"), interval(lengths, 1), _verdict(lengths)])
    return table(["cut after", "MoA against", "kept by the target", "tokens to the first divergence", "ahead"], rows)


def _verdict(difference: list[float] | None) -> str:
    """Zero outside of the interval, or no verdict."""
    if difference is None:
        return NOTHING
    return "yes" if difference[1] > 0 else "no" if difference[2] < 0 else "not told apart"


def interval(values: list[float] | None, digits: int, factor: float = 1, unit: str = "") -> str:
    """A mean and its interval."""
    if values is None:
        return NOTHING
    mean, low, high = (f"{factor * value:.{digits}f}" for value in values)
    return f"{mean}{unit} ({low} to {high})"


OFFLINE_LEGEND = (
    "Means over prompts; 95% bootstrap intervals over prompts in brackets. Kept by the target: share of the offline "
    "tokens that stand when the line is back (policy revise). Regret: how many nats per token less likely the text is "
    "to the target than the target's own text of the same length, so that a text which repeats itself may have little "
    "of it. Repetition: share of runs of four tokens that the text had already. ROUGE-L against the target's own text. "
    "Code that parses: of the answers in which the target writes a block of Python, as far as the last whole line."
)


# -- under load --------------------------------------------------------------------------------------------------------


def load_table(result: Result) -> str:
    """What many clients saw, and what they left."""
    load = result["load"]
    waits, (first, last) = load["first_token_seconds"], load["memory_mib"]
    rows = {
        "clients": f"{load['clients']} for {load['seconds']:.0f} s",
        "texts finished, of them exact": f"{load['texts']}, {load['exact']}",
        "texts whose reader hung up": str(load["hung_up"]),
        "errors at clients, at the server": f"{len(load['errors'])}, {load['server_errors']:.0f}",
        "connections lost, resumed, read anew": f"{load['resumed']:.0f} resumed, {load['rebuilt']:.0f} read anew",
        "tokens/s, all clients": number(load["tokens_per_second"], 1),
        "target calls per 100 tokens": number(load["calls_per_100_tokens"], 1),
        "drafts judged per pass of the target": number(load["drafts_per_pass"]),
        "first token, median and 95th percentile": NOTHING if not waits else f"{waits[0]:.1f} s, {waits[1]:.1f} s",
        "left: sessions, connections, KV tokens": ", ".join(f"{value:.0f}" for value in load["left"].values()),
        "server's memory, second and last fifth": f"{first:.0f} MiB, {last:.0f} MiB",
    }
    return table(["under load", ""], [[name, value] for name, value in rows.items()])


# -- all of them -------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Result], str]] = {
    "serving-settings": settings_text,
    "serving-methods": methods_text,
    "link": link_table,
    "offline": offline_table,
    "offline-ahead": ahead_table,
    "load": load_table,
}


_PARTS: dict[str, Callable[[Result], list[str]]] = {
    "link": lambda result: [link_table(result), LINK_LEGEND],
    "load": lambda result: [load_table(result)],
    "offline": lambda result: [offline_table(result), ahead_table(result), OFFLINE_LEGEND],
}


def report(result: Result) -> str:
    """One record."""
    parts = _PARTS[kind(result) or ""](result)
    methods = [methods_text(result)] if "methods" in result["options"] else []
    return "\n\n".join([settings_text(result), *parts, *methods])


def curves(result: Result) -> dict[str, list[tuple[float, float]]]:
    """The server's memory under load."""
    return {"server": [(at, size) for at, size in result["load"]["memory_samples"]]}


def drawings(result: Result) -> Iterator[tuple[str, list[str], dict[str, list[Any]], str]]:
    """Name, groups, bars by method, and label of each figure."""
    if kind(result) == "offline":
        yield from _offline_drawings(result["offline"])
        return
    link = result["link"]
    methods = list(dict.fromkeys(name for figures in link.values() for name in figures))
    for what, label in (("tokens_per_second", "tokens/s"), ("calls_per_100_tokens", "target calls per 100 tokens")):
        series = {}
        for name in methods:
            values = [figures.get(name, {}).get(what) for figures in link.values()]
            if any(value is not None for value in values):
                series[name] = [None if value is None else (value,) * 3 for value in values]
        yield what.replace("_", "-"), list(link), series, label


def _offline_drawings(cuts: dict[str, Any]) -> Iterator[tuple[str, list[str], dict[str, list[Any]], str]]:
    groups = [f"cut after {cut}" for cut in cuts]
    for what, label in (("kept", "tokens to the first divergence"), ("repetition", "share of repeated runs of 4")):
        series: dict[str, list[Any]] = {}
        for part in cuts.values():
            for name, figures in part["writers"].items():
                series.setdefault(name, []).append(figures[what])
        yield what, groups, series, label
