"""The authors' checkpoints (`huawei-noah/MOASpec-*`) in and out.

Knows the two layouts of their code (`huawei-noah/HEBO`, branch `mixture-of-attentions`) and what each leaves unsaid:

- training: the drafter's tensors beside the *target's* config.json. How many target layers are reused (TLI) is not
  written anywhere.
- vLLM: the same tensors beside a config.json of `model_type` "moa_spec" that gives the drafter's sizes but neither the
  target's name nor its number of layers. Engines that dump their own state pack q, k, v and gate, up into one tensor
  each; both forms are read, the unpacked one (which vLLM loads) is written.

Sizes are read off the tensors, heads off config.json. Does not know how drafters are trained or decoded with.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig

from ..modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from .files import written_beside

Layout = Literal["training", "vllm"]
_ATTENTIONS = ("layer_self_attention", "self_attention", "cross_attention")


class MisfitError(ValueError):
    """A checkpoint that is no MoA drafter of the published design, with the tensor or setting that shows it."""


def read_published(
    source: str | Path,
    target_config: PreTrainedConfig | None = None,
    target_name: str | None = None,
    target_layer_inference: int = 0,
    revision: str | None = None,
) -> MoADrafterForCausalLM:
    """Loads one of the authors' checkpoints, in either layout.

    Args:
        source: a folder or a repository on the Hub.
        target_config: of the target; needed for the vLLM layout, and checked against the training layout's own.
        target_name: the target's name on the Hub; else the one in config.json, if any.
        target_layer_inference: how many target layers it was trained to reuse; no layout says.
        revision: of the repository.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        MisfitError: a tensor is missing, unknown or of another shape than the others imply; or the configuration asks
            for what this project's drafters cannot do.
    """
    folder = _fetch(source, revision)
    settings = _read_config(folder)
    tensors = _unpacked(_read_tensors(folder))
    config, fits_target = _target_config(settings, target_config, source)
    heads = int(settings.get("num_attention_heads") or config.num_attention_heads)
    if settings.get("model_type") == "moa_spec":
        heads = config.num_attention_heads  # vLLM's config class overwrites its own field on the way
    sizes = _sizes(tensors, heads, config)
    sizes["target_name"] = target_name or settings.get("_name_or_path") or None
    if settings.get("rms_norm_eps") is not None:
        sizes["rms_norm_eps"] = settings["rms_norm_eps"]
    try:
        ours = MoADrafterConfig.for_target(config, target_layer_inference, **sizes)
    except ValueError as error:
        raise MisfitError(f"{source}: {error}") from error
    return _filled(ours, tensors, f"{source}{'' if fits_target else ' (with the target given)'}")


def write_published(
    drafter: MoADrafterForCausalLM, folder: str | Path, layout: Layout, target_config: PreTrainedConfig | None = None
) -> None:
    """Writes a drafter in one of the authors' layouts.

    Args:
        target_config: of the target, which is the training layout's config.json.

    Raises:
        MisfitError: the drafter uses something that the published design does not have.
        ValueError: the training layout was asked for without the target's configuration.
        FileExistsError: the folder exists.
    """
    config = drafter.config
    _check_published_design(config, layout)
    tensors = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    if layout == "training":
        if target_config is None:
            raise ValueError("The training layout's config.json is the target's own: name the target (--target).")
        target = target_config.get_text_config(decoder=True)
        if config.attention_bias and target.model_type == "qwen2":  # its o_proj has none; ours is zero when converted
            for name in [name for name in tensors if name.endswith("o_proj.bias")]:
                if tensors.pop(name).any():
                    raise MisfitError(f"{name} is not zero, and a Qwen2 decoder layer has no such bias")
        settings = target.to_dict() | {"_name_or_path": config.target_name or ""}
    else:
        settings = _vllm_config(config, drafter.dtype)
    with written_beside(folder) as beside:
        (beside / "config.json").write_text(json.dumps(settings, indent=2, default=str) + "\n", encoding="utf-8")
        save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})


# -- reading -----------------------------------------------------------------------------------------------------------


def _fetch(source: str | Path, revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    try:
        patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{source} is neither a folder nor a repository that can be reached: {str(error).splitlines()[0]}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; a published checkpoint has one beside its tensors.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MisfitError(f"{path} is not JSON: {error}") from error
    if settings.get("model_type") == MoADrafterConfig.model_type:
        raise MisfitError(f"{folder} is in this project's own layout already.")
    if settings.get("disable_LSA"):
        raise MisfitError(f"{path}: it was trained without Layer Self-Attention (disable_LSA), which MoA cannot do.")
    return settings


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors file; pickled weights are not read.")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except (SafetensorError, OSError) as error:
            raise MisfitError(f"{path} is damaged: {error}. Fetch it again.") from error
    return {name: tensor for name, tensor in tensors.items() if "rotary_emb" not in name}


def _unpacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits vLLM's packed rows: q, k, v (the output map tells how many are q), and gate, up."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module.endswith(".qkv_proj"):
            attention = module.removesuffix("qkv_proj")
            queries = _shape(tensors, f"{attention}o_proj.weight", 2)[1]
            groups, odd = divmod(tensor.shape[0] - queries, 2)
            if odd or groups < 1:
                raise MisfitError(f"{name} has {tensor.shape[0]} rows, {queries} of them queries: no keys and values")
            parts = tensor.split([queries, groups, groups])
            result |= {f"{attention}{part}_proj.{kind}": rows for part, rows in zip("qkv", parts, strict=True)}
        elif module.endswith(".gate_up_proj"):
            if tensor.shape[0] % 2:
                raise MisfitError(f"{name} has {tensor.shape[0]} rows, which are no gate and up of one size")
            gate, up = tensor.chunk(2)
            mlp = module.removesuffix("gate_up_proj")
            result |= {f"{mlp}gate_proj.{kind}": gate, f"{mlp}up_proj.{kind}": up}
        else:
            result[name] = tensor
    return result


def _target_config(
    settings: dict[str, Any], given: PreTrainedConfig | None, source: str | Path
) -> tuple[PreTrainedConfig, bool]:
    """The target's configuration, and whether it is the checkpoint's own."""
    if settings.get("model_type") == "moa_spec":
        if given is None:
            raise MisfitError(
                f"{source} is in the vLLM layout, which does not say how many layers its target has: name the target "
                "(--target), a folder or a repository."
            )
        config, own = given.get_text_config(decoder=True), False
    else:
        try:
            config, own = AutoConfig.for_model(**settings).get_text_config(decoder=True), True
        except (ValueError, TypeError, KeyError) as error:
            raise MisfitError(f"{source}: its config.json is none that transformers knows: {error}") from error
        if given is not None:
            theirs = given.get_text_config(decoder=True)
            for name in (
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
            ):
                if getattr(config, name) != getattr(theirs, name):
                    found, needed = getattr(theirs, name), getattr(config, name)
                    raise MisfitError(
                        f"{source} was trained for a target with {name} {needed}; the one given has {found}"
                    )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise MisfitError(
            f'{source}: its rotary embeddings are scaled (rope_type "{rope["rope_type"]}"), which ours cannot do'
        )
    return config, own


def _shape(tensors: dict[str, torch.Tensor], name: str, dimensions: int) -> torch.Size:
    if name not in tensors:
        raise MisfitError(f"{name} is missing")
    shape = tensors[name].shape
    if len(shape) != dimensions:
        raise MisfitError(f"{name} has the shape {list(shape)}; {dimensions} dimensions were expected")
    return shape


def _sizes(tensors: dict[str, torch.Tensor], heads: int, target: PreTrainedConfig) -> dict[str, Any]:
    """Fields of `MoADrafterConfig` from the shapes of tensors and the number of attention heads."""
    width = _shape(tensors, "self_attention.input_layernorm.weight", 1)[0]
    layer_width = _shape(tensors, "layer_self_attention.input_layernorm.weight", 1)[0]
    if width != target.hidden_size:
        raise MisfitError(f"self_attention.input_layernorm.weight is {width} wide, the target {target.hidden_size}")
    target_head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    expected = 2 * target.num_key_value_heads * target_head_dim
    if layer_width != expected:
        raise MisfitError(
            f"layer_self_attention.input_layernorm.weight is {layer_width} wide; a target with "
            f"{target.num_key_value_heads} key/value heads of {target_head_dim} makes it {expected}"
        )
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "hidden_act": target.hidden_act,
        "layer_self_attention_num_attention_heads": heads,
        "attention_bias": "self_attention.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "self_attention.mlp.up_proj.bias" in tensors,
        "hidden_size": width,
    }
    for attention in _ATTENTIONS:
        in_width = layer_width if attention == "layer_self_attention" else width
        name = f"{attention}.self_attn.q_proj.weight"
        rows = _shape(tensors, name, 2)[0]
        if rows % heads or (attention == "layer_self_attention" and rows != in_width):
            raise MisfitError(f"{name} has {rows} rows, which do not make {heads} heads (num_attention_heads)")
        head_dim = rows // heads
        if attention == "self_attention":
            sizes["head_dim"] = head_dim
        name = f"{attention}.self_attn.k_proj.weight"
        rows = _shape(tensors, name, 2)[0]
        if rows % head_dim or not rows:
            raise MisfitError(f"{name} has {rows} rows, which do not make heads of {head_dim}")
        sizes[f"{attention}_num_key_value_heads"] = rows // head_dim
        sizes[f"{attention}_intermediate_size"] = _shape(tensors, f"{attention}.mlp.up_proj.weight", 2)[0]
    return sizes


def _filled(config: MoADrafterConfig, tensors: dict[str, torch.Tensor], source: str) -> MoADrafterForCausalLM:
    """A drafter with these tensors, each of them checked."""
    with torch.device("meta"):
        expected = MoADrafterForCausalLM(config).state_dict()
    tensors = dict(tensors)
    for name, like in expected.items():
        if name.endswith("o_proj.bias") and name not in tensors:  # Qwen2 has biases on q, k and v only
            tensors[name] = torch.zeros(like.shape, dtype=tensors[name.replace("bias", "weight")].dtype)
        if name not in tensors:
            raise MisfitError(f"{source}: {name} is missing")
        if tensors[name].shape != like.shape:
            found = list(tensors[name].shape)
            raise MisfitError(f"{source}: {name} has the shape {found}; the other tensors need {list(like.shape)}")
    for name, tensor in tensors.items():
        if name not in expected:
            raise MisfitError(f"{source}: {name} is no part of a MoA drafter of the published design")
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise MisfitError(f"{source}: {name} holds numbers that are no weights (integers, NaN or infinity)")
    dtype = tensors["self_attention.self_attn.q_proj.weight"].dtype
    drafter = MoADrafterForCausalLM(config).to(dtype=dtype).eval()
    drafter.load_state_dict(tensors)
    return drafter


# -- writing -----------------------------------------------------------------------------------------------------------


def _check_published_design(config: MoADrafterConfig, layout: Layout) -> None:
    def refuse(what: str) -> None:
        raise MisfitError(f"This drafter does not fit the authors' {layout} layout: {what}.")

    if config.standalone:
        refuse("it carries its own copy of the target's parts (standalone); convert the checkpoint it was made from")
    if config.layer_self_attention_layers is not None:
        refuse("LSA reads a subset of the target's layers (layer_self_attention_layers)")
    if config.memory_hidden_state != "none":
        refuse(f'the target\'s last hidden state is in its memory (hidden_state_map, "{config.memory_hidden_state}")')
    if config.draft_vocab_size is not None:
        refuse(f"it drafts over {config.draft_vocab_size} token ids (draft_vocab_ids)")
    if config.head_norm:
        refuse("it has a norm before the head (head_norm.weight)")
    if config.newest_memory:
        refuse("its queries read the newest memory (newest_memory_map.weight)")
    if config.layer_self_attention_num_attention_heads != config.num_attention_heads:
        heads = config.layer_self_attention_num_attention_heads
        refuse(f"LSA has {heads} attention heads, and theirs always has the target's {config.num_attention_heads}")
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        refuse("its attention heads do not add up to the target's width")
    if config.logit_scale != 1.0 or config.final_logit_softcapping is not None:
        refuse("the target's head scales or caps its logits")
    if layout == "vllm":
        if config.target_layer_inference:
            refuse(f"it reuses {config.target_layer_inference} target layers (TLI), which their engine cannot")
        self_heads, cross_heads = config.self_attention_num_key_value_heads, config.cross_attention_num_key_value_heads
        if self_heads != cross_heads:
            refuse(
                f"their engine needs as many key/value heads in SA as in CA, and it has {self_heads} and {cross_heads}"
            )


def _vllm_config(config: MoADrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `MOASpecConfig` of the authors' vLLM reads."""
    sizes = {
        f"{attention}_{size}": getattr(config, f"{attention}_{size}")
        for attention in _ATTENTIONS
        for size in ("num_key_value_heads", "intermediate_size")
    }
    return sizes | {
        "model_type": "moa_spec",
        "architectures": ["MOASpecModel"],
        "hidden_size": config.hidden_size,
        "kv_hidden_size": config.layer_width,
        "num_attention_heads": config.num_attention_heads,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "disable_LSA": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
