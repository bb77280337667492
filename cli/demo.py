"""Starts the demo: a page in the browser that shows what is drafted, kept and thrown away. Ctrl-C ends it."""

import argparse
import os
import time

from .arguments import add_model_arguments, load_models

EXAMPLE = "moa demo --port 7860"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets others in (default: %(default)s)")
    parser.add_argument("--port", type=int, help="(default: the first free one from 7860)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing leaves this machine
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError:
        raise RuntimeError("The demo needs Gradio: pip install 'moa-spec[demo]'") from None
    from ..demo.app import build_page
    from ..demo.models import Loaded, Models

    models = Models()
    app = build_page(models)
    try:
        app.launch(
            server_name=args.host,
            server_port=args.port,
            inbrowser=args.open,
            quiet=True,
            prevent_thread_lock=True,
            run_history=False,
        )
    except OSError:
        raise RuntimeError(f"Port {args.port or '7860 to 7959'} is taken: choose another with --port") from None
    try:
        print(f"{app.local_url} is there after {time.monotonic() - began:.1f} s; loading the models", flush=True)
        target, drafter, tokenizer = load_models(args)
        from ..demo.decoding import warm_up

        warm_up(target, tokenizer, drafter)
        models.put(Loaded(target, tokenizer, drafter))
        print(f"Ready after {time.monotonic() - began:.1f} s. Ctrl-C ends it.", flush=True)
        app.block_thread()
    finally:
        app.close(verbose=False)
