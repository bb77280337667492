"""The client: drafts here, has the target far away judge, and writes on alone while the line is cut.

    client = MoAClient("wss://host:8040", drafter, tokenizer, token="...")
    for event in client.generate("Why is the sky blue?"):
        ...

Knows when to draft, ask, write alone and reconcile. What is said how is messages', how a line comes about is line's.
"""

import copy
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedTokenizerBase
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection

from ..generation.costs import TREE_BREADTH
from ..generation.draft import Draft
from ..generation.experience import Experience
from ..generation.experience import Memory as Learnt
from ..generation.lookup import RowLookup
from ..generation.options import DraftOptions
from ..generation.policy import AutoPolicy, FixedPolicy
from ..generation.sources import DraftPlan
from ..modeling_moa import MoADrafterForCausalLM
from .client_memory import NoDrafts, OfflineWriter, RemoteMemory
from .events import Confirmed, Event, Finished, Kept, LineState, Progress, Token, Withdrawn
from .identity import drafter_identity
from .line import (
    Address,
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
from .memory_codec import MemoryCodec, vector_widths
from .messages import (
    VERSION,
    Adopt,
    Bye,
    Committed,
    Hello,
    Memory,
    MemoryFormat,
    PrefixDigest,
    ProtocolError,
    Sampling,
    Verify,
    Welcome,
    Working,
    encode,
)
from .pace import LineCosts, RoundTrip, drafting_seconds

Policy = Literal["revise", "keep"]


class MoAClient:
    """A drafter here and a server there. One client may run several generations, also from several threads.

    Args:
        url: "ws://host:port" or "wss://host:port".
        drafter: a standalone one, or one attached to a target that is here as well.
        tokenizer: needed for prompts that are text, and for the ends of texts; None: token ids only.
        token: bearer token, if the server wants one.
        memory: how memory travels: "int8" is smallest, "float32" as if both halves were on one machine. "none": not at
            all; drafts are only looked up in the text.
        ca_file: certificates to trust instead of the system's.
        allow_insecure: send the token without TLS to another machine.
        cut_after: seconds of silence after which the line counts as cut; more where the measured round trip says so.
        connect_timeout: seconds in which the server must answer for the first time.

    Raises:
        ValueError: the address is none, or the drafter knows no target.
        FileNotFoundError: there is no such ca_file.
    """

    def __init__(
        self,
        url: str,
        drafter: MoADrafterForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        token: str | None = None,
        memory: MemoryFormat = "int8",
        ca_file: str | None = None,
        allow_insecure: bool = False,
        cut_after: float = 3.0,
        connect_timeout: float = 10.0,
    ):
        self.address = Address(url, token, ca_file, allow_insecure, cut_after)
        try:
            drafter.lent  # noqa: B018 - raises when there is nothing
        except RuntimeError as error:
            raise ValueError(
                "This drafter has no embeddings and head of its own. A client needs a standalone one: "
                "`moa serve --export-client FOLDER` writes it, as does drafter.save_pretrained(..., standalone=True)."
            ) from error
        if memory not in get_args(MemoryFormat):
            raise ValueError(f"memory must be one of {', '.join(get_args(MemoryFormat))}, not {memory!r}")
        self.drafter = drafter.eval()
        self.tokenizer, self.memory, self.connect_timeout = tokenizer, memory, connect_timeout
        self.identity = drafter_identity(drafter)
        self.widths = vector_widths(drafter.config)
        self.learnt = Learnt()  # how drafts have been doing, from text to text
        self._level_seconds: tuple[float, float] | None = None
        self._lock = threading.Lock()

    def at(self, url: str) -> "MoAClient":
        """The same client for another address of its server."""
        other = copy.copy(self)
        other.address = replace(self.address, url=url)
        return other

    def new_memory(self) -> RemoteMemory:
        """What a text's drafts are made from."""
        return NoDrafts(self.drafter) if self.memory == "none" else RemoteMemory(self.drafter)

    def level_seconds(self) -> tuple[float, float]:
        """What drafting a level of a chain and of a tree takes here; measured once."""
        with self._lock:
            if self._level_seconds is None:
                self._level_seconds = drafting_seconds(self.new_memory(), self.widths, TREE_BREADTH)
            return self._level_seconds

    def generate(
        self,
        prompt: str | Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        policy: Policy = "revise",
        offline: bool = True,
        offline_no_repeat_ngram_size: int = 0,
        start_offline: bool = False,
        patience: float = 60.0,
        num_assistant_tokens: int = 12,
        draft_breadth: int = 4,
        draft_nodes: int = 32,
        prompt_lookup_num_tokens: int = 16,
        draft_policy: Literal["auto", "fixed"] = "auto",
    ) -> "ClientGeneration":
        """Begins a generation; nothing happens until its events are iterated over.

        Args:
            prompt: a user's message, put through the chat template where there is one, or token ids.
            temperature: 0 is greedy. Sampling is done by the server, so that the text has the target's distribution.
            eos_token_ids: ends of the text; None: what the tokenizer and the drafter's configuration say.
            policy: what becomes of provisional tokens when the line is back. "revise": the target judges them, and
                those it would not have written are withdrawn. "keep": they stand, and the text is not exact.
            offline: write on alone while the line is cut.
            offline_no_repeat_ngram_size: provisional tokens never repeat so many of the answer's tokens in a row; 0
                lets them. A drafter alone soon runs in circles. What the target writes is not touched.
            start_offline: begin alone when there is no server, instead of raising.
            patience: seconds to wait for the server once nothing is left to be written alone.
            num_assistant_tokens, draft_breadth, draft_nodes, prompt_lookup_num_tokens, draft_policy: as for
                `target.generate`. "auto" weighs what a draft promises against what line, server and drafter take, as
                measured all the time; the others are its upper limits.

        Raises:
            ValueError: an argument is impossible.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        _check_sampling(sampling)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}")
        options = DraftOptions(
            num_assistant_tokens, 0.0, draft_breadth, draft_nodes, prompt_lookup_num_tokens, draft_policy
        )
        if not isinstance(offline_no_repeat_ngram_size, int) or offline_no_repeat_ngram_size < 0:
            given = repr(offline_no_repeat_ngram_size)
            raise ValueError(f"offline_no_repeat_ngram_size must be a whole number of at least 0, not {given}")
        if policy not in ("revise", "keep"):
            raise ValueError(f'policy must be "revise" or "keep", not {policy!r}')
        tokens = self._tokens(prompt)
        limit = self.drafter.config.max_position_embeddings
        if len(tokens) + max_new_tokens > limit:
            raise ValueError(
                f"The prompt's {len(tokens)} tokens and {max_new_tokens} new ones exceed the context of {limit}"
            )
        eos = self._eos() if eos_token_ids is None else sorted(set(eos_token_ids))
        return ClientGeneration(
            self,
            tokens,
            max_new_tokens,
            sampling,
            eos,
            policy,
            offline,
            offline_no_repeat_ngram_size,
            start_offline,
            patience,
            options,
        )

    def _tokens(self, prompt: str | Sequence[int] | torch.Tensor) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("A prompt that is text needs a tokenizer: give the client one, or pass token ids")
            if self.tokenizer.chat_template:
                message = [{"role": "user", "content": prompt}]
                ids: Any = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
                tokens = list(ids["input_ids"])
            else:
                tokens = list(self.tokenizer(prompt)["input_ids"])
        else:
            tokens = torch.as_tensor(prompt).reshape(-1).tolist()
        size = self.drafter.config.vocab_size
        if not tokens or not all(isinstance(token, int) and 0 <= token < size for token in tokens):
            raise ValueError(f"A prompt is one or more token ids from 0 to {size - 1}")
        return tokens

    def _eos(self) -> list[int]:
        ids = self.drafter.config.eos_token_id
        found = set(ids if isinstance(ids, list) else [ids])
        found.add(self.tokenizer.eos_token_id if self.tokenizer is not None else None)
        return sorted(token for token in found if token is not None)


class ClientGeneration:
    """One text. Iterate over it once for its events; `stop` may be called from any thread.

    Attributes:
        target_calls: rounds that the server has answered.
        drafted, accepted: levels drafted in them, and how many of these the target would have written.
        bytes_up, bytes_down: of messages, in rounds only.
    """

    def __init__(
        self,
        client: MoAClient,
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
        self.max_new_tokens, self.policy, self.options = max_new_tokens, policy, options
        self.writes_offline, self.start_offline, self.patience = offline, start_offline, patience
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.max_length = len(prompt) + max_new_tokens
        self.codec = MemoryCodec(client.widths, client.memory)

        self.final = list(prompt)  # tokens that will not change any more
        self.digest = PrefixDigest(prompt)
        self.provisional: list[int] = []
        self.kept = 0  # tokens that stand without having been judged
        self.adopting: tuple[int, list[int]] | None = None  # round and tokens of an Adopt without an answer yet
        self.finished: Literal["eos", "length"] | None = None
        self.memory = client.new_memory()
        self.lookup = RowLookup(self.final, None)
        self.looked_at = len(self.final)  # tokens that lookup knows
        self.drafting: AutoPolicy | FixedPolicy | None = None
        self.costs: LineCosts | None = None
        self.experience: Experience = client.learnt.experience()
        self.writer: OfflineWriter | None = None

        self.line: Line | None = None
        self.connection: ClientConnection | None = None
        self.welcome: Welcome | None = None
        self.round = 0
        self.is_offline = False
        self.refused: ServerRefused | None = None
        self.last_error: Exception | None = None
        self.round_trip = RoundTrip()
        self.drafted = self.accepted = 0
        self.target_calls = 0
        self.bytes_up = self.bytes_down = 0
        self._stopped = threading.Event()
        self._seed = random.getrandbits(32) if sampling.seed is None else sampling.seed

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
            self.client.learnt.remember(self.experience)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _write(self) -> Iterator[Event]:
        began = time.monotonic()
        waiting_since: float | None = None
        while True:
            yield from self._take_in()
            if self.finished and not self.provisional:
                yield Finished(self.finished, self.kept == 0)
                return
            if self._stopped.is_set():
                yield Finished("stopped", self.kept == 0 and not self.provisional)
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
            if self.is_offline and self._may_write_offline():
                waiting_since = None
                yield self._write_offline()
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

    def _no_server(self) -> str:
        error = self.last_error
        cause = f": {error or type(error).__name__}" if error is not None else ""
        return (
            f"No server at {self.client.address.url} within {self.client.connect_timeout:g} s{cause}. Start one with "
            "`moa serve`, or write without one (start_offline=True, moa chat --offline)."
        )

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
            if message.token_bytes != self.codec.token_bytes:
                raise ProtocolError(f"memory of {message.token_bytes} bytes per token, not {self.codec.token_bytes}")
            self.welcome = message
            self._plan_drafts(message)
        elif isinstance(message, Working):
            if message.total:
                yield Progress(message.done, message.total)
        elif isinstance(message, Committed):
            self.round = message.round
            adopting, self.adopting = self.adopting, None
            if adopting is not None and adopting[0] == message.round:
                yield from self._adopted(adopting[1], message)
            else:
                yield from self._committed(message.base, message.tokens)
            if message.finished and message.base + len(message.tokens) == len(self.final):
                self.finished = message.finished
        elif isinstance(message, Memory):
            self._remember(message)

    def _plan_drafts(self, welcome: Welcome) -> None:
        """Decides by what this server can do and how long it takes."""
        options = replace(self.options, draft_nodes=min(self.options.draft_nodes or 1, welcome.max_nodes))
        chains_only = not welcome.trees
        if options.draft_policy == "fixed":
            self.drafting = FixedPolicy(options, chains_only)
            return
        assert self.line is not None, "it has just brought the welcome"
        line = self.line.welcome_seconds if self.costs is None else self.costs.line
        self.costs = LineCosts(dict(welcome.pass_seconds), *self.client.level_seconds(), observe=0.0, line=line)
        self.drafting = AutoPolicy(options, chains_only, 1, self.costs, self.experience)

    def _remember(self, message: Memory) -> None:
        """Takes in memory of tokens that this text has and whose memory it lacks."""
        try:
            vectors = self.codec.decode(message.data, message.count)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        held = self.memory.held
        if message.start > held:
            raise ProtocolError(f"memory from token {message.start} on, where {held} are held")
        # never of the last token of all, which whatever is written next goes on from
        known = len(self.final) if self.provisional else len(self.final) - 1
        end = min(message.start + message.count, known)
        if end > held:
            self.memory.take(self.final[held:end], [v[held - message.start : end - message.start] for v in vectors])
            self.writer = None

    def _committed(self, base: int, tokens: list[int]) -> Iterator[Event]:
        """Makes tokens final and reconciles what was written alone with them."""
        known = len(self.final) - base
        if known < 0 or base < len(self.prompt) or self.final[base : base + len(tokens)] != tokens[:known]:
            raise ProtocolError("the server's text is not this one")
        confirmed = 0
        first = len(self.final)
        for token in tokens[known:]:
            if self.provisional and self.provisional[0] == token:
                self.provisional.pop(0)
                confirmed += 1
            elif self.provisional and self.policy == "keep":
                break  # what was written alone stands: the server will be told
            else:
                if confirmed:
                    yield self._confirmed(first, confirmed)
                    confirmed = 0
                if self.provisional:
                    yield Withdrawn(self._position(len(self.final)), len(self.provisional))
                    self.provisional.clear()
                yield Token(self._position(len(self.final)), token, "verified")
            self._append([token])
        if confirmed:
            yield self._confirmed(first, confirmed)

    def _confirmed(self, first: int, count: int) -> Confirmed:
        return Confirmed(self._position(first), count)

    def _append(self, tokens: list[int]) -> None:
        self.final += tokens
        self.digest.extend(tokens)
        self.writer = None

    def _position(self, index: int) -> int:
        return index - len(self.prompt)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _round(self) -> Iterator[Event]:
        """Asks the server once and takes in its answer."""
        began = time.monotonic()
        adopting = list(self.provisional) if self.policy == "keep" else []
        message: Verify | Adopt
        draft, plan = Draft(), DraftPlan(0)
        connection, welcome = self.connection, self.welcome
        assert connection is not None, "rounds begin once the line is ready"
        assert welcome is not None
        session, base = welcome.session, len(self.final)
        if adopting:
            message = Adopt(session, self.round + 1, base, self.digest.digest(), adopting)
            self.adopting = (message.round, adopting)
        else:
            draft, plan = self._draft(welcome)
            parents = [] if draft.is_chain else draft.parents
            message = Verify(session, self.round + 1, base, self.digest.digest(), draft.tokens, parents)
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
            self._learn(plan, draft, reply, asked - began, time.monotonic() - asked)

    def _learn(self, plan: DraftPlan, draft: Draft, reply: Committed, drafting: float, seconds: float) -> None:
        """Takes in how a round went: seconds of drafting, and of the server's answer with all that came with it."""
        self.round_trip.saw(seconds)
        self.drafted += max(draft.depths, default=0)
        self.accepted += reply.accepted
        if self.costs is not None:
            self.costs.saw_round(1 + len(draft), seconds, reply.seconds)
        if self.drafting is not None:
            children, path = draft.children(), [-1]
            for token in reply.tokens:
                if (path[-1], token) not in children:
                    break
                path.append(children[path[-1], token])
            self.drafting.learn(plan, [draft], [path[1:]], (drafting, seconds))

    def _adopted(self, tokens: list[int], reply: Committed) -> Iterator[Event]:
        if reply.base != len(self.final) or reply.tokens != tokens or self.provisional[: len(tokens)] != tokens:
            raise ProtocolError("other tokens were adopted than were sent")
        yield Kept(self._position(len(self.final)), len(tokens))
        del self.provisional[: len(tokens)]
        self.kept += len(tokens)
        self._append(tokens)

    def _draft(self, welcome: Welcome) -> tuple[Draft, DraftPlan]:
        """What was written alone, if anything was; else what lookup finds and the drafter makes of its memory."""
        room = self.max_length - len(self.final) - 1
        depth = min(room, welcome.max_depth)
        if self.provisional or depth < 1:
            return Draft.chain(self.provisional[: min(depth, welcome.max_nodes)]), DraftPlan(0)
        assert self.drafting is not None, "a welcome comes before the first round"
        self.lookup.learn(self.final[self.looked_at :])
        self.looked_at = len(self.final)
        found = self.lookup.draft(min(self.drafting.lookup_tokens(), depth, welcome.max_nodes))
        plan = self.drafting.plan([found])
        plan = replace(plan, levels=min(plan.levels, depth), nodes=min(plan.nodes, welcome.max_nodes))
        drafted = Draft()
        if plan.levels:
            self.memory.follow(self.final)
            with torch.no_grad():
                drafted = self.memory.draft(plan)[0]
        return self.drafting.choose(plan, [drafted.limited(depth)], [found])[0].best(welcome.max_nodes), plan

    # -- without a line ------------------------------------------------------------------------------------------------

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

    def _may_write_offline(self) -> bool:
        if not self._met or not self.writes_offline:
            return False
        last = self.provisional[-1] if self.provisional else None
        return last not in self.eos and len(self.final) + len(self.provisional) < self.max_length

    def _write_offline(self) -> Token:
        if self.writer is None:
            text = self.final + self.provisional
            self.writer = OfflineWriter(
                self.memory,
                text,
                self.sampling,
                self.client.widths,
                self._seed,
                len(self.prompt),
                self.no_repeat_ngram_size,
                RowLookup(text, None) if self.options.prompt_lookup_num_tokens else None,
            )
            if self.writer.lookup is not None:
                self.writer.lookup.odds = self.lookup.odds
        token = self.writer.write()
        self.provisional.append(token)
        return Token(self._position(len(self.final) + len(self.provisional) - 1), token, "provisional")

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


def _check_sampling(sampling: Sampling) -> None:
    """
    Raises:
        ValueError: a value is impossible.
    """
    checks = {
        "temperature": 0 <= sampling.temperature <= 100,
        "top_k": isinstance(sampling.top_k, int) and sampling.top_k >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "repetition_penalty": 0.01 <= sampling.repetition_penalty <= 100,
        "seed": sampling.seed is None or 0 <= sampling.seed < 1 << 62,
    }
    for name, fits in checks.items():
        if not fits:
            raise ValueError(f"{name} cannot be {getattr(sampling, name)!r}")
