"""One generation as text for the terminal, showing who wrote what.

Knows how marked tokens look in a terminal; which token is what, generation/marks.py knows. What is marked by colour is
marked by signs as well; without colour the signs alone are left.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..generation.trace import GenerationTrace

Kind = Literal["accepted", "own", "thrown"]

_KINDS: dict[str, Kind] = {"accepted": "accepted", "lookup": "accepted", "own": "own", "rejected": "thrown"}
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
    from ..generation.marks import MarkedText  # brings torch along, which `moa --help` does not wait for

    text = MarkedText(tokenizer, branches=_SHOWN_PATHS)
    text.catch_up(generation)
    text.finish()
    for (_, _, kind), marks in groupby(text.marks, lambda mark: (mark.round, mark.branch, _KINDS[mark.kind])):
        stretch = "".join(mark.text for mark in marks)
        if stretch:
            yield stretch, kind
