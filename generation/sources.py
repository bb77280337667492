"""What the decoding loop asks of anything that drafts: MoA, lookup, other drafters, a remote client.

A source belongs to a model and is shared; `begin` opens a session, which holds everything that belongs to one call.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from .draft import Draft
from .options import DraftOptions


class TargetStates(Protocol):
    """The target's states of the tokens that have just become final."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each (B, kv_heads, n, head_dim); n may be short by the oldest tokens."""
        ...

    def whole_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer for everything in the cache, each (B, kv_heads, T, head_dim)."""
        ...

    def hidden(self, index: int) -> torch.Tensor:
        """One of the hidden states that the session asked for, (B, n, E)."""
        ...


@dataclass
class Verified:
    """Tokens that have just become final and whose target states lie in the cache, row by row.

    Attributes:
        input_ids: (B, n) the tokens; row `b` has `counts[b]` of them, the rest is filling.
        position_ids: (B, n) their positions in the text.
        starts: per row the slot of the target's cache that holds the first of them.
        next_tokens: per row the token after them: final too, but not run through the target yet.
        states: where to read the target's activations.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    counts: list[int]
    starts: list[int]
    next_tokens: list[int]
    states: TargetStates


@dataclass(frozen=True)
class DraftPlan:
    """How much to draft in one round: levels, children per node, nodes in all. No further level is drafted once all
    paths together are less likely than `confidence`."""

    levels: int
    breadth: int = 1
    nodes: int = 1
    confidence: float = 0.0


class DraftSession(Protocol):
    """One call's worth of drafting, for a batch of rows that may shrink."""

    hidden_states: tuple[int, ...]
    """Indices of the target's hidden states that `observe` reads, as in `output_hidden_states`."""

    def observe(self, verified: Verified) -> None:
        """Takes in what the target has just settled; called after the prefill and after every round."""
        ...

    def draft(self, plan: DraftPlan) -> list[Draft]:
        """One draft per row, each following the row's last `next_tokens`."""
        ...

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only; the others have finished."""
        ...


class DraftSource(Protocol):
    """Something attached to a target that can draft for it. It must not change while calls are running."""

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> DraftSession:
        """Opens a session for one call. `prompt_ids` are the rows without padding."""
        ...
