"""Configuration of the Mixture-of-Attentions drafter (arXiv 2410.03804, section 4)."""

from typing import Any, Literal

from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

_SIZES = (
    "vocab_size",
    "hidden_size",
    "target_num_hidden_layers",
    "target_num_key_value_heads",
    "target_head_dim",
    "num_attention_heads",
    "head_dim",
    "self_attention_num_key_value_heads",
    "self_attention_intermediate_size",
    "cross_attention_num_key_value_heads",
    "cross_attention_intermediate_size",
    "layer_self_attention_num_attention_heads",
    "layer_self_attention_num_key_value_heads",
    "layer_self_attention_intermediate_size",
)


class MoADrafterConfig(PreTrainedConfig):
    r"""Sizes of a drafter, the target it belongs to, and the choices the paper leaves open.

    Use [`MoADrafterConfig.for_target`] to size a drafter for a target; the defaults here are those of
    SmolLM2-135M-Instruct.

    Target geometry (must equal the target's):
        vocab_size: size of the target's vocabulary, in rows of its embedding table.
        hidden_size: width `E` of the target and of the drafter's self- and cross-attention.
        target_num_hidden_layers: number `L` of the target's decoder layers.
        target_num_key_value_heads, target_head_dim: of every layer that Layer Self-Attention reads;
            `E_kv = target_num_key_value_heads * target_head_dim`.

    Self-Attention (SA) and Cross-Attention (CA), section 4.1:
        num_attention_heads, head_dim: shared by both.
        self_attention_num_key_value_heads, self_attention_intermediate_size: of SA.
        cross_attention_num_key_value_heads, cross_attention_intermediate_size: of CA.

    The head, as the target has it:
        logit_scale: what the head's products are multiplied by.
        final_logit_softcapping: bound of a tanh over the logits, or None.

    Layer Self-Attention (LSA), section 4.2, of width `2 * E_kv`:
        layer_self_attention_num_attention_heads, layer_self_attention_num_key_value_heads,
        layer_self_attention_intermediate_size.

    Target Layer Inference (TLI), section 4.3:
        target_layer_inference: how many of the target's last layers are reused, frozen; 0 <= N < L.

    Not in the published design, off by default:
        layer_self_attention_layers: the target layers that LSA reads, ascending; None reads all of them. An empty list
            leaves LSA out: the memory is then the mapped hidden state alone, and `memory_hidden_state` must be "add".
        memory_hidden_state: what becomes of the target's last hidden state (after its final norm). "none": unused, as
            published. "entry": one more LSA entry, mapped to `2 * E_kv`. "add": mapped and added to the memory.
        draft_vocab_size: draft over this many token ids instead of all of them; the ids are a buffer of the model.
        head_norm: an RMSNorm between the drafter and the lent head.
        newest_memory: the newest verified token's memory, normed and mapped, is added to CA's queries. Attention brings
            each query only what fits through CA's few value heads; this is the whole vector, at the price of one
            product per round.

    The target's identity, checked when it is attached:
        target_name, target_revision: where it was loaded from.
        target_model_type: its architecture.
        target_fingerprint: a sketch of its embedding table, see `weight_fingerprint`.
        target_config: its whole configuration, kept by standalone drafters that rebuild the lent parts.
        standalone: the checkpoint carries its own copy of the lent parts.
    """

    model_type = "moa_drafter"

    vocab_size: int = 49152
    hidden_size: int = 576
    target_num_hidden_layers: int = 30
    target_num_key_value_heads: int = 3
    target_head_dim: int = 64

    num_attention_heads: int = 9
    head_dim: int = 64
    self_attention_num_key_value_heads: int = 3
    self_attention_intermediate_size: int = 768
    cross_attention_num_key_value_heads: int = 3
    cross_attention_intermediate_size: int = 768

    layer_self_attention_num_attention_heads: int = 6
    layer_self_attention_num_key_value_heads: int = 2
    layer_self_attention_intermediate_size: int = 128

    target_layer_inference: int = 0

    layer_self_attention_layers: list[int] | None = None
    memory_hidden_state: Literal["none", "entry", "add"] = "none"
    draft_vocab_size: int | None = None
    head_norm: bool = False
    newest_memory: bool = False

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
    target_revision: str | None = None
    target_model_type: str | None = None
    target_fingerprint: list[float] | None = None
    target_config: dict[str, Any] | None = None
    standalone: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {size!r}")
        layers = self.target_num_hidden_layers
        if not 0 <= self.target_layer_inference < layers:
            raise ValueError(
                f"target_layer_inference must be between 0 and {layers - 1} for a target of {layers} layers, "
                f"not {self.target_layer_inference}"
            )
        chosen = self.layer_self_attention_layers
        if chosen and (sorted(set(chosen)) != list(chosen) or not 0 <= chosen[0] <= chosen[-1] < layers):
            raise ValueError(
                f"layer_self_attention_layers must be ascending layer numbers below the target's {layers}, not {chosen}"
            )
        if self.memory_hidden_state not in ("none", "entry", "add"):
            raise ValueError(f'memory_hidden_state must be "none", "entry" or "add", not {self.memory_hidden_state!r}')
        if chosen == [] and self.memory_hidden_state != "add":
            raise ValueError(
                "Without layer_self_attention_layers the memory has nothing to be made of but the hidden state: "
                'memory_hidden_state must be "add"'
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be from 1 to the vocabulary's {self.vocab_size}, not {self.draft_vocab_size}"
            )
        for name, heads, groups in (
            ("self_attention", self.num_attention_heads, self.self_attention_num_key_value_heads),
            ("cross_attention", self.num_attention_heads, self.cross_attention_num_key_value_heads),
            (
                "layer_self_attention",
                self.layer_self_attention_num_attention_heads,
                self.layer_self_attention_num_key_value_heads,
            ),
        ):
            if heads % groups:
                raise ValueError(f"{name}: {heads} attention heads cannot share {groups} key/value heads evenly")
        if self.layer_width % (2 * self.layer_self_attention_num_attention_heads):
            raise ValueError(
                f"layer_self_attention_num_attention_heads must divide the LSA width {self.layer_width} into heads "
                f"of an even size (rotary embeddings turn pairs), not {self.layer_self_attention_num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary embeddings turn pairs), not {self.head_dim}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is none that transformers knows, such as silu or gelu")

    @property
    def layer_width(self) -> int:
        """Width `2 * E_kv` of Layer Self-Attention."""
        return 2 * self.target_num_key_value_heads * self.target_head_dim

    @property
    def lsa_layers(self) -> list[int]:
        """The target layers that Layer Self-Attention reads."""
        if self.layer_self_attention_layers is None:
            return list(range(self.target_num_hidden_layers))
        return list(self.layer_self_attention_layers)

    @classmethod
    def for_target(
        cls, target_config: PreTrainedConfig, target_layer_inference: int = 0, **overrides: Any
    ) -> "MoADrafterConfig":
        """Sizes a drafter for a target: about the shape of one target layer for SA and CA, LSA a third of it.

        Raises:
            ValueError: the target has no plain per-layer key/value cache of one shape, or its last layers cannot be
                reused; with the reason.
        """
        config = target_config.get_text_config(decoder=True)
        reason = unsupported_target(config, target_layer_inference)
        if reason:
            raise ValueError(f"A {config.model_type} target cannot have a MoA drafter: {reason}")
        heads = config.num_attention_heads
        groups = key_value_heads(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_theta" not in rope:  # one set of parameters per attention type: take the global one
            rope = rope.get("full_attention", {})
        layer_width = 2 * groups * head_dim
        layer_heads = max(
            h for h in range(1, layer_width // 16 + 1) if layer_width % h == 0 and layer_width // h >= min(64, head_dim)
        )
        layer_groups = next(g for g in range(max(1, layer_heads // 3), 0, -1) if layer_heads % g == 0)
        sizes: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "target_num_hidden_layers": config.num_hidden_layers,
            "target_num_key_value_heads": groups,
            "target_head_dim": head_dim,
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "self_attention_num_key_value_heads": groups,
            "self_attention_intermediate_size": config.intermediate_size // 2,
            "cross_attention_num_key_value_heads": groups,
            "cross_attention_intermediate_size": config.intermediate_size // 2,
            "layer_self_attention_num_attention_heads": layer_heads,
            "layer_self_attention_num_key_value_heads": layer_groups,
            "layer_self_attention_intermediate_size": max(16, layer_width // 3),
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "max_position_embeddings": config.max_position_embeddings,
            "logit_scale": getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0),
            "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "target_name": getattr(config, "_name_or_path", None) or None,
            "target_model_type": config.model_type,
            "target_layer_inference": target_layer_inference,
        }
        return cls(**(sizes | overrides))


def unsupported_target(config: PreTrainedConfig, target_layer_inference: int = 0) -> str | None:
    """Why a target of this configuration cannot have a drafter, or None when it can.

    What only the model itself shows is checked when it is lent.
    """
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(config, "num_attention_heads", None) is None or isinstance(config.num_attention_heads, list):
        return "its attention heads differ from layer to layer, or it has none"
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        return f"its layers of type {', '.join(sorted(unknown))} keep no plain key/value cache"
    if getattr(config, "kv_lora_rank", None):
        return "it caches a compressed latent instead of keys and values"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share another layer's key/value cache"
    if getattr(config, "multi_query", False):
        return "it declares its key/value heads in an older way (multi_query)"
    if target_layer_inference and "sliding_attention" in layer_kinds(config)[-target_layer_inference:]:
        return (
            f"one of its last {target_layer_inference} layers has a sliding window, which cannot be reused for "
            "drafting (TLI); use target_layer_inference=0"
        )
    return None


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kind of attention of each layer; older configurations have one for all of them."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * config.num_hidden_layers


def key_value_heads(config: PreTrainedConfig) -> int:
    """Key/value heads per layer: as many as attention heads in families that know no sharing (GPT-NeoX, OPT), even
    where a number was passed to their configuration."""
    name = "num_key_value_heads"
    cls = type(config)
    knows = hasattr(cls, name) or name in cls.attribute_map or not cls.__module__.startswith("transformers.")
    return (getattr(config, name, None) if knows else None) or config.num_attention_heads
