"""Tiny random targets and drafters for tests. Nothing is downloaded."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from moa_spec.modeling_moa import MoADrafterConfig, MoADrafterForCausalLM

VOCAB = 64

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gpt_neox": {},
    "mistral": {"sliding_window": None},
    "mistral_sliding": {"model_type": "mistral", "sliding_window": 12},
    "gemma2": {"head_dim": 8, "sliding_window": 12},
}


def tiny_target(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a family, sharpened so that greedy text is varied instead of one repeated token."""
    settings = dict(FAMILIES[family])
    model_type = settings.pop("model_type", family)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(_SHAPE | settings | overrides))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def tiny_drafter(target: PreTrainedModel, seed: int = 1, **overrides: Any) -> MoADrafterForCausalLM:
    """A random drafter that fits the target, not attached."""
    torch.manual_seed(seed)
    tli = overrides.pop("target_layer_inference", 0)
    return MoADrafterForCausalLM(MoADrafterConfig.for_target(target.config, tli, **overrides)).eval()


def prompt(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """(rows, length) token ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after `<end>`; so most characters beyond ASCII are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
