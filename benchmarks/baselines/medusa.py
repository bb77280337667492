"""Medusa heads (arXiv 2401.10774): one small network per position ahead, all reading the same hidden state.

Head `d` maps the target's last hidden state of the newest verified token to the one that it expects `d + 1` tokens
later. The published heads end in vocabulary matrices of their own, which for a small target would be most of its
weights again; these end in the target's head, as all drafters compared here do, and spend their weights on layers.
A Medusa draft knows neither the bonus token nor the drafts before it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...generation.draft import Draft
from ...generation.moa_source import MoASession
from ...generation.sources import DraftPlan, Verified
from ...modeling_moa.modeling_moa import MoADrafterOutput
from .lent import BaselineConfig, BaselineDrafter


class MedusaConfig(BaselineConfig):
    """How many heads, and how many residual layers each has."""

    model_type = "medusa_drafter"

    num_heads: int = 5
    layers_per_head: int = 3


@dataclass
class MedusaContext:
    """`feature` (B, 1, E) is the target's last hidden state of the newest verified token."""

    feature: torch.Tensor
    length: int = 0  # no verified token has keys to be seen


class MedusaHead(nn.Module):
    """Residual layers; they start as the identity."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            feature = feature + nn.functional.silu(layer(feature))
        return feature


class MedusaDrafter(BaselineDrafter):
    """Medusa's heads, ending in the head lent by the target."""

    config_class = MedusaConfig

    def _build(self, config: MedusaConfig) -> None:
        self.heads = nn.ModuleList(
            MedusaHead(config.hidden_size, config.layers_per_head) for _ in range(config.num_heads)
        )

    def session(self, target: PreTrainedModel, rows: int) -> "MedusaSession":
        return MedusaSession(self, target, rows)

    def predicted(self, feature: torch.Tensor, depth: int) -> torch.Tensor:
        """The hidden state that head `depth` expects, from the newest verified one. (..., E) -> (..., E)."""
        return self.normed(self.heads[depth](feature.to(self.compute_dtype)))

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: MedusaContext,
        drafted: int | None = None,
        *masks: Any,
        **kwargs: Any,
    ) -> MoADrafterOutput:
        """As `MoADrafterForCausalLM.forward`; all that `drafted` has to say is how many levels there were."""
        depth = drafted or 0
        hidden = self.predicted(context.feature, depth).expand(-1, input_ids.shape[1], -1)
        return MoADrafterOutput(logits=self.head(hidden), hidden=hidden, drafted=depth + 1)  # type: ignore[arg-type]


class MedusaSession(MoASession):
    """Keeps the newest verified token's hidden state."""

    def __init__(self, drafter: MedusaDrafter, target: PreTrainedModel, rows: int):
        super().__init__(drafter, target, rows)
        self.hidden_states = (drafter.config.target_num_hidden_layers,)
        self.feature: torch.Tensor | None = None

    def observe(self, verified: Verified) -> None:
        hidden = verified.states.hidden(self.hidden_states[0]).to(self.drafter.device)
        if self.feature is None:
            self.feature = torch.zeros_like(hidden[:, :1])
        for row, count in enumerate(verified.counts):
            if count:
                self.feature[row, 0] = hidden[row, count - 1]
        self.next_tokens = list(verified.next_tokens)

    def draft(self, plan: DraftPlan) -> list[Draft]:
        return super().draft(replace(plan, levels=min(plan.levels, self.drafter.config.num_heads)))

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.feature = None if self.feature is None else self.feature[rows]

    def context(self) -> MedusaContext:  # type: ignore[override]
        return MedusaContext(self.feature)  # type: ignore[arg-type]  # a session observes before it drafts
