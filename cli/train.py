"""Trains a drafter on the target's own answers.

The target runs over the answers once; its activations are kept on disk and every epoch reads them. A run that was
stopped, in whatever way, goes on from its last checkpoint when it is started again with the same output. To train on
several processes or machines: `accelerate launch -m moa_spec.cli train ...`. With --dry-run it is only worked out what
the run would need, from the recipe and the target's configuration; the target's weights need not be there.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import positive

SMALL_LM = "small-lm"  # a recipe's drafter_type that is no drafter of ours, but a language model of its own

if TYPE_CHECKING:
    from ..training.kind import DrafterKind

EXAMPLE = "moa train --data data/answers.jsonl --output runs/drafter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="rows from moa distill")
    parser.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="answers published on the Hub")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the trained drafter; not for a dry run")
    parser.add_argument(
        "--recipe",
        default="smollm2-135m-instruct",
        metavar="NAME",
        help="a JSON file, or the name of one in training/recipes (default: %(default)s)",
    )
    parser.add_argument(
        "--activations", type=Path, metavar="FOLDER", help="activation cache (default: OUTPUT/activations)"
    )
    parser.add_argument("--max-steps", type=positive, metavar="N", help="instead of the recipe's epochs")
    parser.add_argument(
        "--set",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="override one training argument of the recipe, such as --set learning_rate 0.001",
    )
    parser.add_argument("--profile", action="store_true", help="time 20 steps and print where the time goes, then stop")
    parser.add_argument(
        "--evaluate", metavar="DRAFTER", help="measure a trained one on the held-out rows of the data, then stop"
    )
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run", action="store_true", help="print parameters, cache size, steps and memory; load and write nothing"
    )
    group.add_argument("--json", action="store_true", help="as one JSON object")
    group.add_argument("--rows", type=positive, metavar="N", help="of data that is not there yet")
    group.add_argument("--tokens", type=positive, metavar="N", help="of the data, prompts and answers, if not counted")
    group.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="that train together (default: %(default)s)"
    )
    group.add_argument(
        "--tokens-per-second",
        type=positive,
        metavar="X",
        help="of one process, as moa train --profile prints it with prompts included; gives hours",
    )


def run(args: argparse.Namespace) -> None:
    if args.dry_run:
        dry_run(args)
        return
    from ..hub import fetch_answers
    from ..training.recipe import Recipe
    from ..training.train import prepare, profile, train

    if args.json or args.rows or args.tokens or args.processes > 1 or args.tokens_per_second:
        raise ValueError(
            "--json, --rows, --tokens, --processes and --tokens-per-second belong to a dry run: add --dry-run. "
            "Processes that train are started by accelerate launch"
        )
    if args.output is None:
        raise ValueError("Name the trained drafter's folder with --output")
    if not args.data and not args.dataset:
        raise ValueError("Nothing to train on: name a file with --data or a data set with --dataset")
    recipe = Recipe.load(args.recipe)
    overrides = _overrides(args)
    fetched = [fetch_answers(name) for name in args.dataset]
    data = [*args.data, *(answers.path for answers in fetched)]
    if recipe.drafter_type == SMALL_LM:
        from ..benchmarks.baselines.small_lm import train_small_lm

        if args.evaluate or args.profile or args.activations:
            raise ValueError(
                f"{args.recipe} is of a model without activations: leave out --evaluate, --profile and --activations"
            )
        _print_once(args.output, train_small_lm(recipe, data, args.output, overrides=overrides))
        return
    kind = drafter_kind(recipe.drafter_type)
    activations = args.activations or args.output / "activations"
    if args.evaluate:
        recipe = replace(recipe, start_from=args.evaluate, drafter={})
        trainer = prepare(recipe, data, args.output, activations, overrides, kind=kind)
        _print_once(args.evaluate, trainer.evaluate())
        return
    if args.profile:
        print(profile(recipe, data, args.output, activations, overrides=overrides, kind=kind))
        return
    sources = {
        answers.path: {"dataset": answers.dataset, "commit": answers.commit, "license": answers.license}
        for answers in fetched
    }
    metrics = train(recipe, data, args.output, activations, overrides=overrides, sources=sources, kind=kind)
    _print_once(args.output, metrics)


def _print_once(folder: str | Path, metrics: dict[str, float]) -> None:
    """From one of the processes that have trained together."""
    from accelerate import PartialState

    if PartialState().is_main_process:
        print(f"{folder}: {json.dumps(metrics)}")


def dry_run(args: argparse.Namespace) -> None:
    """Prints what training would need.

    Raises:
        ValueError: data on the Hub are named, which a dry run does not fetch.
    """
    from ..training.estimate import DataSize, estimate, measure
    from ..training.estimate_text import to_text
    from ..training.recipe import Recipe
    from ..training.train import load_rows

    if args.dataset:
        raise ValueError("A dry run fetches nothing: give --rows and --tokens in place of --dataset")
    recipe = Recipe.load(args.recipe)
    if recipe.drafter_type == SMALL_LM:
        raise ValueError(f"{args.recipe} is of an independent language model: a dry run knows drafters only")
    data = DataSize(args.rows, args.tokens)
    if args.data:
        data = measure(recipe, load_rows(args.data), args.tokens)
    found = estimate(
        recipe,
        drafter_kind(recipe.drafter_type),
        data,
        overrides=_overrides(args),
        processes=args.processes,
        tokens_per_second=args.tokens_per_second,
    )
    print(json.dumps(asdict(found)) if args.json else to_text(found))


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Of the recipe's training arguments."""
    overrides = {name: _value(value) for name, value in args.set}
    return overrides | ({"max_steps": args.max_steps} if args.max_steps else {})


def drafter_kind(name: str) -> "DrafterKind":
    """
    Raises:
        ValueError: there is no such kind of drafter.
    """
    from ..benchmarks.baselines.kinds import KINDS
    from ..training.kind import MOA

    kinds = {kind.name: kind for kind in (MOA, *KINDS)}
    if name not in kinds:
        raise ValueError(f"There is no drafter_type {name!r}; there are {', '.join(kinds)}")
    return kinds[name]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
