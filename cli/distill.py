"""Collects the target's own answers, the training data of a drafter.

Prompts come from a JSON-lines file (`prompt` or `messages` per line), from a data set on the Hub, or, when none is
named, from the target itself. A run that was stopped goes on where it ended when it is started again with the same
output.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arguments import positive, share

EXAMPLE = "moa distill --output data/answers.jsonl --answer-tokens 500000"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON-lines file; rows are appended")
    parser.add_argument(
        "--answer-tokens",
        type=positive,
        default=1_000_000,
        metavar="N",
        help="stop at N in the file (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON-lines file of prompts")
    parser.add_argument("--dataset", metavar="NAME", help="a data set on the Hub or a folder, with prompt or messages")
    parser.add_argument("--split", default="train", help="of the data set (default: %(default)s)")
    parser.add_argument(
        "--turns",
        choices=["last", "every"],
        default="last",
        help="of the user's in a given conversation, which are answered (default: %(default)s)",
    )
    parser.add_argument("--target", metavar="NAME", help="a folder or a repository (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--slots", type=positive, default=96, help="rows decoded together (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=positive, default=768, help="of prompt and answer together (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--greedy-share",
        type=share,
        default=0.6,
        metavar="X",
        help="of prompts that do not say it themselves, how many are answered greedily (default: %(default)s)",
    )
    own = parser.add_argument_group("the target's own prompts")
    own.add_argument(
        "--passages", type=Path, nargs="+", default=[], metavar="FILE",
        help="plain text to summarise, question and rewrite, instead of the target's own articles",
    )  # fmt: skip
    own.add_argument(
        "--foreign", type=Path, nargs="+", default=[], metavar="FILE",
        help="plain text to translate, instead of German sentences put together here",
    )  # fmt: skip
    own.add_argument("--kinds", nargs="+", metavar="KIND", help="of prompts, such as summary passage_qa (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--push", metavar="NAMESPACE/NAME", help="publish the file as a data set when it is complete")
    parser.add_argument("--license", metavar="ID", help="of the answers, an identifier of the Hub's")


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from ..hub import push_answers
    from ..hub.remote import check_repo_id
    from ..targets import load_target
    from ..training.distill import Distiller, conversations, write_record
    from ..training.passages import read_passages

    if args.push:
        check_repo_id(args.push)  # before hours of work
    prompts = None
    if (args.prompts or args.dataset) and (args.passages or args.foreign or args.kinds):
        raise ValueError("--passages, --foreign and --kinds shape the target's own prompts: leave --prompts out")
    if args.prompts or args.dataset:
        prompts = conversations(_read_prompts(args), args.seed, args.greedy_share, args.turns == "every")
    target, tokenizer = load_target(args.target, args.dtype)
    distiller = Distiller(
        target.to(args.device),
        tokenizer,
        args.output,
        slots=args.slots,
        max_length=args.max_length,
        max_new_tokens=args.max_new_tokens,
        prompts=prompts,
        seed=args.seed,
        greedy_share=args.greedy_share,
        passages=read_passages(args.passages),
        foreign=read_passages(args.foreign),
        kinds=args.kinds,
    )
    with tqdm(total=args.answer_tokens, initial=distiller.tokens, unit=" tokens", unit_scale=True) as bar:

        def show(rows: int, tokens: int) -> None:
            bar.set_description(f"{rows} rows", refresh=False)
            bar.update(tokens - bar.n)

        distiller.run(args.answer_tokens, show)
    name = target.config._name_or_path
    prompts_of = str(args.prompts or args.dataset or "the target's own")
    texts = [path.name for path in (*args.passages, *args.foreign)]
    prompts_of += f", about {', '.join(texts)}" if texts else ""
    write_record(distiller, name, args.dtype, args.seed, prompts_of, args.license)
    print(f"{args.output}: {distiller.rows} rows, {distiller.tokens} answer tokens")
    if args.push:
        print(push_answers(args.output, args.push, name, licence=args.license).url)


def _read_prompts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A data set is opened at once, so that a wrong name is an error before the target is loaded."""
    if args.prompts and args.dataset:
        raise ValueError("--prompts and --dataset are two sources of prompts: name one of them")
    if args.prompts:
        from ..training.distill import read_rows

        return read_rows(args.prompts)
    from datasets import load_dataset

    return iter(load_dataset(args.dataset, split=args.split))
