"""Training end to end on a tiny target: the cache, learning, resuming, several processes, and what goes wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import moa_spec
from moa_spec.training.activations import ActivationCache, ActivationDataset, collate, shard_paths
from moa_spec.training.distill import Distiller, conversations, read_rows
from moa_spec.training.initialisation import frequent_tokens
from moa_spec.training.recipe import RECIPES, Recipe
from moa_spec.training.train import last_checkpoint, load_rows, new_drafter, prepare, train

from .training_data import prompts, tiny_chat_target, tiny_tokenizer, write_rows

TRAINING = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.005,
    "logging_steps": 1,
    "eval_steps": 100,
    "save_steps": 3,
    "disable_tqdm": True,
}
DRAFTER = {
    "layer_self_attention_layers": [0, 2],
    "memory_hidden_state": "add",
    "head_norm": True,
    "draft_vocab_size": 48,
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that the tiny target answered itself."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    Distiller(
        target, tokenizer, path, slots=8, max_length=64, max_new_tokens=24, prompts=conversations(iter(prompts(40)))
    ).run(10**6)
    return path


def _recipe(**changes) -> Recipe:
    return Recipe(held_out=5, max_length=64, drafter=DRAFTER, training=TRAINING, **changes)


def _train(answers: Path, folder: Path, recipe: Recipe | None = None, **overrides) -> dict[str, float]:
    return train(
        recipe or _recipe(),
        [answers],
        folder / "drafter",
        folder / "activations",
        overrides=overrides,
        target=tiny_chat_target(),
        tokenizer=tiny_tokenizer(),
    )


def test_cached_activations_are_the_targets_own_and_are_continued(answers: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("moa_spec.training.activations.SHARD_TOKENS", 200)
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    rows = load_rows([answers])
    drafter = new_drafter(_recipe(), target, rows)
    cache = ActivationCache(tmp_path / "a", drafter.config)
    cache.build(target, tokenizer, rows[:20], 64)
    first = {path: path.stat().st_mtime_ns for path in shard_paths(tmp_path / "a")}
    assert len(first) > 1
    cache.build(target, tokenizer, rows, 64)
    assert {path: path.stat().st_mtime_ns for path in first} == first  # what is finished is not touched again
    dataset = ActivationDataset(tmp_path / "a", drafter)
    assert len(dataset) == sum(len(row["response_ids"]) >= 2 for row in rows)
    item = dataset[3]
    with torch.no_grad():
        output = target.model(item["input_ids"][None], use_cache=True)
        layers = [output.cache.layers[i] for i in (0, 2)]
        states = drafter.layer_states([x.keys for x in layers], [x.values for x in layers], output.last_hidden_state)
    torch.testing.assert_close(item["layer_states"].float(), states[0], atol=0.05, rtol=0.01)
    torch.testing.assert_close(item["last_hidden"].float(), output.last_hidden_state[0], atol=0.05, rtol=0.01)
    batch = collate([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == (2, batch["lengths"].max())
    other = moa_spec.MoADrafterConfig.for_target(target.config, **(DRAFTER | {"layer_self_attention_layers": [1]}))
    with pytest.raises(ValueError, match="another layers"):
        ActivationCache(tmp_path / "a", other).build(target, tokenizer, rows, 64)


def test_a_cache_of_other_rows_is_not_continued(answers: Path, tmp_path: Path) -> None:
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    rows = load_rows([answers])
    cache = ActivationCache(tmp_path / "a", new_drafter(_recipe(), target, rows).config)
    cache.build(target, tokenizer, rows[:10], 64)
    with pytest.raises(ValueError, match="row 3 is not the same"):
        cache.build(target, tokenizer, rows[:2] + rows[3:], 64)
    with pytest.raises(ValueError, match="same max_length"):
        cache.build(target, tokenizer, rows, 8)


def test_one_cache_serves_every_tli_up_to_its_own(answers: Path, tmp_path: Path) -> None:
    target, tokenizer, rows = tiny_chat_target(), tiny_tokenizer(), load_rows([answers])

    def drafter(tail: int) -> moa_spec.MoADrafterForCausalLM:
        return new_drafter(Recipe(drafter=DRAFTER | {"target_layer_inference": tail}), target, rows)

    ActivationCache(tmp_path / "a", drafter(2).config).build(target, tokenizer, rows, 64)
    for tail in (1, 2):
        ActivationCache(tmp_path / "a", drafter(tail).config).build(target, tokenizer, rows, 64)  # nothing to add
        item = ActivationDataset(tmp_path / "a", drafter(tail))[3]
        with torch.no_grad():
            states = target.model(item["input_ids"][None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(item["layer_input"].float(), states[-1 - tail][0], atol=0.05, rtol=0.02)
    assert "layer_input" not in ActivationDataset(tmp_path / "a", drafter(0))[3]
    ActivationCache(tmp_path / "b", drafter(1).config).build(target, tokenizer, rows, 64)
    with pytest.raises(ValueError, match="another target_layer_inference"):
        ActivationCache(tmp_path / "b", drafter(2).config).build(target, tokenizer, rows, 64)


def test_a_sliding_window_does_not_misalign_what_is_cached(answers: Path, tmp_path: Path) -> None:
    target, tokenizer = tiny_chat_target(family="mistral_sliding"), tiny_tokenizer()
    config = moa_spec.MoADrafterConfig.for_target(target.config, layer_self_attention_layers=[1])
    rows = load_rows([answers])
    ActivationCache(tmp_path / "a", config).build(target, tokenizer, rows, 64)
    dataset = ActivationDataset(tmp_path / "a", moa_spec.MoADrafterForCausalLM(config))
    longest = max(range(len(dataset)), key=lambda i: dataset.lengths[i])
    assert dataset.lengths[longest] > 20  # the window is 12
    item = dataset[longest]
    ids = item["input_ids"][None]
    with torch.no_grad():
        head = target.model(ids[:, :10], use_cache=True).cache.layers[1].keys[0].transpose(0, 1)
        tail = target.model(ids, use_cache=True).cache.layers[1].keys[0].transpose(0, 1)
    heads, head_dim = head.shape[1:]
    keys = item["layer_states"].view(len(ids[0]), heads, 2 * head_dim)[..., :head_dim].float()
    torch.testing.assert_close(keys[:10], head, atol=0.05, rtol=0.02)
    torch.testing.assert_close(keys[-11:], tail[-11:], atol=0.05, rtol=0.02)


def test_training_learns_and_leaves_a_drafter_that_loads(answers: Path, tmp_path: Path) -> None:
    start = prepare(
        _recipe(), [answers], tmp_path / "x", tmp_path / "activations", None, tiny_chat_target(), tiny_tokenizer()
    ).evaluate()
    metrics = _train(answers, tmp_path, num_train_epochs=12)
    assert metrics["eval_agreement_0"] > start["eval_agreement_0"] + 0.1
    assert metrics["eval_loss"] < start["eval_loss"]
    record = json.loads((tmp_path / "drafter" / "training_record.json").read_text())
    assert record["steps"] == 12 * 8
    assert record["recipe"]["drafter"] == DRAFTER
    assert any("loss" in entry for entry in record["log"])
    weights = load_file(tmp_path / "drafter" / "model.safetensors")
    assert not [name for name in weights if "embed" in name or "lm_head" in name]
    target = tiny_chat_target()
    drafter = moa_spec.load_drafter(tmp_path / "drafter", target)
    ids = torch.tensor([[3, 7, 9, 4]])
    assisted = target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert assisted.tolist() == target.generate(ids, max_new_tokens=20, do_sample=False).tolist()


def test_a_resumed_run_ends_with_the_same_weights(answers: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(answers, whole, max_steps=7)
    # the schedule of seven steps, cut after the checkpoint at step 3
    trainer = prepare(
        _recipe(), [answers], parts / "drafter", parts / "activations", {"max_steps": 7}, tiny_chat_target(),
        tiny_tokenizer(),
    )  # fmt: skip
    real_step = trainer.training_step

    def killed(*args, **kwargs):
        if trainer.state.global_step == 4:
            raise KeyboardInterrupt
        return real_step(*args, **kwargs)

    trainer.training_step = killed
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    state = parts / "drafter" / "run" / "checkpoint-3" / "trainer_state.json"
    history = json.loads(state.read_text())
    history["log_history"][-1]["hours"] = 5.0
    state.write_text(json.dumps(history))
    _train(answers, parts, max_steps=7)
    record = json.loads((parts / "drafter" / "training_record.json").read_text())
    assert 5.0 <= record["hours"] < 5.1  # those before the stop count
    a, b = (load_file(p / "drafter" / "model.safetensors") for p in (whole, parts))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0, rtol=0)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_batch(answers: Path, tmp_path: Path) -> None:
    trainer = prepare(_recipe(), [answers], tmp_path / "d", tmp_path / "a", None, tiny_chat_target(), tiny_tokenizer())
    with torch.no_grad():
        trainer.drafter.Ekv2E.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="in the batch after step 0"):
        trainer.train()
    assert not (tmp_path / "d" / "model.safetensors").exists()


def _launch(arguments: list[str], *launcher: str, **environment: str) -> None:
    """Runs tests/train_tiny.py, under `accelerate launch` where arguments for it are given."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", *launcher, "--main_process_port", "0"]
    command = [*(launch if launcher else [sys.executable]), "-m", "tests.train_tiny", *arguments]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def _losses(drafter: Path) -> list[float]:
    log = json.loads((drafter / "training_record.json").read_text())["log"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.fixture(scope="module")
def one_process(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    _launch([str(answers), str(folder), "4"])
    return folder / "drafter"


def _launcher(name: str) -> list[str]:
    return ["--config_file", str(RECIPES / f"accelerate-{name}.yaml"), "--num_processes", "2"]


def test_two_processes_train_like_one_with_the_same_global_batch(
    answers: Path, one_process: Path, tmp_path: Path
) -> None:
    """With the shipped DDP configuration, on two processors over gloo."""
    _launch([str(answers), str(tmp_path), "2"], *_launcher("ddp"), ACCELERATE_USE_CPU="true")
    assert len(_losses(one_process)) == 6
    assert _losses(tmp_path / "drafter") == pytest.approx(_losses(one_process), rel=1e-3)


def test_two_processes_that_share_the_weights_train_like_one(answers: Path, one_process: Path, tmp_path: Path) -> None:
    """With the shipped FSDP configuration, on two processors over gloo; and a run that was stopped goes on."""
    drafter = tmp_path / "drafter"
    arguments = [str(answers), str(tmp_path), "2"]
    _launch(arguments, *_launcher("fsdp"))
    assert _losses(drafter) == pytest.approx(_losses(one_process), rel=1e-3)
    first = drafter / "run" / "checkpoint-3"
    assert (first / "pytorch_model_fsdp.bin").exists()  # it was FSDP, and not what accelerate falls back to
    for folder in (first, drafter):
        moa_spec.load_drafter(folder, tiny_chat_target())
    whole = load_file(drafter / "model.safetensors")
    for name, weight in load_file(one_process / "model.safetensors").items():
        torch.testing.assert_close(whole[name], weight, atol=2e-3, rtol=1e-2)
    shutil.rmtree(drafter / "run" / "checkpoint-6")
    (drafter / "model.safetensors").unlink()
    _launch(arguments, *_launcher("fsdp"))
    again = load_file(drafter / "model.safetensors")
    for name in whole:
        torch.testing.assert_close(again[name], whole[name], atol=0, rtol=0)


def test_a_killed_run_goes_on(answers: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "train_tiny.py"
    command = [sys.executable, "-m", "tests.train_tiny", str(answers), str(tmp_path), "4", "400"]
    run = subprocess.Popen(command, cwd=script.parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "drafter" / "run"
    deadline = time.time() + 120
    while not list(checkpoints.glob("checkpoint-*/trainer_state.json")) and time.time() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "drafter" / "model.safetensors").exists()
    reached = int(last_checkpoint(checkpoints).name.removeprefix("checkpoint-"))
    command[-1] = str(reached + 3)
    subprocess.run(command, cwd=script.parents[1], check=True, capture_output=True, timeout=120)
    record = json.loads((tmp_path / "drafter" / "training_record.json").read_text())
    assert record["steps"] == reached + 3
    steps = [entry["step"] for entry in record["log"] if "loss" in entry]
    assert steps == list(range(1, reached + 4))


def test_a_checkpoint_that_was_being_written_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    for step, state in ((90, "{}"), (100, "{}"), (110, '{"half'), (120, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


def test_draft_vocabulary_holds_the_most_frequent_tokens() -> None:
    ids = frequent_tokens([[5, 5, 5, 9, 9, 7], [7, 7, 30]], 4, always=[2])
    assert ids.tolist() == [2, 5, 7, 9]
    assert frequent_tokens([[5]], 4).tolist() == [0, 1, 2, 5]


def test_bad_input_is_named_before_work_starts(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="smollm2-135m-instruct"):
        Recipe.load("no-such-recipe")
    bad = tmp_path / "recipe.json"
    bad.write_text('{"learning_rat": 1}')
    with pytest.raises(ValueError, match="learning_rat"):
        Recipe.load(bad)
    with pytest.raises(ValueError, match="row 1: needs response_ids"):
        load_rows([write_rows(tmp_path / "rows.jsonl", [{"prompt": "w1"}])])
    drafter = moa_spec.MoADrafterForCausalLM(moa_spec.MoADrafterConfig.for_target(tiny_chat_target().config))
    with pytest.raises(FileNotFoundError, match="no activations"):
        ActivationDataset(tmp_path, drafter)


def test_rows_of_the_given_data_are_read(answers: Path) -> None:
    assert len(list(read_rows(answers))) == 40
