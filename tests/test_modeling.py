"""The drafter as a transformers model: configuration, checkpoints, what it lends, precision, gradients."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, prompt, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import moa_spec
from moa_spec.modeling_moa import (
    DraftContext,
    MoADrafterConfig,
    MoADrafterForCausalLM,
    MoADrafterOutput,
    WrongTargetError,
    weight_fingerprint,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "tli": {"target_layer_inference": 2},
    "some_layers": {"layer_self_attention_layers": [0, 2]},
    "hidden_entry": {"memory_hidden_state": "entry"},
    "hidden_added": {"memory_hidden_state": "add"},
    "without_lsa": {"layer_self_attention_layers": [], "memory_hidden_state": "add"},
    "draft_vocabulary": {"draft_vocab_size": 20},
    "head_norm": {"head_norm": True},
    "newest_memory": {"newest_memory": True},
    "everything": {
        "target_layer_inference": 1,
        "layer_self_attention_layers": [1, 2],
        "memory_hidden_state": "add",
        "draft_vocab_size": 20,
        "head_norm": True,
        "newest_memory": True,
    },
}
IDS = prompt(12, rows=2)
KNOWN = 8  # of the tokens in IDS, how many are verified; the others are queries


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target()


def make_drafter(target: PreTrainedModel, options: dict[str, Any]) -> MoADrafterForCausalLM:
    """Attached, and with a draft vocabulary that is not simply the first ids."""
    drafter = tiny_drafter(target, **options)
    if drafter.config.draft_vocab_size is not None:
        drafter.draft_vocab_ids.copy_(torch.arange(VOCAB - 1, 0, -3)[: drafter.config.draft_vocab_size].sort().values)
    drafter.lend(target)
    return drafter


@torch.no_grad()
def encode(drafter: MoADrafterForCausalLM, target: PreTrainedModel, known: int = KNOWN) -> DraftContext:
    """The context of the first `known` tokens of IDS."""
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()  # sliding layers keep what they would drop
    output = target(IDS[:, :known], cache=cache, use_cache=True, output_hidden_states=True)
    layers = [cache.layers[i] for i in drafter.config.lsa_layers]
    hidden = None if drafter.config.memory_hidden_state == "none" else output.hidden_states[-1]
    states = drafter.layer_states([layer.keys for layer in layers], [layer.values for layer in layers], hidden)
    last = target.config.num_hidden_layers
    tail = [cache.layers[i] for i in range(last - drafter.config.target_layer_inference, last)]
    positions = torch.arange(known)[None].expand(len(IDS), known)
    return drafter.encode(IDS[:, :known], states, positions, [(layer.keys, layer.values) for layer in tail])


def draft(drafter: MoADrafterForCausalLM, target: PreTrainedModel) -> MoADrafterOutput:
    return drafter(IDS[:, KNOWN:], context=encode(drafter, target))


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"target_layer_inference": 30}, "between 0 and 29"),
        ({"target_layer_inference": -1}, "between 0 and 29"),
        ({"layer_self_attention_layers": []}, "nothing to be made of"),
        ({"layer_self_attention_layers": [3, 2]}, "ascending layer numbers"),
        ({"layer_self_attention_layers": [0, 30]}, "ascending layer numbers"),
        ({"layer_self_attention_layers": [2, 2]}, "ascending layer numbers"),
        ({"memory_hidden_state": "first"}, "memory_hidden_state"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"draft_vocab_size": 49153}, "draft_vocab_size"),
        ({"self_attention_num_key_value_heads": 2}, "self_attention: 9 attention heads"),
        ({"cross_attention_num_key_value_heads": 0}, "cross_attention_num_key_value_heads must be"),
        ({"layer_self_attention_num_attention_heads": 5, "layer_self_attention_num_key_value_heads": 1}, "LSA width"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"hidden_act": "smooth"}, "hidden_act"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_impossible_configuration(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoADrafterConfig(**wrong)


def test_for_target_default_target_size() -> None:
    """About 5 M parameters for SmolLM2-135M-Instruct, whose sizes are the configuration's defaults."""
    smollm2 = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    config = MoADrafterConfig.for_target(smollm2)
    defaults = MoADrafterConfig()
    for name in ("vocab_size", "hidden_size", "target_num_hidden_layers", "target_head_dim", "layer_width"):
        assert getattr(config, name) == getattr(defaults, name)
    with torch.device("meta"):
        count = sum(p.numel() for p in MoADrafterForCausalLM(config).parameters())
    assert 4e6 < count < 7e6


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_round_trip(target: PreTrainedModel, options: dict[str, Any], tmp_path: Path) -> None:
    drafter = make_drafter(target, options)
    drafter.generation_config.num_assistant_tokens = 5
    drafter.save_pretrained(tmp_path)
    loaded = MoADrafterForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert loaded.generation_config.num_assistant_tokens == 5
    loaded.lend(target)
    with torch.no_grad():
        assert torch.equal(draft(loaded, target).logits, draft(drafter, target).logits)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_only_its_own_weights_are_saved_and_moved(
    target: PreTrainedModel, options: dict[str, Any], tmp_path: Path
) -> None:
    drafter = make_drafter(target, options)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    allowed = (
        "layer_self_attention.",
        "Ekv2E.",
        "self_attention.",
        "cross_attention.",
        "hidden_state_map.",
        "head_norm.",
        "newest_memory_",
    )
    names = set(drafter.state_dict())
    assert all(name.startswith(allowed) or name == "draft_vocab_ids" for name in names)
    lent = {tensor.data_ptr() for tensor in target.state_dict().values()}
    assert not lent & {tensor.data_ptr() for tensor in drafter.state_dict().values()}
    assert not {id(module) for module in target.modules()} & {id(module) for module in drafter.modules()}
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names
    drafter.to(torch.bfloat16)
    for name, tensor in target.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_nothing_of_the_target_is_needed_to_load(target: PreTrainedModel, tmp_path: Path) -> None:
    """Every weight of the target is NaN while the drafter is saved and loaded: none may have slipped in."""
    drafter = make_drafter(target, OPTIONS["everything"])
    expected = draft(drafter, target).logits
    poisoned = tiny_target()
    with torch.no_grad():
        for parameter in poisoned.parameters():
            parameter.fill_(float("nan"))
    drafter._lent.embed_tokens = poisoned.get_input_embeddings()
    drafter._lent.head_weight = poisoned.get_output_embeddings().weight
    drafter.save_pretrained(tmp_path)
    loaded = MoADrafterForCausalLM.from_pretrained(tmp_path)
    assert all(tensor.isfinite().all() for tensor in loaded.state_dict().values())
    loaded.lend(target)
    assert torch.equal(draft(loaded, target).logits, expected)


