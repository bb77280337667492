"""`moa bench quality`: what the tasks' own metrics say of the answers in a result, method by method."""

import argparse
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Assesses the answers that a result holds: exact match of final numbers (GSM8K, mathematical reasoning), ROUGE-L
(summaries), BLEU and chrF (translations), pass@1 (HumanEval: the programs are run, in processes with limited time and
memory and no network). The figures are kept in the result. A lossless method has plain decoding's figures; in float32,
greedy, the command fails where one has not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="what moa bench run has written")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="the questions (default: what fetch has downloaded)"
    )
    parser.add_argument("--target", metavar="NAME", help="for its tokenizer (default: SmolLM2-135M-Instruct)")


def run(args: argparse.Namespace) -> int:
    from .. import targets
    from ..benchmarks import datasets, quality, records, report

    results = {path: records.read_result(path) for path in args.results}
    for path, result in results.items():
        if "questions" not in result:
            raise records.ResultError(f"{path} holds no answers: name what `moa bench run` has written")
    folder = datasets.find_folder(args.data)
    suites = sorted({entry["key"].partition("/")[0] for result in results.values() for entry in result["questions"]})
    questions = {question.key: question for question in datasets.load(suites, folder)}
    keys = [entry["key"] for result in results.values() for entry in result["questions"]]
    with_programs = any(key.startswith(quality.PROGRAMS) for key in keys)
    problems = quality.read_problems(folder) if with_programs else None
    _, tokenizer = targets.load_target(args.target)
    status = 0
    for path, result in results.items():
        _same_data(path, result, suites, folder)
        result["quality"] = quality.assess(
            result, questions, tokenizer, problems, lambda task: print(f"assessing {task}", file=sys.stderr, flush=True)
        )
        records.write_json(path, result)
        print(f"{path}\n\n{report.quality_table(result)}\n")
        exact = result["options"]["dtype"] == "float32" and result["options"]["temperature"] == 0
        for where in quality.differing(result["quality"]) if exact else ():
            print(f"differs from plain decoding in float32: {where}", file=sys.stderr)
            status = 1
    return status


def _same_data(path: Path, result: dict[str, Any], suites: list[str], folder: Path) -> None:
    """
    Raises:
        ResultError: the result was made with other questions than those in the folder.
    """
    from ..benchmarks import datasets, records

    now = datasets.checksums(suites, folder)
    for name, entry in result["data"].items():
        if entry["sha256"] != now.get(name, {}).get("sha256"):
            raise records.ResultError(f"{path} was made with another {name} than the one in {folder}")
