"""A generation as marked tokens: accepted draft, draft copied by lookup, the target's own, thrown away.

Knows traces and tokenizers. Does not know models, nor how a mark is shown: that is cli's and demo's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .trace import GenerationTrace, NodeTrace, RoundTrace

Kind = Literal["accepted", "lookup", "own", "rejected", "verified", "provisional", "confirmed", "withdrawn"]
"""The first four are of one generation; the others of a text that is written over a line that can be cut."""

GONE: tuple[Kind, ...] = ("rejected", "withdrawn")
"""Kinds that are not part of the text."""


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
        branch: of several thrown-away drafts in one place, the one it belongs to, from 0.
    """

    text: str
    kind: Kind
    token: int
    round: int
    special: str = ""
    probability: float | None = None
    branch: int = 0


class MarkedText:
    """Grows with a generation: marks in the order in which the tokens stood.

    The texts of all marks but those in `GONE`, put together, are the answer as the tokenizer decodes it.

    Args:
        branches: thrown-away branches of one round that stand in the text, at most.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", branches: int = 2):
        self.tokenizer, self.branches = tokenizer, branches
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
        for branch, path in enumerate(rejected_branches(entry.nodes)[: self.branches]):
            nodes = [entry.nodes[index] for index in path]
            texts = self._texts_after([node.token for node in nodes])
            self.marks += [
                Mark(text, "rejected", node.token, self.rounds, "", node.probability, branch)
                for text, node in zip(texts, nodes, strict=True)
            ]
        self.add_own(entry.tokens[len(accepted) :], self.rounds)

    def add(self, token: int, kind: Kind) -> None:
        """One token of a text that is written over a line."""
        self._append(token, kind, self.rounds)

    def add_withdrawn(self, tokens: list[int]) -> None:
        """Tokens that stood here and were taken back."""
        texts = self._texts_after(tokens)
        self.marks += [Mark(text, "withdrawn", token, self.rounds) for text, token in zip(texts, tokens, strict=True)]

    def finish(self) -> None:
        """Shows what is left of a last character that never became complete."""
        rest = self._decode(self.token_ids)[len(self._shown) :]
        if rest and self.marks:
            index = max(i for i, mark in enumerate(self.marks) if mark.kind not in GONE)
            self.marks[index] = replace(self.marks[index], text=self.marks[index].text + rest)
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

    def _texts_after(self, tokens: list[int]) -> list[str]:
        """What each of these would add to the text if it went on with them; a character appears when complete."""
        texts, added = [], ""
        for index, token in enumerate(tokens):
            if token in self._specials:
                texts.append(text_after(self.tokenizer, [], token))
                continue
            whole = _added(self.tokenizer, self.token_ids, tokens[: index + 1])
            waits = whole.endswith("\ufffd") and index + 1 < len(tokens)
            texts.append("" if waits else whole[len(added) :])
            added = added if waits else whole
        return texts

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def text_after(tokenizer: "PreTrainedTokenizerBase", before: list[int], token: int) -> str:
    """What one token adds after others. Special tokens have their names; an incomplete character is "\ufffd"."""
    if token in tokenizer.all_special_ids:
        return str(tokenizer.convert_ids_to_tokens(token))
    return _added(tokenizer, before, [token])


def _added(tokenizer: "PreTrainedTokenizerBase", before: list[int], tokens: list[int]) -> str:
    """What tokens add after others, special ones left out."""
    tail = [token for token in before[-8:] if token not in tokenizer.all_special_ids]
    start = str(tokenizer.decode(tail))
    whole = str(tokenizer.decode([*tail, *tokens], skip_special_tokens=True))
    return whole[len(start) :] if whole.startswith(start) else str(tokenizer.decode(tokens, skip_special_tokens=True))


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
