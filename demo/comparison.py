"""A prompt decoded with drafts and then plainly: both clocks, and what follows from them.

Knows progress and its arithmetic. Does not know how it is shown.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .decoding import Progress, encode, watch
from .request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..generation.trace import RoundTrace
    from ..modeling_moa import MoADrafterForCausalLM


@dataclass
class Comparison:
    """How far both ways of decoding one prompt are. `plain` stands still until the drafted one has finished."""

    request: Request
    prompt_tokens: int
    drafted: Progress = field(default_factory=Progress)
    plain: Progress = field(default_factory=Progress)

    @property
    def finished(self) -> bool:
        return self.drafted.finished and (self.plain.finished or self.drafted.stopped)

    @property
    def stopped(self) -> bool:
        return self.drafted.stopped or self.plain.stopped

    @property
    def rounds(self) -> list["RoundTrace"]:
        return self.drafted.generation.rounds if self.drafted.generation else []

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by what became of them, in all rounds: "accepted", "lookup", "own", "rejected"."""
        generation = self.drafted.generation
        found = {"accepted": 0, "lookup": 0, "own": len(generation.first_tokens) if generation else 0, "rejected": 0}
        for entry in self.rounds:
            found["own"] += len(entry.tokens) - entry.accepted
            for node in entry.nodes:
                kept = "lookup" if node.origin == "lookup" else "accepted"
                found[kept if node.accepted else "rejected"] += 1
        return found

    @property
    def mean_accepted_tokens(self) -> float | None:
        """New tokens per target call after the prefill, over all rounds."""
        rounds = self.rounds
        return sum(len(entry.tokens) for entry in rounds) / len(rounds) if rounds else None

    @property
    def speedup(self) -> float | None:
        """Of the whole answers, prefill included; None until both are there."""
        if self.stopped or not (self.drafted.finished and self.plain.finished):
            return None
        return self.drafted.tokens_per_second / self.plain.tokens_per_second

    @property
    def identical(self) -> bool | None:
        """Whether greedy decoding wrote the same tokens both ways; None under sampling or before both are there."""
        if self.speedup is None or self.request.temperature:
            return None
        return self.drafted.token_ids == self.plain.token_ids


def compare(
    target: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    drafter: "MoADrafterForCausalLM",
    request: Request,
    stop: threading.Event,
) -> Iterator[Comparison]:
    """Decodes with drafts, then plainly, on the same threads; yields how far both are.

    Raises:
        BadRequest: the prompt does not fit.
    """
    inputs = encode(request, target, tokenizer)
    result = Comparison(request, inputs["input_ids"].shape[1])
    for name, assistant in (("drafted", drafter), ("plain", None)):
        if stop.is_set():
            break
        for progress in watch(target, inputs, request, assistant, stop):
            setattr(result, name, progress)
            yield result
