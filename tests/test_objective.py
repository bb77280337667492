"""Synchronisation, masks and losses of the training objective."""

import pytest
import torch

from moa_spec.training.distillation_loss import distillation_loss
from moa_spec.training.initialisation import with_options
from moa_spec.training.objective import (
    ObjectiveConfig,
    agreement,
    bounded_masks,
    draw_synchronised,
    training_objective,
)
from moa_spec.training.trainer import DrafterWithObjective

from .tiny import prompt, tiny_drafter, tiny_target


def test_synchronised_positions_lie_k_apart_and_cover_the_prompt() -> None:
    lengths, prompts = torch.tensor([60, 40]), torch.tensor([10, 5])
    seen_intervals, first_depths = set(), set()
    for seed in range(60):
        synchronised = draw_synchronised(lengths, prompts, 60, (6, 15), [seed, seed + 100])
        for row in range(2):
            assert synchronised[row, : prompts[row]].all()
            at = synchronised[row, prompts[row] :].nonzero()[:, 0]
            gaps = set(at.diff().tolist())
            assert len(gaps) == 1
            seen_intervals |= gaps
            first_depths.add(at[0].item())
    assert seen_intervals == set(range(6, 15))
    assert len(first_depths) > 6  # the phase varies, so every position is trained at every depth


def test_masks_show_what_inference_will_have() -> None:
    synchronised = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 0]], dtype=torch.bool)
    queries = torch.arange(3, 8)[None]
    own, cross, last = bounded_masks(synchronised, queries, torch.tensor([8]))
    assert last.tolist() == [[2, 2, 5, 5, 5]]
    assert cross[0, 0].sum(-1).tolist() == [3, 3, 6, 6, 6]
    assert own[0, 0].sum(-1).tolist() == [4, 5, 6, 7, 8]
    stairs, _, _ = bounded_masks(synchronised, queries, torch.tensor([8]), staircase=True)
    assert [row.nonzero()[:, 0].tolist() for row in stairs[0, 0]] == [[3], [3, 4], [5], [6], [6, 7]]


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma 2 caps its logits
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])  # Cohere and Granite scale theirs
def test_distillation_loss_and_its_gradient_equal_automatic_differentiation(family: str, logit_scale: float) -> None:
    target = tiny_target(family)
    drafter = tiny_drafter(target, draft_vocab_size=40)
    assert (drafter.config.final_logit_softcapping is not None) == (family == "gemma2")
    drafter.lend(target)
    drafter.config.logit_scale = logit_scale
    torch.manual_seed(0)
    hidden = torch.randn(300, 32, requires_grad=True)
    true, weight = torch.randn(300, 32), torch.rand(300)
    cross_entropy, acceptance = distillation_loss(drafter, hidden, true, weight, with_acceptance=True)
    (cross_entropy - 2 * acceptance).backward()
    ours, hidden.grad = hidden.grad, None
    logits, p = drafter.head(hidden), drafter.head(true).softmax(-1)
    expected_entropy = -(weight * (p * logits.log_softmax(-1)).sum(-1)).sum()
    expected_acceptance = (weight * torch.minimum(p, logits.softmax(-1)).sum(-1)).sum()
    (expected_entropy - 2 * expected_acceptance).backward()
    torch.testing.assert_close(cross_entropy, expected_entropy)
    torch.testing.assert_close(acceptance, expected_acceptance)
    torch.testing.assert_close(ours, hidden.grad, atol=1e-5, rtol=1e-4)


def _batch(target, drafter, rows: int = 2, length: int = 30) -> dict[str, torch.Tensor]:
    ids = prompt(length, rows=rows)
    tail = drafter.config.target_layer_inference
    with torch.no_grad():
        output = target.model(ids, use_cache=True, output_hidden_states=True)
    layers = [output.cache.layers[i] for i in drafter.config.lsa_layers]
    states = drafter.layer_states([x.keys for x in layers], [x.values for x in layers], output.last_hidden_state)
    return {
        "input_ids": ids,
        "lengths": torch.tensor([length, length - 6][:rows]),
        "prompt_lengths": torch.tensor([8, 5][:rows]),
        "layer_states": states,
        "last_hidden": output.last_hidden_state,
        "layer_input": output.hidden_states[-1 - tail],
    }


def test_without_the_bound_every_position_reads_all_memory_before_it() -> None:
    """The same predictions as when every block is one position long, but all positions bear loss."""
    target = tiny_target()
    drafter = tiny_drafter(target, newest_memory=True, memory_hidden_state="add")
    drafter.lend(target)
    batch = _batch(target, drafter, rows=1)
    synchronised = torch.zeros(1, 30, dtype=torch.bool)
    synchronised[:, :8] = True
    unbounded = training_objective(drafter, batch, ObjectiveConfig(bounded=False), synchronised)
    assert unbounded.depth.tolist() == list(range(22))
    for position in (8, 15, 29):
        alone = synchronised.clone()
        alone[:, :position] = True
        bounded = training_objective(drafter, batch, ObjectiveConfig(), alone)
        torch.testing.assert_close(unbounded.hidden[position - 8], bounded.hidden[0], atol=2e-5, rtol=1e-4)
    whole = training_objective(drafter, batch, ObjectiveConfig(), synchronised)
    torch.testing.assert_close(unbounded.hidden[0], whole.hidden[0], atol=2e-5, rtol=1e-4)
    assert (unbounded.hidden[5] - whole.hidden[5]).abs().max() > 1e-3
    module = DrafterWithObjective(drafter, ObjectiveConfig(bounded=False)).eval()
    batch |= {"rows": torch.tensor([0])}
    judged = module(**batch)
    module.objective = ObjectiveConfig()
    torch.testing.assert_close(judged.hidden, module(**batch).hidden)