def test_auto_classes(target: PreTrainedModel, tmp_path: Path) -> None:
    tiny_drafter(target).save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MoADrafterConfig)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), MoADrafterForCausalLM)
    assert isinstance(
        AutoModelForCausalLM.from_config(MoADrafterConfig.for_target(target.config)), MoADrafterForCausalLM
    )


@pytest.mark.parametrize("options", ["draft_vocabulary", "tli"])
def test_remote_code_without_this_project(target: PreTrainedModel, options: str, tmp_path: Path) -> None:
    """A saved folder is all that another machine needs: there, `moa_spec` cannot be imported."""
    drafter = make_drafter(target, OPTIONS[options])
    context = encode(drafter, target)
    drafter.save_pretrained(tmp_path / "drafter", standalone=True)
    ids = IDS[:, : KNOWN + 1]
    torch.save(
        {"ids": ids, "memory": (context.self_attention, context.cross_attention, context.target_layers)},
        tmp_path / "context.pt",
    )
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "moa_spec":
            raise ImportError("moa_spec is not installed here")
sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM
drafter = AutoModelForCausalLM.from_pretrained("drafter", trust_remote_code=True)
assert "moa_spec" not in sys.modules
saved = torch.load("context.pt")
context = sys.modules[type(drafter).__module__].DraftContext(*saved["memory"])
out = drafter.generate(saved["ids"], context=context, max_new_tokens=6, do_sample=False, eos_token_id=None)
print(out.tolist())
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == continuation(drafter, context, ids, 6).tolist()


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "missing_tensor", "no_weights", "no_config", "bad_config", "other"]
)
def test_damaged_checkpoint(target: PreTrainedModel, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "drafter"
    drafter = tiny_drafter(target)
    drafter.save_pretrained(folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "missing_tensor":
        kept = {name: tensor for name, tensor in drafter.state_dict().items() if name != "Ekv2E.weight"}
        drafter.save_pretrained(folder, state_dict=kept)
    elif damage == "no_weights":
        weights.unlink()
    elif damage == "no_config":
        (folder / "config.json").unlink()
    elif damage == "bad_config":
        (folder / "config.json").write_text('{"model_type": "moa_drafter", "hidden_size"')
    else:
        shutil.rmtree(folder)
        target.save_pretrained(folder)
    with pytest.raises((OSError, ValueError)) as error:
        moa_spec.load_drafter(folder, target)
    assert str(folder) in str(error.value)
    if damage == "missing_tensor":
        assert "Ekv2E.weight" in str(error.value)


def test_wrong_shape_in_checkpoint(target: PreTrainedModel, tmp_path: Path) -> None:
    tiny_drafter(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"self_attention_intermediate_size": 7}))
    with pytest.raises(OSError, match=str(tmp_path)):
        moa_spec.load_drafter(tmp_path, target)


