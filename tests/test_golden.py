"""The drafter and its losses against tensors that the authors' published code produced (TLI 0, 1 and 3)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from moa_spec.modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from moa_spec.modeling_moa.modeling_moa import rotary_tables
from moa_spec.training.objective import ObjectiveConfig, bounded_masks, training_objective

GOLDEN = Path(__file__).resolve().parent.parent.parent / "shared" / "golden" / "seed0"

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the reference tensors are not on this machine")

Tensors = dict[str, torch.Tensor]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs.reshape(ours.shape), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    sizes = json.loads((GOLDEN / "config.json").read_text())["target"]
    unknown_now = ("torch_dtype", "transformers_version", "_name_or_path")
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in sizes.items() if k not in unknown_now}))
    model.load_state_dict(load_file(GOLDEN / "target.safetensors"))
    return model.eval()


@pytest.fixture(scope="module", params=[0, 1, 3], ids="TLI={}".format)
def case(request: pytest.FixtureRequest, target: LlamaForCausalLM) -> tuple[MoADrafterForCausalLM, Tensors]:
    """A published drafter with the target's parts lent, and one recorded forward pass."""
    sizes = json.loads((GOLDEN / "config.json").read_text())["drafter"]
    config = MoADrafterConfig.for_target(
        target.config, request.param, layer_self_attention_num_attention_heads=4, **sizes
    )
    drafter = MoADrafterForCausalLM(config).eval()
    drafter.load_state_dict(load_file(GOLDEN / f"drafter_tli{request.param}.safetensors"))
    drafter.lend(target)
    return drafter, load_file(GOLDEN / f"forward_tli{request.param}.safetensors")


def layer_states(drafter: MoADrafterForCausalLM, golden: Tensors) -> torch.Tensor:
    layers = range(drafter.config.target_num_hidden_layers)
    return drafter.layer_states(
        [golden[f"target_key_{i}"] for i in layers], [golden[f"target_value_{i}"] for i in layers]
    )


def test_target_itself(target: LlamaForCausalLM, case: tuple[MoADrafterForCausalLM, Tensors]) -> None:
    """The recorded activations are what today's transformers computes: LSA would read the same at inference."""
    _, golden = case
    with torch.no_grad():
        output = target(golden["input_ids"], use_cache=True, output_hidden_states=True)
    close(output.logits, golden["target_logits"])
    close(output.hidden_states[-1], golden["target_last_hidden"])
    for index, layer in enumerate(output.cache.layers):
        close(layer.keys, golden[f"target_key_{index}"])
        close(layer.values, golden[f"target_value_{index}"])


@torch.no_grad()
def test_every_stage(case: tuple[MoADrafterForCausalLM, Tensors]) -> None:
    drafter, golden = case
    ids, synchronised = golden["input_ids"], golden["response_mask"] == 0
    batch, length = ids.shape
    positions = torch.arange(length)[None].expand(batch, length)
    states = layer_states(drafter, golden)
    close(drafter.layer_attention(states), golden["lsa_layers"])
    close(drafter.memory(states), golden["memory"])

    context = drafter.encode(ids, states, positions)
    self_mask, cross_mask, _ = bounded_masks(synchronised, positions, torch.full((batch,), length))
    tables = rotary_tables(positions, drafter.config.head_dim, drafter.config.rope_theta, torch.float32)
    hidden = drafter.self_attention(drafter.lent.embed(ids), tables, *context.self_attention, self_mask)
    close(hidden, golden["self_attention"])
    hidden = drafter.cross_attention(hidden, tables, *context.cross_attention, cross_mask)
    close(hidden, golden["cross_attention"])
    if drafter.config.target_layer_inference:
        known = torch.where(synchronised[..., None], golden["target_layer_input"], hidden)
        hidden = drafter.run_target_layers(known, positions, self_mask, None)
    close(hidden, golden["drafter_hidden"])
    close(drafter.head(hidden), golden["drafter_logits"])


def test_losses(case: tuple[MoADrafterForCausalLM, Tensors]) -> None:
    """The objective with the paper's weights, at the recorded synchronisation points."""
    drafter, golden = case
    synchronised = golden["response_mask"] == 0
    batch, length = golden["input_ids"].shape
    data = {
        "input_ids": golden["input_ids"],
        "lengths": torch.full((batch,), length),
        "prompt_lengths": (~synchronised).int().argmax(dim=1),
        "layer_states": layer_states(drafter, golden),
        "last_hidden": golden["target_last_hidden"],
        "layer_input": golden["target_layer_input"],
    }
    output = training_objective(drafter, data, ObjectiveConfig(), synchronised)
    close(output.feature_loss, golden["stat_feature_loss"])
    close(output.cross_entropy, golden["stat_forward_KL"])
    if drafter.config.target_layer_inference:
        close(output.layer_input_loss, golden["stat_prev_feature_loss"])
    close(output.loss, golden["loss"])
