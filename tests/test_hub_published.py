"""The authors' checkpoints in and out, against tensors that their code produced."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from moa_spec.cli import main
from moa_spec.hub.published import MisfitError, read_published, write_published
from moa_spec.modeling_moa import MoADrafterForCausalLM
from moa_spec.modeling_moa.modeling_moa import rotary_tables
from moa_spec.training.objective import bounded_masks

GOLDEN = Path(__file__).resolve().parent.parent.parent / "shared" / "golden" / "seed0"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the reference tensors are not on this machine")

Tensors = dict[str, torch.Tensor]


def published(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def golden_training(folder: Path, layers: int) -> Path:
    config = json.loads((GOLDEN / "config.json").read_text())["target"]
    return published(folder, load_file(GOLDEN / f"drafter_tli{layers}.safetensors"), config)


@needs_golden
@torch.no_grad()
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_training_layout_computes_what_theirs_did(tmp_path: Path, layers: int) -> None:
    drafter = read_published(golden_training(tmp_path / "theirs", layers), target_layer_inference=layers)
    drafter.save_pretrained(tmp_path / "ours")
    drafter = MoADrafterForCausalLM.from_pretrained(tmp_path / "ours")
    target = LlamaForCausalLM(AutoConfig.from_pretrained(tmp_path / "theirs")).eval()
    target.load_state_dict(load_file(GOLDEN / "target.safetensors"))
    drafter.lend(target)

    golden = load_file(GOLDEN / f"forward_tli{layers}.safetensors")
    ids, synchronised = golden["input_ids"], golden["response_mask"] == 0
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    which = range(drafter.config.target_num_hidden_layers)
    states = drafter.layer_states(
        [golden[f"target_key_{i}"] for i in which], [golden[f"target_value_{i}"] for i in which]
    )
    context = drafter.encode(ids, states, positions)
    self_mask, cross_mask, _ = bounded_masks(synchronised, positions, torch.full((len(ids),), ids.shape[1]))
    tables = rotary_tables(positions, drafter.config.head_dim, drafter.config.rope_theta, torch.float32)
    hidden = drafter.self_attention(drafter.lent.embed(ids), tables, *context.self_attention, self_mask)
    hidden = drafter.cross_attention(hidden, tables, *context.cross_attention, cross_mask)
    if layers:
        hidden = torch.where(synchronised[..., None], golden["target_layer_input"], hidden)
        hidden = drafter.run_target_layers(hidden, positions, self_mask, None)

    def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), atol=1e-4, rtol=0)

    close(drafter.layer_attention(states), golden["lsa_layers"])
    close(drafter.memory(states), golden["memory"])
    close(drafter.head(hidden), golden["drafter_logits"])


@needs_golden
def test_training_layout_and_back(tmp_path: Path) -> None:
    source = golden_training(tmp_path / "theirs", 3)
    drafter = read_published(source, target_name="someone/tiny", target_layer_inference=3)
    write_published(drafter, tmp_path / "back", "training", AutoConfig.from_pretrained(source))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = read_published(tmp_path / "back", target_layer_inference=3)
    assert again.config.to_dict() == drafter.config.to_dict()


def vllm_drafter() -> tuple[LlamaForCausalLM, MoADrafterForCausalLM]:
    target = tiny.tiny_target()
    return target, tiny.tiny_drafter(target, layer_self_attention_num_attention_heads=4)


def test_vllm_layout_and_back(tmp_path: Path) -> None:
    """Also with q, k, v and gate, up packed, as the engine holds them in memory."""
    target, drafter = vllm_drafter()
    write_published(drafter, tmp_path / "vllm", "vllm")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["model_type"] == "moa_spec"
    assert config["kv_hidden_size"] == drafter.config.layer_width
    assert config["num_attention_heads"] == 4
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    packed: Tensors = {}
    for name, tensor in tensors.items():
        if ".q_proj" in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            packed[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj" in name:
            packed[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(part in name for part in (".k_proj", ".v_proj", ".up_proj")):
            packed[name] = tensor
    packed["self_attention.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    for folder in (tmp_path / "vllm", published(tmp_path / "packed", packed, config)):
        again = read_published(folder, target.config, "someone/tiny")
        assert again.config.target_name == "someone/tiny"
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(MisfitError, match="does not say how many layers"):
        read_published(tmp_path / "vllm")


def test_qwen2_has_no_bias_on_its_output_map(tmp_path: Path) -> None:
    target = tiny.tiny_target("qwen2")
    drafter = tiny.tiny_drafter(target, layer_self_attention_num_attention_heads=4, attention_bias=True)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("o_proj.bias"):
                parameter.zero_()
    write_published(drafter, tmp_path / "theirs", "training", target.config)
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert "self_attention.self_attn.q_proj.bias" in names
    assert "self_attention.self_attn.o_proj.bias" not in names
    again = read_published(tmp_path / "theirs")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cross_attention.mlp.down_proj.weight": None}, "cross_attention.mlp.down_proj.weight is missing"),
        ({"Ekv2E.weight": None}, "Ekv2E.weight is missing"),
        (
            {"layer_self_attention.input_layernorm.weight": None},
            "layer_self_attention.input_layernorm.weight is missing",
        ),
        (
            {"layer_self_attention.input_layernorm.weight": torch.ones(40)},
            "layer_self_attention.input_layernorm.weight is 40 wide",
        ),
        ({"self_attention.self_attn.k_proj.weight": torch.ones(12, 32)}, "k_proj.weight has 12 rows"),
        ({"cross_attention.self_attn.v_proj.weight": torch.ones(8, 32)}, "v_proj.weight has the shape"),
        (
            {"self_attention.mlp.down_proj.weight": torch.ones(32, 7)},
            "self_attention.mlp.down_proj.weight has the shape",
        ),
        ({"token_map": torch.arange(3)}, "token_map is no part"),
        ({"Ekv2E.bias": torch.full((32,), float("nan"))}, "Ekv2E.bias holds numbers that are no weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_tensor(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    target, drafter = vllm_drafter()
    tensors: dict[str, Any] = drafter.state_dict() | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder = published(tmp_path / "theirs", tensors, target.config.to_dict())
    with pytest.raises(MisfitError, match=message):
        read_published(folder)


def test_what_is_not_of_the_published_design_is_not_written(tmp_path: Path) -> None:
    target = tiny.tiny_target()
    for options, message in (
        ({"layer_self_attention_layers": [0, 2]}, "layer_self_attention_layers"),
        ({"memory_hidden_state": "entry"}, "hidden_state_map"),
        ({"draft_vocab_size": 9}, "draft_vocab_ids"),
        ({"head_norm": True}, "head_norm"),
        ({"newest_memory": True}, "newest_memory_map"),
        ({"layer_self_attention_num_attention_heads": 2}, "LSA has 2 attention heads"),
        ({"target_layer_inference": 1}, "reuses 1 target layers"),
        ({"cross_attention_num_key_value_heads": 1}, "has 2 and 1"),
    ):
        drafter = tiny.tiny_drafter(target, **({"layer_self_attention_num_attention_heads": 4} | options))
        with pytest.raises(MisfitError, match=message):
            write_published(drafter, tmp_path / "theirs", "vllm")
    assert not list(tmp_path.iterdir())


def test_other_bad_sources(tmp_path: Path) -> None:
    target, drafter = vllm_drafter()
    config = target.config.to_dict()
    with pytest.raises(FileNotFoundError, match="holds no config"):
        read_published(tmp_path)
    folder = published(tmp_path / "theirs", drafter.state_dict(), config)
    with pytest.raises(MisfitError, match="num_hidden_layers 3; the one given has 5"):
        read_published(folder, tiny.tiny_target(num_hidden_layers=5).config)
    with pytest.raises(MisfitError, match="target_layer_inference must be between 0 and 2"):
        read_published(folder, target_layer_inference=9)
    scaled = config | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    with pytest.raises(MisfitError, match="rotary embeddings are scaled"):
        read_published(published(tmp_path / "scaled", drafter.state_dict(), scaled))
    with pytest.raises(MisfitError, match="without Layer Self-Attention"):
        read_published(published(tmp_path / "no_lsa", drafter.state_dict(), config | {"disable_LSA": True}))
    (folder / "model.safetensors").write_bytes(b"12345678 not safetensors")
    with pytest.raises(MisfitError, match="damaged"):
        read_published(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pickled weights are not read"):
        read_published(folder)
    drafter.save_pretrained(tmp_path / "ours")
    with pytest.raises(MisfitError, match="own layout already"):
        read_published(tmp_path / "ours")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = vllm_drafter()
    published(tmp_path / "theirs", drafter.state_dict(), target.config.to_dict())
    command = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main(command) == 0
    assert MoADrafterForCausalLM.from_pretrained(tmp_path / "ours").config.target_num_hidden_layers == 3
    assert main([*command[:1], *command[:0:-1], "--to", "vllm"]) == 2
    assert main(command) == 2
    assert capsys.readouterr().err.count("exists: name another folder") == 2
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "vllm"]) == 0
    assert (tmp_path / "back" / "config.json").is_file()
