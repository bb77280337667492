"""A generation as marked tokens: accepted draft, draft copied by lookup, the target's own, thrown away.

Knows traces, tokenizers and how marked tokens become HTML. Does not know models or the page. A kind is told by colour
and by a sign (line, box, strike-through), never by colour alone. Spaces and line breaks are drawn by the style sheet
over real ones, so that copied text and screen readers get the answer's own characters.
"""

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..generation.trace import GenerationTrace, NodeTrace, RoundTrace

Kind = Literal["accepted", "lookup", "own", "rejected", "verified", "provisional", "confirmed", "withdrawn"]

KINDS: dict[Kind, str] = {
    "accepted": "drafted and accepted",
    "lookup": "copied from the text so far (lookup) and accepted",
    "own": "the target's own",
    "rejected": "drafted and thrown away",
}
LINE_KINDS: dict[Kind, str] = {
    "verified": "chosen by the target",
    "provisional": "written alone while the line is cut: provisional",
    "confirmed": "written alone, then confirmed by the target",
    "withdrawn": "written alone, then withdrawn",
}
GONE = ("rejected", "withdrawn")
"""Kinds that are not part of the text."""
SHOWN_BRANCHES = 2
"""Thrown-away branches of one round that stand in the text; the picture of the round has all of them."""


@dataclass(frozen=True)
class Mark:
    """One token as it is shown.

    Attributes:
        text: what it adds to the text; "" while a character is not complete, and for special tokens.
        kind: who wrote it, and what became of it.
        token: its id.
        round: 0 is the prefill.
        special: the name of a special token such as end-of-text, else "".
        probability: what the drafter gave it; None for the target's own tokens.
    """

    text: str
    kind: Kind
    token: int
    round: int
    special: str = ""
    probability: float | None = None


