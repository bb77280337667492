"""`moa bench engine`: whether the decoding engine reaches its goals, in every dtype, as one record.

Knows options, order and files. What is measured is said in `benchmarks.probes`, what must be reached in
`benchmarks.goals`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .arguments import DEFAULT_DRAFTER, positive

_DESCRIPTION = """\
Runs Spec-Bench in every dtype, then measures what a round costs: target passes, drafts, bookkeeping, a batch of four,
memory, short and long prompts, draft lengths. Lists what was to be reached beside what was measured.

The usual amount takes about 20 minutes on two quiet cores. For figures to rely on, with a spread worth the name:
--per-task 8 --prompts 4 --max-new-tokens 128 --repetitions 3, which takes several hours. Every question and every probe
is kept and told as soon as it is done; a run that was stopped goes on where it was when started again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/engine.json"),
        metavar="FILE",
        help="the record; the comparison in each dtype goes beside, NAME-DTYPE.json (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew whatever is there")
    group = parser.add_argument_group("how much is measured")
    group.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["float32", "bfloat16", "float16"]
    )
    for name, default, what in (
        ("--per-task", 1, "Spec-Bench questions of each task"),
        ("--prompts", 2, "prompts of each probe; the batch always has four"),
        ("--max-new-tokens", 64, "of every answer"),
        ("--repetitions", 2, "of every answer"),
    ):
        group.add_argument(name, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    group.add_argument(
        "--contexts",
        nargs="+",
        type=positive,
        default=[400, 4000],
        metavar="N",
        help="tokens of the long prompts (default: 400 4000)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="the questions (default: what fetch has downloaded)"
    )
    parser.add_argument("--target", metavar="NAME", help="a folder or a repository (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", metavar="NAME", help=f"likewise (default: checkpoints/{DEFAULT_DRAFTER.name})")
    parser.add_argument("--device", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="of the CPU (default: as many as cores)")


def run(args: argparse.Namespace) -> int:
    from ..benchmarks import goals, probes, records, report
    from .bench_comparison import Bench, recount_agrees

    args.methods, args.sets, args.assistant, args.temperature = [*goals.METHODS, "moa"], [goals.SUITE], None, 0.0
    amount = probes.Amount(args.prompts, args.max_new_tokens, args.repetitions, tuple(args.contexts))
    results: records.ResultFile | None = None
    parts: dict[str, Any] = {}
    agrees = True
    for dtype in args.dtypes:
        bench = Bench(args, dtype)
        if results is None:
            options = bench.options() | {
                "dtype": args.dtypes,
                "prompts": args.prompts,
                "contexts": args.contexts,
            }
            results = records.ResultFile(args.output, options, args.overwrite)
            results.begin(records.environment())
        comparison = bench.compare(args.output.with_name(f"{args.output.stem}-{dtype}.json"))
        agrees &= recount_agrees(comparison)
        print(f"{dtype}\n\n{report.speedup_table(comparison)}\n", flush=True)
        by_task = {question.task: question.turns[0] for question in reversed(bench.questions)}
        measured = probes.probe(
            bench.target,
            bench.tokenizer,
            {method.name: method for method in bench.methods},
            list(by_task.values())[::-1],
            [question.turns[0] for question in bench.everything if question.task in ("summarization", "rag")],
            amount,
            bench.clock,
            _done(results, dtype),
            _Keeper(results, dtype),
        )
        parts[dtype] = {"goals": goals.check(comparison, measured), "probes": measured}
        print(f"\n{report.goals_table({'engine': {dtype: parts[dtype]}})}\n", flush=True)
    assert results is not None
    record = results.finish(engine=parts)
    print(report.engine_settings_text(record), report.goals_table(record), report.probes_table(record), sep="\n\n")
    return 0 if agrees else 1


def _done(results: Any, dtype: str) -> dict[str, Any]:
    """What earlier runs have measured, by the probe's name."""
    keys = [(entry["key"].split(":"), entry["measured"]) for entry in results.questions]
    return {name: measured for (of, name), measured in keys if of == dtype}


class _Keeper:
    """Keeps a probe's figures for good, and prints them."""

    def __init__(self, results: Any, dtype: str):
        self.results, self.dtype = results, dtype

    def __call__(self, name: str, measured: dict[str, Any]) -> None:
        self.results.add({"key": f"{self.dtype}:{name}", "measured": measured})
        print(f"{self.dtype} {name}: {json.dumps(_rounded(measured))}", file=sys.stderr, flush=True)


def _rounded(value: Any) -> Any:
    """Numbers short enough to be read."""
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
