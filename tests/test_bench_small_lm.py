"""The independent small language model: trained on answers alone, loaded by transformers, exact as an assistant."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from tiny import prompt
from transformers import AutoModelForCausalLM

from moa_spec.benchmarks import methods
from moa_spec.benchmarks.baselines.small_lm import new_small_lm, train_small_lm
from moa_spec.cli import arguments, bench_comparison, main
from moa_spec.training.recipe import Recipe
from moa_spec.training.train import split

from .training_data import prompts, tiny_chat_target, tiny_tokenizer, write_rows

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES["num_key_value_heads"] = 2


def _recipe(steps: int) -> Recipe:
    training = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "eval_steps": 100,
        "save_steps": 5,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Recipe(held_out=5, max_length=64, drafter_type="small-lm", drafter=SIZES, training=training)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Answers that count on from the prompt's last word: something to learn."""
    rows = [row | {"greedy": True, "finished": True} for row in prompts(40)]
    for i, row in enumerate(rows):
        row["response_ids"] = [8 + (i + k) % 24 for k in range(12)] + [2]
    return write_rows(tmp_path / "answers.jsonl", rows)


def _train(answers: Path, output: Path, steps: int, **overrides: object) -> dict[str, float]:
    return train_small_lm(
        _recipe(steps), [answers], output, overrides=overrides, target=tiny_chat_target(), tokenizer=tiny_tokenizer()
    )


def test_it_learns_from_answers_and_assists_exactly(answers: Path, tmp_path: Path) -> None:
    metrics = _train(answers, tmp_path / "small", 40)
    record = json.loads((tmp_path / "small" / "training_record.json").read_text())
    losses = [entry["loss"] for entry in record["log"] if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
    assert metrics["eval_loss"] < losses[0]
    assert record["training_rows"] == 32
    assert record["training_answer_tokens"] == 32 * 13  # the prompts are not learnt
    assert record["data"][0]["file"] == "answers.jsonl"
    assert record["recipe"]["drafter_type"] == "small-lm"
    assert record["versions"].keys() == {"python", "torch", "transformers"}

    target, small = tiny_chat_target(), AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    ids = prompt(9)
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    assert torch.equal(plain, target.generate(ids, assistant_model=small, do_sample=False, max_new_tokens=20))


def test_only_answers_are_scored(answers: Path, tmp_path: Path) -> None:
    """The held-out loss is the mean over the answers' tokens, computed here row by row."""
    metrics = _train(answers, tmp_path / "small", 3, bf16=False, per_device_eval_batch_size=100)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    losses = []
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    for row in (rows[i] for i in split(len(rows), 5)[1]):
        chat = [{"role": "user", "content": row["prompt"]}]
        before = tiny_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([before + row["response_ids"]])
        log_probs = small(ids).logits[0].log_softmax(-1)
        losses += [-log_probs[i - 1, ids[0, i]].item() for i in range(len(before), ids.shape[1])]
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_stopped_run_goes_on_to_the_same_weights(answers: Path, tmp_path: Path) -> None:
    _train(answers, tmp_path / "whole", 10)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        _stopped_at_seven(answers, tmp_path / "parts")
    _train(answers, tmp_path / "parts", 10)
    whole, parts = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def _stopped_at_seven(answers: Path, output: Path) -> None:
    from transformers import TrainerCallback

    from moa_spec.benchmarks.baselines import small_lm

    class Plug(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            if state.global_step == 7:
                raise RuntimeError("pulled the plug")

    class Stopped(small_lm._AnswerTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Plug())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_lm, "_AnswerTrainer", Stopped)
        _train(answers, output, 10)


def test_its_embeddings_are_the_targets_principal_components() -> None:
    target = tiny_chat_target()
    small = new_small_lm(target, **SIZES)
    rows = target.get_input_embeddings().weight
    mine = small.get_input_embeddings().weight
    assert small.lm_head.weight is mine
    scale = mine.norm() / torch.linalg.svdvals(rows)[:16].norm()
    assert torch.allclose(torch.linalg.svdvals(mine), torch.linalg.svdvals(rows)[:16] * scale, rtol=1e-3)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (["--activations", "x"], "without activations"),
        (["--profile"], "without activations"),
        (["--evaluate", "x"], "without activations"),
        (["--dry-run"], "a dry run knows drafters only"),
    ],
)
def test_what_only_drafters_have_is_refused(
    more: list[str], fault: str, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    command = ["train", "--recipe", "smollm2-135m-instruct-small-lm", "--data", str(answers), "--output", str(output)]
    assert main([*command, *more]) == 2
    error = capsys.readouterr().err
    assert fault in error
    assert error.count("\n") == 1
    assert not output.exists()


def test_the_benchmark_looks_for_it_in_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "DEFAULT_DRAFTER", tmp_path / "moa")
    monkeypatch.setattr(bench_comparison, "checkpoints", lambda names, given: {})
    asked = []
    monkeypatch.setattr(methods, "check_names", lambda names, assistant: asked.append(assistant))
    monkeypatch.setattr("moa_spec.benchmarks.datasets.find_folder", lambda data: (_ for _ in ()).throw(KeyError))

    def bench(name: str | None) -> None:
        args = argparse.Namespace(methods=["plain", "assistant"], assistant=name, checkpoint=[], data=None)
        with pytest.raises(KeyError):
            bench_comparison.Bench(args, "float32")

    bench(None)
    (tmp_path / "smollm2-135m-instruct-small-lm").mkdir()
    bench(None)
    bench("mine")
    assert asked == [None, tmp_path / "smollm2-135m-instruct-small-lm", "mine"]
