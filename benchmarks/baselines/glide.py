"""The GLIDE drafter (arXiv 2402.02082): a layer that attends to the drafts and to the target's last keys and values.

Self-attention over the tokens, cross-attention to the key/value cache of the target's last layer, an MLP. It is what
is left of MoA without Layer Self-Attention, and is trained by MoA's objective, whose masks are GLIDE's as well.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...generation.moa_source import MoASession
from ...modeling_moa.modeling_moa import (
    DraftContext,
    KeyValue,
    MoAAttention,
    MoADecoderLayer,
    MoARMSNorm,
    rotary_tables,
)
from .lent import BaselineConfig, BaselineDrafter


class GlideConfig(BaselineConfig):
    """Sizes of a GLIDE drafter: a target layer's attention, twice, and an MLP of `intermediate_size`."""

    model_type = "glide_drafter"

    intermediate_size: int = 2304

    @property
    def lsa_layers(self) -> list[int]:
        return [self.target_num_hidden_layers - 1]

    @classmethod
    def for_target(cls, target_config: Any, **overrides: Any) -> "GlideConfig":
        theirs = target_config.get_text_config(decoder=True)
        return super().for_target(
            target_config, **({"intermediate_size": theirs.intermediate_size * 3 // 2} | overrides)
        )


class _SelfAttention(torch.nn.Module):
    """The first half of a decoder layer."""

    def __init__(self, config: GlideConfig):
        super().__init__()
        self.self_attn = MoAAttention(
            config,  # type: ignore[arg-type]  # has the fields that it reads
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.input_layernorm = MoARMSNorm(config.hidden_size, config.rms_norm_eps)

    def key_value(self, hidden: torch.Tensor, tables: KeyValue) -> KeyValue:
        return self.self_attn.key_value(self.input_layernorm(hidden), tables)

    def forward(
        self, hidden: torch.Tensor, tables: KeyValue, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return hidden + self.self_attn(self.input_layernorm(hidden), tables, key, value, mask)


class GlideDrafter(BaselineDrafter):
    """GLIDE's layer, and a head lent by the target."""

    config_class = GlideConfig

    def _build(self, config: GlideConfig) -> None:
        self.self_attention = _SelfAttention(config)  # type: ignore[assignment]
        self.cross_attention = MoADecoderLayer(
            config,  # type: ignore[arg-type]
            config.hidden_size,
            config.num_attention_heads,
            config.target_num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
        )
        # keys and values are the target's
        del self.cross_attention.self_attn.k_proj, self.cross_attention.self_attn.v_proj

    def session(self, target: PreTrainedModel, rows: int) -> MoASession:
        return MoASession(self, target, rows)

    def memory(self, layer_states: torch.Tensor) -> torch.Tensor:
        """The last layer's keys and values as they are, (B, T, 2 * E_kv)."""
        return layer_states.to(self.compute_dtype)

    def encode_memory(
        self,
        input_ids: torch.Tensor,
        memory: torch.Tensor,
        position_ids: torch.Tensor,
        target_layers: list[KeyValue] | None = None,
    ) -> DraftContext:
        """As `MoADrafterForCausalLM.encode_memory`; the keys are already rotated, as the target's cache has them."""
        tables = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta, self.compute_dtype)
        embeddings = self.lent.embed(input_ids).to(self.compute_dtype)
        heads = memory.view(*memory.shape[:2], self.config.target_num_key_value_heads, -1).transpose(1, 2)
        keys, values = heads.chunk(2, dim=-1)
        return DraftContext(self.self_attention.key_value(embeddings, tables), (keys, values))