class MarkedText:
    """Grows with a generation: marks in the order in which the tokens stood.

    The texts of all marks but the rejected ones, put together, are the answer as the tokenizer decodes it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        self.marks: list[Mark] = []
        self.token_ids: list[int] = []
        self.rounds = 0
        self._shown = ""
        self._specials = set(tokenizer.all_special_ids)

    def add_own(self, tokens: Iterable[int], round_number: int | None = None) -> None:
        """Tokens of the target, of the prefill or of plain decoding."""
        for token in tokens:
            self._append(token, "own", self.rounds if round_number is None else round_number)

    def add_round(self, entry: "RoundTrace") -> None:
        """What one round drafted, and what came of it."""
        self.rounds += 1
        accepted = [node for node in entry.nodes if node.accepted]
        for node, token in zip(accepted, entry.tokens, strict=False):
            kind: Kind = "lookup" if node.origin == "lookup" else "accepted"
            self._append(token, kind, self.rounds, node.probability)
        for path in rejected_branches(entry.nodes)[:SHOWN_BRANCHES]:
            self._append_rejected([entry.nodes[index] for index in path])
        self.add_own(entry.tokens[len(accepted) :], self.rounds)

    def add(self, token: int, kind: Kind) -> None:
        """One token of a text that is written over a line."""
        self._append(token, kind, self.rounds)

    def add_withdrawn(self, tokens: list[int]) -> None:
        """Tokens that stood here and were taken back."""
        for index, token in enumerate(tokens):
            text = text_after(self.tokenizer, self.token_ids + tokens[:index], token)
            self.marks.append(Mark(text, "withdrawn", token, self.rounds))

    def finish(self) -> None:
        """Shows what is left of a last character that never became complete."""
        rest = self._decode(self.token_ids)[len(self._shown) :]
        if rest and self.marks:
            index = max(i for i, mark in enumerate(self.marks) if mark.kind not in GONE)
            last = self.marks[index]
            self.marks[index] = Mark(
                last.text + rest, last.kind, last.token, last.round, last.special, last.probability
            )
            self._shown += rest

    def catch_up(self, generation: "GenerationTrace") -> None:
        """Adds what the trace of a running or finished generation has beyond what is shown; its first row only."""
        if not self.token_ids:
            self.add_own(generation.first_tokens[:1])
        rounds = [entry for entry in generation.rounds if entry.row == 0]
        for entry in rounds[self.rounds :]:
            self.add_round(entry)

    def _append(self, token: int, kind: Kind, round_number: int, probability: float | None = None) -> None:
        self.token_ids.append(token)
        text, special = "", ""
        if token in self._specials:
            special = str(self.tokenizer.convert_ids_to_tokens(token))
        else:
            whole = self._decode(self.token_ids)
            if not whole.endswith("\ufffd"):  # else a character waits for its last bytes
                text, self._shown = whole[len(self._shown) :], whole
        self.marks.append(Mark(text, kind, token, round_number, special, probability))

    def _append_rejected(self, nodes: list["NodeTrace"]) -> None:
        path: list[int] = []
        for node in nodes:
            text = text_after(self.tokenizer, self.token_ids + path, node.token)
            path.append(node.token)
            self.marks.append(Mark(text, "rejected", node.token, self.rounds, "", node.probability))

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def text_after(tokenizer: "PreTrainedTokenizerBase", before: list[int], token: int) -> str:
    """What one token adds after others. Special tokens have their names; an incomplete character is "\ufffd"."""
    if token in tokenizer.all_special_ids:
        return str(tokenizer.convert_ids_to_tokens(token))
    tail = [t for t in before[-8:] if t not in tokenizer.all_special_ids]
    start = str(tokenizer.decode(tail))
    whole = str(tokenizer.decode([*tail, token]))
    return whole[len(start) :] if whole.startswith(start) else str(tokenizer.decode([token]))


def rejected_branches(nodes: list["NodeTrace"]) -> list[list[int]]:
    """Indices of the drafts that the target did not keep, one list per branch.

    A branch starts where it leaves the accepted path and follows the most probable child. The branches that left last
    come first, among them the most probable ones; so the first is the one that the target's own token replaced.
    """
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if not node.accepted:
            children.setdefault(node.parent, []).append(index)
    for siblings in children.values():
        siblings.sort(key=lambda index: -nodes[index].probability)
    starts = [i for parent, found in children.items() if parent < 0 or nodes[parent].accepted for i in found]
    branches = []
    for start in sorted(starts, key=lambda index: (-nodes[index].depth, -nodes[index].probability)):
        path = [start]
        while path[-1] in children:
            path.append(children[path[-1]][0])
        branches.append(path)
    return branches


# -- as HTML -----------------------------------------------------------------------------------------------------------

_SPACES = {" ": '<span class="moa-space"> </span>', "\t": '<span class="moa-tab">\t</span>'}
_BREAK = '<span class="moa-break"></span>'


def render(marks: Iterable[Mark]) -> str:
    """Marked tokens as HTML. A thrown-away line break is drawn but does not break the line."""
    return f'<div class="moa-text">{"".join(_render(mark) for mark in marks)}</div>'


def _render(mark: Mark) -> str:
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
    return f'<{element} class="moa-token moa-{mark.kind}" title="{html.escape(title)}">{inner}</{element}>'


def _character(character: str, kind: Kind) -> str:
    if character == "\n":
        return _BREAK if kind in GONE else _BREAK + "\n"
    return _SPACES.get(character) or html.escape(_sign(character))


def _element(kind: Kind) -> str:
    return "del" if kind in GONE else "span"


def legend(kinds: dict[Kind, str] = KINDS) -> str:
    """What the marks mean, in the marks."""
    items = "".join(
        f'<li><{_element(kind)} class="moa-token moa-{kind}">{html.escape(words)}</{_element(kind)}></li>'
        for kind, words in kinds.items()
    )
    return (
        f'<ul class="moa-legend" aria-label="What the marks mean">{items}'
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
