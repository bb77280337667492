"""What a visitor may ask for, and what is wrong with it, in words. Knows no model: nothing here brings torch along."""

from dataclasses import dataclass
from typing import Any, Literal

Shape = Literal["automatic", "chain", "tree"]
MOST_CHARACTERS = 20_000
MOST_NEW_TOKENS = 512
_TREE_BREADTH = 3
_LOOKUP_TOKENS = 16


class BadRequest(ValueError):
    """A prompt or setting that cannot be decoded; the message is for the person who gave it."""


@dataclass(frozen=True)
class Request:
    """What is to be decoded, and how.

    Attributes:
        prompt: goes through the chat template where the tokenizer has one.
        temperature: 0 is greedy.
        shape: "automatic" measures what pays, with chains, trees and lookup; the others do as told in every round.
        levels: tokens drafted one after another, at most.
        lookup: also copies drafts from the text so far.
        drafter: its name; "" is the default one. Whoever has the drafters checks it.
    """

    prompt: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    shape: Shape = "automatic"
    levels: int = 6
    lookup: bool = True
    seed: int = 0
    drafter: str = ""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise BadRequest("The prompt is empty: type something, or pick an example.")
        if len(self.prompt) > MOST_CHARACTERS:
            raise BadRequest(f"The prompt has {len(self.prompt)} characters; at most {MOST_CHARACTERS} can be used.")
        if any(0xD800 <= ord(character) < 0xE000 for character in self.prompt):
            raise BadRequest("The prompt is not valid text: it has half of a character pair in it.")
        if not 1 <= self.max_new_tokens <= MOST_NEW_TOKENS:
            raise BadRequest(f"The answer's length must be from 1 to {MOST_NEW_TOKENS} tokens.")
        if not 0 <= self.temperature <= 2:
            raise BadRequest("The temperature must be from 0 (greedy) to 2.")
        if self.shape not in ("automatic", "chain", "tree"):
            raise BadRequest('The draft must be "automatic", "chain" or "tree".')
        if not 1 <= self.levels <= 16:
            raise BadRequest("The depth must be from 1 to 16 drafted tokens.")

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`, the same for both ways of decoding."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}

    def drafting(self) -> dict[str, Any]:
        """Arguments of `generate` that say how to draft."""
        options: dict[str, Any] = {"num_assistant_tokens": self.levels}
        options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS if self.lookup else 0
        if self.shape == "automatic":
            return options | {"draft_policy": "auto"}
        breadth = 1 if self.shape == "chain" else _TREE_BREADTH
        nodes = self.levels * breadth
        return options | {"draft_policy": "fixed", "draft_breadth": breadth, "draft_nodes": nodes}
