"""Starts the demo: a page in the browser that shows what is drafted, kept and thrown away. Ctrl-C ends it."""

import argparse

from .arguments import add_model_arguments, load_models

EXAMPLE = "moa demo --port 7860"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets others in (default: %(default)s)")
    parser.add_argument("--port", type=int, help="(default: the first free one from 7860)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError:
        raise RuntimeError("The demo needs Gradio: pip install 'moa-spec[demo]'") from None
    target, drafter, tokenizer = load_models(args)
    from ..demo.app import build
    from ..demo.decoding import warm_up

    warm_up(target, tokenizer, drafter)
    app = build(target, tokenizer, drafter)
    app.launch(server_name=args.host, server_port=args.port, inbrowser=args.open, run_history=False)
