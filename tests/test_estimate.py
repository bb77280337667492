"""The dry run of `moa train`: what it says is what training then does, and it needs nothing but sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_spec.cli import main
from moa_spec.training.activations import shard_paths
from moa_spec.training.footprint import _LiveBytes, step_bytes
from moa_spec.training.objective import ObjectiveConfig, draw_synchronised, training_objective
from moa_spec.training.recipe import Recipe

from .tiny import prompt, tiny_drafter, tiny_target
from .training_data import tiny_chat_target, tiny_tokenizer, write_rows


def _dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["train", "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_large_target_needs_only_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--recipe", "llama-3-8b-instruct", "--rows", "207865", "--tokens", "240000000", "--processes", "8"]
    found = _dry_run(capsys, *size, "--tokens-per-second", "1000")
    assert found["cache_bytes_per_token"] == 2 * (32 * 2 * 8 * 128 + 4096)
    assert found["cache_bytes"] == 240_000_000 * found["cache_bytes_per_token"]
    trainable = found["trainable_parameters"]
    assert trainable["SA"] == trainable["CA"] == 2 * 4096**2 + 2 * 4096 * 512 + 3 * 4096 * 6144 + 2 * 4096
    assert 0.24e9 < sum(trainable.values()) < 0.27e9  # the paper's 0.25 B
    assert found["lent_parameters"] == {"embeddings": 128256 * 4096, "head": 128256 * 4096}
    assert found["target_bytes"] == 2 * 8_030_261_248
    assert (found["global_batch"], found["steps_per_epoch"], found["steps"]) == (32, 6431, 40 * 6431)
    kwargs = Recipe.load("llama-3-8b-instruct").training["lr_scheduler_kwargs"]
    assert kwargs["num_decay_steps"] == found["steps_per_epoch"] - 50  # decays from the warm-up to the epoch's end
    assert found["hours"] == pytest.approx(40 * 6431 * 4 * 240e6 / 207865 / 1000 / 3600)
    assert main(["train", "--dry-run", *size]) == 0
    text = capsys.readouterr().out
    assert "139,264 bytes per token, 30.40 TiB in all" in text
    assert "--tokens-per-second" in text  # and no hours made up


def test_what_the_dry_run_says_is_what_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    tiny_chat_target().save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    rows = [{"prompt": f"w{i} w{i + 1}", "response_ids": [3 + i] * (1 + i % 9)} for i in range(40)]
    data = write_rows(tmp_path / "answers.jsonl", rows)
    recipe = tmp_path / "recipe.json"
    training = {"num_train_epochs": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    training |= {"use_cpu": True, "eval_strategy": "no"}
    drafter = {"layer_self_attention_layers": [0, 2], "draft_vocab_size": 40, "newest_memory": True}
    settings = {"target": str(target), "held_out": 5, "max_length": 12, "drafter": drafter, "training": training}
    recipe.write_text(json.dumps(settings))
    output = tmp_path / "drafter"
    before = sorted(tmp_path.iterdir())
    arguments = ["--recipe", str(recipe), "--data", str(data), "--output", str(output)]
    found = _dry_run(capsys, *arguments)
    assert sorted(tmp_path.iterdir()) == before
    assert main(["train", *arguments]) == 0
    record = json.loads((output / "training_record.json").read_text())
    assert (found["rows"], found["steps"]) == (record["training_rows"], record["steps"])
    assert sum(found["trainable_parameters"].values()) == record["trainable_parameters"]
    on_disk = sum(path.stat().st_size for path in shard_paths(output / "activations"))
    wrong = {"target_config": tiny_target().config.to_dict() | {"num_hidden_layers": 9}}
    recipe.write_text(json.dumps(settings | wrong))
    assert main(["train", *arguments]) == 2
    assert "a target with num_hidden_layers 9, not 3" in capsys.readouterr().err
    assert found["cache_bytes"] < on_disk < 1.3 * found["cache_bytes"] + 4096  # token ids, offsets, names


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"target_layer_inference": 1, "memory_hidden_state": "entry"},
        {"newest_memory": True, "draft_vocab_size": 30},
    ],
)
def test_memory_of_a_step_is_that_of_a_real_one(sizes: dict[str, Any]) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, **sizes).train()
    drafter.lend(target)
    target.requires_grad_(False)
    rows, width, start = 3, 120, 20
    objective = ObjectiveConfig(interval=(6, 7))
    entries = drafter.config.layer_width * 3 + (32 if drafter.config.memory_hidden_state != "none" else 0)
    with _LiveBytes() as counted:
        for tensor in [*target.parameters(), *drafter.parameters(), *drafter.buffers()]:
            counted.count(tensor)
        given = counted.peak = counted.live
        batch = {
            "input_ids": prompt(width, rows=rows),
            "lengths": torch.full((rows,), width),
            "prompt_lengths": torch.full((rows,), start),
            "layer_states": torch.zeros(rows, width, entries, dtype=torch.bfloat16),
            "last_hidden": torch.zeros(rows, width, 32, dtype=torch.bfloat16),
            "layer_input": torch.zeros(rows, width, 32, dtype=torch.bfloat16),
        }
        drawn = draw_synchronised(batch["lengths"], batch["prompt_lengths"], width, objective.interval, [1, 2, 3])
        output = training_objective(drafter, batch, objective, drawn)
        output.loss.backward()
    estimated = step_bytes(
        drafter.config,
        objective,
        target.config,
        rows=rows,
        width=width,
        answer=width - start,
        loss_bearing=len(output.depth),
        autocast=False,
        target_dtype=torch.float32,
    )
    assert estimated == pytest.approx(counted.peak - given, rel=0.1)


def test_sizes_without_a_dry_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--output", "x", "--rows", "3"]) == 2
    assert "add --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "me/answers"], "fetches nothing"),
        (["--recipe", "nope"], "No recipe nope"),
        (["--recipe", "TARGET", "--data", "DATA"], "--tokens"),
        (["--recipe", "BROKEN"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    sizes = tiny_target().config.to_dict()
    (tmp_path / "TARGET").write_text(json.dumps({"target": missing, "target_config": sizes}))
    (tmp_path / "BROKEN").write_text(json.dumps({"target": missing}))
    write_rows(tmp_path / "DATA", [{"prompt": "w1", "response_ids": [3, 4]}])
    arguments = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in arguments]
    assert main(["train", "--dry-run", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
