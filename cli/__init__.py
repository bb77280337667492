"""The `moa` command-line tool: finds the subcommand, turns errors into one line.

A subcommand is a module of this package with a docstring (its description), `EXAMPLE` (a command line),
`add_arguments(parser)` and `run(args)`, which may return an exit status. Only the one that was asked for is imported,
so that `moa --help` does not wait for torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

COMMANDS = {
    "generate": "answer a prompt, and show what was drafted, kept and thrown away",
    "distill": "collect the target's own answers, the training data of a drafter",
    "train": "train a drafter on them",
    "bench": "measure drafters against plain decoding and other methods",
    "serve": "serve a target to clients that hold its drafter",
    "chat": "talk with a target far away, also while the line is cut",
    "link": "put a bad line between the two: delay, bandwidth, cuts",
    "demo": "a page in the browser that shows what is drafted, kept and thrown away",
    "push": "publish a drafter, or its demo, on the Hub",
    "convert": "convert the authors' published checkpoints into ours, and back",
}


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments: of the subcommands, only the one they name is filled in."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="moa",
        formatter_class=layout,
        description="Mixture-of-Attentions speculative decoding for transformers models.",
        epilog='example:\n  moa generate "Why is the sky blue?"\n\n`moa COMMAND --help` says more about a command.',
    )
    parser.add_argument("--version", action="version", version=f"moa-spec {metadata.version('moa-spec')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=layout)
        if name == named:
            module = import_module(f".{name}", __name__)
            command.description = module.__doc__
            command.epilog = f"example:\n  {module.EXAMPLE}"
            command.set_defaults(run=module.run)
            module.add_arguments(command)
            command.add_argument("--debug", action="store_true", help="show where an error came from")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `moa`; returns its exit status. An error is one line on standard error and status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = build_parser(arguments).parse_args(arguments)
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"moa {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if args.debug:
            raise
        print(f"moa {args.command}: {one_line(error)}", file=sys.stderr)
        return 2


def one_line(error: Exception) -> str:
    """An error's message on one line. Where it was not written for users, its type comes first."""
    message = " ".join(str(error).split())
    if isinstance(error, (ValueError, OSError, RuntimeError)) and message:
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"
