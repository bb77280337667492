"""One generation as text for the terminal, showing who wrote what.

Knows: tokens, their origin and how to mark them. Does not know models or timing. What is marked by colour is marked by
signs as well; without colour the signs alone are left.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..generation.trace import GenerationTrace, RoundTrace

Kind = Literal["accepted", "own", "thrown"]

_SIGNS: dict[Kind, tuple[str, str]] = {"accepted": ("", ""), "own": ("[", "]"), "thrown": ("~", "~")}
_STYLES: dict[Kind, str] = {"accepted": "\x1b[4;32m", "own": "\x1b[1m", "thrown": "\x1b[2;9;31m"}
_PLAIN = "\x1b[0m"
_SHOWN_PATHS = 3  # thrown-away branches shown per round


def mark(text: str, kind: Kind, colour: bool) -> str:
    """`text` with its signs; a line break inside signs is shown and follows them."""
    before, after = _SIGNS[kind]
    shown = text.replace("\n", "⏎") if before else text
    breaks = "\n" * text.count("\n") if kind == "own" else ""
    if colour:
        # styles end before each line break, or terminals paint the rest of the line
        shown = "\n".join(
            f"{_STYLES[kind]}{part}{_PLAIN}" if part else "" for part in f"{before}{shown}{after}".split("\n")
        )
        return shown + breaks
    return before + shown + after + breaks


def legend(colour: bool) -> str:
    """What the signs mean, in the signs."""
    samples: tuple[tuple[str, Kind], ...] = (
        ("drafted and accepted", "accepted"),
        ("the target's own", "own"),
        ("drafted and thrown away", "thrown"),
    )
    return "   ".join(mark(text, kind, colour) for text, kind in samples)


def render(generation: "GenerationTrace", tokenizer: "PreTrainedTokenizerBase", colour: bool) -> str:
    """The first row's answer, token by token marked by who wrote it."""
    return "".join(mark(text, kind, colour) for text, kind in pieces(generation, tokenizer))


def pieces(generation: "GenerationTrace", tokenizer: "PreTrainedTokenizerBase") -> Iterator[tuple[str, Kind]]:
    """Stretches of text and their kind. All but the thrown-away ones together are the answer's text."""
    written: list[int] = []
    shown = ""

    def grow(tokens: list[int]) -> str:
        """The text that these tokens add. A character that is not complete yet waits for its last token."""
        nonlocal shown
        written.extend(tokens)
        text = decode(tokenizer, written)
        if text.endswith("\ufffd"):
            return ""
        added, shown = text[len(shown) :], text
        return added

    segments: list[tuple[str, Kind]] = [(grow(generation.first_tokens[:1]), "own")]
    for entry in generation.rounds:
        if entry.row != 0:
            continue
        segments.append((grow(entry.tokens[: entry.accepted]), "accepted"))
        segments += [(text, "thrown") for text in thrown_away(entry, tokenizer)]
        segments.append((grow(entry.tokens[entry.accepted :]), "own"))
    segments.append((decode(tokenizer, written)[len(shown) :], "own"))
    yield from (segment for segment in segments if segment[0])


def thrown_away(entry: "RoundTrace", tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The drafts of one round that the target did not keep, one text per branch, the most probable ones first."""
    nodes = entry.nodes
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if not node.accepted:
            children.setdefault(node.parent, []).append(index)
    for siblings in children.values():
        siblings.sort(key=lambda index: -nodes[index].probability)
    branches = []
    starts = [
        child for parent, siblings in children.items() if parent < 0 or nodes[parent].accepted for child in siblings
    ]
    for start in sorted(starts, key=lambda index: -nodes[index].depth)[:_SHOWN_PATHS]:
        path = [start]
        while path[-1] in children:
            path.append(children[path[-1]][0])
        branches.append(str(tokenizer.decode([nodes[index].token for index in path])))
    return branches


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    """The text as the answer shows it, without end-of-text and the like."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