# -- the target --------------------------------------------------------------------------------------------------------


def test_wrong_target_names_both(target: PreTrainedModel) -> None:
    drafter = tiny_drafter(target, target_name="org/right", target_fingerprint=weight_fingerprint(target))
    wider = tiny_target(hidden_size=48, intermediate_size=96)
    reseeded = tiny_target(seed=7)
    other = tiny_target("qwen2")
    for wrong, reason in ((wider, "hidden_size is 48"), (reseeded, "weights are not"), (other, "qwen2 model")):
        wrong.config._name_or_path = "org/wrong"
        with pytest.raises(WrongTargetError, match=reason) as error:
            moa_spec.attach(wrong, drafter)
        assert "org/right" in str(error.value)
        assert "org/wrong" in str(error.value)
        with pytest.raises(RuntimeError, match="not attached"):
            _ = drafter.lent


def test_a_refused_target_leaves_the_drafter_attached(target: PreTrainedModel) -> None:
    drafter = make_drafter(target, {})
    with pytest.raises(WrongTargetError):
        drafter.lend(tiny_target(hidden_size=48, intermediate_size=96))
    assert drafter.lent.embed_tokens is target.get_input_embeddings()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fingerprint_survives_rounding(target: PreTrainedModel, dtype: torch.dtype) -> None:
    drafter = tiny_drafter(target, target_fingerprint=weight_fingerprint(target))
    drafter.to(dtype).lend(tiny_target().to(dtype))


def test_unattached_drafter_says_what_to_call(target: PreTrainedModel) -> None:
    drafter = tiny_drafter(target, target_name="org/right")
    with pytest.raises(RuntimeError, match=r"org/right: call moa_spec.attach\(target, drafter\)"):
        drafter.get_input_embeddings()
    with pytest.raises((RuntimeError, ValueError), match=r"moa_spec.attach\(target, drafter\)"):
        drafter.generate(IDS, max_new_tokens=2)
    with pytest.raises((RuntimeError, ValueError), match=r"moa_spec.attach\(target, drafter\)"):
        tiny_target().generate(IDS[:1], assistant_model=drafter, max_new_tokens=4)


def test_wrong_layer_states(target: PreTrainedModel) -> None:
    drafter = make_drafter(target, OPTIONS["hidden_added"])
    keys = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ValueError, match="3 layers of 32 numbers"):
        drafter.layer_states(keys[:2], keys[:2], torch.zeros(1, 4, 32))
    with pytest.raises(ValueError, match="last hidden state"):
        drafter.layer_states(keys, keys)


# -- computing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_level_by_level_equals_all_at_once(target: PreTrainedModel, options: dict[str, Any]) -> None:
    """Drafting one token at a time, with what earlier levels left, gives what one causal pass over all gives."""
    drafter = make_drafter(target, options)
    context = encode(drafter, target)
    together = drafter(IDS[:, KNOWN:], context=context)
    drafted = None
    for level in range(IDS.shape[1] - KNOWN):
        output = drafter(IDS[:, KNOWN + level : KNOWN + level + 1], context=context, drafted=drafted)
        drafted = output.drafted
        torch.testing.assert_close(output.logits[:, 0], together.logits[:, level], atol=1e-4, rtol=1e-4)
    ids = drafter.to_token_ids(torch.arange(together.logits.shape[-1]))
    expected = drafter.draft_vocab_ids if drafter.config.draft_vocab_size else torch.arange(VOCAB)
    assert torch.equal(ids, expected)


