"""Marked tokens as HTML.

Knows kinds of marks and how they look. A kind is told by colour and by a sign (line, box, strike-through), never by
colour alone. Spaces and line breaks are drawn by the style sheet over real ones, so that copied text and screen readers
get the answer's own characters. Imports nothing that brings torch along: the page is up before it is loaded.
"""

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..generation.marks import Kind, Mark

KINDS: dict["Kind", str] = {
    "accepted": "drafted and kept",
    "lookup": "copied from the text so far and kept",
    "own": "the target's own",
    "rejected": "drafted and thrown away",
}
LINE_KINDS: dict["Kind", str] = {
    "verified": "chosen by the target",
    "provisional": "written alone while the line is cut: provisional",
    "confirmed": "written alone, then confirmed by the target",
    "withdrawn": "written alone, then withdrawn",
}
STRUCK = ("rejected", "withdrawn")
"""Kinds that are struck through: `generation.marks.GONE`."""

_SPACES = {" ": '<span class="moa-space"> </span>', "\t": '<span class="moa-tab">\t</span>'}
_BREAK = '<span class="moa-break"></span>'


def render(marks: Iterable["Mark"]) -> str:
    """Marked tokens as HTML. A thrown-away line break is drawn but does not break the line."""
    parts, before = [], 0
    for mark in marks:
        parts.append(_render(mark, mark.branch not in (0, before)))
        before = mark.branch
    return f'<div class="moa-text">{"".join(parts)}</div>'


def _render(mark: "Mark", begins_branch: bool) -> str:
    inner = "".join(_character(character, mark.kind) for character in mark.text)
    if mark.special:
        inner = f'<span class="moa-special">{html.escape(mark.special)}</span>'
    if not inner:
        return ""
    title = LINE_KINDS.get(mark.kind, "")
    if mark.kind in KINDS:
        title = f"{KINDS[mark.kind]}, {'prefill' if mark.round == 0 else f'round {mark.round}'}"
    if mark.probability is not None:
        title += f", drafter's probability {mark.probability:.0%}"
    element = _element(mark.kind)
    other = " moa-other" if begins_branch else ""
    return f'<{element} class="moa-token moa-{mark.kind}{other}" title="{html.escape(title)}">{inner}</{element}>'


def _character(character: str, kind: "Kind") -> str:
    if character == "\n":
        return _BREAK if kind in STRUCK else _BREAK + "\n"
    return _SPACES.get(character) or html.escape(_sign(character))


def _element(kind: "Kind") -> str:
    return "del" if kind in STRUCK else "span"


def legend(kinds: dict["Kind", str], counts: dict[str, int] | None = None) -> str:
    """What the marks mean, in the marks; with `counts`, how many tokens have each of them."""
    items = []
    for kind, words in kinds.items():
        element = _element(kind)
        number = "" if counts is None else f" <strong>{counts[kind]}</strong>"
        items.append(f'<li><{element} class="moa-token moa-{kind}">{html.escape(words)}</{element}>{number}</li>')
    return (
        f'<ul class="moa-legend" aria-label="What the marks mean">{"".join(items)}'
        '<li><span class="moa-space"> </span> space</li><li><span class="moa-break"></span> line break</li></ul>'
    )


def visible(text: str) -> str:
    """One token for a picture or table: spaces, line breaks and control characters as signs."""
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return "".join(signs.get(character) or _sign(character) for character in text) or "∅"


def _sign(character: str) -> str:
    """A control character, which neither HTML nor SVG may contain, as its picture; others as they are."""
    code = ord(character)
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd" if 127 < code < 160 else character
