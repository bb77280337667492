"""The EAGLE-2 drafter (arXiv 2401.15077 and 2406.16858): one decoder layer that continues the target's hidden states.

The query at position `p` is a linear map of token `p`'s embedding beside the target's last hidden state at `p - 1`; the
layer predicts the hidden state at `p`, from which the target's own head reads token `p + 1`. While drafting, what was
predicted takes the place of the hidden state that the target has not computed yet.

What EAGLE-2 has not, and later drafters gave it, is here too, because the baseline has to be a strong one: both inputs
are normed (EAGLE-3, arXiv 2503.01840), and training is on the drafter's own predictions (see `eagle_objective`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...generation.moa_source import MoASession
from ...generation.sources import Verified
from ...modeling_moa.modeling_moa import (
    DraftContext,
    KeyValue,
    MoADecoderLayer,
    MoADrafterOutput,
    MoARMSNorm,
    rotary_tables,
)
from .lent import BaselineConfig, BaselineDrafter


class EagleConfig(BaselineConfig):
    """Sizes of an EAGLE drafter: a target layer's attention, and an MLP of `intermediate_size`."""

    model_type = "eagle_drafter"

    intermediate_size: int = 2304

    @classmethod
    def for_target(cls, target_config: Any, **overrides: Any) -> "EagleConfig":
        theirs = target_config.get_text_config(decoder=True)
        # beside the map of both inputs, one layer: as many weights as MoA's three
        return super().for_target(
            target_config, **({"intermediate_size": theirs.intermediate_size * 3 // 2} | overrides)
        )


@dataclass
class EagleContext(DraftContext):
    """`self_attention` of the verified tokens; `feature` (B, 1, E) is the target's hidden state of the newest one."""

    feature: torch.Tensor | None = None


class EagleDrafter(BaselineDrafter):
    """EAGLE's map and layer, and a head lent by the target."""

    config_class = EagleConfig

    def _build(self, config: EagleConfig) -> None:
        width = config.hidden_size
        self.embedding_norm = MoARMSNorm(width, config.rms_norm_eps)
        self.feature_norm = MoARMSNorm(width, config.rms_norm_eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = MoADecoderLayer(
            config,  # type: ignore[arg-type]  # has the fields that the layer reads
            width,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
        )

    def session(self, target: PreTrainedModel, rows: int) -> "EagleSession":
        return EagleSession(self, target, rows)

    def joined(self, input_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What enters the layer: tokens (B, Q) beside the hidden states (B, Q, E) of those before them. (B, Q, E)."""
        embeddings = self.embedding_norm(self.lent.embed(input_ids).to(self.compute_dtype))
        return self.fc(torch.cat([embeddings, self.feature_norm(features.to(self.compute_dtype))], dim=-1))

    def tables(self, position_ids: torch.Tensor) -> KeyValue:
        return rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta, self.compute_dtype)

    def encode(self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor) -> EagleContext:  # type: ignore[override]
        """Keys and values of verified tokens.

        Args:
            input_ids, position_ids: (B, T).
            features: (B, T, E) the target's last hidden states of the tokens before them.
        """
        keys, values = self.layer.key_value(self.joined(input_ids, features), self.tables(position_ids))
        nothing = keys[:, :0]  # there is no cross-attention
        return EagleContext((keys, values), (nothing, nothing))

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: EagleContext,
        drafted: list[KeyValue] | None = None,
        self_mask: torch.Tensor | None = None,
        cross_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MoADrafterOutput:
        """As `MoADrafterForCausalLM.forward`. `drafted` also carries the hidden states predicted by the level before.

        Of the level before, a query may see one token only, its parent: that is how the parent's hidden state is found.
        """
        key, value = context.self_attention
        features = context.feature
        if drafted:
            (keys, values), (features, _) = drafted
            key, value = torch.cat([key, keys], dim=2), torch.cat([value, values], dim=2)
            queries, before = input_ids.shape[1], features.shape[1]
            if before > 1:
                parents = self_mask[:, 0, :, -queries - before : -queries].int().argmax(dim=-1)
                features = features.gather(1, parents[..., None].expand(-1, -1, features.shape[-1]))
            else:
                features = features.expand(-1, queries, -1)
        tables = self.tables(position_ids)
        hidden = self.joined(input_ids, features)
        new_key, new_value = self.layer.key_value(hidden, tables)
        key, value = torch.cat([key, new_key], dim=2), torch.cat([value, new_value], dim=2)
        predicted = self.normed(self.layer(hidden, tables, key, value, self_mask))
        length = context.length
        kept = [(key[:, :, length:], value[:, :, length:]), (predicted, predicted)]
        return MoADrafterOutput(logits=self.head(predicted), hidden=predicted, drafted=kept)


class EagleSession(MoASession):
    """Pairs every verified token with the hidden state of the one before it."""

    def __init__(self, drafter: EagleDrafter, target: PreTrainedModel, rows: int):
        super().__init__(drafter, target, rows)
        self.hidden_states = (drafter.config.target_num_hidden_layers,)
        self.feature: torch.Tensor | None = None  # (B, 1, E), of each row's newest verified token

    def observe(self, verified: Verified) -> None:
        device = self.drafter.device
        hidden = verified.states.hidden(self.hidden_states[0]).to(device)  # (B, n, E)
        position_ids = verified.position_ids.to(device)
        if self.feature is None:  # nothing comes before the first token
            self.feature = torch.zeros_like(hidden[:, :1])
        features = torch.cat([self.feature, hidden[:, :-1]], dim=1)
        new = self.drafter.encode(verified.input_ids.to(device), features, position_ids)
        self.extend(new, position_ids, verified.starts, verified.counts, verified.next_tokens)
        for row, count in enumerate(verified.counts):
            if count:
                self.feature[row, 0] = hidden[row, count - 1]

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.feature = None if self.feature is None else self.feature[rows]

    def context(self) -> EagleContext:  # type: ignore[override]
        return replace(super().context(), feature=self.feature)
