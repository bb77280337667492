"""Measures drafters on Spec-Bench and the paper's six test sets, every method in the same run.

  run      measure; a run that was stopped goes on where it was when started again
  engine   check what one round costs: passes, drafts, bookkeeping, memory, long contexts, batches
  report   turn results into Markdown and figures, and renew the tables in documents
  fetch    download the questions once

`moa bench ACTION --help` says more.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import DEFAULT_DRAFTER, add_model_arguments, not_negative, positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXAMPLE = "moa bench run --quick"

# what is measured unless told otherwise, and with --quick: under five minutes on two cores
USUAL: dict[str, Any] = {
    "methods": ["plain", "stock-lookup", "lookup", "moa", "moa-tree", "moa-auto"],
    "sets": ["spec_bench"],
    "per_task": 8,
    "max_new_tokens": 128,
    "repetitions": 3,
    "output": Path("runs/bench.json"),
    "max_minutes": None,
}
QUICK: dict[str, Any] = USUAL | {
    "methods": ["plain", "stock-lookup", "moa-auto"],
    "per_task": 1,
    "max_new_tokens": 48,
    "repetitions": 2,
    "output": Path("runs/bench-quick.json"),
    "max_minutes": 3.5,  # the last question begun by then, the report still comes in time
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, add, example in (
        ("run", _add_run_arguments, "moa bench run --dtype bfloat16 --per-task 8 --output runs/greedy-bf16.json"),
        ("report", _add_report_arguments, "moa bench report runs/greedy-bf16.json --figures runs"),
        ("fetch", _add_fetch_arguments, "moa bench fetch"),
    ):
        action = actions.add_parser(
            name, epilog=f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add(action)
        action.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    def usual(name: str) -> str:
        value = USUAL[name]
        return f"(default: {' '.join(value) if isinstance(value, list) else value})"

    parser.add_argument("--quick", action="store_true", help="a small table in under five minutes on two cores")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"the result, a .json file {usual('output')}")
    parser.add_argument("--overwrite", action="store_true", help="begin anew whatever is there")
    group = parser.add_argument_group("what is measured")
    group.add_argument("--methods", nargs="+", metavar="NAME", help=usual("methods"))
    group.add_argument("--sets", nargs="+", metavar="SET", help=f"spec_bench, moa_bench {usual('sets')}")
    amount = group.add_mutually_exclusive_group()
    amount.add_argument("--per-task", type=positive, metavar="N", help=f"questions of each task {usual('per_task')}")
    amount.add_argument("--all", action="store_true", help="all questions")
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help=usual("max_new_tokens"))
    group.add_argument("--repetitions", type=positive, metavar="N", help=usual("repetitions"))
    group.add_argument("--temperature", type=not_negative, default=0.0, metavar="T", help="0 is greedy (the default)")
    group.add_argument("--seed", type=int, default=0, help="of the choice of questions and of sampling (default: 0)")
    group.add_argument("--data", type=Path, metavar="FOLDER", help="the questions (default: what fetch has downloaded)")
    group.add_argument("--max-minutes", type=not_negative, metavar="M", help="begin no question after so long")
    add_model_arguments(parser)
    parser.add_argument("--assistant", metavar="NAME", help="an independent small model, for the method of that name")
    parser.add_argument("--threads", type=positive, metavar="N", help="of the CPU (default: as many as cores)")


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT", help="what run and engine have written")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report (default: printed)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="also draw figures there")
    parser.add_argument(
        "--into", nargs="+", type=Path, default=[], metavar="DOCUMENT", help="renew what stands between its markers"
    )


def _add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to (default: beside the Hub's cache)")


def run(args: argparse.Namespace) -> int:
    return {"run": run_comparison, "report": run_report, "fetch": run_fetch}[args.action](args)


def run_fetch(args: argparse.Namespace) -> int:
    from ..benchmarks import datasets

    folder = args.output or datasets.default_folder()
    fetched = datasets.fetch(folder)
    print(f"{len(fetched)} files fetched, {len(datasets.FILES)} in {folder}")
    return 0


def run_report(args: argparse.Namespace) -> int:
    from ..benchmarks import report
    from ..benchmarks.records import read_result

    if not args.results and not args.into:
        raise ValueError("Name a result to report on, or a document to renew with --into")
    results = {path.stem: read_result(path) for path in args.results}
    if results and args.output:
        report.write_text(args.output, report.report(results))
    elif results:
        print(report.report(results), end="")
    if args.figures:
        from ..benchmarks import figures

        for name, result in results.items():
            for path in figures.draw(result, args.figures, name):
                print(path, file=sys.stderr)
    for document in args.into:
        print(f"{report.fill(document)} parts of {document} renewed", file=sys.stderr)
    return 0


def run_comparison(args: argparse.Namespace) -> int:
    began = time.monotonic()
    from ..benchmarks import datasets, methods, records, report, runner
    from ..benchmarks.measure import clock_for

    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    per_task = None if args.all else args.per_task
    methods.check_names(args.methods, args.assistant)
    folder = datasets.find_folder(args.data)
    questions = datasets.choose(datasets.load(args.sets, folder), per_task, args.seed)

    threads = pin_threads(args.threads)
    target, tokenizer = load_target(args)
    drafter = drafter_name(args)
    prepared = methods.prepare(args.methods, target, drafter, args.assistant, args.seed)
    options = {
        "target": target.config._name_or_path,
        "drafter": None if drafter is None else str(drafter),
        "drafter_sha256": records.checkpoint_digest(drafter),
        "assistant": args.assistant,
        "methods": args.methods,
        "sets": args.sets,
        "per_task": per_task,
        "max_new_tokens": args.max_new_tokens,
        "repetitions": args.repetitions,
        "temperature": args.temperature,
        "seed": args.seed,
        "dtype": args.dtype,
        "device": args.device,
        "threads": threads,
    }
    results = records.ResultFile(args.output, options, overwrite=args.overwrite or args.quick)
    comparison = runner.Comparison(
        target,
        tokenizer,
        prepared,
        args.max_new_tokens,
        args.repetitions,
        args.temperature,
        args.seed,
        clock_for(target.device),
    )
    limit = None if args.max_minutes is None else 60 * args.max_minutes - (time.monotonic() - began)
    data = datasets.checksums(args.sets, folder)
    result = runner.measure_all(comparison, questions, results, data, limit)
    print(report.settings_text(result), report.speedup_table(result), report.detail_table(result), sep="\n\n")
    print(f"\n`moa bench report {args.output}` says more")
    agrees = all(figures["recount_agrees"] for group in result["summary"].values() for figures in group.values())
    return 0 if agrees else 1


def drafter_name(args: argparse.Namespace) -> str | Path | None:
    """The drafter to use, if there is one."""
    return args.drafter or (DEFAULT_DRAFTER if DEFAULT_DRAFTER.is_dir() else None)


def load_target(args: argparse.Namespace) -> tuple["PreTrainedModel", Any]:
    from .. import targets

    target, tokenizer = targets.load_target(args.target, args.dtype)
    return target.to(args.device), tokenizer


def pin_threads(count: int | None) -> int:
    """As many threads as told, or as cores this process may use, so that runs can be compared."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count or cores)
    return torch.get_num_threads()
