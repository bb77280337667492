"""The questions: Spec-Bench and the six test sets of the paper, from a folder or fetched once.

Knows where the files come from, their checksums and their format. Does not know models. The files are never part of
this repository: their sources keep their own licences.

Layout of a data folder:

    spec_bench/question.jsonl               480 questions, six tasks of 80 (Spec-Bench, arXiv 2401.07851)
    moa_bench/{alpaca,gsm8k,...}.jsonl      the six sets of arXiv 2410.03804, one task per file
    human_eval/HumanEval.jsonl.gz           the tests of one of them, which is all that is read of it
"""

import hashlib
import http.client
import json
import os
import random
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants

DATA_VARIABLE = "MOA_BENCH_DATA"

_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
_MOA_BENCH = (
    "https://raw.githubusercontent.com/huawei-noah/HEBO/433c5812e4fa70924e503ad74774cb94c32d4136/data/{}/question.jsonl"
)

HUMAN_EVAL = "human_eval/HumanEval.jsonl.gz"

# file: where it comes from, and its SHA-256
FILES: dict[str, tuple[str, str]] = {
    "spec_bench/question.jsonl": (_SPEC_BENCH, "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"),
    "moa_bench/mt_bench.jsonl": (
        _MOA_BENCH.format("mt_bench"),
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "moa_bench/humaneval.jsonl": (
        _MOA_BENCH.format("humaneval"),
        "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e",
    ),
    "moa_bench/gsm8k.jsonl": (
        _MOA_BENCH.format("gsm8k"),
        "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27",
    ),
    "moa_bench/alpaca.jsonl": (
        _MOA_BENCH.format("alpaca"),
        "8ad3e5a7fc61b88d8e25edb81a52a2ce00a04494d5694c122cb11a5cc26a00df",
    ),
    "moa_bench/sum.jsonl": (
        _MOA_BENCH.format("sum"),
        "916876f0c42f938a944de96eed16e51425f29f27438cca5c9ef4737c0fedf771",
    ),
    "moa_bench/qa.jsonl": (
        _MOA_BENCH.format("qa"),
        "04252e41ab00bcc03b11940b4a3766cf40ae0b76a09c4f56968ba952f0b029f3",
    ),
    HUMAN_EVAL: (
        "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
}

# the order in which the two papers list their tasks
TASKS: dict[str, tuple[str, ...]] = {
    "spec_bench": ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"),
    "moa_bench": ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"),
}

# Spec-Bench gives the questions of MT-Bench their own eight categories
_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


class DataNotFoundError(FileNotFoundError):
    """A set of questions is not here; the message says how to get it."""


class MalformedDataError(ValueError):
    """A line of a data file is not a question; the message names file, line and fault."""


@dataclass(frozen=True)
class Question:
    """One conversation to be had with the target.

    Attributes:
        suite: "spec_bench" or "moa_bench".
        task: one of `TASKS[suite]`.
        number: its `question_id`, unique within the suite's task.
        category: as in the file; of MT-Bench's eight, or the task.
        turns: what the user says, one turn after the other.
        reference: what the file gives as an answer, if anything.
    """

    suite: str
    task: str
    number: int
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        """A name unique over all suites."""
        return f"{self.suite}/{self.task}/{self.number}"


def default_folder() -> Path:
    """Where `fetch` puts the files, and where they are looked for last."""
    return Path(constants.HF_HOME) / "moa_spec" / "bench_data"


def find_folder(data: str | Path | None = None) -> Path:
    """The data folder: the one named, else the one in the environment variable MOA_BENCH_DATA, else the cache.

    Raises:
        DataNotFoundError: there is no such folder.
    """
    named = data or os.environ.get(DATA_VARIABLE)
    folder = Path(named) if named else default_folder()
    if not folder.is_dir():
        raise DataNotFoundError(
            f"There is no benchmark data in {folder}: run `moa bench fetch`, or name a folder that has it with --data "
            f"or in {DATA_VARIABLE}"
        )
    return folder


def load(suites: Iterable[str], folder: str | Path) -> list[Question]:
    """All questions of the suites, task by task in the papers' order, each as it stands in its file.

    Raises:
        ValueError: an unknown suite.
        DataNotFoundError: a file is missing.
        MalformedDataError: a line is not a question.
    """
    questions: list[Question] = []
    for suite in suites:
        if suite not in TASKS:
            raise ValueError(f"There is no set {suite!r}; there are {' and '.join(TASKS)}")
        read: list[Question] = []
        for name in _files_of(suite):
            read += read_file(Path(folder) / name, suite, None if suite == "spec_bench" else Path(name).stem)
        questions += sorted(read, key=lambda question: TASKS[suite].index(question.task))
    return questions


def _files_of(suite: str) -> list[str]:
    return [name for name in FILES if name.startswith(f"{suite}/")]


def read_file(path: Path, suite: str, task: str | None = None) -> list[Question]:
    """The questions of one file. The task is the one given, or follows from each line's category.

    Raises:
        DataNotFoundError, MalformedDataError: as for `load`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataNotFoundError(
            f"{path} is missing: run `moa bench fetch`, or name a folder that has it with --data"
        ) from None
    except UnicodeDecodeError as error:
        raise MalformedDataError(f"{path} is not a text file in UTF-8: {error}") from None
    questions = []
    first_line: dict[int, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            question = _parse(line, suite, task)
            if question.number in first_line:
                raise ValueError(f"question_id {question.number} is also that of line {first_line[question.number]}")
        except ValueError as error:
            raise MalformedDataError(f"{path}, line {number}: {error}") from None
        first_line[question.number] = number
        questions.append(question)
    if not questions:
        raise MalformedDataError(f"{path} holds no questions")
    return questions


def _parse(line: str, suite: str, task: str | None) -> Question:
    """
    Raises:
        ValueError: says what is wrong with the line.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    number, turns, category = row.get("question_id"), row.get("turns"), row.get("category", "")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f'"question_id" must be a whole number, not {number!r}')
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError('"turns" must be a list of one or more texts that are not empty')
    if not isinstance(category, str):
        raise ValueError(f'"category" must be a text, not {category!r}')
    if task is None:
        task = "mt_bench" if category in _MT_BENCH else category
        if task not in TASKS[suite]:
            raise ValueError(f'"category" {category!r} belongs to none of the tasks {", ".join(TASKS[suite])}')
    reference = row.get("reference") or ()
    if isinstance(reference, str):
        reference = (reference,)
    return Question(suite, task, number, category or task, tuple(turns), tuple(str(text) for text in reference))


def choose(questions: Iterable[Question], per_task: int | None, seed: int = 0) -> list[Question]:
    """A choice of `per_task` questions of every task, spread evenly over its categories; None takes all.

    The choice depends on the seed and the questions alone, and a larger one contains every smaller one, so that a run
    can be extended. Questions keep their order.
    """
    questions = list(questions)
    if per_task is None:
        return questions
    chosen: set[str] = set()
    for suite, task in dict.fromkeys((q.suite, q.task) for q in questions):
        drawn: dict[str, list[str]] = {}
        for question in questions:
            if (question.suite, question.task) == (suite, task):
                drawn.setdefault(question.category, []).append(question.key)
        for category, keys in drawn.items():
            random.Random(f"{seed}/{suite}/{task}/{category}").shuffle(keys)
        # one of each category, then a second of each, and so on
        longest = max(len(keys) for keys in drawn.values())
        in_turn = [keys[i] for i in range(longest) for keys in drawn.values() if i < len(keys)]
        chosen.update(in_turn[:per_task])
    return [question for question in questions if question.key in chosen]


def checksums(suites: Iterable[str], folder: str | Path) -> dict[str, dict[str, str | bool]]:
    """For the record of a run: each file's SHA-256 and whether it is the published file's."""
    found: dict[str, dict[str, str | bool]] = {}
    for name in (name for suite in suites for name in _files_of(suite)):
        digest = _digest(Path(folder) / name)
        found[name] = {"sha256": digest, "as_published": digest == FILES[name][1]}
    return found


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: str | Path | None = None, files: dict[str, tuple[str, str]] | None = None) -> list[str]:
    """Downloads what is missing or differs from its checksum. Each file is checked before it takes its place.

    Args:
        folder: where to; None is the cache.
        files: name in the folder: (address, SHA-256); None is `FILES`.

    Returns:
        The names of the files that were downloaded.

    Raises:
        DataNotFoundError: an address cannot be reached.
        MalformedDataError: a download is not the file that was asked for.
    """
    folder = Path(folder) if folder else default_folder()
    fetched = []
    for name, (url, expected) in (FILES if files is None else files).items():
        path = folder / name
        if path.is_file() and _digest(path) == expected:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as beside:
            try:
                with urllib.request.urlopen(url, timeout=30) as response:
                    shutil.copyfileobj(response, beside)
                beside.close()
                digest = _digest(Path(beside.name))
                if digest != expected:
                    raise MalformedDataError(
                        f"What {url} delivered is not {name}: its SHA-256 is {digest}, not {expected}. Nothing was "
                        "changed; put the right file there by hand."
                    )
                os.replace(beside.name, path)
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                raise DataNotFoundError(
                    f"Cannot fetch {name} from {url} ({error}). Fetch it elsewhere and put it into {folder}"
                ) from error
            finally:
                Path(beside.name).unlink(missing_ok=True)
        fetched.append(name)
    return fetched
