"""One text that a client has written: rounds while there is a line, going on alone while there is none.

Knows when to draft, ask, write alone and give up. How texts are reconciled is client_text's, what is drafted is
client_drafts', what is said how is messages', how a line comes about is line's.
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection

from ..generation.draft import Draft
from ..generation.options import DraftOptions
from ..generation.sources import DraftPlan
from .client_drafts import ClientDrafts
from .client_memory import RemoteMemory
from .client_text import ClientText, Policy
from .events import Event, Finished, LineState, Progress, Token
from .line import (
    Arrived,
    Failed,
    Line,
    Ready,
    Refusal,
    Said,
    ServerRefused,
    ServerUnavailable,
    Trying,
    abandon,
    receive,
)
from .messages import (
    VERSION,
    Adopt,
    Bye,
    Committed,
    Hello,
    Memory,
    ProtocolError,
    Sampling,
    Verify,
    Welcome,
    Working,
    encode,
)
from .pace import RoundTrip

if TYPE_CHECKING:
    from .client import MoAClient


class ClientGeneration:
    """One text. Iterate over it once for its events; `stop` may be called from any thread. `MoAClient.generate` makes
    it, and says what its arguments mean.

    Attributes:
        prompt, eos: token ids.
        target_calls: rounds that the server has answered.
        bytes_up, bytes_down: of messages, in rounds only.
    """

    def __init__(
        self,
        client: "MoAClient",
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        eos: list[int],
        policy: Policy,
        offline: bool,
        no_repeat_ngram_size: int,
        start_offline: bool,
        patience: float,
        options: DraftOptions,
    ):
        self.client, self.prompt, self.sampling, self.eos = client, prompt, sampling, eos
        self.max_new_tokens, self.writes_offline = max_new_tokens, offline
        self.start_offline, self.patience = start_offline, patience
        self.text = ClientText(prompt, max_new_tokens, policy)
        self.drafts = ClientDrafts(client, self.text, sampling, options, no_repeat_ngram_size)

        self.line: Line | None = None
        self.connection: ClientConnection | None = None
        self.welcome: Welcome | None = None
        self.round = 0
        self.adopting: tuple[int, list[int]] | None = None  # round and tokens of an Adopt without an answer yet
        self.is_offline = False
        self.refused: ServerRefused | None = None
        self.last_error: Exception | None = None
        self.target_calls = 0
        self.bytes_up = self.bytes_down = 0
        self._stopped = threading.Event()

    @property
    def final(self) -> list[int]:
        """The prompt and the tokens that will not change any more."""
        return self.text.final

    @property
    def memory(self) -> RemoteMemory:
        """What the server has sent of the text."""
        return self.drafts.memory

    @property
    def round_trip(self) -> RoundTrip:
        """How long rounds take."""
        return self.drafts.round_trip

    @property
    def drafted(self) -> int:
        """Levels drafted in all rounds."""
        return self.drafts.drafted

    @property
    def accepted(self) -> int:
        """How many of these the target would have written."""
        return self.drafts.accepted

    def stop(self) -> None:
        """Ends the text after the token being written."""
        self._stopped.set()
        connection = self.connection
        if connection is not None:
            abandon(connection)

    def __iter__(self) -> Iterator[Event]:
        if self.line is not None:
            raise RuntimeError("A generation can be iterated over once; call generate() again")
        try:
            yield LineState("connecting")
            self._dial()
            yield from self._write()
        finally:
            self._hang_up()
            self.drafts.remember_for_later_texts()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _write(self) -> Iterator[Event]:
        began = time.monotonic()
        waiting_since: float | None = None
        while True:
            yield from self._take_in()
            if self.text.finished and not self.text.provisional:
                yield Finished(self.text.finished, self.text.exact)
                return
            if self._stopped.is_set():
                yield Finished("stopped", self.text.exact)
                return
            if self.connection is not None:
                waiting_since = None
                yield from self._round()
                continue
            if self.welcome is None and not self.start_offline:
                if self.refused is not None:
                    raise self.refused
                if time.monotonic() - began > self.client.connect_timeout:
                    raise ServerUnavailable(self._no_server())
            if self.is_offline and self._may_write_alone():
                waiting_since = None
                yield self._write_alone()
                continue
            now = time.monotonic()
            waiting_since = waiting_since or now
            if self.is_offline and self._met and (self.refused or now - waiting_since > self.patience):
                yield Finished("offline", False)
                return
            time.sleep(0.01)

    @property
    def _met(self) -> bool:
        return self.welcome is not None or self.start_offline

    def _may_write_alone(self) -> bool:
        return self._met and self.writes_offline and not self.text.ended(self.eos)

    def _write_alone(self) -> Token:
        return self.text.write_alone(self.drafts.write_alone())

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _take_in(self) -> Iterator[Event]:
        """Everything that the line has brought so far."""
        while self.line is not None:
            try:
                arrived = self.line.arrived.get_nowait()
            except queue.Empty:
                return
            try:
                yield from self._arrived(arrived)
            except ProtocolError as error:
                yield from self._lost(error)

    def _arrived(self, arrived: Arrived) -> Iterator[Event]:
        if isinstance(arrived, Ready):
            self.connection, self.is_offline = arrived.connection, False
            yield LineState("connected")
        elif isinstance(arrived, Trying):
            self.last_error = arrived.error
            yield from self._gone_offline(arrived.error)
        elif isinstance(arrived, Failed):
            self.last_error = self.refused = arrived.error
            yield from self._gone_offline(arrived.error)
        else:
            yield from self._message(arrived)

    def _message(self, message: Said) -> Iterator[Event]:
        if isinstance(message, Welcome):
            if self.welcome is not None and message.session != self.welcome.session:
                self.adopting = None
            assert self.line is not None, "it has just brought the welcome"
            self.drafts.welcomed(message, self.line.welcome_seconds)
            self.welcome = message
        elif isinstance(message, Working):
            if message.total:
                yield Progress(message.done, message.total)
        elif isinstance(message, Committed):
            self.round = message.round
            adopting, self.adopting = self.adopting, None
            if adopting is not None and adopting[0] == message.round:
                yield from self.text.adopt(adopting[1], message)
            else:
                yield from self.text.commit(message.base, message.tokens)
            if message.finished and message.base + len(message.tokens) == len(self.final):
                self.text.finished = message.finished
        elif isinstance(message, Memory):
            self.drafts.remember(message)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _round(self) -> Iterator[Event]:
        """Asks the server once and takes in its answer."""
        began = time.monotonic()
        adopting = list(self.text.provisional) if self.text.policy == "keep" else []
        message: Verify | Adopt
        draft, plan = Draft(), DraftPlan(0)
        connection, welcome = self.connection, self.welcome
        assert connection is not None, "rounds begin once the line is ready"
        assert welcome is not None
        session, base, digest = welcome.session, len(self.final), self.text.digest()
        if adopting:
            message = Adopt(session, self.round + 1, base, digest, adopting)
            self.adopting = (message.round, adopting)
        else:
            draft, plan = self.drafts.draft(welcome)
            parents = [] if draft.is_chain else draft.parents
            message = Verify(session, self.round + 1, base, digest, draft.tokens, parents)
        frame = encode(message)
        asked = time.monotonic()
        try:
            connection.send(frame)
            self.bytes_up += len(frame)
            reply = None
            while reply is None or self.memory.held < min(reply.held, len(self.final)):
                answer = receive(connection, self.round_trip.patience(self.client.address.cut_after))
                if isinstance(answer, Committed):
                    if answer.round != message.round or answer.base != base:
                        raise ProtocolError("an answer to another round")
                    reply = answer
                yield from self._message(answer)
                self.bytes_down += len(answer.data) if isinstance(answer, Memory) else 0
        except Refusal as refusal:
            if refusal.final:
                self.refused = ServerRefused(str(refusal))
            yield from self._lost(refusal)
            return
        except (OSError, TimeoutError, WebSocketException, ProtocolError) as error:
            yield from self._lost(error)
            return
        self.target_calls += 1
        if not adopting:
            self.drafts.learn(plan, draft, reply, asked - began, time.monotonic() - asked)

    # -- the line ------------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        self.line = Line(self.client.address, self._hello)

    def _hello(self) -> Hello:
        """Called by the line's thread: `final` only grows and memory only follows it, so any moment will do."""
        held = self.memory.held
        final = list(self.final)
        session = self.welcome.session if self.welcome else None
        return Hello(
            VERSION,
            self.client.identity,
            self.client.memory,
            final,
            len(self.prompt),
            self.max_new_tokens,
            self.eos,
            self.sampling,
            session,
            min(held, len(final)),
        )

    def _no_server(self) -> str:
        error = self.last_error
        cause = f": {error or type(error).__name__}" if error is not None else ""
        return (
            f"No server at {self.client.address.url} within {self.client.connect_timeout:g} s{cause}. Start one with "
            "`moa serve`, or write without one (start_offline=True, moa chat --offline)."
        )

    def _lost(self, error: Exception) -> Iterator[Event]:
        """The connection is of no use any more; dials again unless the server has refused."""
        if self.connection is not None:
            abandon(self.connection)
            self.connection = None
        if self.line is not None:
            self.line.give_up()
        self.last_error = error
        yield from self._gone_offline(error)
        if self.refused is None and not self._stopped.is_set():
            self._dial()

    def _gone_offline(self, error: Exception) -> Iterator[Event]:
        if not self.is_offline:
            self.is_offline = True
            yield LineState("offline", str(error) or type(error).__name__)

    def _hang_up(self) -> None:
        """Tells the server, if it can be told, that it need not wait for this text."""
        connection, self.connection = self.connection, None
        farewell = None if self.welcome is None else encode(Bye(self.welcome.session))
        if self.line is not None:
            self.line.give_up(farewell)
            while connection is None and not self.line.arrived.empty():
                arrived = self.line.arrived.get()
                if isinstance(arrived, Ready):
                    connection = arrived.connection
        if connection is None or farewell is None:
            return
        try:
            connection.send(farewell)
            connection.close()
        except (OSError, WebSocketException):
            abandon(connection)
