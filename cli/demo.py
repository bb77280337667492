"""Starts the demo: a page in the browser that shows what is drafted, kept and thrown away. Ctrl-C ends it."""

import argparse
import json
import os
import time
from pathlib import Path

from .arguments import DEFAULT_DRAFTER, add_model_arguments, load_models

EXAMPLE = "moa demo --port 7860"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets others in (default: %(default)s)")
    parser.add_argument("--port", type=int, help="(default: the first free one from 7860)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    add_model_arguments(parser, several_drafters=True)


def shipped_drafters(target_name: str, folder: Path = DEFAULT_DRAFTER.parent) -> list[Path]:
    """The MoA drafters in a folder that name a target as theirs, by folder; everybody's default drafter comes first.

    Raises:
        ValueError: a config.json there is damaged.
    """
    found = []
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") == "moa_drafter" and config.get("target_name") == target_name:
            found.append(path.parent)
    return sorted(found, key=lambda path: (path != DEFAULT_DRAFTER, path.name))


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # nothing leaves this machine
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError:
        raise RuntimeError("The demo needs Gradio: pip install 'moa-spec[demo]'") from None
    from ..demo.app import build_page
    from ..demo.models import Loaded, Models, name_drafters

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
        from ..demo.decoding import warm_up
        from ..generation import load_drafter
        from ..targets import DEFAULT_TARGET, quiet

        # a target that no checkpoint names may still be one under another name: load_models tries its default
        wanted = args.drafter or shipped_drafters(args.target or DEFAULT_TARGET) or [None]
        args.drafter, *others = dict.fromkeys(wanted)
        target, first, tokenizer = load_models(args)
        with quiet():
            more = [load_drafter(name, target, revision=args.drafter_revision) for name in others]
        drafters = name_drafters([first, *more])
        warm_up(target, tokenizer, drafters.values())
        models.put(Loaded(target, tokenizer, drafters))
        print(f"Ready after {time.monotonic() - began:.1f} s. Ctrl-C ends it.", flush=True)
        app.block_thread()
    finally:
        app.close(verbose=False)
