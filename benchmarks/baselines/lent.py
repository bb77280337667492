"""What the baselines have in common with MoA: the target's frozen embeddings and head, a draft vocabulary, checkpoints.

So that the comparison is about what a drafter reads and how it is built, and about nothing else.
"""

from dataclasses import fields
from typing import Any, ClassVar, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ...generation import DraftOptions
from ...generation.moa_source import MoASession
from ...modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from ...modeling_moa.modeling_moa import MoAPreTrainedModel, MoARMSNorm


class BaselineConfig(PreTrainedConfig):
    """Sizes and identity of the target, and what all baselines choose alike. Fields are `MoADrafterConfig`'s.

    Raises:
        ValueError: a draft vocabulary larger than the target's, or heads that cannot share their keys evenly.
    """

    vocab_size: int = 49152
    hidden_size: int = 576
    target_num_hidden_layers: int = 30
    target_num_key_value_heads: int = 3
    target_head_dim: int = 64
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    draft_vocab_size: int | None = None
    head_norm: bool = True

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    target_name: str | None = None
    target_model_type: str | None = None
    target_fingerprint: list[float] | None = None

    # what code shared with MoA asks for, and no baseline has
    standalone: ClassVar[bool] = False
    target_layer_inference: ClassVar[int] = 0
    memory_hidden_state: ClassVar[str] = "none"
    newest_memory: ClassVar[bool] = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must be from 1 to {self.vocab_size}, not {self.draft_vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key/value heads"
            )

    @property
    def lsa_layers(self) -> list[int]:
        """The target layers whose keys and values are read."""
        return []

    @property
    def layer_width(self) -> int:
        """Numbers per token and layer, `2 * E_kv`."""
        return 2 * self.target_num_key_value_heads * self.target_head_dim

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "BaselineConfig":
        """Sizes a drafter for a target, about as large as the MoA drafter for it.

        Raises:
            ValueError: MoA could not draft for this target either.
        """
        theirs = MoADrafterConfig.for_target(target_config)
        own = {field.name for field in fields(cls)}
        sizes = {name: value for name, value in theirs.to_dict().items() if name in own and name != "model_type"}
        sizes["num_key_value_heads"] = theirs.target_num_key_value_heads
        return cls(**(sizes | {"draft_vocab_size": None, "head_norm": True} | overrides))


class BaselineDrafter(MoADrafterForCausalLM):
    """Borrows the target's parts as a MoA drafter does, and has its own blocks in place of MoA's."""

    config_class = BaselineConfig
    _auto_class = None  # unlike MoA's, its code does not travel with a checkpoint

    def __init__(self, config: Any):
        MoAPreTrainedModel.__init__(self, config)  # MoADrafterForCausalLM's would build the blocks of MoA
        self._build(config)
        if config.head_norm:
            self.head_norm = MoARMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_vocab_ids", torch.arange(config.draft_vocab_size))
        self._lent = None
        self.generation_config._from_model_config = False
        self.post_init()

    def _build(self, config: Any) -> None:
        """Creates the drafter's own blocks."""
        raise NotImplementedError

    def session(self, target: PreTrainedModel, rows: int) -> MoASession:
        """One call's drafts."""
        raise NotImplementedError

    def standalone_copy(self) -> NoReturn:
        raise NotImplementedError("The baselines draft beside their target only; there is no standalone copy")

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            "This drafter does not write by itself: use target.generate(..., assistant_model=drafter) after "
            "moa_spec.benchmarks.baselines.attach_baseline(target, drafter)."
        )


class BaselineSource:
    """A baseline as a source of drafts."""

    def __init__(self, drafter: BaselineDrafter):
        self.drafter = drafter

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> MoASession:
        if self.drafter.lent.embed_tokens is not target.get_input_embeddings():
            raise RuntimeError(
                "This drafter has been attached to another target since: call attach_baseline(target, drafter) again."
            )
        return self.drafter.session(target, len(prompt_ids))
