"""One client's connection, on the server: from `Hello` to the end of a generation or of the line.

Knows the protocol's order and what each message may change. Model work is handed to the server's worker; how sessions
are counted is theirs.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.websockets import WebSocket, WebSocketDisconnect
from transformers import PreTrainedModel

from ..generation.draft import Draft
from ..modeling_moa import MoADrafterForCausalLM
from .decoding import RemoteText
from .memory_codec import MemoryCodec, vector_widths
from .messages import (
    CLOSE_CODES,
    MAX_CHUNK,
    VERSION,
    Adopt,
    Bye,
    Committed,
    Hello,
    Memory,
    Message,
    PrefixDigest,
    ProtocolError,
    Reason,
    Refused,
    Verify,
    Welcome,
    Working,
    decode_from_client,
    encode,
)
from .metrics import Metrics
from .sessions import NoRoom, Session, Sessions
from .together import Judging

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
SEND_SECONDS = 30.0
EARLY_BYTES = 128 * 1024  # of memory per second, sent while the prompt is being read


class Refusal(Exception):
    """This connection ends here, and the client is told why."""

    def __init__(self, reason: Reason, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.refused = Refused(reason, message[:500], retry_after)


class Models:
    """What all connections share: target and drafter, the identity that clients must have, and the one thread in which
    models run."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: MoADrafterForCausalLM,
        identity: str,
        trees: bool,
        pass_seconds: dict[int, float],
    ):
        self.target, self.drafter, self.identity, self.trees = target, drafter, identity, trees
        self.pass_seconds = pass_seconds
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moa-model")
        self.judging = Judging(target, self.worker, trees)
        self.widths = vector_widths(drafter.config)
        self.vocab_size = drafter.config.vocab_size
        text_config = target.config.get_text_config(decoder=True)
        self.context = getattr(text_config, "max_position_embeddings", None)


