"""The benchmark's questions: format, choice, errors, fetching."""

import functools
import hashlib
import http.server
import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from moa_spec.benchmarks import datasets
from moa_spec.benchmarks.datasets import DataNotFoundError, MalformedDataError, Question

PUBLISHED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def question(task: str, number: int, category: str) -> Question:
    return Question("spec_bench", task, number, category, ("Hello?",))


def mt_bench(per_category: int) -> list[Question]:
    categories = ["writing", "roleplay", "reasoning", "math"]
    return [
        question("mt_bench", 10 * i + j, category) for i, category in enumerate(categories) for j in range(per_category)
    ]


def write_suite(folder: Path, lines: list[str]) -> Path:
    (folder / "spec_bench").mkdir(parents=True)
    (folder / "spec_bench" / "question.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


GOOD = json.dumps({"question_id": 1, "category": "qa", "turns": ["Who?"], "reference": ["Me."]})


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published data sets are not here")
def test_published_files_are_read_whole() -> None:
    questions = datasets.load(["spec_bench", "moa_bench"], PUBLISHED)
    counts = Counter((q.suite, q.task) for q in questions)
    assert counts == {(suite, task): 80 for suite, tasks in datasets.TASKS.items() for task in tasks}
    assert len({q.key for q in questions}) == len(questions)
    assert all(len(q.turns) == 2 for q in questions if q.task == "mt_bench")
    assert all(entry["as_published"] for entry in datasets.checksums(datasets.TASKS, PUBLISHED).values())


def test_choice_is_spread_over_categories() -> None:
    chosen = datasets.choose(mt_bench(5), per_task=8, seed=3)
    assert Counter(q.category for q in chosen) == {"writing": 2, "roleplay": 2, "reasoning": 2, "math": 2}


def test_choice_depends_on_the_seed_alone_and_grows() -> None:
    questions = mt_bench(10) + [question("qa", n, "qa") for n in range(30)]
    assert datasets.choose(questions, 6, seed=0) == datasets.choose(list(questions), 6, seed=0)
    assert datasets.choose(questions, 6, seed=0) != datasets.choose(questions, 6, seed=1)
    smaller, larger = (set(datasets.choose(questions, n, seed=0)) for n in (6, 7))
    assert smaller < larger
    assert datasets.choose(questions, None) == questions
    assert datasets.choose(questions, 1000) == questions


def test_choice_keeps_the_order() -> None:
    questions = mt_bench(10)
    chosen = datasets.choose(questions, 8)
    assert chosen == [q for q in questions if q in chosen]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"category": "qa", "turns": ["a"]}', "question_id"),
        ('{"question_id": true, "category": "qa", "turns": ["a"]}', "question_id"),
        ('{"question_id": 2, "category": "qa", "turns": []}', "turns"),
        ('{"question_id": 2, "category": "qa", "turns": "a"}', "turns"),
        ('{"question_id": 2, "category": "qa", "turns": ["a", " "]}', "turns"),
        ('{"question_id": 2, "category": "qa", "turns": ["a", 7]}', "turns"),
        ('{"question_id": 2, "category": 4, "turns": ["a"]}', "category"),
        ('{"question_id": 2, "category": "cooking", "turns": ["a"]}', "cooking"),
        ('{"question_id": 1, "category": "qa", "turns": ["a"]}', "also that of line 1"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, fault: str) -> None:
    folder = write_suite(tmp_path, [GOOD, "", line])
    with pytest.raises(MalformedDataError, match=fault) as error:
        datasets.load(["spec_bench"], folder)
    assert "question.jsonl, line 3" in str(error.value)


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    row = json.dumps({"question_id": 1, "category": "qa", "turns": ["a\u2028b\x85c"]}, ensure_ascii=False)
    assert datasets.load(["spec_bench"], write_suite(tmp_path, [row]))[0].turns == ("a\u2028b\x85c",)


def test_missing_set_and_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataNotFoundError, match=r"moa_bench/mt_bench\.jsonl is missing.*moa bench fetch"):
        datasets.load(["moa_bench"], tmp_path)
    with pytest.raises(ValueError, match="no set 'other'"):
        datasets.load(["other"], tmp_path)
    with pytest.raises(MalformedDataError, match="no questions"):
        datasets.load(["spec_bench"], write_suite(tmp_path, [""]))
    monkeypatch.setenv(datasets.DATA_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DataNotFoundError, match=r"nowhere.*moa bench fetch"):
        datasets.find_folder()
    assert datasets.find_folder(tmp_path) == tmp_path


@pytest.fixture
def server(tmp_path: Path):
    """A web server for the files in tmp_path/served; yields its address."""
    (tmp_path / "served").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_fetch_checks_what_it_gets(tmp_path: Path, server: str) -> None:
    (tmp_path / "served" / "a.jsonl").write_text(GOOD)
    digest = hashlib.sha256(GOOD.encode()).hexdigest()
    target = tmp_path / "data"
    files = {"spec_bench/question.jsonl": (f"{server}/a.jsonl", digest)}
    assert datasets.fetch(target, files) == ["spec_bench/question.jsonl"]
    assert datasets.load(["spec_bench"], target)[0].number == 1
    assert datasets.fetch(target, files) == []  # what is there and right is left alone

    (tmp_path / "served" / "a.jsonl").write_text("something else")
    (target / "spec_bench" / "question.jsonl").write_text("damaged")
    with pytest.raises(MalformedDataError, match="SHA-256"):
        datasets.fetch(target, files)
    assert (target / "spec_bench" / "question.jsonl").read_text() == "damaged"
    assert [path.name for path in (target / "spec_bench").iterdir()] == ["question.jsonl"]
    with pytest.raises(DataNotFoundError, match="Cannot fetch"):
        datasets.fetch(target, {"x.jsonl": (f"{server}/none", digest)})
