"""Converts the authors' published checkpoints into drafters of this project, and back.

The source's layout is told from its config.json: the authors' training layout, their vLLM layout, or this project's.
Theirs become this project's; this project's become theirs with --to.
"""

import argparse
from pathlib import Path

EXAMPLE = (
    "moa convert huawei-noah/MOASpec-Llama-3-8B-Instruct checkpoints/llama-3-8b-moa "
    "--target meta-llama/Meta-Llama-3-8B-Instruct"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a folder or a repository on the Hub")
    parser.add_argument("output", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--to", choices=["training", "vllm"], help="write the authors' layout from a drafter of ours")
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="the target, a folder or a repository, of which only the configuration is read; "
        "needed to read the vLLM layout and to write the training layout",
    )
    parser.add_argument(
        "--target-layer-inference",
        type=int,
        default=0,
        metavar="N",
        help="target layers that the drafter reuses; the authors' files do not say (default: %(default)s)",
    )
    parser.add_argument("--revision", metavar="NAME", help="of the source on the Hub")


def run(args: argparse.Namespace) -> None:
    from transformers import AutoConfig

    from ..hub.files import written_beside
    from ..hub.published import read_published, write_published
    from ..modeling_moa import MoADrafterForCausalLM
    from ..targets import quiet

    if args.output.exists():
        raise FileExistsError(f"{args.output} exists: name another folder, or remove it first.")
    target_config = AutoConfig.from_pretrained(args.target) if args.target else None
    with quiet():
        if args.to:
            drafter = MoADrafterForCausalLM.from_pretrained(args.source, revision=args.revision)
            write_published(drafter, args.output, args.to, target_config)
        else:
            name = args.target if args.target and not Path(args.target).exists() else None
            drafter = read_published(args.source, target_config, name, args.target_layer_inference, args.revision)
            with written_beside(args.output) as beside:
                drafter.save_pretrained(beside)
    count = sum(parameter.numel() for parameter in drafter.parameters())
    layout = args.to or "this project's"
    print(
        f"{args.output}: {count:,} parameters for {drafter.config.target_name or 'an unnamed target'}, {layout} layout"
    )
