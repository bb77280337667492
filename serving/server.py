"""The server: a target and a drafter's Layer Self-Attention behind a WebSocket.

`MoAServer` is the application (Starlette), `serve` runs it with uvicorn until it is told to stop, `serve_in_thread` for
tests and notebooks. Knows who may come in; what is said then is connection's.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from transformers import PreTrainedModel

from ..modeling_moa import MoADrafterForCausalLM, WrongTargetError
from .auth import ANYONE, Tokens, check_address
from .connection import Connection, Models
from .decoding import pass_seconds, takes_trees, unservable
from .identity import drafter_identity
from .messages import PATH, SESSION_HEADER
from .metrics import Metrics
from .sessions import Limits, NoRoom, Sessions

logger = logging.getLogger(__name__)


class MoAServer:
    """Serves texts of one target to clients that hold its drafter.

    Args:
        target: any causal language model whose layers all attend to the whole text.
        drafter: its drafter, whole; attached to the target or not.
        limits: what is allowed.
        tokens: who may come in; None: anyone who can reach the address.

    Attributes:
        app: the ASGI application.

    Raises:
        WrongTargetError: the two do not belong together, or this target cannot be served.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: MoADrafterForCausalLM,
        limits: Limits | None = None,
        tokens: Tokens | None = None,
    ):
        reason = unservable(target)
        if reason:
            raise WrongTargetError(f"This target cannot be served: {reason}.")
        drafter.lend(target)
        drafter.eval()
        self.limits = limits or Limits()
        self.tokens = tokens
        self.models = Models(target, drafter, drafter_identity(drafter), takes_trees(target), pass_seconds(target))
        self.sessions = Sessions(self.limits)
        self.metrics = Metrics()
        self.connections: set[Connection] = set()
        self.draining = False
        routes = [
            WebSocketRoute(PATH, self._generate),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @property
    def frame_limit(self) -> int:
        """Bytes of the longest message that a client can have reason to send."""
        longest = min(self.limits.kv_tokens, self.models.context or self.limits.kv_tokens)
        return 64 * 1024 + 5 * longest  # a token id takes at most 5 bytes

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _generate(self, websocket: WebSocket) -> None:
        if websocket.headers.get("origin") is not None:  # a web page that reaches for a server on its visitor's machine
            await self._deny(websocket, 403, "Web pages are not served here.\n")
            return
        principal = self._principal(websocket.headers.get("authorization"))
        if principal is None:
            await self._deny(websocket, 401, "A bearer token is needed.\n", {"WWW-Authenticate": "Bearer"})
            return
        known = self.sessions.find(websocket.headers.get(SESSION_HEADER), principal)
        retry = {"Retry-After": f"{max(1, round(self.limits.retry_seconds))}"}
        if self.draining:
            await self._deny(websocket, 503, "The server is shutting down.\n", retry)
            return
        if known is None:
            try:
                self.sessions.take_place()
            except NoRoom:
                await self._deny(websocket, 503, "The server has no room for another text now.\n", retry)
                return
        connection = Connection(websocket, principal, self.models, self.sessions, self.metrics)
        has_place = known is None
        try:
            await websocket.accept()
            self.connections.add(connection)
            has_place, promised = False, has_place
            await connection.run(promised)
        finally:
            if has_place:
                self.sessions.give_place()
            self.connections.discard(connection)

    async def _deny(self, websocket: WebSocket, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.metrics.refuse(str(status))
        await websocket.send_denial_response(PlainTextResponse(text, status, headers))

    def _principal(self, authorization: str | None) -> str | None:
        return ANYONE if self.tokens is None else self.tokens.principal(authorization)

    async def _health(self, request: Request) -> Response:
        status = "draining" if self.draining else "ok"
        return JSONResponse({"status": status}, 503 if self.draining else 200)

    async def _metrics(self, request: Request) -> Response:
        if self._principal(request.headers.get("authorization")) is None:
            return PlainTextResponse("A bearer token is needed.\n", 401, {"WWW-Authenticate": "Bearer"})
        self.metrics.sessions_evicted = self.sessions.evicted
        self.metrics.target_passes, self.metrics.drafts_judged = self.models.judging.passes, self.models.judging.drafts
        gauges = {
            "sessions": len(self.sessions),
            "connections": len(self.connections),
            "kv_tokens_reserved": self.sessions.kv_tokens,
            "kv_tokens_limit": self.limits.kv_tokens,
        }
        return PlainTextResponse(self.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    # -- life ----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            self.models.worker.shutdown(wait=False, cancel_futures=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.limits.grace_seconds / 4))
            self.sessions.sweep()

    async def drain(self) -> None:
        """Takes nobody new in, and waits until the texts in progress are finished or their time is up."""
        self.draining = True
        for connection in self.connections:
            connection.leaving = True
        deadline = asyncio.get_running_loop().time() + self.limits.drain_seconds
        while self.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.gather(*(connection.send_away() for connection in list(self.connections)))


class _DrainingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, server: MoAServer):
        super().__init__(config)
        self.moa = server

    async def shutdown(self, sockets: Any = None) -> None:
        if not self.force_exit:
            await self.moa.drain()
        await super().shutdown(sockets)


def check_tls(certificate: str | Path | None, key: str | Path | None) -> None:
    """
    Raises:
        ValueError: one of the two is missing.
        FileNotFoundError: one of the files is.
    """
    if (certificate is None) != (key is None):
        raise ValueError("TLS needs both a certificate and its key: pass --tls-cert and --tls-key")
    for path in (certificate, key):
        if path is not None and not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {path} for TLS")


def _not_a_refusal(record: logging.LogRecord) -> bool:
    """uvicorn calls it an error when a client is refused before the upgrade; strangers could fill the log with it."""
    return "without completing handshake" not in record.getMessage()


def _uvicorn(
    server: MoAServer, host: str, port: int, certificate: str | Path | None, key: str | Path | None, level: str
) -> _DrainingServer:
    check_address(host, server.tokens)
    check_tls(certificate, key)
    config = uvicorn.Config(
        server.app,
        host=host,
        port=port,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level=level,
        access_log=False,
        ws_max_size=server.frame_limit,
        ws_max_queue=4,
        ws_per_message_deflate=False,  # memory does not compress, and a small frame could unpack to a large one
        timeout_graceful_shutdown=5,
        lifespan="on",
    )
    logging.getLogger("uvicorn.error").addFilter(_not_a_refusal)  # added once, however often this runs
    return _DrainingServer(config, server)


def serve(
    server: MoAServer,
    host: str = "127.0.0.1",
    port: int = 8040,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> None:
    """Serves until interrupted or terminated, then drains.

    Raises:
        ValueError: the address can be reached from other machines and there are no tokens; or half of TLS is missing.
        FileNotFoundError: the certificate or its key is not there.
        SystemExit: the port is taken.
    """
    _uvicorn(server, host, port, certificate, key, "info").run()


@contextlib.contextmanager
def serve_in_thread(
    server: MoAServer,
    host: str = "127.0.0.1",
    port: int = 0,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> Iterator[str]:
    """Serves while the block runs; gives the address for clients. Port 0 takes a free one.

    Raises:
        RuntimeError: it did not come up.
    """
    running = _uvicorn(server, host, port, certificate, key, "warning")
    thread = threading.Thread(target=running.run, name="moa-server", daemon=True)
    thread.start()
    try:
        while not running.started:
            if not thread.is_alive():
                raise RuntimeError(f"The server did not come up on {host}, port {port}")
            thread.join(0.01)
        port = running.servers[0].sockets[0].getsockname()[1]
        scheme = "ws" if certificate is None else "wss"
        yield f"{scheme}://{host}:{port}"
    finally:
        running.should_exit = True
        thread.join(server.limits.drain_seconds + 10)
