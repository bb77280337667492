"""Measures drafters on Spec-Bench and the paper's six test sets, every method in the same run.

  run      measure; a run that was stopped goes on where it was when started again
  engine   check what one round costs: passes, drafts, bookkeeping, memory, long contexts, batches
  link     client and server over an emulated line, against drafting beside the target and streaming from it
  load     many clients at one server for minutes: every text right, nothing left behind, memory flat
  offline  what a client writes while its line is cut, and how much of it the target keeps
  quality  what the tasks' own metrics say of the answers in a result, method by method
  report   turn results into Markdown and figures, and renew the tables in documents
  fetch    download the questions once

`moa bench ACTION --help` says more.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from . import bench_engine, bench_quality, bench_serving
from .arguments import add_model_arguments, not_negative, positive
from .bench_comparison import Bench, recount_agrees

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
        ("engine", bench_engine.add_arguments, "moa bench engine --output runs/engine.json"),
        ("link", bench_serving.add_link_arguments, "moa bench link --profiles 5g 4g --figures runs"),
        ("load", bench_serving.add_load_arguments, "moa bench load --clients 16 --seconds 300 --figures runs"),
        ("offline", bench_serving.add_offline_arguments, "moa bench offline --prompts 100 --figures runs"),
        ("quality", bench_quality.add_arguments, "moa bench quality runs/greedy-fp32.json"),
        ("report", _add_report_arguments, "moa bench report runs/greedy-bf16.json --figures runs"),
        ("fetch", _add_fetch_arguments, "moa bench fetch"),
    ):
        action = actions.add_parser(
            name, epilog=f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        action.set_defaults(checkpoint=[], drafter_revision=None)  # not every action lets them be chosen
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
    parser.add_argument(
        "--assistant",
        metavar="NAME",
        help="an independent small model, for the method of that name "
        "(default: checkpoints/smollm2-135m-instruct-small-lm)",
    )
    parser.add_argument(
        "--checkpoint",
        nargs=2,
        action="append",
        default=[],
        metavar=("KIND", "FOLDER"),
        help="the drafter of another kind: moa-equal, moa-tli1, moa-tli3, eagle, medusa, glide "
        "(default: checkpoints/smollm2-135m-instruct-KIND where there is one)",
    )
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
    actions = {"run": run_comparison, "engine": bench_engine.run, "report": run_report, "fetch": run_fetch}
    return (
        actions
        | {
            "link": bench_serving.run_link,
            "load": bench_serving.run_load,
            "offline": bench_serving.run_offline,
            "quality": bench_quality.run,
        }
    )[args.action](args)


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
    from ..benchmarks import report

    for name, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.per_task = None if args.all else args.per_task
    args.overwrite |= args.quick
    limit = None if args.max_minutes is None else began + 60 * args.max_minutes
    result = Bench(args, args.dtype).compare(args.output, limit)
    print(report.settings_text(result), report.speedup_table(result), report.detail_table(result), sep="\n\n")
    print(f"\n`moa bench report {args.output}` says more")
    return 0 if recount_agrees(result) else 1
