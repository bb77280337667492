"""The Mixture-of-Attentions drafter (arXiv 2410.03804, section 4; figure 2 has all of it in one picture).

Knows: its three attention blocks, and how to use the frozen parts that a target lends it. Does not know how drafts are
chosen, verified or trained.

Two calls are all there is:

    context = drafter.encode(input_ids, layer_states)        once per verified token: LSA, map, keys/values of SA and CA
    output  = drafter(input_ids, position_ids, context)      once per drafted level: SA, CA, TLI, head

Shapes use B rows, T verified tokens, Q query tokens, L layers read by LSA, E the target's width, W = 2 * E_kv.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto import AutoConfig, AutoModel

from .configuration_moa import MoADrafterConfig, key_value_heads, unsupported_target

KeyValue = tuple[torch.Tensor, torch.Tensor]  # keys and values, each (B, kv_heads, T, head_dim)


class WrongTargetError(ValueError):
    """The drafter was trained for another target than the one it is given."""


@dataclass
class DraftContext:
    """What the drafter keeps about verified tokens of one generation.

    `self_attention` and `cross_attention` are keys and values, (B, kv_heads, T, head_dim). `target_layers` is, with
    TLI = N, the target's own keys and values of its last N layers, read where they lie in its cache. `memory` is that
    of the tokens encoded last, (B, T', E), of which drafting reads the last one.
    """

    self_attention: KeyValue
    cross_attention: KeyValue
    target_layers: list[KeyValue] = field(default_factory=list)
    memory: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of verified tokens held, padding included."""
        return self.self_attention[0].shape[2]

    def extended(self, newer: "DraftContext") -> "DraftContext":
        """This context followed by `newer`; `target_layers` and `memory` are taken from `newer` as they are."""
        pairs = zip(
            (self.self_attention, self.cross_attention), (newer.self_attention, newer.cross_attention), strict=True
        )
        joined = [(torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2)) for a, b in pairs]
        return DraftContext(joined[0], joined[1], newer.target_layers, newer.memory)


@dataclass
class MoADrafterOutput(CausalLMOutput):
    """One call of the drafter.

    `logits` is (B, Q, draft vocabulary); map its columns to token ids with `MoADrafterForCausalLM.to_token_ids`.
    `hidden` (B, Q, E) is what enters the head, `layer_input` (B, Q, E) what entered the reused target layers (TLI) or
    `hidden` itself, `self_attention_states` (B, Q, E) SA's output, and `drafted` the keys and values of the queries,
    to be handed back as `drafted` with the next level.
    """

    hidden: torch.Tensor | None = None
    layer_input: torch.Tensor | None = None
    self_attention_states: torch.Tensor | None = None
    drafted: list[KeyValue] | None = None


@dataclass
class LentParts:
    """The target's frozen parts. Held by plain reference: never registered, saved, moved or trained."""

    embed_tokens: nn.Module
    head_weight: torch.Tensor  # (draft vocabulary, E)
    head_bias: torch.Tensor | None
    tail: "nn.Module | None"  # the target's last N layers and final norm, as a base model of N layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)


class MoARMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=self.eps).to(hidden.dtype)
        return normed * self.weight.to(hidden.dtype)