@pytest.mark.parametrize("tail", [0, 1])
@pytest.mark.parametrize("hidden_state", ["none", "entry", "add", "only"])
@pytest.mark.parametrize("newest", [False, True])
def test_training_predicts_exactly_what_drafting_predicts(tail: int, hidden_state: str, newest: bool) -> None:
    """The T-step mask promises that a position sees in training what it will see in a draft: compare the two."""
    target = tiny_target()
    drafter = tiny_drafter(
        target,
        target_layer_inference=tail,
        memory_hidden_state="add" if hidden_state == "only" else hidden_state,
        layer_self_attention_layers=[] if hidden_state == "only" else None,  # without LSA
        head_norm=True,
        newest_memory=newest,
    )
    drafter.lend(target)
    batch = _batch(target, drafter, rows=1)
    synchronised = torch.zeros(1, 30, dtype=torch.bool)
    synchronised[:, :8] = True  # one block: the whole answer is one draft, its true tokens given
    output = training_objective(drafter, batch, ObjectiveConfig(), synchronised)
    ids = batch["input_ids"]
    with torch.no_grad():
        cache = target.model(ids[:, :8], use_cache=True).cache
        tail_states = [(x.keys, x.values) for x in cache.layers[len(cache.layers) - tail :]]
        positions = torch.arange(8)[None]
        context = drafter.encode(ids[:, :8], batch["layer_states"][:, :8], positions, tail_states)
        drafted, hidden = None, []
        for level in range(22):
            step = drafter(ids[:, 8 + level : 9 + level], context=context, drafted=drafted)
            drafted = step.drafted
            hidden.append(step.hidden[0])
    torch.testing.assert_close(output.hidden, torch.cat(hidden), atol=2e-5, rtol=1e-4)
    assert output.depth.tolist() == list(range(22))


def test_the_newest_memory_is_added_to_a_trained_drafter_without_changing_its_drafts() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, memory_hidden_state="add", draft_vocab_size=30)
    with torch.no_grad():
        drafter.draft_vocab_ids.copy_(torch.arange(30) * 2)
    grown = with_options(drafter, newest_memory=True)
    batch = _batch(target, drafter, rows=1)
    synchronised = draw_synchronised(batch["lengths"], batch["prompt_lengths"], 30, (4, 5), [0])
    hidden = []
    for model in (drafter, grown):
        model.lend(target)
        hidden.append(training_objective(model, batch, ObjectiveConfig(), synchronised).hidden)
    assert torch.equal(*hidden)
    assert torch.equal(drafter.draft_vocab_ids, grown.draft_vocab_ids)
    assert grown.config.newest_memory
    reused = with_options(grown, target_layer_inference=1)
    assert (reused.config.target_layer_inference, reused.config.newest_memory) == (1, True)
    assert torch.equal(reused.cross_attention.self_attn.o_proj.weight, drafter.cross_attention.self_attn.o_proj.weight)
    assert not drafter.config.newest_memory


def test_padding_and_prompts_bear_no_loss() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.lend(target)
    batch = _batch(target, drafter)
    synchronised = draw_synchronised(batch["lengths"], batch["prompt_lengths"], 30, (4, 5), [0, 1])
    output = training_objective(drafter, batch, ObjectiveConfig(), synchronised)
    real = (torch.arange(30)[None] < batch["lengths"][:, None]) & ~synchronised
    assert len(output.depth) == real.sum()
    changed = dict(batch)
    changed["input_ids"] = batch["input_ids"].clone()
    changed["input_ids"][1, 24:] = 5
    changed["layer_states"] = batch["layer_states"].clone()
    changed["layer_states"][1, 24:] = float("inf")
    again = training_objective(
        drafter,
        {**changed, "layer_states": changed["layer_states"].nan_to_num(posinf=9.0)},
        ObjectiveConfig(),
        synchronised,
    )
    torch.testing.assert_close(output.loss, again.loss)


def test_every_own_parameter_learns_and_nothing_lent_does() -> None:
    target = tiny_target().requires_grad_(False)
    drafter = tiny_drafter(
        target, target_layer_inference=1, memory_hidden_state="add", head_norm=True, newest_memory=True
    )
    drafter.lend(target)
    batch = _batch(target, drafter)
    synchronised = draw_synchronised(batch["lengths"], batch["prompt_lengths"], 30, (4, 6), [0, 1])
    training_objective(drafter, batch, ObjectiveConfig(acceptance_weight=1.0), synchronised).loss.backward()
    assert [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().any()] == []
    assert all(p.grad is None for p in target.parameters())


def test_agreement_is_one_when_the_prediction_is_the_truth() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.lend(target)
    batch = _batch(target, drafter)
    synchronised = draw_synchronised(batch["lengths"], batch["prompt_lengths"], 30, (4, 6), [0, 1])
    output = training_objective(drafter, batch, ObjectiveConfig(), synchronised)
    assert agreement(drafter, output).float().mean() < 0.9
    output.hidden = output.true_hidden
    assert agreement(drafter, output).all()


def test_bad_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="interval"):
        ObjectiveConfig(interval=(9, 9))