class Connection:
    """Serves one accepted WebSocket. `run` returns when it is over, whoever ended it."""

    def __init__(self, websocket: WebSocket, principal: str, models: Models, sessions: Sessions, metrics: Metrics):
        self.websocket, self.principal = websocket, principal
        self.models, self.sessions, self.metrics = models, sessions, metrics
        self.limits = sessions.limits
        self.session: Session | None = None
        self.gone = False
        self.leaving = False  # the server is shutting down

    async def run(self, has_place: bool) -> None:
        """`has_place`: a place for a new session was taken for this connection."""
        self.has_place = has_place
        try:
            await self._serve()
        except Refusal as refusal:
            self.metrics.refuse(refusal.refused.reason)
            await self._refuse(refusal.refused)
        except ProtocolError as error:
            self.metrics.refuse("invalid")
            await self._refuse(Refused("invalid", str(error)[:500]))
        except WebSocketDisconnect:
            pass
        except Exception:
            logger.exception("session %s: failed", self.session.number if self.session else "-")
            self.metrics.refuse("error")
            if self.session is not None:
                self.sessions.drop(self.session)
            await self._refuse(Refused("session", "the server failed in this session; it is gone", 1.0))
        finally:
            self.gone = True
            if self.has_place:
                self.sessions.give_place()
            if self.session is not None:
                self.sessions.leave(self.session, self)

    async def _serve(self) -> None:
        hello = await self._receive(self.limits.hello_seconds, "no hello came")
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message must be hello")
        self._check(hello)
        self.codec = MemoryCodec(self.models.widths, hello.memory)
        session = self.session = await self._session(hello)
        async with session.lock:
            await self._begin(session, hello)
        while True:
            message = await self._receive(self.limits.idle_seconds, "nothing was asked for")
            if isinstance(message, Hello):
                raise ProtocolError("there is one hello per connection")
            if message.session != session.name:
                raise Refusal("session", "this is not the connection's session")
            if isinstance(message, Bye):
                self.sessions.drop(session)
                await self._close(1000)
                return
            await self._round(session, message)

    # -- hello ---------------------------------------------------------------------------------------------------------

    def _check(self, hello: Hello) -> None:
        models = self.models
        if hello.version != VERSION:
            raise Refusal("version", f"this server speaks version {VERSION} of the protocol, not {hello.version}")
        if hello.memory != "none" and hello.drafter != models.identity:
            raise Refusal("drafter", "the client's drafter is not the one that this server makes memory for")
        if hello.prompt > len(hello.tokens):
            raise ProtocolError("the prompt is longer than the text")
        if len(hello.tokens) > hello.prompt + hello.max_new_tokens:
            raise ProtocolError("the text is longer than max_new_tokens allows")
        if hello.held >= len(hello.tokens) + 1:
            raise ProtocolError("held covers more than the text")
        if max(hello.tokens + hello.eos) >= models.vocab_size:
            raise ProtocolError(f"token ids go up to {models.vocab_size - 1}")
        size = hello.prompt + hello.max_new_tokens
        most = min(self.limits.kv_tokens, models.context or size)
        if size > most:
            raise ProtocolError(f"prompt and max_new_tokens are {size} tokens, and this server takes at most {most}")

    async def _session(self, hello: Hello) -> Session:
        """The session to go on with, or a new one."""
        session = self.sessions.find(hello.session, self.principal)
        if session is not None:
            if session.connection is not None:
                session.connection.gone = True  # sends nothing more into what is probably a black hole
            async with session.lock:  # what an earlier connection began is finished first
                if not session.dropped and session.can_resume(hello):
                    self._take_over(session)
                    self.metrics.sessions_resumed += 1
                    return session
            self.sessions.drop(session)
        if self.leaving:
            raise Refusal("leaving", "the server is shutting down", self.limits.retry_seconds)
        seed = hello.sampling.seed if hello.sampling.seed is not None else secrets.randbits(62)
        length = hello.prompt + hello.max_new_tokens
        models = self.models
        try:
            if not self.has_place:
                self.sessions.take_place()
                self.has_place = True
            drafter = None if hello.memory == "none" else models.drafter
            text = RemoteText(models.target, drafter, hello.tokens, length, hello.eos, hello.sampling, seed)
            session = self.sessions.open(self.principal, hello, text)
        except NoRoom:
            raise Refusal("busy", "the server has no room for another text now", self.limits.retry_seconds) from None
        self.has_place = False
        self._take_over(session)
        if hello.session is None:
            self.metrics.sessions_begun += 1
        else:
            self.metrics.sessions_rebuilt += 1
        logger.info("session %d: %d tokens to read for %s", session.number, len(hello.tokens), self.principal)
        return session

    def _take_over(self, session: Session) -> None:
        """The newest connection has the session; one whose end nobody noticed yet is closed."""
        before, session.connection = session.connection, self
        if before is not None:
            before.session = None
            task = asyncio.get_running_loop().create_task(before._close(CLOSE_CODES["session"]))
            _closing.add(task)
            task.add_done_callback(_closing.discard)

    async def _begin(self, session: Session, hello: Hello) -> None:
        """Answers hello: reads the text if it is new here, says what the client lacks."""
        text, models = session.text, self.models
        depth = min(self.limits.nodes, models.context or self.limits.nodes)
        await self._send(
            Welcome(
                VERSION,
                session.name,
                session.ready,
                self.codec.token_bytes,
                self.limits.nodes,
                depth,
                models.trees,
                models.pass_seconds,
            )
        )
        held = hello.held
        if not session.ready:
            held = await self._read(session, hello)
        held = min(held, text.record.length)
        base = len(hello.tokens)
        new = text.tokens[base:]
        await self._answer(
            session,
            Committed(session.name, session.round, base, new, 0, max(held, text.record.length), text.finished),
            held,
        )

    async def _read(self, session: Session, hello: Hello) -> int:
        """Reads what has not been read yet; a line that was cut meanwhile goes on where it was. Returns how many tokens
        the client has memory of then."""
        text, held, total = session.text, hello.held, len(hello.tokens)
        steps = session.steps = session.steps or text.read()
        started = time.monotonic()
        while True:
            step = await self._work(lambda: next(steps, None), Working(text.read_tokens, total))
            if step is None:
                break
            if self.gone:
                raise WebSocketDisconnect(1006)
            await self._send(Working(step, total))
            if step < total and self.codec.token_bytes:
                # as much as a slow line carries meanwhile, so that the first token is not held up behind it
                afforded = int((time.monotonic() - started) * EARLY_BYTES // self.codec.token_bytes)
                held = await self._send_memory(text, held, min(text.record.length, hello.held + afforded))
        session.ready, session.steps = True, None
        self._count(session, 0)
        self.metrics.tokens_committed += len(text.tokens) - total
        logger.info("session %d: read in %.2f s", session.number, time.monotonic() - started)
        return held

    # -- rounds --------------------------------------------------------------------------------------------------------

    async def _round(self, session: Session, message: Verify | Adopt) -> None:
        arrived = time.monotonic()
        async with session.lock:
            if session.dropped or session.connection is not self:
                raise Refusal("session", "another connection has this session now")
            if message.round == session.round and session.reply is not None:
                self.metrics.rounds_repeated += 1
                reply = session.reply
                if message.base != reply.base:
                    raise Refusal("session", f"round {message.round} was about another place in the text")
            else:
                reply = await self._new_round(session, message)
                self.metrics.saw_round(time.monotonic() - arrived)
        held = session.reply_held
        await self._answer(session, reply, held)

    async def _new_round(self, session: Session, message: Verify | Adopt) -> Committed:
        text = session.text
        if message.round != session.round + 1:
            raise Refusal("session", f"the next round is {session.round + 1}, not {message.round}")
        if text.passes is None:
            raise Refusal("session", "this text was finished before it came here")
        if isinstance(message, Adopt):
            fits = session.hello.prompt <= message.base <= len(text.tokens)
            if not fits or message.prefix != PrefixDigest(text.tokens[: message.base]).digest():
                raise Refusal("session", "the client's text is not the server's")
        elif message.base != len(text.tokens) or message.prefix != text.digest.digest():
            raise Refusal("session", "the client's text is not the server's")
        elif text.finished:
            raise Refusal("session", "this text is finished")
        if max(message.tokens, default=0) >= self.models.vocab_size:
            raise ProtocolError(f"token ids go up to {self.models.vocab_size - 1}")
        base, held, started = message.base, min(text.record.length, message.base - 1), time.monotonic()
        if isinstance(message, Adopt):
            if base + len(message.tokens) > text.max_length:
                raise ProtocolError("there is no room for so many tokens")
            await self._work(lambda: text.adopt(base, message.tokens))
            accepted = 0
            self.metrics.tokens_adopted += len(message.tokens)
        else:
            draft = _draft(message, self.limits.nodes)
            accepted = await self._wait_for(self.models.judging.verify(text, draft))
            self.metrics.tokens_drafted += len(draft)
            self.metrics.tokens_accepted += accepted
            self.metrics.tokens_committed += len(text.tokens) - base
        reply = Committed(
            session.name,
            message.round,
            base,
            text.tokens[base:],
            accepted,
            held if text.finished else text.record.length,
            text.finished,
            time.monotonic() - started,
        )
        session.round, session.reply, session.reply_held = message.round, reply, held
        self._count(session, session.counted_calls)
        return reply

    def _count(self, session: Session, before: int) -> None:
        self.metrics.target_calls += session.text.calls - before
        session.counted_calls = session.text.calls

    async def _answer(self, session: Session, reply: Committed, held: int) -> None:
        """Sends tokens at once, then the memory from `held` on."""
        await self._send(reply)
        await self._send_memory(session.text, held, reply.held)

    async def _send_memory(self, text: RemoteText, held: int, wanted: int) -> int:
        """Sends memory from token `held` on, to `wanted`; returns how many tokens the client holds then."""
        at_once = max(1, MAX_CHUNK // max(1, self.codec.token_bytes))
        for start in range(held, wanted, at_once):
            end = min(start + at_once, wanted)
            data = await self._work(lambda s=start, e=end: self.codec.encode(text.vectors(s, e)))
            self.metrics.memory_bytes += len(data)
            await self._send(Memory(start, end - start, data))
        return max(held, wanted)

    # -- the line ------------------------------------------------------------------------------------------------------

    async def _work(self, job: Callable[[], Result], sign: Working = Working()) -> Result:  # noqa: B008 - frozen
        """Runs model work in the worker."""
        return await self._wait_for(asyncio.get_running_loop().run_in_executor(self.models.worker, job), sign)

    async def _wait_for(self, future: "asyncio.Future[Result]", sign: Working = Working()) -> Result:  # noqa: B008
        """Sends signs of life until the work is done. Work that has begun is always finished."""
        while True:
            done, _ = await asyncio.wait({future}, timeout=self.limits.heartbeat_seconds)
            if done:
                return future.result()
            with contextlib.suppress(WebSocketDisconnect):
                await self._send(sign)

    async def _receive(self, seconds: float, problem: str) -> Hello | Verify | Adopt | Bye:
        try:
            event = await asyncio.wait_for(self.websocket.receive(), seconds)
        except TimeoutError:
            raise Refusal("session", f"{problem} for {seconds:g} s") from None
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code", 1006))
        return decode_from_client(event.get("bytes"))

    async def _send(self, message: Message) -> None:
        """
        Raises:
            WebSocketDisconnect: the client is gone.
        """
        if self.gone:
            raise WebSocketDisconnect(1006)
        try:
            await asyncio.wait_for(self.websocket.send_bytes(encode(message)), SEND_SECONDS)
        except (RuntimeError, OSError, TimeoutError, WebSocketDisconnect) as error:
            self.gone = True
            raise WebSocketDisconnect(1006) from error

    async def send_away(self) -> None:
        """The server's time is up; the client may come back to another, or later."""
        await self._refuse(Refused("leaving", "the server is shutting down", self.limits.retry_seconds))

    async def _refuse(self, refused: Refused) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            await self._send(refused)
        await self._close(CLOSE_CODES[refused.reason])

    async def _close(self, code: int) -> None:
        self.gone = True
        with contextlib.suppress(RuntimeError, OSError, WebSocketDisconnect, TimeoutError):
            await asyncio.wait_for(self.websocket.close(code), 5)


_closing: set["asyncio.Task[None]"] = set()  # keeps tasks alive until they are done


def _draft(message: Verify, most: int) -> Draft:
    """
    Raises:
        ProtocolError: the nodes are no tree, or too many.
    """
    count = len(message.tokens)
    if count > most:
        raise ProtocolError(f"a draft has at most {most} tokens, not {count}")
    parents = message.parents or list(range(-1, count - 1))
    if len(parents) != count or any(parent >= node for node, parent in enumerate(parents)):
        raise ProtocolError("every drafted token needs a parent that comes before it")
    if len(set(zip(parents, message.tokens, strict=True))) != count:
        raise ProtocolError("two drafted tokens with one parent are the same")
    return Draft(list(message.tokens), list(parents), [0.0] * count, ["drafter"] * count)
