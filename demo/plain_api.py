"""A plain streaming API, as most are, to compare with: one request, tokens as they are decided, nothing to go on with.

Server side a route beside the real server's, with the same target in the same worker; client side a thread that reads
lines until they end. Knows nothing of drafts: the client has no model, so when the line is cut it can only stop.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import httpx
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from ..generation.draft import Draft
from ..serving.decoding import RemoteText
from ..serving.messages import Sampling
from ..serving.server import MoAServer

_PATH = "/v1/plain"
_SILENCE = 30.0  # seconds without a token after which the client gives up


def add_plain_route(server: MoAServer) -> None:
    """Lets a server answer plain requests too, greedily: {"tokens", "max_new_tokens", "eos"}, a JSON line per token."""

    async def stream(request: Request) -> StreamingResponse:
        asked = await request.json()
        tokens = asked["tokens"]
        length = len(tokens) + asked["max_new_tokens"]
        text = RemoteText(server.models.target, None, tokens, length, asked["eos"], Sampling(), 0)
        return StreamingResponse(_lines(server, text, len(tokens)), media_type="application/x-ndjson")

    server.app.router.routes.append(Route(_PATH, stream, methods=["POST"]))


async def _lines(server: MoAServer, text: RemoteText, start: int) -> AsyncIterator[str]:
    """Each step is a job of the server's one worker, so that texts take turns."""
    loop = asyncio.get_running_loop()
    steps = text.read()
    while await loop.run_in_executor(server.models.worker, lambda: next(steps, None)) is not None:
        pass
    while True:
        for token in text.tokens[start:]:
            yield json.dumps({"id": token, "target_calls": text.calls}) + "\n"
        start = len(text.tokens)
        if text.finished:
            return
        await loop.run_in_executor(server.models.worker, text.verify, Draft())


@dataclass
class PlainText:
    """What the plain client has. `state` is "cut" when the line broke before the end: nothing more will come."""

    token_ids: list[int] = field(default_factory=list)
    target_calls: int = 0
    state: Literal["waiting", "streaming", "cut", "done", "stopped"] = "waiting"

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "streaming")

    @property
    def calls_per_100_tokens(self) -> float | None:
        return 100 * self.target_calls / len(self.token_ids) if self.token_ids else None


class PlainClient:
    """Asks once and reads what comes, in a thread of its own. `stop` may be called from any thread.

    Attributes:
        text: as far as it has come.
    """

    def __init__(self, port: int, tokens: list[int], max_new_tokens: int, eos: list[int]):
        self.text = PlainText()
        self._stopped = threading.Event()
        self._asked = {"tokens": tokens, "max_new_tokens": max_new_tokens, "eos": eos}
        self._url = f"http://127.0.0.1:{port}{_PATH}"
        self._thread = threading.Thread(target=self._run, name="moa-plain", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._asked, timeout=_SILENCE, trust_env=False) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if self._stopped.is_set():
                        self.text.state = "stopped"
                        return
                    said = json.loads(line)
                    self.text.token_ids.append(said["id"])
                    self.text.target_calls = said["target_calls"]
                    self.text.state = "streaming"
            self.text.state = "done"
        except httpx.HTTPError:  # reset, refused, silent
            self.text.state = "stopped" if self._stopped.is_set() else "cut"
