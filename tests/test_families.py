"""Targets of many families: each can have a drafter, or is refused with the reason.

Where TLI is offered, the reused last layers must give the target's own last hidden state when they get the true input.
"""

from typing import Any

import pytest
import torch
from tiny import VOCAB, prompt
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from moa_spec.modeling_moa import MoADrafterConfig, MoADrafterForCausalLM, WrongTargetError

LAYERS, KNOWN = 4, 9
IDS = prompt(14, rows=2)

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
WINDOW = {"head_dim": 8, "sliding_window": 6}

# family: extra settings, and for TLI = 1 and 2 a part of the reason why not, or None where it works
SLIDING, ELSEWHERE = "sliding window", "something else"
WORKS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "llama": ({}, None, None),
    "qwen2": ({}, None, None),
    "qwen3": ({"head_dim": 16}, None, None),
    "qwen3_moe": (MOE | {"head_dim": 8}, None, None),
    "mistral": ({"sliding_window": None}, None, None),
    "mistral with a window": ({"sliding_window": 6}, SLIDING, SLIDING),
    "mixtral": (MOE, None, None),
    "gemma": ({"head_dim": 8}, None, None),
    "gemma2": (WINDOW, None, SLIDING),
    "gemma3_text": (WINDOW, SLIDING, SLIDING),
    "phi": ({}, None, None),
    "phi3": ({}, None, None),
    "gpt_neox": ({}, None, None),
    "gpt_oss": (MOE | WINDOW, None, SLIDING),
    "olmo2": ({}, None, None),
    "smollm3": ({}, None, None),
    "cohere": ({"logit_scale": 0.25}, None, None),
    "granite": ({"embedding_multiplier": 3.0, "logits_scaling": 2.0}, ELSEWHERE, ELSEWHERE),
    "gpt2": ({}, "layers of a GPT2Model", "layers of a GPT2Model"),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, ELSEWHERE, ELSEWHERE),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": ({"kv_lora_rank": 8, "n_group": 1, "topk_group": 1}, "compressed latent"),
    "mamba": ({}, "no plain key/value cache"),
    "jamba": ({}, "no plain key/value cache"),
    "llama4_text": ({}, "no plain key/value cache"),
    "gemma3n_text": ({}, "share another layer's"),
    "falcon": ({}, "multi_query"),
    "t5": ({}, "encoder-decoder"),
}


def random_target(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    """Every parameter is random, norms and biases too, so that nothing hides behind a one or a zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition(" ")[0], **(SHAPE | settings))
    target = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return target


@pytest.mark.parametrize("family", WORKS)
@torch.no_grad()
def test_family(family: str) -> None:
    settings, *tli_reasons = WORKS[family]
    target = random_target(family, settings)
    for tail, reason in enumerate([None, *tli_reasons]):
        if reason is not None:
            with pytest.raises(ValueError, match=reason):
                MoADrafterForCausalLM(MoADrafterConfig.for_target(target.config, tail)).lend(target)
            continue
        drafter = MoADrafterForCausalLM(MoADrafterConfig.for_target(target.config, tail)).eval()
        drafter.lend(target)
        check(drafter, target, tail)


def check(drafter: MoADrafterForCausalLM, target: PreTrainedModel, tail: int) -> None:
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()  # sliding layers keep what they would drop
    target(IDS[:, :KNOWN], cache=cache, use_cache=True)
    past = [(layer.keys, layer.values) for layer in cache.layers]
    positions = torch.arange(IDS.shape[1])[None].expand(IDS.shape)
    states = drafter.layer_states([keys for keys, _ in past], [values for _, values in past])
    context = drafter.encode(IDS[:, :KNOWN], states, positions[:, :KNOWN], past[LAYERS - tail :] if tail else None)
    output = drafter(IDS[:, KNOWN:], context=context)
    assert output.logits.shape == (2, IDS.shape[1] - KNOWN, VOCAB)
    assert output.logits.isfinite().all()

    truth = target(IDS, output_hidden_states=True)
    torch.testing.assert_close(drafter.head(truth.hidden_states[-1]), truth.logits, atol=1e-4, rtol=1e-4)
    if tail:
        layer_input, last_hidden = truth.hidden_states[LAYERS - tail], truth.hidden_states[-1]
        mask = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).tril()[None, None]
        whole = drafter.run_target_layers(layer_input, positions, mask, None)
        torch.testing.assert_close(whole, last_hidden, atol=1e-4, rtol=1e-4)
        # as in drafting: token by token, after the target's own keys and values, which must stay as they are
        before = [keys.clone() for keys, _ in context.target_layers]
        drafter.cross_attention.forward = lambda hidden, *_: layer_input[:, step : step + 1]
        drafted = None
        for step in range(KNOWN, IDS.shape[1]):
            output = drafter(IDS[:, step : step + 1], context=context, drafted=drafted)
            drafted = output.drafted
            torch.testing.assert_close(output.hidden[:, 0], last_hidden[:, step], atol=1e-4, rtol=1e-4)
        for keys, (after, _) in zip(before, context.target_layers, strict=True):
            assert torch.equal(keys, after)


@pytest.mark.parametrize("family", REFUSED)
def test_refused_family(family: str) -> None:
    settings, reason = REFUSED[family]
    config = AutoConfig.for_model(family, **(SHAPE | settings))
    with pytest.raises(ValueError, match=f"A {family} target cannot have a MoA drafter: .*{reason}"):
        MoADrafterConfig.for_target(config)


def test_a_head_that_is_no_matrix_is_refused() -> None:
    """BERT's head has a layer of its own before the vocabulary; only running the model shows it."""
    target = random_target("bert", {"is_decoder": True})
    drafter = MoADrafterForCausalLM(MoADrafterConfig.for_target(target.config))
    with pytest.raises(WrongTargetError, match="head does more"):
        drafter.lend(target)
