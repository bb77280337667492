"""Figures of a whole generation: acceptance by depth, accepted length over time, time spent.

Knows traces, their arithmetic and how to draw it as SVG. Does not know the page.
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..generation.trace import RoundTrace

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 220, 24, 36, 44, 12


@dataclass(frozen=True)
class Acceptance:
    """How drafts of one depth fared.

    Attributes:
        depth: 1 is the first drafted token.
        judged: rounds that drafted this deep and accepted everything up to here.
        accepted: those of them that accepted this depth too.
    """

    depth: int
    judged: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.judged


def acceptance_by_depth(rounds: Sequence["RoundTrace"]) -> list[Acceptance]:
    """Conditional acceptance among the rounds that drafted so deep, for every depth that was judged.

    The benchmark's conditional acceptance also counts the rounds that drafted less deep, as not accepted.
    """
    deepest = [max((node.depth for node in entry.nodes), default=0) for entry in rounds]
    found = []
    for depth in range(1, max(deepest, default=0) + 1):
        reached = [
            entry for entry, most in zip(rounds, deepest, strict=True) if most >= depth and entry.accepted >= depth - 1
        ]
        if reached:
            found.append(Acceptance(depth, len(reached), sum(entry.accepted >= depth for entry in reached)))
    return found


def draw_acceptance(rounds: Sequence["RoundTrace"]) -> str:
    """A bar for each depth, with the share and the number of rounds it rests on."""
    found = acceptance_by_depth(rounds)
    if not found:
        return "<p>Nothing was drafted, so there is no acceptance to show.</p>"
    words = "; ".join(f"depth {a.depth}: {a.rate:.0%} of {a.judged}" for a in found)
    slot = 56
    width = _LEFT + slot * len(found) + _RIGHT
    parts = [_axis(width, [(0.0, "0%"), (0.5, "50%"), (1.0, "100%")], 1.0)]
    for i, a in enumerate(found):
        x, y = _LEFT + slot * i + 8, _y(a.rate, 1.0)
        parts.append(f'<rect class="moa-bar" x="{x}" y="{y:g}" width="{slot - 16}" height="{_y(0, 1) - y:g}"/>')
        parts.append(_text(x + slot / 2 - 8, y - 5, f"{a.rate:.0%}"))
        parts.append(_text(x + slot / 2 - 8, _HEIGHT - 20, str(a.depth)))
        parts.append(_text(x + slot / 2 - 8, _HEIGHT - 6, f"of {a.judged}", small=True))
    return _svg("acceptance", "Share of drafts accepted, by depth", words, width, parts)


def draw_lengths(rounds: Sequence["RoundTrace"]) -> str:
    """A bar for each round: tokens it yielded, the target's own included; the dashed line is their mean."""
    if not rounds:
        return "<p>There was no round after the prefill.</p>"
    lengths = [len(entry.tokens) for entry in rounds]
    mean = sum(lengths) / len(lengths)
    most = max(lengths)
    slot = max(5, min(24, 600 // len(lengths)))
    width = max(_LEFT + slot * len(lengths) + _RIGHT, 200)
    step = max(1, -(-most // 6))
    parts = [_axis(width, [(float(v), str(v)) for v in range(0, most + 1, step)], float(most))]
    for i, length in enumerate(lengths):
        y = _y(length, most)
        parts.append(
            f'<rect class="moa-bar" x="{_LEFT + slot * i + 1}" y="{y:g}" width="{slot - 2}" '
            f'height="{_y(0, most) - y:g}"><title>round {i + 1}: {length}</title></rect>'
        )
    y = _y(mean, most)
    parts.append(f'<path class="moa-mean" d="M{_LEFT},{y:g} H{width - _RIGHT}"/>')
    parts.append(_text((_LEFT + width) / 2, _HEIGHT - 12, f"round 1 to {len(lengths)}; mean {mean:.2f}"))
    words = f"{len(lengths)} rounds, {mean:.2f} tokens on average, at most {most}: {', '.join(map(str, lengths))}"
    return _svg("lengths", "Tokens per round over time", words, width, parts)


def draw_groups(
    title: str,
    groups: Sequence[str],
    series: dict[str, list[float | None]],
    *,
    percent: bool = False,
    mark: float | None = None,
) -> str:
    """Bars side by side in every group, one per name, with the figure on top and the name's letter below.

    Args:
        series: values by name, group by group; None and what is missing at the end are left out.
        percent: values are shares.
        mark: where a dashed line is drawn, such as 1 for no speedup.
    """
    known = [value for values in series.values() for value in values if value is not None]
    if not known:
        return f"<p>{html.escape(title)}: nothing was measured.</p>"
    most = 1.0 if percent else max(*known, mark or 0.0, 1e-9)
    slot, gap = 42, 22
    width = _LEFT + len(groups) * (slot * len(series) + gap) + _RIGHT
    shown = "{:.0%}" if percent else "{:.2f}" if most < 10 else "{:.0f}"
    parts = [_axis(width, [(share * most, shown.format(share * most)) for share in (0.0, 0.5, 1.0)], most)]
    for i, group in enumerate(groups):
        left = _LEFT + i * (slot * len(series) + gap) + gap / 2
        parts.append(_text(left + slot * len(series) / 2, _HEIGHT - 6, group, small=True))
        for j, (_, values) in enumerate(series.items()):
            value = values[i] if i < len(values) else None
            if value is None:
                continue
            x, y = left + slot * j, _y(value, most)
            parts.append(
                f'<rect class="moa-bar moa-bar-{j % 3}" x="{x + 3:g}" y="{y:g}" width="{slot - 6}" '
                f'height="{_y(0, most) - y:g}"/>'
            )
            parts.append(_text(x + slot / 2, y - 4, shown.format(value), small=True))
            parts.append(_text(x + slot / 2, _HEIGHT - 22, _LETTERS[j % len(_LETTERS)], small=True))
    if mark is not None:
        parts.append(f'<path class="moa-mean" d="M{_LEFT},{_y(mark, most):g} H{width - _RIGHT}"/>')
    names = ", ".join(f"{_LETTERS[j % len(_LETTERS)]} = {name}" for j, name in enumerate(series))
    words = "; ".join(
        f"{name}: "
        + ", ".join(f"{group} {shown.format(v)}" for group, v in zip(groups, values, strict=False) if v is not None)
        for name, values in series.items()
    )
    key = re.sub(r"[^a-z]+", "-", title.lower())
    return _svg(key, f"{title} ({names})", words, width, parts)


def seconds_table(rounds: Sequence["RoundTrace"]) -> str:
    """Where the time of all rounds went."""
    total = [
        ("drafting", sum(entry.draft_seconds for entry in rounds)),
        ("the target's passes (verifying)", sum(entry.verify_seconds for entry in rounds)),
        ("bookkeeping", sum(entry.bookkeeping_seconds for entry in rounds)),
    ]
    whole = sum(seconds for _, seconds in total) or 1.0
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{seconds:.2f} s</td><td>{seconds / whole:.0%}</td></tr>'
        for name, seconds in total
    )
    return (
        '<table class="moa-figures"><caption>Time of all rounds</caption>'
        f'<thead><tr><th scope="col">part</th><th scope="col">time</th><th scope="col">share</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _y(value: float, most: float) -> float:
    return _HEIGHT - _BOTTOM - (value / most) * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, words: str, small: bool = False, anchor: str = "middle") -> str:
    return (
        f'<text class="{"moa-small" if small else "moa-label"}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def _axis(width: float, ticks: list[tuple[float, str]], most: float) -> str:
    lines = f'<path class="moa-axis" d="M{_LEFT},{_TOP} V{_HEIGHT - _BOTTOM} H{width - _RIGHT}"/>'
    return lines + "".join(_text(_LEFT - 6, _y(value, most) + 4, name, True, "end") for value, name in ticks)


def _svg(name: str, title: str, words: str, width: float, parts: list[str]) -> str:
    title = html.escape(title)
    return (
        f'<figure class="moa-picture" tabindex="0" aria-label="{title}, scrolls sideways">'
        f'<figcaption>{title}</figcaption><svg role="img" width="{width:g}" height="{_HEIGHT}" '
        f'viewBox="0 0 {width:g} {_HEIGHT}" aria-labelledby="moa-{name}-title moa-{name}-description">'
        f'<title id="moa-{name}-title">{title}</title><desc id="moa-{name}-description">{html.escape(words)}</desc>'
        f"{''.join(parts)}</svg></figure>"
    )
