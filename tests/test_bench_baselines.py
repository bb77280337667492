"""The drafters that MoA is compared with: exact like MoA, trained at the depths they draft at, saved and loaded."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny_drafter, tiny_target

import moa_spec
from moa_spec.benchmarks import methods
from moa_spec.benchmarks.baselines import BaselineDrafter, attach_baseline, load_baseline
from moa_spec.benchmarks.baselines.kinds import KINDS
from moa_spec.benchmarks.baselines.objectives import blocks
from moa_spec.cli import arguments, bench, bench_comparison
from moa_spec.generation import DraftPlan
from moa_spec.modeling_moa import WrongTargetError
from moa_spec.training.distill import Distiller, conversations
from moa_spec.training.kind import DrafterKind
from moa_spec.training.objective import ObjectiveConfig, draw_synchronised
from moa_spec.training.recipe import Recipe
from moa_spec.training.train import new_drafter, train

from .training_data import prompts, tiny_chat_target, tiny_tokenizer

FIXED = {"draft_policy": "fixed", "num_assistant_tokens": 4, "prompt_lookup_num_tokens": 0}
TREE = FIXED | {"draft_breadth": 3, "draft_nodes": 9}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def _drafter(kind: DrafterKind, target: torch.nn.Module, seed: int = 3, **overrides) -> BaselineDrafter:
    torch.manual_seed(seed)
    return kind.model(kind.config.for_target(target.config, **overrides)).eval()


@kinds
@pytest.mark.parametrize("options", [FIXED, TREE, {"draft_policy": "auto"}], ids=["chain", "tree", "auto"])
def test_baselines_are_exact(kind: DrafterKind, options: dict) -> None:
    target = tiny_target()
    drafter = _drafter(kind, target, draft_vocab_size=48)
    attach_baseline(target, drafter)
    for rows in (1, 3):
        ids = prompt(9, rows=rows)
        mask = torch.ones_like(ids)
        if rows > 1:
            mask[0, :4] = 0
        plain = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=30)
        with moa_spec.record_trace() as trace:
            drafted = target.generate(
                ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=30, **options
            )
        assert torch.equal(plain, drafted)
        assert options["draft_policy"] == "auto" or any(r.nodes for r in trace.rounds)


@kinds
def test_saved_and_loaded_it_drafts_the_same(kind: DrafterKind, tmp_path: Path) -> None:
    target = tiny_target()
    drafter = _drafter(kind, target, draft_vocab_size=32)
    drafter.draft_vocab_ids.copy_(torch.arange(0, 64, 2))
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"{kind.name}_drafter"
    attach_baseline(target, drafter)
    loaded = load_baseline(tmp_path, target)
    assert type(loaded) is kind.model
    traces = []
    for assistant in (drafter, loaded):
        with moa_spec.record_trace() as trace:
            target.generate(prompt(9), assistant_model=assistant, do_sample=False, max_new_tokens=20, **TREE)
        traces.append([[(n.token, n.parent) for n in r.nodes] for r in trace.rounds])
    assert traces[0] == traces[1]
    assert {token for r in traces[0] for token, _ in r} <= set(range(0, 64, 2))


@kinds
def test_a_baseline_refuses_another_target(kind: DrafterKind, tmp_path: Path) -> None:
    drafter = _drafter(kind, tiny_target())
    with pytest.raises(WrongTargetError, match="num_hidden_layers"):
        attach_baseline(tiny_target(num_hidden_layers=2), drafter)
    one, other = tiny_target(), tiny_target()
    attach_baseline(one, drafter)
    attach_baseline(other, drafter)
    with pytest.raises(RuntimeError, match="another target"):
        one.generate(prompt(5), assistant_model=drafter, max_new_tokens=4)
    with pytest.raises(ValueError, match="does not write by itself"):
        drafter.generate(prompt(5), max_new_tokens=4)
    tiny_drafter(one).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="moa_drafter, and the baselines are eagle_drafter"):
        load_baseline(tmp_path, one)


# -- training ----------------------------------------------------------------------------------------------------------


def test_blocks_are_what_lies_between_synchronised_positions() -> None:
    synchronised = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0, 0]]).bool()
    starts, sizes = blocks(synchronised, torch.tensor([8, 6]))
    assert starts[sizes > 0].tolist() == [2, 5, 1, 4]
    assert sizes.tolist() == [[2, 3], [1, 2]]


@kinds
def test_training_predicts_what_drafting_predicts(kind: DrafterKind) -> None:
    """Fed the true tokens, a draft's hidden states are those that the objective scores, position by position."""
    target = tiny_target()
    drafter = _drafter(kind, target)
    drafter.lend(target)
    lengths, prompts_ = torch.tensor([20, 15]), torch.tensor([5, 4])
    ids = prompt(20, rows=2)
    output = target(ids, output_hidden_states=True, use_cache=True)
    hidden = output.hidden_states[-1]
    pairs = [(output.cache.layers[i].keys, output.cache.layers[i].values) for i in drafter.config.lsa_layers]
    batch = {"input_ids": ids, "lengths": lengths, "prompt_lengths": prompts_, "last_hidden": hidden}
    if pairs:
        batch["layer_states"] = drafter.layer_states([k for k, _ in pairs], [v for _, v in pairs])
    synchronised = draw_synchronised(lengths, prompts_, 20, (4, 6), [0, 1])
    with torch.no_grad():
        scored = kind.objective(drafter, batch, ObjectiveConfig(), synchronised)
    assert scored.depth.max() >= 3
    expected = {}
    for row in range(2):
        for position in range(int(prompts_[row]), int(lengths[row])):
            if synchronised[row, position]:
                continue
            last = max(p for p in range(position) if synchronised[row, p])
            session = drafter.session(target, 1)
            session.observe(_verified(session, output, ids[row : row + 1, : last + 1], row, int(ids[row, last + 1])))
            context, drafted = session.context(), None
            for at in range(last + 1, position + 1):
                with torch.no_grad():
                    step = drafter(ids[row : row + 1, at : at + 1], torch.tensor([[at]]), context, drafted)
                drafted = step.drafted
            expected[(row, position - last - 1, position)] = step.hidden[0, -1]
    assert len(expected) == len(scored.depth) == int((scored.true_hidden != 0).any(-1).sum())
    for row, depth, ours, true in zip(scored.row, scored.depth, scored.hidden, scored.true_hidden, strict=True):
        at = next(p for p in range(20) if torch.equal(hidden[row, p], true))
        torch.testing.assert_close(ours, expected[(int(row), int(depth), at)], rtol=1e-4, atol=1e-4)


