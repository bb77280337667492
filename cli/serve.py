"""Serves a target to clients that hold its drafter; SIGTERM or Ctrl-C lets texts in progress finish.

Without --token-file only this machine is served. --export-client writes what a client needs into a folder and ends.
"""

import argparse
import logging
import os
import shutil
import tempfile
from pathlib import Path

from .arguments import add_model_arguments, load_models, positive

EXAMPLE = "moa serve --host 0.0.0.0 --token-file tokens.txt --tls-cert cert.pem --tls-key key.pem"


def seconds(text: str) -> float:
    """An argparse type: more than 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    parser.add_argument("--port", type=int, default=8040, help="(default: %(default)s)")
    parser.add_argument("--token-file", metavar="FILE", help="who may come in: lines of a name, a space and a token")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    parser.add_argument(
        "--export-client", metavar="FOLDER", help="write the drafter's client half and the tokenizer there, and end"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-sessions", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    limits.add_argument(
        "--kv-tokens",
        type=positive,
        default=65536,
        metavar="N",
        help="tokens that the caches of all sessions may grow to (default: %(default)s)",
    )
    limits.add_argument(
        "--idle", type=seconds, default=300.0, metavar="S", help="seconds without a request (default: %(default)s)"
    )
    limits.add_argument(
        "--grace",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds that the cache of a lost client is kept (default: %(default)s)",
    )
    limits.add_argument(
        "--drain", type=seconds, default=20.0, metavar="S", help="seconds to finish at shutdown (default: %(default)s)"
    )
    limits.add_argument(
        "--max-draft", type=positive, default=64, metavar="N", help="tokens of one draft (default: %(default)s)"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from ..serving.auth import Tokens, check_address
    from ..serving.server import MoAServer, check_tls, serve
    from ..serving.sessions import Limits

    if args.export_client is not None:
        export_client(args)
        return
    tokens = None if args.token_file is None else Tokens.from_file(args.token_file)
    check_address(args.host, tokens)  # before the models are loaded
    check_tls(args.tls_cert, args.tls_key)
    limits = Limits(
        sessions=args.max_sessions,
        kv_tokens=args.kv_tokens,
        idle_seconds=args.idle,
        grace_seconds=args.grace,
        drain_seconds=args.drain,
        nodes=args.max_draft,
    )
    target, drafter, _ = load_models(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    server = MoAServer(target, drafter, limits, tokens)
    serve(server, args.host, args.port, args.tls_cert, args.tls_key)


def export_client(args: argparse.Namespace) -> None:
    """Writes beside the folder and renames.

    Raises:
        FileExistsError: the folder is there already.
    """
    from ..targets import quiet

    folder = Path(args.export_client)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; name another folder")
    _, drafter, tokenizer = load_models(args)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        with quiet():
            drafter.save_pretrained(beside, standalone=True)
        tokenizer.save_pretrained(beside)
        os.chmod(beside, 0o755)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"{folder}: what a client needs; moa chat --drafter {folder} --server ws://HOST:{args.port}")
