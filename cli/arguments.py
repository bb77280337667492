"""Arguments that several subcommands share, and how they become a target and a drafter."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM

DEFAULT_DRAFTER = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct-moa"


def shipped(kind: str) -> Path | None:
    """The checkpoint of another kind for the default target in this project's checkpoints/, if it is there."""
    folder = DEFAULT_DRAFTER.with_name(f"smollm2-135m-instruct-{kind}")
    return folder if folder.is_dir() else None


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def not_negative(text: str) -> float:
    """An argparse type: a number of at least 0."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


def fraction(text: str) -> float:
    """An argparse type: a number above 0, at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {text}")
    return value


def add_model_arguments(parser: argparse.ArgumentParser, several_drafters: bool = False) -> None:
    """Which target and drafter, and how they are held. With `several_drafters`, `drafter` is a list, or None."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        metavar="NAME",
        help="a folder or a repository on the Hub (default: SmolLM2-135M-Instruct, installed)",
    )
    where = "a folder or a repository on the Hub"
    if several_drafters:
        group.add_argument(
            "--drafter",
            action="append",
            metavar="NAME",
            help=f"{where}; may be given several times, the first is the default (default: all in "
            f"{DEFAULT_DRAFTER.parent.name}/ that are the target's)",
        )
    else:
        group.add_argument("--drafter", metavar="NAME", help=f"{where} (default: checkpoints/{DEFAULT_DRAFTER.name})")
    group.add_argument("--drafter-revision", metavar="NAME", help="a branch, tag or commit of the drafter's repository")
    group.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(default: %(default)s)"
    )
    group.add_argument("--device", default="cpu", help="such as cuda or mps (default: %(default)s)")


def add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    """How to draft. What is left out is as the drafter's generation_config says."""
    group = parser.add_argument_group("drafting (default: as the drafter's checkpoint says)")
    group.add_argument("--num-assistant-tokens", type=positive, metavar="N", help="levels drafted per round")
    group.add_argument(
        "--assistant-confidence-threshold",
        type=not_negative,
        metavar="P",
        help="stop a draft when its probability falls below P; 0 never",
    )
    group.add_argument("--draft-breadth", type=positive, metavar="N", help="tokens per level; 1 drafts a chain")
    group.add_argument("--draft-nodes", type=positive, metavar="N", help="drafted tokens judged per target call")
    group.add_argument(
        "--prompt-lookup-num-tokens",
        type=int,
        metavar="N",
        help="also copy drafts of N tokens from the text so far; 0 does not",
    )
    group.add_argument("--draft-policy", choices=["auto", "fixed"], help="auto measures what pays; fixed does as told")


DRAFTING_ARGUMENTS = (
    "num_assistant_tokens",
    "assistant_confidence_threshold",
    "draft_breadth",
    "draft_nodes",
    "prompt_lookup_num_tokens",
    "draft_policy",
)


def drafting_options(args: argparse.Namespace) -> dict[str, Any]:
    """The drafting options that were given, as keywords for `generate`."""
    return {name: value for name in DRAFTING_ARGUMENTS if (value := getattr(args, name)) is not None}


def load_models(
    args: argparse.Namespace,
) -> tuple["PreTrainedModel", "MoADrafterForCausalLM", "PreTrainedTokenizerBase"]:
    """The target, the drafter attached to it, and the tokenizer.

    Raises:
        FileNotFoundError: there is no such target or drafter.
        WrongTargetError: they do not belong together.
    """
    if args.drafter is None and not DEFAULT_DRAFTER.is_dir():
        raise FileNotFoundError(
            f"There is no drafter in {DEFAULT_DRAFTER}: name one with --drafter, a folder or a repository on the Hub"
        )
    from ..generation import load_drafter
    from ..targets import load_target, quiet

    target, tokenizer = load_target(args.target, args.dtype)
    target = target.to(args.device)
    with quiet():
        drafter = load_drafter(args.drafter or DEFAULT_DRAFTER, target, revision=args.drafter_revision)
    return target, drafter, tokenizer