def test_the_staircase_is_moas() -> None:
    with pytest.raises(ValueError, match="leave staircase_epochs out"):
        KINDS[0].objective(None, {}, ObjectiveConfig(), torch.zeros(1, 1), staircase=True)


def _verified(session, output, ids: torch.Tensor, row: int, following: int) -> moa_spec.generation.Verified:
    count = ids.shape[1]

    class States:
        def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            layer = output.cache.layers[index]
            return layer.keys[row : row + 1, :, :count], layer.values[row : row + 1, :, :count]

        def hidden(self, index: int) -> torch.Tensor:
            return output.hidden_states[index][row : row + 1, :count]

    return moa_spec.generation.Verified(ids, torch.arange(count)[None], [count], [0], [following], States())


def test_the_right_parents_hidden_state_is_fed_back() -> None:
    """A branch of a tree is drafted as the chain of its tokens would be."""
    target = tiny_target()
    drafter = _drafter(KINDS[0], target)
    drafter.lend(target)
    ids = prompt(9)
    output = target(ids, output_hidden_states=True, use_cache=True)
    session = drafter.session(target, 1)
    session.observe(_verified(session, output, ids, 0, 7))
    with torch.no_grad():
        (tree,) = session.draft(DraftPlan(4, 3, 12))
        assert not tree.is_chain
        for node in range(len(tree)):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            drafted = None
            for depth, token in enumerate([7, *(tree.tokens[n] for n in path[:-1])]):
                step = drafter(torch.tensor([[token]]), torch.tensor([[9 + depth]]), session.context(), drafted)
                drafted = step.drafted
            log_prob = step.logits[0, -1].log_softmax(-1)[tree.tokens[node]]
            assert log_prob.item() == pytest.approx(tree.log_probs[node], abs=1e-4)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    Distiller(
        target, tokenizer, path, slots=8, max_length=64, max_new_tokens=24, prompts=conversations(iter(prompts(30)))
    ).run(10**6)
    return path


