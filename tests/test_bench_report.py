"""Results as tables, inside documents, as pictures, and from the command line."""

import json
from pathlib import Path

import pytest
from bench_mock import FakeClock, MockTokenizer, mock_methods, mock_question, mock_target

from moa_spec.benchmarks import report
from moa_spec.benchmarks.records import ResultError, ResultFile, read_result
from moa_spec.benchmarks.runner import Comparison, measure_all
from moa_spec.cli import main

TOKENS = 22
OPTIONS = {
    "target": "mock",
    "dtype": "float32",
    "temperature": 0.0,
    "max_new_tokens": TOKENS,
    "per_task": 1,
    "repetitions": 1,
    "threads": 1,
}


@pytest.fixture(scope="module")
def result_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of two tasks: plain 23 seconds per answer, the drafter 20 (see `bench_mock`)."""
    path = tmp_path_factory.mktemp("results") / "mock.json"
    clock = FakeClock()
    target = mock_target(clock)
    with pytest.MonkeyPatch.context() as patch:
        methods = mock_methods(target, clock, TOKENS, patch)
        comparison = Comparison(target, MockTokenizer(), methods, TOKENS, repetitions=1, clock=clock)
        questions = [mock_question(0, "qa"), mock_question(1, "rag")]
        data = {"spec_bench/question.jsonl": {"sha256": "", "as_published": False}}
        measure_all(comparison, questions, ResultFile(path, OPTIONS), data, progress=False)
    return path


def test_tables_say_what_was_measured(result_path: Path) -> None:
    result = read_result(result_path)
    text = report.report({"mock": result})
    assert "| plain | 1.00x / 1.00 | 1.00x / 1.00 | 1.00x / 1.00 |" in text
    assert "| moa | 1.15x / 2.33 | 1.15x / 2.33 | 1.15x / 2.33 |" in text
    assert "**Not the published questions**" in text
    assert "Not complete" not in text
    assert "disagrees" not in text
    result["complete"], result["questions_chosen"] = False, 5
    assert "**Not complete**: 2 of 5 questions" in report.settings_text(result)
    result["summary"]["spec_bench/qa"]["moa"]["recount_agrees"] = False
    assert "recount from the traces disagrees" in report.settings_text(result)


def test_losses_are_named(result_path: Path) -> None:
    result = read_result(result_path)
    assert "No method is slower" in report.losses_text(result)
    result["summary"]["spec_bench/qa"]["moa"]["speedup"] = [0.9, 0.9, 0.9]
    assert "moa: slower than plain decoding on qa 0.90x" in report.losses_text(result)


def test_other_drafters_are_compared_like_with_like(result_path: Path) -> None:
    result = read_result(result_path)
    assert report.baselines_text(result) == report.NOTHING
    # the same answers under another name, of a drafter that keeps 2 tokens per call and was faster on one task
    result["methods"]["eagle"] = result["methods"]["moa"]
    for entry in result["questions"]:
        entry["turns"][0]["answers"]["eagle"] = entry["turns"][0]["answers"]["moa"]
    for group in result["summary"].values():
        group["eagle"] = group["moa"] | {"tau": 2.0}
    result["summary"]["spec_bench/rag"]["eagle"]["speedup"] = [1.3, 1.3, 1.3]
    assert report.baselines_text(result) == (
        "- spec_bench, moa against eagle: 2.33 against 2.00 tokens per target call (+16.7%), 1.00x its speed."
    )
    assert report.losses_text(result) == "- spec_bench, moa: behind EAGLE's chain on rag 1.15x against 1.30x."
    assert "### Against other trained drafters" in report.report({"mock": result})


def test_a_document_is_renewed_between_its_markers(tmp_path: Path, result_path: Path) -> None:
    document = tmp_path / "README.md"
    marked = f"# Title\n\n<!-- bench speedup {result_path} -->\n<!-- /bench -->\n\nThe end 1.15x.\n"
    document.write_text(marked)
    assert report.fill(document) == 1
    filled = document.read_text()
    assert filled.startswith("# Title\n\n<!-- bench speedup ")
    assert filled.endswith("|\n<!-- /bench -->\n\nThe end 1.15x.\n")
    assert filled.count("1.15x / 2.33") == 3
    report.fill(document)
    assert document.read_text() == filled
    document.write_text(filled.replace("1.15x / 2.33", "9.99x / 9.99"))  # typed by hand
    report.fill(document)
    assert document.read_text() == filled


@pytest.mark.parametrize(
    ("marker", "fault"),
    [
        ("<!-- bench nothing mock.json -->\n<!-- /bench -->", "no section 'nothing'"),
        ("<!-- bench speedup none.json -->\n<!-- /bench -->", "no result"),
        ("<!-- bench speedup -->\n<!-- /bench -->", "not of the form"),
        ("<!-- bench speedup mock.json -->\n", "not of the form"),
    ],
)
def test_a_wrong_marker_changes_nothing(tmp_path: Path, marker: str, fault: str) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"before\n{marker}\nafter\n")
    with pytest.raises(ResultError, match=fault):
        report.fill(document)
    assert document.read_text() == f"before\n{marker}\nafter\n"


def test_markers_inside_a_line_are_text(tmp_path: Path) -> None:
    document = tmp_path / "guide.md"
    document.write_text("Write `<!-- bench speedup x.json -->` and\n\n    <!-- bench speedup y.json -->\n")
    assert report.fill(document) == 0


ENGINE = {
    "format": 1,
    "options": OPTIONS | {"dtype": ["float32"]},
    "engine": {
        "float32": {
            "goals": [
                {"goal": "speedup", "limit": "at least 1.8", "measured": 1.25, "met": False},
                {"goal": "memory", "limit": "at most 0.1", "measured": None, "met": None},
            ],
            "probes": {
                "pass_seconds": {"1": 0.03, "8": 0.04},
                "verify_cost": {"1": 1.0, "8": 1.33},
                "round": {"verify": 1.2, "bookkeeping": 0.02},
                "draft_lengths": {"1": 1.1, "5": None},
                "context": {
                    n: {m: {"speedup": 1.2, "decode_speedup": 1.4} for m in ("moa", "moa-auto")}
                    for n in ("400", "4000")
                },
                "memory": dict.fromkeys(("target_weights", "target_cache", "drafter_weights", "drafter_cache"), 2**20)
                | {"prompt_tokens": 4000},
                "batch": {"rows": 4, "plain_tokens_per_second": 80.0, "tokens_per_second": 88.0, "identical_rows": 4},
            },
        }
    },
}


def test_a_record_of_the_engine(tmp_path: Path, result_path: Path) -> None:
    sessions = read_result(result_path)["sessions"]
    text = report.report({"engine": ENGINE | {"sessions": sessions}})
    assert "| speedup | float32 | at least 1.8 | 1.250 | **no** |" in text
    assert "| memory | float32 | at most 0.1 | - | not measured |" in text
    assert "| v(8) | 1.33 |" in text
    with pytest.raises(ResultError, match="is a comparison"):
        report.goals_table(read_result(result_path))
    pytest.importorskip("matplotlib")
    from moa_spec.benchmarks import figures

    drawn = figures.draw(ENGINE, tmp_path, "engine")
    assert [path.name for path in drawn] == ["engine-draft-length.png", "engine-context.png", "engine-verify-cost.png"]
    assert all(path.exists() for path in drawn)


def test_figures_are_drawn(tmp_path: Path, result_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (
        main(["bench", "report", str(result_path), "--figures", str(tmp_path), "--output", str(tmp_path / "r.md")]) == 0
    )
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["mock-spec_bench-acceptance.png", "mock-spec_bench-speedup.png", "r.md"]
    assert (tmp_path / drawn[0]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["run", "--methods", "plain", "guess"], "no method 'guess'"),
        (["run", "--methods", "plain", "plain"], "named twice"),
        (["run", "--methods", "moa"], "name 'plain' among the methods"),
        (["run", "--methods", "plain", "--data", "nowhere"], "moa bench fetch"),
        (["report"], "Name a result"),
        (["report", "nothing.json"], "no result nothing.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert fault in error


def test_run_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way with a tiny target saved to disk: measure, report, extend, refuse other options."""
    from tiny import tiny_target
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(tmp_path / "target")
    tiny_target().save_pretrained(tmp_path / "target")
    (tmp_path / "spec_bench").mkdir()
    rows = [{"question_id": n, "category": "qa", "turns": [f"w{n} w7 w9"]} for n in range(4)]
    (tmp_path / "spec_bench" / "question.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out.json"
    command = ["bench", "run", "--target", str(tmp_path / "target"), "--data", str(tmp_path), "--output", str(output)]
    command += ["--methods", "plain", "stock-lookup", "--max-new-tokens", "6", "--repetitions", "1", "--threads", "1"]

    assert main([*command, "--per-task", "1"]) == 0
    assert "| plain | 1.00x / 1.00 |" in capsys.readouterr().out
    first = read_result(output)
    assert main([*command, "--per-task", "2"]) == 0
    second = read_result(output)
    assert first["complete"]
    assert len(second["questions"]) == 2
    assert first["questions"][0] in second["questions"]
    assert [a["rounds"] for a in second["questions"][0]["turns"][0]["answers"]["plain"]] == [[1] * 5]
    assert main([*command[:-6], "--per-task", "2", "--max-new-tokens", "7"]) == 2
    assert "give another --output, or --overwrite" in capsys.readouterr().err
    assert read_result(output) == second
