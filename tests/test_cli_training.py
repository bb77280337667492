"""`moa distill` and `moa train` as commands, on a tiny target in a folder."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from moa_spec.cli import main
from moa_spec.hub.answers import FetchedAnswers
from moa_spec.hub.remote import Pushed

from .training_data import prompts, tiny_chat_target, tiny_tokenizer, write_rows


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_chat_target().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_from_prompts_to_a_drafter(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = write_rows(tmp_path / "prompts.jsonl", prompts(24))
    answers = tmp_path / "answers.jsonl"
    distill = ["distill", "--target", str(target), "--prompts", str(asked), "--output", str(answers)]
    distill += ["--dtype", "float32", "--slots", "8", "--max-length", "64", "--max-new-tokens", "16"]
    assert main(distill) == 0
    rows = answers.read_text().splitlines()
    assert len(rows) == 24
    record = json.loads((tmp_path / "answers.record.json").read_text())
    assert record["rows"] == 24
    assert record["rows_by_kind"] == {"even": 12, "odd": 12}
    assert record["answer_tokens"] == sum(len(json.loads(row)["response_ids"]) for row in rows)
    assert main(distill) == 0  # again: every prompt has its answer
    assert answers.read_text().splitlines() == rows

    recipe = tmp_path / "recipe.json"
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True}
    recipe.write_text(json.dumps({"target": str(target), "held_out": 6, "max_length": 64, "training": settings}))
    output = tmp_path / "drafter"
    train = ["train", "--recipe", str(recipe), "--data", str(answers), "--output", str(output)]
    assert main([*train, "--set", "learning_rate", "0.002"]) == 0
    record = json.loads((output / "training_record.json").read_text())
    assert record["steps"] == 2
    assert record["log"][0]["learning_rate"] == pytest.approx(0.002)
    assert main([*train, "--output", str(tmp_path / "none"), "--profile"]) == 0
    assert "loss-bearing tokens/s" in capsys.readouterr().out
    assert not (tmp_path / "none" / "model.safetensors").exists()

    final = record["final_evaluation"]
    capsys.readouterr()
    assert main([*train, "--evaluate", str(output)]) == 0
    measured = json.loads(capsys.readouterr().out.partition(": ")[2])
    assert measured["eval_loss"] == pytest.approx(final["eval_loss"], rel=1e-4)
    assert measured["eval_agreement_0"] == final["eval_agreement_0"]

    again = tmp_path / "again.json"
    earlier = output
    for stage, drafter in (("second", {}), ("third", {"draft_vocab_size": 30}), ("fourth", {"draft_vocab_size": 20})):
        settings = json.loads(recipe.read_text()) | {"start_from": str(earlier), "drafter": drafter}
        again.write_text(json.dumps(settings))
        earlier = tmp_path / stage
        assert main(["train", "--recipe", str(again), "--data", str(answers), "--output", str(earlier)]) == 0
        config = json.loads((earlier / "config.json").read_text())
        assert config["draft_vocab_size"] == drafter.get("draft_vocab_size")
    record = json.loads((earlier / "training_record.json").read_text())
    assert record["started_from"]["started_from"]["started_from"]["steps"] == 2


def test_answers_go_to_the_hub_and_come_back(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How the commands call the Hub; what the calls do there is tested in test_hub_answers.py."""
    asked = write_rows(tmp_path / "prompts.jsonl", prompts(8))
    answers = tmp_path / "answers.jsonl"
    pushed = {}

    def push(path: Path, repo_id: str, target_name: str, *, licence: str | None) -> Pushed:
        pushed.update(rows=path.read_text().count("\n"), repo_id=repo_id, target=target_name, licence=licence)
        return Pushed("https://hub/datasets/me/answers", "abc", True)

    monkeypatch.setattr("moa_spec.hub.push_answers", push)
    distill = ["distill", "--target", str(target), "--prompts", str(asked), "--output", str(answers)]
    distill += ["--dtype", "float32", "--max-length", "64", "--max-new-tokens", "16"]
    assert main([*distill, "--push", "me/answers", "--license", "apache-2.0"]) == 0
    assert json.loads((tmp_path / "answers.record.json").read_text())["license"] == "apache-2.0"
    assert pushed == {"rows": 8, "repo_id": "me/answers", "target": str(target), "licence": "apache-2.0"}
    assert "https://hub/datasets/me/answers" in capsys.readouterr().out

    fetched = FetchedAnswers(answers, "me/answers", "abc", str(target), "apache-2.0")
    monkeypatch.setattr("moa_spec.hub.fetch_answers", lambda name: fetched if name == "me/answers" else None)
    recipe = tmp_path / "recipe.json"
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    recipe.write_text(json.dumps({"target": str(target), "held_out": 4, "max_length": 64, "training": settings}))
    output = tmp_path / "drafter"
    assert main(["train", "--recipe", str(recipe), "--dataset", "me/answers", "--output", str(output)]) == 0
    (data,) = json.loads((output / "training_record.json").read_text())["data"]
    assert (data["dataset"], data["commit"], data["license"]) == ("me/answers", "abc", "apache-2.0")


def test_conversations_of_a_data_set_are_answered(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder laid out as UltraChat-200k is: splits of its own names, conversations that the assistant ends."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def talk(i: int) -> dict[str, Any]:
        words = [f"w{i}", "w9 w8", f"w{i + 20}", "w7"]
        messages = [{"content": w, "role": ("user", "assistant")[n % 2]} for n, w in enumerate(words)]
        return {"prompt": words[0], "prompt_id": str(i), "messages": messages}

    folder = tmp_path / "ultrachat" / "data"
    folder.mkdir(parents=True)
    for split, count in (("train_sft", 6), ("test_sft", 2)):
        talks = datasets.Dataset.from_list([talk(i) for i in range(count)])
        talks.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    distill = ["distill", "--target", str(target), "--dataset", str(folder.parent), "--dtype", "float32"]
    distill += ["--max-length", "64", "--max-new-tokens", "8"]
    for turns, expected in (("last", 6), ("every", 12)):
        output = tmp_path / f"{turns}.jsonl"
        assert main([*distill, "--split", "train_sft", "--turns", turns, "--output", str(output)]) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == expected
        assert all(row["messages"][-1]["role"] == "user" and row["response_ids"] for row in rows)
        assert sum(len(row["messages"]) == 3 for row in rows) == 6
    assert main([*distill, "--split", "train", "--output", str(tmp_path / "x.jsonl")]) == 2
    assert "train_sft" in capsys.readouterr().err  # which splits there are


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--output", "x"], "Nothing to train on"),
        (["train", "--output", "x", "--data", "missing.jsonl"], "missing.jsonl"),
        (["train", "--output", "x", "--data", "d", "--recipe", "nope"], "No recipe nope"),
        (["distill", "--output", "x", "--push", "no namespace"], "no namespace"),
        (["distill", "--output", "x", "--target", "missing-folder"], "missing-folder"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
