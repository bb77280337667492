"""The target's own answers as a data set on the Hub: what `moa distill` wrote, out and in again.

Knows the rows' fields and the card of such a data set. Does not know how answers are made or trained on.

    answers.jsonl     the rows, as they are
    record.json       target, counts, hash, licence, and how they were made where that was recorded
    README.md         the card, made from the record
"""

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .card import TAG
from .remote import Pushed, check_repo_id, has_tag, push_folder

ROWS, RECORD = "answers.jsonl", "record.json"


@dataclass(frozen=True)
class FetchedAnswers:
    """Where the rows lie now, and what they are: for the training record, and to check that the target is the same."""

    path: Path
    dataset: str
    commit: str
    target: str
    license: str | None


def push_answers(
    path: str | Path,
    repo_id: str,
    target_name: str,
    *,
    licence: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    force: bool = False,
) -> Pushed:
    """Publishes a file of `moa distill` as a data set with a card.

    Args:
        path: JSON lines. Where `NAME.record.json` lies beside `NAME.jsonl`, it goes along.
        repo_id: NAMESPACE/NAME.
        target_name: of the model that wrote the answers.
        licence: a licence identifier of the Hub's; said to be unstated when left out.
        private, revision, token: as in `huggingface_hub`.
        force: overwrite a data set that is something else.

    Raises:
        ValueError: a bad name, or a row that is not an answer; with the line.
        FileNotFoundError: there is no such file.
        HubError: the Hub refused or failed; nothing was changed there.
    """
    check_repo_id(repo_id)
    path = Path(path)
    record = describe(path, target_name, licence)
    with tempfile.TemporaryDirectory(prefix="moa-push-") as temporary:
        folder = Path(temporary)
        shutil.copyfile(path, folder / ROWS)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(dataset_card(record, repo_id), encoding="utf-8")
        return push_folder(
            folder,
            repo_id,
            "dataset",
            is_ours=has_tag("dataset", TAG),
            what="a data set of moa distill",
            private=private,
            revision=revision,
            token=token,
            force=force,
        )


def fetch_answers(name: str, *, revision: str | None = None, token: str | bool | None = None) -> FetchedAnswers:
    """Fetches a data set that `push_answers` published, or finds it in the cache.

    Raises:
        FileNotFoundError: there is no such data set, or it is not one of `moa distill`.
        ValueError: its rows are not those that its record tells of.
    """
    try:
        files = [
            Path(hf_hub_download(name, file, repo_type="dataset", revision=revision, token=token))
            for file in (ROWS, RECORD)
        ]
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(f"The data set {name} cannot be reached and is not in the cache: {error}") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"The data set {name} holds no {ROWS} and {RECORD}: it was not published by `moa distill --push`."
        ) from error
    except HfHubHTTPError as error:
        raise FileNotFoundError(
            f"There is no data set {name} (revision {revision or 'main'}), or your token may not see it: "
            f"{str(error).splitlines()[0]}"
        ) from error
    rows, record = files[0], json.loads(files[1].read_text(encoding="utf-8"))
    if _sha256(rows) != record["sha256"]:
        raise ValueError(f"{rows} is not what {name} published: delete it and fetch it again.")
    # the cache keeps the files of a commit in a folder of its name
    return FetchedAnswers(rows, name, rows.parent.name, record["target"], record["license"])


def describe(path: Path, target_name: str, licence: str | None) -> dict[str, Any]:
    """Checks all rows and counts them.

    Raises:
        ValueError: with the line of the first row that is not an answer.
    """
    kinds: Counter[str] = Counter()
    tokens = greedy = finished = 0
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            row = _checked(line, f"{path}, line {number}")
            kinds[str(row.get("kind", "unnamed"))] += 1
            tokens += len(row["response_ids"])
            greedy += bool(row.get("greedy"))
            finished += bool(row.get("finished"))
    if not kinds:
        raise ValueError(f"{path} holds no answers.")
    made = path.with_suffix(".record.json")
    return {
        "target": target_name,
        "license": licence,
        "sha256": _sha256(path),
        "rows": kinds.total(),
        "answer_tokens": tokens,
        "greedy_rows": greedy,
        "finished_rows": finished,
        "kinds": dict(sorted(kinds.items())),
        "made": json.loads(made.read_text(encoding="utf-8")) if made.is_file() else None,
    }


def _checked(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}). Let `moa distill` finish, or remove the line.") from error
    if not isinstance(row, dict) or not ("messages" in row or "prompt" in row):
        raise ValueError(f"{where}: a row has messages (or a prompt) and response_ids")
    ids = row.get("response_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"{where}: response_ids must be a list of token ids")
    return row


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dataset_card(record: dict[str, Any], repo_id: str) -> str:
    """The card, from the record."""
    rows = record["rows"]
    size = next(label for limit, label in _SIZES if rows < limit)
    data = DatasetCardData(
        license=record["license"],
        tags=[TAG, "speculative-decoding", "distillation", "synthetic"],
        task_categories=["text-generation"],
        size_categories=[size],
        configs=[{"config_name": "default", "data_files": ROWS}],
        pretty_name=repo_id.split("/")[1],
    )
    kinds = "\n".join(f"| {kind} | {count:,} |" for kind, count in record["kinds"].items())
    made = json.dumps(record["made"], indent=1) if record["made"] else "How they were made was not recorded."
    fence = "```json\n{}\n```" if record["made"] else "{}"
    return f"""---
{data}
---

# {repo_id.split("/")[1]}

Answers that `{record["target"]}` wrote itself: training data for a
[Mixture-of-Attentions drafter](https://arxiv.org/abs/2410.03804) of that model.

| | |
|---|---|
| rows | {rows:,} |
| answer tokens | {record["answer_tokens"]:,} |
| greedy, the others sampled | {record["greedy_rows"]:,} |
| ended by the model itself | {record["finished_rows"]:,} |
| sha256 of `{ROWS}` | `{record["sha256"]}` |
| licence | {record["license"] or "not stated"} |

| kind of prompt | rows |
|---|---|
{kinds}

A row: `messages` (or `prompt`), `response_ids` (the answer as token ids of the target), `greedy`, `finished`, `kind`.

```bash
moa train --dataset {repo_id} --output runs/drafter
```

```python
from datasets import load_dataset

rows = load_dataset("{repo_id}", split="train")
```

## How they were made

{fence.format(made)}
"""


_SIZES: tuple[tuple[float, str], ...] = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (float("inf"), "n>1M"),
)
