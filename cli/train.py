"""Trains a drafter on the target's own answers.

The target runs over the answers once; its activations are kept on disk and every epoch reads them. A run that was
stopped, in whatever way, goes on from its last checkpoint when it is started again with the same output. To train on
several processes or machines: `accelerate launch -m moa_spec.cli train ...`.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import positive

if TYPE_CHECKING:
    from ..training.kind import DrafterKind

EXAMPLE = "moa train --data data/answers.jsonl --output runs/drafter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="rows from moa distill")
    parser.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="answers published on the Hub")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="of the trained drafter")
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


def run(args: argparse.Namespace) -> None:
    from ..hub import fetch_answers
    from ..training.recipe import Recipe
    from ..training.train import profile, train

    if not args.data and not args.dataset:
        raise ValueError("Nothing to train on: name a file with --data or a data set with --dataset")
    recipe = Recipe.load(args.recipe)
    kind = drafter_kind(recipe.drafter_type)
    overrides = {name: _value(value) for name, value in args.set}
    if args.max_steps:
        overrides["max_steps"] = args.max_steps
    fetched = [fetch_answers(name) for name in args.dataset]
    data = [*args.data, *(answers.path for answers in fetched)]
    activations = args.activations or args.output / "activations"
    if args.profile:
        print(profile(recipe, data, args.output, activations, overrides=overrides, kind=kind))
        return
    sources = {
        answers.path: {"dataset": answers.dataset, "commit": answers.commit, "license": answers.license}
        for answers in fetched
    }
    metrics = train(recipe, data, args.output, activations, overrides=overrides, sources=sources, kind=kind)
    print(f"{args.output}: {json.dumps(metrics)}")


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
