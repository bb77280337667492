"""The authors' published decoding, round by round, from their code's own output."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import moa_spec
from moa_spec.generation import record_trace
from moa_spec.modeling_moa import MoADrafterConfig, MoADrafterForCausalLM

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "seed0"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the reference tensors are not part of the repository")


@pytest.fixture(scope="module")
def models() -> tuple[LlamaForCausalLM, MoADrafterForCausalLM]:
    config = json.loads((GOLDEN / "config.json").read_text())
    dropped = ("torch_dtype", "transformers_version", "_name_or_path", "eos_token_id")
    target = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config["target"].items() if k not in dropped})).eval()
    target.load_state_dict(load_file(GOLDEN / "target.safetensors"))
    target.generation_config.eos_token_id = None
    heads = {"layer_self_attention_num_attention_heads": 4}
    drafter = MoADrafterForCausalLM(MoADrafterConfig.for_target(target.config, 0, **heads, **config["drafter"])).eval()
    drafter.load_state_dict(load_file(GOLDEN / "drafter_tli0.safetensors"))
    moa_spec.attach(target, drafter)
    return target, drafter


def decode(
    models: tuple[LlamaForCausalLM, MoADrafterForCausalLM], case: dict, nodes: int
) -> tuple[list[int], list[int]]:
    """Output ids and tokens per round. The published code may write one token more than asked for."""
    target, drafter = models
    prompt, new = case["prompt"], len(case["output"]) - len(case["prompt"]) + 1
    with record_trace() as trace:
        output = target.generate(
            torch.tensor([prompt]),
            max_new_tokens=new,
            do_sample=False,
            assistant_model=drafter,
            draft_policy="fixed",
            num_assistant_tokens=case["depth"] - 1,  # their depth counts one more than the drafted levels
            draft_breadth=case["breadth"],
            draft_nodes=nodes,
        )
    return output[0].tolist(), [len(r.tokens) for r in trace.rounds]


def cases() -> list[dict]:
    return json.loads((GOLDEN / "decoding.json").read_text())["0"] if GOLDEN.is_dir() else []


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"depth{c['depth']}-{c['prompt'][0]}")
def test_ids_and_accepted_lengths_of_every_round(models: tuple, case: dict) -> None:
    output, lengths = decode(models, case, case["total_tokens"])
    assert output[: len(case["output"])] == case["output"]
    rounds = len(case["accept_lengths"])
    assert lengths[:rounds] == case["accept_lengths"]
    assert 1 + rounds == case["target_calls"]


def test_a_smaller_tree_is_told_apart(models: tuple) -> None:
    lengths = [decode(models, case, case["total_tokens"] - 1)[1] for case in cases()]
    expected = [case["accept_lengths"] for case in cases()]
    assert any(mine[: len(theirs)] != theirs for mine, theirs in zip(lengths, expected, strict=True))
