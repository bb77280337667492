"""One round as a picture: the drafted tree, what the target kept, and its own token.

Knows one round of a trace and how to draw it as SVG; the same is said in words for screen readers. Does not know the
page. Colours come from the style sheet; a kept token has a tick and a thick border, a thrown-away one a dashed border
and a strike-through.
"""

import html
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .marks import visible

if TYPE_CHECKING:
    from ..generation.trace import NodeTrace, RoundTrace

_COLUMN, _ROW, _WIDTH, _HEIGHT, _MARGIN = 150, 54, 116, 40, 8
_LONGEST = 12  # characters of a token that fit into its box

TextAfter = Callable[[list[int], int], str]
"""The text that a token adds after other drafted tokens of the round."""


@dataclass(frozen=True)
class Box:
    """A token in the picture.

    Attributes:
        text: what it adds to the text before it.
        note: its probability, or who it is.
        kind: "root" (the last verified token), "accepted", "lookup", "rejected" or "own".
        column: 0 for the root, k for depth k.
        parent: index of the box it follows, -1 for the root.
        row: from the top; a token stands in the row of its first child.
    """

    text: str
    note: str
    kind: str
    column: int
    parent: int
    row: int = 0


def boxes(entry: "RoundTrace", root: str, text_after: TextAfter) -> list[Box]:
    """The round's tokens, laid out. The first is the root, node i of the trace is box i + 1, the own token is last."""
    nodes = entry.nodes
    found = [Box(root, "verified", "root", 0, -1)]
    for node in nodes:
        kind = "rejected" if not node.accepted else "lookup" if node.origin == "lookup" else "accepted"
        note = f"{node.probability:.0%}" + (" lookup" if node.origin == "lookup" else "")
        text = text_after(path_to(nodes, node.parent), node.token)
        found.append(Box(text, note, kind, node.depth, node.parent + 1))
    last = max((index for index, node in enumerate(nodes) if node.accepted), default=-1)
    for token in entry.tokens[entry.accepted :]:
        found.append(
            Box(text_after(path_to(nodes, last), token), "target", "own", found[last + 1].column + 1, last + 1)
        )
    probabilities = [1.0, *(node.probability for node in nodes), 1.0]
    return _in_rows(found, probabilities)


def _in_rows(found: list[Box], probabilities: list[float]) -> list[Box]:
    """Gives every leaf a row of its own: what was kept on top, then by probability."""
    children: dict[int, list[int]] = {}
    for index, box in enumerate(found[1:], start=1):
        children.setdefault(box.parent, []).append(index)
    for siblings in children.values():
        siblings.sort(key=lambda index: (found[index].kind == "rejected", -probabilities[index]))
    rows = [0] * len(found)
    leaves = 0
    stack = [0]
    order = []
    while stack:
        index = stack.pop()
        order.append(index)
        if index in children:
            stack.extend(reversed(children[index]))
        else:
            rows[index] = leaves
            leaves += 1
    for index in reversed(order):
        if index in children:
            rows[index] = rows[children[index][0]]
    return [replace(box, row=row) for box, row in zip(found, rows, strict=True)]


def path_to(nodes: list["NodeTrace"], index: int) -> list[int]:
    """Tokens from the first level down to a node; none for the root (-1)."""
    path = []
    while index >= 0:
        path.append(nodes[index].token)
        index = nodes[index].parent
    return path[::-1]


def draw(entry: "RoundTrace", number: int, root: str, text_after: TextAfter) -> str:
    """The round as inline SVG with a title and a description.

    Args:
        number: of the round, from 1.
        root: text of the last verified token, which all drafts follow.
        text_after: text of a token after drafted ones.
    """
    shown = boxes(entry, root, text_after)
    width = max(box.column for box in shown) * _COLUMN + _WIDTH + 2 * _MARGIN
    height = max(box.row for box in shown) * _ROW + _HEIGHT + 2 * _MARGIN
    edges = "".join(_edge(shown[box.parent], box) for box in shown[1:])
    tokens = "".join(_box(box) for box in shown)
    title, description = f"Round {number}: the draft tree", html.escape(describe(entry, shown))
    return (
        f'<div class="moa-picture" tabindex="0" role="group" aria-label="{title}, scrolls sideways">'
        f'<svg role="img" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'aria-labelledby="moa-tree-title moa-tree-description"><title id="moa-tree-title">{title}</title>'
        f'<desc id="moa-tree-description">{description}</desc>{edges}{tokens}</svg></div>'
    )


def describe(entry: "RoundTrace", shown: list[Box]) -> str:
    """The picture in words."""
    kept = [f"“{visible(box.text)}” ({box.note})" for box in shown if box.kind in ("accepted", "lookup")]
    thrown = [f"“{visible(box.text)}” ({box.note}, depth {box.column})" for box in shown if box.kind == "rejected"]
    own = [f"“{visible(box.text)}”" for box in shown if box.kind == "own"]
    return " ".join(
        [
            f"After “{visible(shown[0].text)}”, {len(entry.nodes)} tokens were drafted.",
            f"Kept: {', '.join(kept)}." if kept else "None was kept.",
            f"Thrown away: {', '.join(thrown)}." if thrown else "None was thrown away.",
            f"The target's own token: {own[0]}." if own else "Decoding stopped inside the draft.",
        ]
    )


def _corner(box: Box) -> tuple[float, float]:
    return _MARGIN + box.column * _COLUMN, _MARGIN + box.row * _ROW


def _edge(parent: Box, child: Box) -> str:
    x1, y1 = _corner(parent)
    x2, y2 = _corner(child)
    x1, y1, y2 = x1 + _WIDTH, y1 + _HEIGHT / 2, y2 + _HEIGHT / 2
    middle = (x1 + x2) / 2
    kept = " moa-kept" if child.kind in ("accepted", "lookup", "own") else ""
    return f'<path class="moa-edge{kept}" d="M{x1:g},{y1:g} C{middle:g},{y1:g} {middle:g},{y2:g} {x2:g},{y2:g}"/>'


def _box(box: Box) -> str:
    x, y = _corner(box)
    text = visible(box.text)
    name = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    tick = "✓ " if box.kind in ("accepted", "lookup") else "✗ " if box.kind == "rejected" else ""
    middle = x + _WIDTH / 2
    return (
        f'<g class="moa-box-{box.kind}"><title>{html.escape(f"{text} ({box.note})")}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text class="moa-name" x="{middle:g}" y="{y + 17:g}" text-anchor="middle">{html.escape(name)}</text>'
        f'<text class="moa-small" x="{middle:g}" y="{y + 33:g}" text-anchor="middle">{tick}{html.escape(box.note)}'
        "</text></g>"
    )