@torch.no_grad()
def test_context_grows_token_by_token(target: PreTrainedModel) -> None:
    """LSA works token by token, so encoding in two parts and joining equals encoding at once."""
    drafter = make_drafter(target, {})
    whole = encode(drafter, target)
    start = encode(drafter, target, known=5)
    rest = DraftContext(
        tuple(t[:, :, 5:] for t in whole.self_attention), tuple(t[:, :, 5:] for t in whole.cross_attention)
    )
    joined = start.extended(rest)
    assert joined.length == KNOWN
    for ours, theirs in zip(joined.cross_attention, whole.cross_attention, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_memory_is_read(target: PreTrainedModel) -> None:
    """Another memory, another draft; and the order of layers counts (LSA has positions)."""
    drafter = make_drafter(target, {})
    context = encode(drafter, target)
    plain = drafter(IDS[:, KNOWN:], context=context).logits
    emptied = DraftContext(context.self_attention, tuple(torch.zeros_like(t) for t in context.cross_attention))
    assert not torch.allclose(plain, drafter(IDS[:, KNOWN:], context=emptied).logits)
    states = torch.randn(1, 4, 3 * drafter.config.layer_width)
    swapped = states.view(1, 4, 3, -1).flip(2).reshape(states.shape)
    assert not torch.allclose(drafter.memory(states), drafter.memory(swapped))


@pytest.mark.parametrize("options", ["published", "tli"])
@torch.no_grad()
def test_eager_equals_sdpa(target: PreTrainedModel, options: str) -> None:
    drafter = make_drafter(target, OPTIONS[options])
    context = encode(drafter, target)
    outputs = {}
    for name in ("eager", "sdpa"):
        drafter.set_attn_implementation(name)
        assert drafter.config._attn_implementation == name
        outputs[name] = drafter(IDS[:, KNOWN:], context=context).logits
    torch.testing.assert_close(outputs["eager"], outputs["sdpa"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_half_precision(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    half = tiny_target().to(dtype)
    make_drafter(tiny_target(), options).save_pretrained(tmp_path)
    drafter = MoADrafterForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    drafter.lend(half)
    logits = draft(drafter, half).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    full = make_drafter(tiny_target(), options)
    full.load_state_dict(MoADrafterForCausalLM.from_pretrained(tmp_path).state_dict())
    expected = draft(full, tiny_target()).logits
    assert (logits.float() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_reach_all_of_the_drafter_and_nothing_else(options: dict[str, Any]) -> None:
    target = tiny_target()
    drafter = make_drafter(target, options).train()
    states = torch.randn(2, KNOWN, 3 * drafter.config.layer_width + 32 * (drafter.config.memory_hidden_state != "none"))
    if drafter.config.layer_self_attention_layers is not None:
        states = states[..., drafter.config.layer_width :]
    past = encode(drafter, target).target_layers
    context = drafter.encode(IDS[:, :KNOWN], states, torch.arange(KNOWN)[None].expand(2, KNOWN), past)
    drafter(IDS[:, KNOWN:], context=context).logits.square().sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    # what a trainer sees is the drafter's own; a target that is frozen, as in training, gets no gradient at all
    assert not {id(p) for p in target.parameters()} & {id(p) for p in drafter.parameters()}
    frozen = tiny_target().requires_grad_(False)
    drafter.lend(frozen)
    context = drafter.encode(IDS[:, :KNOWN], states, torch.arange(KNOWN)[None].expand(2, KNOWN), past)
    drafter(IDS[:, KNOWN:], context=context).logits.square().sum().backward()
    assert all(parameter.grad is None for parameter in frozen.parameters())


# -- standalone --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def continuation(drafter: MoADrafterForCausalLM, context: DraftContext, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy, written out: what the attached drafter itself would go on with."""
    for _ in range(count):
        logits = drafter(ids[:, context.length :], context=context).logits[:, -1]
        ids = torch.cat([ids, drafter.to_token_ids(logits.argmax(-1))[:, None]], dim=1)
    return ids


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_standalone(target: PreTrainedModel, options: dict[str, Any], tmp_path: Path) -> None:
    drafter = make_drafter(target, options)
    context = encode(drafter, target)
    drafter.save_pretrained(tmp_path, standalone=True)
    assert drafter.config.standalone is False
    alone = MoADrafterForCausalLM.from_pretrained(tmp_path)
    assert alone.config.standalone is True
    ids = IDS[:, : KNOWN + 1]
    written = alone.generate(ids, context=context, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(written, continuation(drafter, context, ids, 8))
    with pytest.raises(ValueError, match="one more to go on from"):
        alone.generate(ids[:, :KNOWN], context=context, max_new_tokens=1)


# -- public interface --------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    for name in moa_spec.__all__:
        assert getattr(moa_spec, name) is not None
    assert set(moa_spec.__all__) <= set(dir(moa_spec))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = moa_spec.nonsense
