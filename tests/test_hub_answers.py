"""The target's answers as a data set: out, in again, and refused when it is something else."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub
from hub_setting import TARGET, TOKEN, local_hub
from huggingface_hub import DatasetCard, HfApi

from moa_spec.hub import fetch_answers, push_answers
from moa_spec.hub.answers import dataset_card, describe
from moa_spec.hub.remote import HubError

REPO = "alice/answers"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with local_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"kind": kind, "messages": [{"role": "user", "content": "Hä?"}], "greedy": greedy, "finished": True}
        | {"response_ids": list(range(3, 3 + length))}
        for kind, greedy, length in (("maths", True, 5), ("chat", False, 7), ("chat", True, 2))
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    path.with_suffix(".record.json").write_text('{"command": "distill --output mine.jsonl"}')
    return path


def test_out_and_in_again(hub: FakeHub, answers: Path) -> None:
    pushed = push_answers(answers, REPO, TARGET, licence="apache-2.0", private=True)
    assert pushed.changed
    assert not push_answers(answers, REPO, TARGET, licence="apache-2.0").changed
    assert hub.repositories["dataset", REPO].private
    fetched = fetch_answers(REPO)
    assert fetched.path.read_bytes() == answers.read_bytes()
    assert (fetched.dataset, fetched.commit, fetched.target) == (REPO, pushed.commit, TARGET)
    assert fetched.license == "apache-2.0"

    with open(answers, "a", encoding="utf-8") as file:
        file.write('{"prompt": "More", "response_ids": [4]}\n')
    push_answers(answers, REPO, TARGET)
    assert fetch_answers(REPO).path.read_bytes() == answers.read_bytes()
    assert fetch_answers(REPO, revision=pushed.commit).path == fetched.path


def test_card(hub: FakeHub, answers: Path) -> None:
    push_answers(answers, REPO, TARGET)
    card = DatasetCard(hub.files(REPO, "dataset")["README.md"].decode())
    card.validate()
    for text in (
        f"`{TARGET}` wrote itself",
        "| rows | 3 |",
        "| answer tokens | 14 |",
        "| greedy, the others sampled | 2 |",
        "| chat | 2 |",
        "| licence | not stated |",
        f"moa train --dataset {REPO}",
        "distill --output mine.jsonl",
    ):
        assert text in card.content, text
    answers.with_suffix(".record.json").unlink()
    assert "was not recorded" in dataset_card(describe(answers, TARGET, None), REPO)


def test_the_datasets_library_reads_it(answers: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "answers.jsonl").write_bytes(answers.read_bytes())
    (folder / "README.md").write_text(dataset_card(describe(answers, TARGET, None), REPO))
    (folder / "record.json").write_text("{}")
    rows = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["kind"][:] == ["maths", "chat", "chat"]
    assert rows[1]["response_ids"] == list(range(3, 10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 4: not JSON"),
        ('{"response_ids": [1]}', "line 4: a row has messages"),
        ('{"prompt": "x", "response_ids": []}', "line 4: response_ids"),
        ('{"prompt": "x", "response_ids": ["a"]}', "line 4: response_ids"),
        ("[]", "line 4: a row has messages"),
    ],
)
def test_bad_rows_are_named(hub: FakeHub, answers: Path, line: str, message: str) -> None:
    with open(answers, "a", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(ValueError, match=message):
        push_answers(answers, REPO, TARGET)
    assert not hub.calls


def test_what_is_refused(hub: FakeHub, answers: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        push_answers(tmp_path / "nothing.jsonl", REPO, TARGET)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no answers"):
        push_answers(tmp_path / "empty.jsonl", REPO, TARGET)
    with pytest.raises(FileNotFoundError, match="no data set alice/answers"):
        fetch_answers(REPO)
    with pytest.raises(FileNotFoundError, match="cannot be reached"):
        fetch_answers("a/b/c")

    api = HfApi()
    api.create_repo("alice/theirs", repo_type="dataset")
    api.upload_file(path_or_fileobj=b"1\n", path_in_repo="data.csv", repo_id="alice/theirs", repo_type="dataset")
    with pytest.raises(FileNotFoundError, match="not published by"):
        fetch_answers("alice/theirs")
    with pytest.raises(HubError, match="is not a data set of moa distill"):
        push_answers(answers, "alice/theirs", TARGET)
    assert push_answers(answers, "alice/theirs", TARGET, force=True).changed

    hub.fail("PUT", "/lfs/", 500)
    hub.fail("POST", "/commit/", 500)
    with pytest.raises(HubError) as caught:
        push_answers(answers, REPO, TARGET)
    assert TOKEN not in str(caught.value)


def test_damaged_cache_is_noticed(hub: FakeHub, answers: Path) -> None:
    push_answers(answers, REPO, TARGET)
    fetched = fetch_answers(REPO)
    blob = fetched.path.resolve()
    blob.write_bytes(blob.read_bytes()[:-5])
    with pytest.raises(ValueError, match="delete it and fetch it again"):
        fetch_answers(REPO)