@pytest.fixture(scope="module")
def activations(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache made for a MoA drafter that reads more than any of the baselines."""
    folder = tmp_path_factory.mktemp("activations")
    recipe = Recipe(held_out=5, max_length=64, drafter={"layer_self_attention_layers": [0, 2]}, training=_training(1))
    train(recipe, [answers], folder / "moa", folder / "cache", target=tiny_chat_target(), tokenizer=tiny_tokenizer())
    return folder / "cache"


def _training(steps: int) -> dict:
    return {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.005,
        "logging_steps": 1,
        "eval_steps": 100,
        "disable_tqdm": True,
    }


@kinds
def test_a_baseline_learns_from_moas_activations(
    kind: DrafterKind, answers: Path, activations: Path, tmp_path: Path
) -> None:
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    recipe = Recipe(
        held_out=5, max_length=64, drafter_type=kind.name, drafter={"draft_vocab_size": 48}, training=_training(25)
    )
    before = {path: path.stat().st_mtime_ns for path in activations.iterdir()}
    metrics = train(recipe, [answers], tmp_path / "drafter", activations, target=target, tokenizer=tokenizer, kind=kind)
    assert {path: path.stat().st_mtime_ns for path in activations.iterdir()} == before
    log = json.loads((tmp_path / "drafter" / "training_record.json").read_text())["log"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert metrics["eval_expected_tau"] > 1
    drafter = load_baseline(tmp_path / "drafter", target)
    ids = prompt(7)
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    assert torch.equal(plain, target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=20, **TREE))


def test_a_recipe_of_another_kind_is_refused(answers: Path) -> None:
    with pytest.raises(ValueError, match="of type eagle, not moa"):
        new_drafter(Recipe(drafter_type="eagle"), tiny_chat_target(), [])
    from moa_spec.cli.train import drafter_kind

    with pytest.raises(ValueError, match="no drafter_type 'hydra'; there are moa, eagle, medusa, glide"):
        drafter_kind("hydra")


def test_shipped_recipes_differ_in_the_drafter_alone() -> None:
    """EAGLE's, Medusa's, GLIDE's, and one that trains MoA in the same way."""
    names = [*(kind.name for kind in KINDS), "moa-equal"]
    recipes = [Recipe.load(f"smollm2-135m-instruct-{name}").to_dict() for name in names]
    assert [recipe.pop("drafter_type") for recipe in recipes] == [*(kind.name for kind in KINDS), "moa"]
    assert {recipe.pop("drafter")["draft_vocab_size"] for recipe in recipes} == {12288}
    assert all(recipe == recipes[0] for recipe in recipes)


# -- in the benchmark --------------------------------------------------------------------------------------------------


def test_every_kind_is_a_row_of_the_comparison(tmp_path: Path) -> None:
    target = tiny_target()
    checkpoints = {}
    for kind in KINDS:
        _drafter(kind, target).save_pretrained(tmp_path / kind.name)
        checkpoints[kind.name] = tmp_path / kind.name
    for layers, name in ((0, "moa-equal"), (1, "moa-tli1"), (2, "moa-tli3")):
        tiny_drafter(target, target_layer_inference=layers).save_pretrained(tmp_path / name)
        checkpoints[name] = tmp_path / name
    prepared = {m.name: m for m in methods.prepare(["plain", *methods.OWN_DRAFTER], target, checkpoints=checkpoints)}
    assert prepared["eagle"].assistant is prepared["eagle2"].assistant
    ids = prompt(11)
    plain = target.generate(ids, do_sample=False, max_new_tokens=16)
    for method in prepared.values():
        written = target.generate(ids, do_sample=False, max_new_tokens=16, **method.keywords())
        assert torch.equal(plain, written), method.name
    with pytest.raises(ValueError, match=r"'eagle2' needs a drafter.*--checkpoint eagle FOLDER.*moa train --recipe"):
        methods.prepare(["plain", "eagle2"], target)


def test_checkpoints_are_found_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "DEFAULT_DRAFTER", tmp_path / "moa")
    (tmp_path / "smollm2-135m-instruct-eagle").mkdir()
    assert bench_comparison.checkpoints(
        ["plain", "eagle", "eagle2", "glide"], [["glide", "x"], ["medusa", "unused"]]
    ) == {
        "eagle": tmp_path / "smollm2-135m-instruct-eagle",
        "glide": "x",
    }
    assert bench_comparison.checkpoints(["plain", "moa"], []) == {}
    with pytest.raises(ValueError, match="no such kind of drafter"):
        bench_comparison.checkpoints(["plain"], [["hydra", "x"]])
    with pytest.raises(ValueError, match="given twice"):
        bench_comparison.checkpoints(["plain"], [["glide", "x"], ["glide", "y"]])
    with pytest.raises(ValueError, match="'medusa' needs a drafter"):
        bench_comparison.checkpoints(["plain", "medusa"], [])


def test_the_drafters_revision_reaches_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def load(name: str, target: object, **kwargs) -> object:
        asked.update(kwargs, name=name)
        return tiny_drafter(target)

    monkeypatch.setattr(methods, "load_drafter", load)
    methods.prepare(["plain", "moa"], tiny_target(), "somebody/drafter", revision="v2")
    assert asked == {"name": "somebody/drafter", "revision": "v2"}

    class Stopped(Exception):
        pass

    def prepare(*args: object) -> None:
        asked["args"] = args
        raise Stopped

    monkeypatch.setattr(methods, "prepare", prepare)
    monkeypatch.setattr("moa_spec.benchmarks.datasets.find_folder", lambda data: None)
    monkeypatch.setattr("moa_spec.benchmarks.datasets.load", lambda sets, folder: [])
    monkeypatch.setattr("moa_spec.benchmarks.datasets.choose", lambda *args: [])
    monkeypatch.setattr("moa_spec.targets.load_target", lambda name, dtype: (tiny_target(), None))
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["run", "--methods", "plain", "moa", "--drafter", "x", "--drafter-revision", "v3"])
    args.sets, args.per_task = ["spec_bench"], 1
    with pytest.raises(Stopped):
        bench_comparison.Bench(args, "float32")
    assert "v3" in asked["args"]
