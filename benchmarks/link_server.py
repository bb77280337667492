"""The far end of the line in a process of its own: the server under test, and the same target without a client's help.

Besides the protocol, `POST /stream` writes a text with the target here and sends each token as it comes: by plain
decoding, or with the drafter beside the target. That is what a client that drafts has to be compared with.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation import attach, load_drafter
from ..modeling_moa import MoADrafterForCausalLM
from ..serving.server import MoAServer, serve_in_thread
from ..serving.sessions import Limits
from ..targets import load_target
from .link_clients import HiddenStates

STREAM = "/stream"
GRACE_SECONDS = 20.0  # that the session of a lost client is kept
_START_SECONDS = 600


@dataclass(frozen=True)
class Far:
    """What runs at the far end.

    Attributes:
        target, drafter: as `load_target` and `load_drafter` take them.
        hidden_states: also serve the target's last hidden states, for drafters that read those.
        threads: of the CPU.
        cores: that the process keeps to; empty: any.
        others: further MoA drafters by name, each served at an address of its own.
        together: judge the drafts of several texts in one pass, as servers do.
    """

    target: str | None
    drafter: str
    dtype: str
    hidden_states: bool
    threads: int
    cores: tuple[int, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    together: bool = True


@dataclass(frozen=True)
class Running:
    """A far end that runs: its addresses, "moa", those of others, and "hidden" where asked for; and its process."""

    urls: dict[str, str]
    pid: int


@contextlib.contextmanager
def far_end(far: Far) -> Iterator[Running]:
    """Runs it while the block runs.

    Raises:
        RuntimeError: it did not come up.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(far, theirs), name="moa-far-end", daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SECONDS):
            raise RuntimeError("The server did not come up in time")
        try:
            running = ours.recv()
        except EOFError:
            raise RuntimeError("The server did not come up; what it said stands above") from None
        yield running
    finally:
        ours.close()  # ends it
        process.join(30)
        if process.is_alive():
            process.kill()


def _run(far: Far, parent: Connection) -> None:
    if far.cores:
        os.sched_setaffinity(0, far.cores)
    torch.set_num_threads(far.threads)
    target, _ = load_target(far.target, far.dtype)
    drafter = load_drafter(far.drafter, target)
    limits = Limits(drain_seconds=0.5, grace_seconds=GRACE_SECONDS)
    with contextlib.ExitStack() as stack:
        server = MoAServer(target, drafter, limits)
        server.models.judging.together &= far.together
        add_stream(server)
        urls = {"moa": stack.enter_context(serve_in_thread(server))}
        if far.hidden_states:
            hidden: Any = HiddenStates(target)
            urls["hidden"] = stack.enter_context(serve_in_thread(MoAServer(target, hidden, limits)))
        for name, path in far.others.items():
            other = MoAServer(target, load_drafter(path, target), limits)
            urls[name] = stack.enter_context(serve_in_thread(other))
        parent.send(Running(urls, os.getpid()))
        with contextlib.suppress(EOFError):
            parent.recv()  # until the parent is done with us, or gone


def add_stream(server: MoAServer) -> None:
    """Lets a server also write texts without a client's drafts."""
    target, drafter = server.models.target, server.models.drafter
    attach(target, drafter)

    async def stream(request: Request) -> Response:
        asked = json.loads(await request.body())
        return StreamingResponse(_tokens(server, target, drafter, asked), media_type="text/plain")

    server.app.router.routes.append(Route(STREAM, stream, methods=["POST"]))


async def _tokens(
    server: MoAServer, target: PreTrainedModel, drafter: MoADrafterForCausalLM, asked: dict[str, Any]
) -> AsyncIterator[str]:
    """Token ids, a line each, as they are written, then `calls N`: the target's, without the reading of the prompt.

    In the server's one worker, as everything of its models.
    """
    loop, queue, calls = asyncio.get_running_loop(), asyncio.Queue[int | None](), 0

    def called(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def write() -> None:
        ids = torch.tensor([asked["tokens"]], device=target.device)
        extra = {"assistant_model": drafter} if asked["drafting"] else {}
        counting = target.register_forward_hook(called)
        try:
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=asked["max_new_tokens"],
                eos_token_id=asked["eos"] or None,
                streamer=_Streamer(lambda token: loop.call_soon_threadsafe(queue.put_nowait, token)),
                **extra,
            )
        finally:
            counting.remove()
            loop.call_soon_threadsafe(queue.put_nowait, None)

    future = loop.run_in_executor(server.models.worker, write)
    while (token := await queue.get()) is not None:
        yield f"{token}\n"
    await future
    yield f"calls {calls - 1}\n"


class _Streamer(BaseStreamer):
    """Hands every new token on; `generate` puts the prompt first."""

    def __init__(self, put: Any):
        self.hand_on = put
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:
            self.prompt = False
            return
        for token in value.reshape(-1).tolist():
            self.hand_on(token)

    def end(self) -> None:
        pass