def rotary_tables(position_ids: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> KeyValue:
    """Cosine and sine of rotary embeddings, each (B, 1, T, head_dim), in float32 until the last step."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[:, None, :, None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: torch.Tensor, tables: KeyValue) -> torch.Tensor:
    """Applies rotary embeddings to (B, heads, T, head_dim)."""
    cos, sin = tables
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def eager_attention(
    module: "MoAAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention; `query` (B, heads, Q, D), `attention_mask` additive or boolean (True: attend)."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def short_attention(
    module: "MoAAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a handful of positions for very many sequences, as LSA needs it: (N, heads, L, D) to
    (N, L, heads, D).

    One batched product for the query heads that share a key/value head. Kernels made for long sequences take half as
    long again for four positions, and LSA is most of what training costs.
    """
    sequences, heads, length, dim = query.shape
    groups = key.shape[1]
    grouped = query.reshape(sequences * groups, heads // groups * length, dim)
    scores = torch.bmm(grouped, key.transpose(2, 3).reshape(sequences * groups, dim, length)) * scaling
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    output = torch.bmm(weights, value.reshape(sequences * groups, length, dim))
    return output.view(sequences, heads, length, dim).transpose(1, 2), weights


class MoAAttention(nn.Module):
    """Attention whose queries and keys/values are computed apart, because CA's come from different tokens."""

    over_layers = False  # true in LSA: a handful of positions, very many sequences
    is_causal = False  # masks say who sees whom; sdpa would assume a causal one where there is none

    def __init__(self, config: MoADrafterConfig, width: int, heads: int, groups: int, head_dim: int):
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.num_key_value_groups = heads // groups
        self.scaling = head_dim**-0.5
        self.q_proj = nn.Linear(width, heads * head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, groups * head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, groups * head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=config.attention_bias)

    def key_value(self, normed: torch.Tensor, tables: KeyValue) -> KeyValue:
        """Keys (rotated) and values of (B, T, width), each (B, kv_heads, T, head_dim)."""
        shape = (*normed.shape[:-1], -1, self.head_dim)
        key = self.k_proj(normed).view(shape).transpose(1, 2)
        value = self.v_proj(normed).view(shape).transpose(1, 2)
        return rotate(key, tables), value

    def forward(
        self, normed: torch.Tensor, tables: KeyValue, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        query = self.q_proj(normed).view(*normed.shape[:-1], -1, self.head_dim).transpose(1, 2)
        attend: Callable[..., Any] = short_attention
        if not self.over_layers:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        output, _ = attend(self, rotate(query, tables), key, value, mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(output.reshape(*normed.shape[:-1], -1))


class MoAMLP(nn.Module):
    def __init__(self, config: MoADrafterConfig, width: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(intermediate, width, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class MoADecoderLayer(nn.Module):
    """A pre-norm decoder layer. Parameter names follow transformers' Llama, as in the published checkpoints."""

    def __init__(self, config: MoADrafterConfig, width: int, heads: int, groups: int, head_dim: int, intermediate: int):
        super().__init__()
        self.self_attn = MoAAttention(config, width, heads, groups, head_dim)
        self.mlp = MoAMLP(config, width, intermediate)
        self.input_layernorm = MoARMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = MoARMSNorm(width, config.rms_norm_eps)

    def key_value(self, hidden: torch.Tensor, tables: KeyValue) -> KeyValue:
        """What others attend to: keys and values of (B, T, width), normed like the queries."""
        return self.self_attn.key_value(self.input_layernorm(hidden), tables)

    def forward(
        self, hidden: torch.Tensor, tables: KeyValue, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables, key, value, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MoAPreTrainedModel(PreTrainedModel):
    config_class = MoADrafterConfig
    config: MoADrafterConfig
    base_model_prefix = ""
    _no_split_modules: ClassVar[list[str]] = ["MoADecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_attention_backend = True
    supports_gradient_checkpointing = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MoARMSNorm):
            init.ones_(module.weight)
        if isinstance(module, MoADrafterForCausalLM) and module.config.draft_vocab_size is not None:
            init.copy_(module.draft_vocab_ids, torch.arange(module.config.draft_vocab_size))


class MoADrafterForCausalLM(MoAPreTrainedModel, GenerationMixin):
    """The drafter: Layer Self-Attention, Self-Attention, Cross-Attention, and a head lent by the target.

    A new or loaded drafter knows no target until `lend` is called (`moa_spec.attach` does so), except a standalone one,
    which carries its own copy of the lent parts.
    """

    _is_stateful = False

    def __init__(self, config: MoADrafterConfig):
        super().__init__(config)
        width, layer_width = config.hidden_size, config.layer_width
        layer_heads = config.layer_self_attention_num_attention_heads
        if config.lsa_layers:
            self.layer_self_attention = MoADecoderLayer(
                config,
                layer_width,
                layer_heads,
                config.layer_self_attention_num_key_value_heads,
                layer_width // layer_heads,
                config.layer_self_attention_intermediate_size,
            )
            self.layer_self_attention.self_attn.over_layers = True
            self.Ekv2E = nn.Linear(layer_width, width)
        self.self_attention = MoADecoderLayer(
            config,
            width,
            config.num_attention_heads,
            config.self_attention_num_key_value_heads,
            config.head_dim,
            config.self_attention_intermediate_size,
        )
        self.cross_attention = MoADecoderLayer(
            config,
            width,
            config.num_attention_heads,
            config.cross_attention_num_key_value_heads,
            config.head_dim,
            config.cross_attention_intermediate_size,
        )
        if config.memory_hidden_state != "none":
            out = layer_width if config.memory_hidden_state == "entry" else width
            self.hidden_state_map = nn.Linear(width, out)
        if config.head_norm:
            self.head_norm = MoARMSNorm(width, config.rms_norm_eps)
        if config.newest_memory:
            self.newest_memory_norm = MoARMSNorm(width, config.rms_norm_eps)
            self.newest_memory_map = nn.Linear(width, width, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_vocab_ids", torch.arange(config.draft_vocab_size))
        self._lent: LentParts | None = None
        if config.standalone:
            self._build_own_copies()
        # how to draft is kept here; transformers drops our names from a config that it takes for the model's own
        self.generation_config._from_model_config = False
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers'; a weight that the checkpoint lacks is an error, where transformers would draw it at random,
        and pickled weights are not read.

        Raises:
            OSError: there is no such checkpoint.
            ValueError: it is not a drafter's, or not all of one.
        """
        kwargs["use_safetensors"] = True
        try:
            drafter, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"The checkpoint {args[0]} is damaged: {error}. Fetch or write it again.") from error
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            raise ValueError(
                f"The checkpoint {args[0]} is not a whole MoA drafter: it lacks {len(missing)} of its weights, such as "
                f"{missing[0]}."
            )
        return (drafter, info) if output_loading_info else drafter

    # -- the frozen parts ------------------------------------------------------------------------------------------

    def lend(self, target: PreTrainedModel) -> None:
        """Takes the target's embeddings, head, final norm and last layers by reference, after checking that they fit.

        Raises:
            WrongTargetError: the target's sizes, architecture or weights are not those the drafter was made for, or it
                computes differently from what they say (three tokens are tried).
        """
        check_target(self.config, target)
        base = target.get_decoder()
        tail_layers = self.config.target_layer_inference
        if tail_layers and not isinstance(getattr(base, "layers", None), nn.ModuleList):
            what = f"the layers of a {base.__class__.__name__} cannot be reused for drafting (TLI)"
            refuse_target(self.config, target, f"{what}; use target_layer_inference=0")
        tail = tail_model(base, tail_layers) if tail_layers else None
        before = self._lent
        self._lent = LentParts(target.get_input_embeddings(), *self._head_rows(target.get_output_embeddings()), tail)
        try:
            self._try_lent_parts(target)
        except Exception:
            self._lent = before
            raise

    @torch.no_grad()
    def _try_lent_parts(self, target: PreTrainedModel) -> None:
        """Runs the target on three tokens and compares. Families differ in ways that no configuration states, such as
        position embeddings or scales applied outside of the layers, or a head that is not one matrix."""
        config = self.config
        ids = (torch.arange(1, 4, device=target.device) % config.vocab_size)[None]
        training = target.training
        if training:
            target.eval()
        try:
            output = target(input_ids=ids, use_cache=True, output_hidden_states=True)
        finally:
            if training:
                target.train()
        cache = output.get("cache")
        layers = config.target_num_hidden_layers
        if not isinstance(cache, Cache) or len(cache.layers) != layers:
            refuse_target(config, target, f"it keeps no key/value cache of its {layers} layers")
        expected = (1, config.target_num_key_value_heads, ids.shape[1], config.target_head_dim)
        for index in config.lsa_layers:
            for states in (cache.layers[index].keys, cache.layers[index].values):
                if tuple(states.shape) != expected:
                    found = tuple(states.shape)
                    refuse_target(
                        config, target, f"layer {index} caches {found} numbers where {expected} were expected"
                    )

        tolerance = 5e-3 if output.logits.dtype == torch.float32 else 5e-2  # above TF32's and bf16's rounding

        def differs(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
            ours, theirs = ours.float(), theirs.float()
            return not (ours - theirs).norm() <= tolerance * theirs.norm()  # true of NaN as well

        last_hidden = output.hidden_states[-1]
        logits = output.logits
        if config.draft_vocab_size is not None:
            logits = logits[..., self.draft_vocab_ids.to(logits.device)]
        if differs(self.head(last_hidden), logits):
            refuse_target(config, target, "its head does more than multiply its last hidden state with a matrix")
        tail_layers = config.target_layer_inference
        if tail_layers:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            causal = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            try:
                reused = self.run_target_layers(output.hidden_states[layers - tail_layers], positions, causal, None)
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                what = f"its last {tail_layers} layers cannot be reused for drafting (TLI)"
                refuse_target(config, target, f"{what}: {error}; use target_layer_inference=0")
            if differs(reused, last_hidden):
                what = f"its last {tail_layers} layers compute something else when reused for drafting (TLI)"
                refuse_target(config, target, f"{what}; use target_layer_inference=0")

    def take_back(self) -> None:
        """Forgets the lent parts."""
        self._lent = None

    @property
    def lent(self) -> LentParts:
        """The target's frozen parts.

        Raises:
            RuntimeError: none were lent yet; the message says what to call.
        """
        if self._lent is None and self.config.standalone:
            tail = self.tail if self.config.target_layer_inference else None
            self._lent = LentParts(self.embed_tokens, self.lm_head.weight, self.lm_head.bias, tail)
        if self._lent is None:
            name = self.config.target_name or "its target"
            raise RuntimeError(
                f"This MoA drafter is not attached. It needs the embeddings and head of {name}: call "
                "moa_spec.attach(target, drafter) first, then target.generate(..., assistant_model=drafter)."
            )
        return self._lent

    def _head_rows(self, head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's weight and bias, restricted to the draft vocabulary. Dense even when the target is quantized."""
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        if self.config.draft_vocab_size is not None:
            ids = self.draft_vocab_ids.to(weight.device)
            weight = weight.index_select(0, ids)
            bias = None if bias is None else bias.detach().index_select(0, ids)
        return weight, bias

    def _build_own_copies(self) -> None:
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.target_layer_inference:
            if not config.target_config:
                raise ValueError("A standalone drafter with target_layer_inference needs target_config in its config")
            whole = AutoConfig.for_model(**config.target_config)
            tail = AutoModel.from_config(tail_config(whole, config.target_layer_inference))
            tail.set_input_embeddings(nn.Identity())
            self.tail = tail

    def standalone_copy(self) -> "MoADrafterForCausalLM":
        """A drafter that carries its own copy of the lent parts, for a machine without the target.

        Raises:
            RuntimeError: nothing was lent.
            ValueError: the target's head has a bias, or its embedding is not a plain table.
        """
        lent = self.lent
        if lent.head_bias is not None or type(lent.embed_tokens).forward is not nn.Embedding.forward:
            raise ValueError("This target's embedding or head is not a plain matrix; a standalone copy is not possible")
        tail_config = lent.tail.config.to_dict() if lent.tail is not None else None
        changes = {"standalone": True, "target_config": tail_config}
        config = self.config.__class__.from_dict(self.config.to_dict() | changes)
        copy = type(self)(config).to(self.dtype)
        copy.load_state_dict(self.state_dict(), strict=False)
        with torch.no_grad():
            copy.embed_tokens.weight.copy_(lent.embed_tokens.weight)
            copy.lm_head.weight.copy_(lent.head_weight)
            if lent.tail is not None:
                own = {k: v for k, v in lent.tail.state_dict().items() if not k.startswith("embed_")}
                missing = copy.tail.load_state_dict(own, strict=False).missing_keys
                if missing:
                    raise ValueError(f"The target's last layers could not be copied: {missing[0]} is missing")
        copy.generation_config = self.generation_config
        return copy.to(self.device).eval()

    def save_pretrained(self, save_directory: Any, *args: Any, standalone: bool = False, **kwargs: Any) -> Any:
        """As transformers', plus `standalone=True`: with its own copy of the lent parts."""
        if standalone and not self.config.standalone:
            return self.standalone_copy().save_pretrained(save_directory, *args, **kwargs)
        return super().save_pretrained(save_directory, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.lent.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise NotImplementedError("The embeddings belong to the target")

    def get_output_embeddings(self) -> None:
        return None

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of the drafter's own is tied."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations: autocast's where it is on, which saves casting back and forth; else the weights'."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype

    # -- once per verified token -------------------------------------------------------------------------------------

    def layer_states(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], last_hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Stacks the target's activations the way LSA reads them (section 4.2).

        Args:
            keys, values: of the layers in `config.lsa_layers`, each (B, kv_heads, T, head_dim), keys after RoPE.
            last_hidden: (B, T, E), after the final norm; needed when `config.memory_hidden_state` is not "none".

        Returns:
            (B, T, L * W), followed by the E of the hidden state where it travels along.

        Raises:
            ValueError: these are not the states of the layers that LSA reads.
        """
        pairs = zip(keys, values, strict=True)
        # head by head, each key beside its value: the order of the published checkpoints
        parts = [torch.cat([k, v], -1).transpose(1, 2).flatten(2) for k, v in pairs]
        numbers = sum(part.shape[-1] for part in parts)
        if numbers != len(self.config.lsa_layers) * self.config.layer_width:
            raise ValueError(
                f"LSA reads {len(self.config.lsa_layers)} layers of {self.config.layer_width} numbers per token; "
                f"{len(keys)} layers with {numbers} numbers in all were given"
            )
        if self.config.memory_hidden_state != "none":
            if last_hidden is None:
                raise ValueError("This drafter's memory includes the target's last hidden state, and none was given")
            parts.append(last_hidden.to(parts[0].dtype) if parts else last_hidden)
        return torch.cat(parts, dim=-1)

    def layer_attention(self, layer_states: torch.Tensor) -> torch.Tensor:
        """LSA: attention over the layer axis, one sequence per token. (B, T, L * W [+ E]) -> (B * T, L', W)."""
        width, count = self.config.layer_width, len(self.config.lsa_layers)
        entries = layer_states[..., : count * width].reshape(-1, count, width)
        if self.config.memory_hidden_state == "entry":
            extra = self.hidden_state_map(layer_states[..., count * width :]).reshape(-1, 1, width)
            entries = torch.cat([entries, extra], dim=1)
        layer = self.layer_self_attention
        positions = torch.arange(entries.shape[1], device=entries.device)[None]
        tables = rotary_tables(positions, layer.self_attn.head_dim, self.config.rope_theta, entries.dtype)
        return layer(entries, tables, *layer.key_value(entries, tables), None)

    def memory_vectors(self, layer_states: torch.Tensor) -> torch.Tensor:
        """The mean over layers, before the map: what a server sends to a client. (B, T, ...) -> (B, T, W)."""
        return self.layer_attention(layer_states).mean(dim=1).view(*layer_states.shape[:2], -1)

    def memory(self, layer_states: torch.Tensor) -> torch.Tensor:
        """One vector per verified token, (B, T, E)."""
        layer_states = layer_states.to(self.compute_dtype)
        parts = []
        if self.config.lsa_layers:
            parts.append(self.Ekv2E(self.memory_vectors(layer_states)))
        if self.config.memory_hidden_state == "add":
            parts.append(self.hidden_state_map(layer_states[..., -self.config.hidden_size :]))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def encode(
        self,
        input_ids: torch.Tensor,
        layer_states: torch.Tensor,
        position_ids: torch.Tensor,
        target_layers: list[KeyValue] | None = None,
    ) -> DraftContext:
        """Everything that is computed once per verified token.

        Args:
            input_ids: (B, T) verified tokens.
            layer_states: from `layer_states`, for the same tokens.
            position_ids: (B, T) their positions in the text.
            target_layers: with TLI = N, keys and values of the target's last N layers for *all* verified tokens.
        """
        return self.encode_memory(input_ids, self.memory(layer_states), position_ids, target_layers)

    def encode_memory(
        self,
        input_ids: torch.Tensor,
        memory: torch.Tensor,
        position_ids: torch.Tensor,
        target_layers: list[KeyValue] | None = None,
    ) -> DraftContext:
        """`encode` from memory vectors (B, T, E) that were computed elsewhere."""
        tables = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta, self.compute_dtype)
        embeddings = self.lent.embed(input_ids).to(self.compute_dtype)
        return DraftContext(
            self.self_attention.key_value(embeddings, tables),
            self.cross_attention.key_value(memory, tables),
            target_layers or [],
            memory if self.config.newest_memory else None,
        )

    # -- once per drafted level --------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        context: DraftContext | None = None,
        drafted: list[KeyValue] | None = None,
        self_mask: torch.Tensor | None = None,
        cross_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MoADrafterOutput:
        """Logits of the token after each query token, from verified tokens and the drafts before it.

        Args:
            input_ids: (B, Q) query tokens: the bonus token, or one level of a draft.
            position_ids: (B, Q); one after another from the end of the context when left out.
            context: of the verified tokens.
            drafted: `MoADrafterOutput.drafted` of earlier levels, concatenated over all of them.
            self_mask: (B or 1, 1, Q, T + drafted + Q), True where SA may look; all of it when left out and Q is 1.
            cross_mask: (B or 1, 1, Q, T), True where CA may look; all of it when left out.

        Raises:
            ValueError: no context was given.
        """
        if context is None:
            raise ValueError("A MoA drafter drafts from the verified past: give it a context (see `encode`)")
        queries = input_ids.shape[1]
        before = drafted[0][0].shape[2] if drafted else 0
        if position_ids is None:
            position_ids = context.length + before + torch.arange(queries, device=input_ids.device)[None]
        if self_mask is None and queries > 1:
            visible = context.length + before + queries
            self_mask = torch.ones(queries, visible, dtype=torch.bool, device=input_ids.device)
            self_mask = self_mask.tril(context.length + before)[None, None]
        tables = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta, self.compute_dtype)

        hidden = self.lent.embed(input_ids).to(self.compute_dtype)
        new_key, new_value = self.self_attention.key_value(hidden, tables)
        if drafted:
            new_key = torch.cat([drafted[0][0], new_key], dim=2)
            new_value = torch.cat([drafted[0][1], new_value], dim=2)
        key = torch.cat([context.self_attention[0], new_key], dim=2)
        value = torch.cat([context.self_attention[1], new_value], dim=2)
        after_self = self.self_attention(hidden, tables, key, value, self_mask)
        query = after_self
        if self.config.newest_memory:
            if context.memory is None:
                raise ValueError("This drafter reads the newest memory, and the context holds none")
            query = self.with_newest_memory(after_self, context.memory[:, -1:])
        prediction = self.cross_attention(query, tables, *context.cross_attention, cross_mask)
        kept = [(new_key, new_value)]

        layer_input = prediction
        if self.config.target_layer_inference:
            cache = _BorrowedCache(context.target_layers, drafted[1:] if drafted else [])
            prediction = self.run_target_layers(prediction, position_ids, self_mask, cache)
            kept += cache.drafted()
        prediction = self.normed(prediction)
        return MoADrafterOutput(
            logits=self.head(prediction),
            hidden=prediction,
            layer_input=layer_input,
            self_attention_states=after_self,
            drafted=kept,
        )

    def with_newest_memory(self, queries: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """CA's queries (B, Q, E) with the newest memory that each may read, (B, Q or 1, E)."""
        return queries + self.newest_memory_map(self.newest_memory_norm(memory))

    def run_target_layers(
        self, layer_input: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        """TLI (section 4.3): the target's last N layers and final norm, frozen. (B, Q, E) -> (B, Q, E).

        `mask` is boolean, (B or 1, 1, Q, keys), as `self_mask`.
        """
        tail = self.lent.tail
        if tail is None:
            raise RuntimeError("This drafter reuses target layers, and none were lent")
        dtype = next(tail.parameters()).dtype
        if mask is None and layer_input.shape[1] == 1:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layer_input.device)
        additive = None
        if mask is not None:
            additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            additive = additive.masked_fill(~mask, torch.finfo(dtype).min).expand(layer_input.shape[0], -1, -1, -1)
        output = tail(
            inputs_embeds=layer_input.to(dtype),
            attention_mask=additive,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state.to(layer_input.dtype)

    def normed(self, prediction: torch.Tensor) -> torch.Tensor:
        """The drafter's own norm before the head, where it has one. The published design has none."""
        return self.head_norm(prediction) if self.config.head_norm else prediction

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The lent LM head, over the draft vocabulary. (..., E) -> (..., draft vocabulary)."""
        lent = self.lent
        logits = nn.functional.linear(hidden.to(lent.head_weight.dtype), lent.head_weight, lent.head_bias)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def to_token_ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Columns of `logits` as token ids of the target."""
        return columns if self.config.draft_vocab_size is None else self.draft_vocab_ids[columns]

    # -- writing without a target ------------------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, context: DraftContext | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """`drafter.generate(input_ids, context=context)` goes on from a memory alone, as an offline client does.

        The queries are the tokens that the context does not cover. They are few, so SA's keys are computed anew.
        """
        if context is None:
            raise ValueError(
                "A MoA drafter does not write by itself: use target.generate(..., assistant_model=drafter) after "
                "moa_spec.attach(target, drafter), or give generate() a context (see `encode`)."
            )
        if input_ids.shape[1] <= context.length:
            raise ValueError(f"The context covers {context.length} tokens; there must be one more to go on from")
        return {"input_ids": input_ids[:, context.length :], "context": context, "whole_vocabulary": True}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the context takes a cache's place

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k != "context"})

    def __call__(self, *args: Any, whole_vocabulary: bool = False, **kwargs: Any) -> MoADrafterOutput:
        output = super().__call__(*args, **kwargs)
        if whole_vocabulary and self.config.draft_vocab_size is not None:
            whole = output.logits.new_full((*output.logits.shape[:-1], self.config.vocab_size), -math.inf)
            output.logits = whole.index_copy(-1, self.draft_vocab_ids, output.logits)
        return output


class _BorrowedLayer(DynamicLayer):
    """The target's verified keys and values, then the drafter's own; the target's cache is never written to."""

    def __init__(self, verified: KeyValue, drafted: KeyValue | None):
        super().__init__()
        self.verified_length = verified[0].shape[2]
        parts = [verified] if drafted is None else [verified, drafted]
        self.keys = torch.cat([p[0] for p in parts], dim=2)
        self.values = torch.cat([p[1] for p in parts], dim=2)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True


class _BorrowedCache(Cache):
    def __init__(self, verified: list[KeyValue], drafted: list[KeyValue]):
        padded: list[KeyValue | None] = list(drafted) or [None] * len(verified)
        super().__init__(layers=[_BorrowedLayer(v, d) for v, d in zip(verified, padded, strict=True)])

    def drafted(self) -> list[KeyValue]:
        """What was added after the verified tokens, per layer."""
        return [
            (layer.keys[:, :, layer.verified_length :], layer.values[:, :, layer.verified_length :])
            for layer in self.layers
        ]


def tail_config(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The target's configuration with only its last `layers` layers."""
    values = config.to_dict() | {"num_hidden_layers": layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][-layers:]
    return type(config).from_dict(values)


def tail_model(base: PreTrainedModel, layers: int) -> nn.Module:
    """The target's last layers and final norm as a base model that shares every parameter with the target.

    A shallow copy of the target's own base model, so that each family's forward does its own norms and rotary
    embeddings. Its layers count from zero, to index a cache of `layers` layers.
    """
    tail = _shallow(base)
    tail.config = tail_config(base.config, layers)
    tail.config._attn_implementation = base.config._attn_implementation
    chosen = []
    for index, layer in enumerate(list(base.layers)[-layers:]):
        layer = _shallow(layer)
        for name, module in list(layer.named_children()):
            if hasattr(module, "layer_idx"):
                module = _shallow(module)
                module.layer_idx = index
                setattr(layer, name, module)
        if hasattr(layer, "layer_idx"):
            layer.layer_idx = index
        chosen.append(layer)
    tail.layers = nn.ModuleList(chosen)
    return tail


def _shallow(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and children but whose own attributes can be changed."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        copy.__dict__[name] = dict(module.__dict__[name])
    return copy


def weight_fingerprint(target: PreTrainedModel, samples: int = 64) -> list[float]:
    """A sketch of the target's embedding table: entries on a fixed lattice, scaled to unit length.

    Compared by cosine, so that the same weights in another dtype or quantisation still match, and others do not.
    """
    table = target.get_input_embeddings().weight
    rows = torch.linspace(0, table.shape[0] - 1, samples).long()
    columns = torch.arange(samples) * 37 % table.shape[1]
    values = table.detach()[rows.to(table.device), columns.to(table.device)].float().cpu()
    return [round(v, 4) for v in (values / values.norm().clamp(min=1e-12)).tolist()]


def refuse_target(config: MoADrafterConfig, target: PreTrainedModel, what: str) -> NoReturn:
    """
    Raises:
        WrongTargetError: with the name of the target that the drafter was made for, of this one, and the reason.
    """
    name = getattr(target.config, "_name_or_path", None) or target.config.get_text_config(decoder=True).model_type
    raise WrongTargetError(
        f"This drafter was made for {config.target_name or 'an unnamed target'} and does not fit {name}: {what}"
    )


def check_target(config: MoADrafterConfig, target: PreTrainedModel) -> None:
    """Compares a target with the one the drafter was made for.

    Raises:
        WrongTargetError: with both names and the first thing that differs.
    """
    theirs = target.config.get_text_config(decoder=True)

    def refuse(what: str) -> NoReturn:
        refuse_target(config, target, what)

    reason = unsupported_target(theirs, config.target_layer_inference)
    if reason:
        refuse(reason)
    sizes = {
        "vocab_size": (config.vocab_size, theirs.vocab_size),
        "hidden_size": (config.hidden_size, theirs.hidden_size),
        "num_hidden_layers": (config.target_num_hidden_layers, theirs.num_hidden_layers),
        "num_key_value_heads": (config.target_num_key_value_heads, key_value_heads(theirs)),
        "head_dim": (
            config.target_head_dim,
            getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        ),
    }
    for what, (ours, found) in sizes.items():
        if ours != found:
            refuse(f"its {what} is {found}, the drafter needs {ours}")
    if config.target_model_type and config.target_model_type != theirs.model_type:
        refuse(f"it is a {theirs.model_type} model, the drafter needs {config.target_model_type}")
    if config.target_fingerprint:
        sketches = torch.tensor([config.target_fingerprint, weight_fingerprint(target, len(config.target_fingerprint))])
        similarity = nn.functional.cosine_similarity(sketches[0], sketches[1], dim=0).item()
        if similarity < 0.9:
            refuse(f"the sizes are the same but the weights are not (similarity {similarity:.2f})")
