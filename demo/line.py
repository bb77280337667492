"""One text over a bad line: the real client, server and link emulator in this process, and what a watcher sees.

Knows serving's events and how they add up to counters and marked tokens. Does not know the page. A server, a line and a
client are made for each text and are gone after it, so visitors share the models and nothing else.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..generation.marks import MarkedText
from ..serving.client import MoAClient
from ..serving.client_generation import ClientGeneration
from ..serving.events import Confirmed, Event, Finished, LineState, Token, Transcript, Withdrawn
from ..serving.link import Conditions, Link, Profile
from ..serving.server import MoAServer, serve_in_thread
from ..serving.sessions import Limits
from .plain_api import PlainClient, PlainText, add_plain_route

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM

_LIMITS = Limits(sessions=1, drain_seconds=0.2)
_REFRESH_SECONDS = 0.2
_SILENCE = 10.0  # seconds; a cut resets the connection, so only a machine that is very busy is silent for so long
_PATIENCE = 120.0  # seconds that a finished offline text waits for the line


@dataclass
class OverTheLine:
    """A text being written over a line.

    Attributes:
        confirmed: positions written offline that the target confirmed.
        withdrawn: what was taken back: where it stood, and its tokens.
        calls_while_cut: the server's answers between a cut and the reconnection.
        line: "connecting", "connected" or "offline": what the phone knows of it.
        cut: somebody has cut the line and not restored it.
        reason: why it ended, None while it goes on; see `serving.events.Finished`.
        plain: the same text from a plain streaming API, over a line of its own that is cut at the same time.
        plain_bytes_up, plain_bytes_down: over that line.
    """

    transcript: Transcript = field(default_factory=Transcript)
    confirmed: set[int] = field(default_factory=set)
    withdrawn: list[tuple[int, list[int]]] = field(default_factory=list)
    line: str = "connecting"
    cut: bool = False
    target_calls: int = 0
    calls_while_cut: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    reason: str | None = None
    exact: bool = False
    plain: PlainText = field(default_factory=PlainText)
    plain_bytes_up: int = 0
    plain_bytes_down: int = 0

    @property
    def provisional(self) -> int:
        return self.transcript.states.count("provisional")

    @property
    def calls_per_100_tokens(self) -> float | None:
        """Target calls for every 100 tokens that are final."""
        final = len(self.transcript.tokens) - self.provisional
        return 100 * self.target_calls / final if final else None

    def add(self, event: Event) -> None:
        """Takes in one event."""
        if isinstance(event, Withdrawn):
            self.withdrawn.append((event.position, self.transcript.tokens[event.position :]))
        self.transcript.add(event)
        if isinstance(event, Confirmed):
            self.confirmed |= set(range(event.position, event.position + event.count))
        elif isinstance(event, LineState):
            self.line = event.state
        elif isinstance(event, Finished):
            self.reason, self.exact = event.reason, event.exact

    def marks(self, tokenizer: "PreTrainedTokenizerBase") -> MarkedText:
        """The text so far; what was withdrawn is struck out where it stood."""
        text = MarkedText(tokenizer)
        gone: dict[int, list[list[int]]] = {}
        for position, tokens in self.withdrawn:
            gone.setdefault(position, []).append(tokens)
        for position, (token, state) in enumerate(zip(self.transcript.tokens, self.transcript.states, strict=True)):
            for tokens in gone.pop(position, []):
                text.add_withdrawn(tokens)
            kind = "confirmed" if position in self.confirmed else state
            text.add(token, "verified" if kind == "kept" else kind)
        for tokens in (tokens for position in sorted(gone) for tokens in gone[position]):
            text.add_withdrawn(tokens)
        if self.reason is not None:
            text.finish()
        return text

    def plain_marks(self, tokenizer: "PreTrainedTokenizerBase") -> MarkedText:
        """What the plain client has: all of it the target's."""
        text = MarkedText(tokenizer)
        for token in list(self.plain.token_ids):
            text.add(token, "verified")
        if self.plain.ended:
            text.finish()
        return text


def conditions(round_trip_ms: float, down_mbit: float, up_mbit: float) -> Profile:
    """A line whose round trip varies by a quarter, as the presets' do; 0 Mbit/s is no limit."""
    return Profile((Conditions(round_trip_ms, round_trip_ms / 4, down_mbit, up_mbit),))


class Lines:
    """The two clients' lines, which are cut and restored together. Safe with several threads."""

    def __init__(self, moa: Link, plain: Link, generation: ClientGeneration, plain_client: PlainClient):
        self.moa, self.plain, self.generation, self.plain_client = moa, plain, generation, plain_client
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True
        self.moa.cut("refused")
        self.plain.cut("refused")

    def restore(self) -> None:
        self.is_cut = False
        self.moa.restore()
        self.plain.restore()

    def stop(self) -> None:
        """Ends both texts."""
        self.generation.stop()
        self.plain_client.stop()


def write_over_line(
    target: "PreTrainedModel",
    drafter: "MoADrafterForCausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    profile: str | Profile,
    max_new_tokens: int,
    *,
    cut_after: int = 0,
    reconnect_after: int = 0,
    began: Callable[[Lines], None] = lambda lines: None,
) -> Iterator[OverTheLine]:
    """Writes a greedy answer over an emulated line, and yields how far it is a few times a second.

    A plain client asks the same server for the same text at the same time; both take turns with the one target.

    Args:
        profile: of each line, or a profile's name in `serving.link.PROFILES`.
        cut_after: cuts both lines by itself after so many tokens; 0: only when somebody calls `Lines.cut`.
        reconnect_after: restores such a cut after so many provisional tokens, or when the text is at its end.
        began: is told the lines, to cut, restore and stop them from other threads.

    Raises:
        ValueError: the prompt does not fit.
        WrongTargetError: this target cannot be served.
    """
    server = MoAServer(target, drafter, _LIMITS)
    add_plain_route(server)
    with serve_in_thread(server) as url:
        address = urlsplit(url)
        host, port = str(address.hostname), int(address.port or 0)
        with Link(host, port, profile) as link, Link(host, port, profile) as plain_link:
            client = MoAClient(f"ws://127.0.0.1:{link.port}", drafter, tokenizer, cut_after=_SILENCE)
            generation = client.generate(prompt, max_new_tokens=max_new_tokens, patience=_PATIENCE)
            plain = PlainClient(plain_link.port, generation.prompt, max_new_tokens, generation.eos)
            lines = Lines(link, plain_link, generation, plain)
            began(lines)
            try:
                yield from _watch(lines, max_new_tokens, cut_after, reconnect_after)
            finally:
                lines.stop()
                plain_link.close()  # wakes a client that waits for its next token
                plain.join()


def _watch(lines: Lines, most: int, cut_after: int, reconnect_after: int) -> Iterator[OverTheLine]:
    generation, link = lines.generation, lines.moa
    seen = OverTheLine(plain=lines.plain_client.text)
    started = shown = time.monotonic()
    calls_at_cut: int | None = None
    cut_by_itself = restored = False
    for event in generation:
        before = seen.line
        seen.add(event)
        seen.cut = lines.is_cut
        now = time.monotonic()
        seen.target_calls, seen.seconds = generation.target_calls, now - started
        seen.bytes_up, seen.bytes_down = link.bytes_up, link.bytes_down
        seen.plain_bytes_up, seen.plain_bytes_down = lines.plain.bytes_up, lines.plain.bytes_down
        if seen.line == "offline":
            if before != "offline":
                calls_at_cut = generation.target_calls
            if calls_at_cut is not None:
                seen.calls_while_cut = generation.target_calls - calls_at_cut
        if cut_after and not cut_by_itself and len(seen.transcript.tokens) >= cut_after:
            cut_by_itself = True
            lines.cut()
        # after the last provisional token nothing more comes until the line is back: it is shown at once
        at_end = isinstance(event, Token) and (len(seen.transcript.tokens) >= most or event.token in generation.eos)
        enough = at_end or (isinstance(event, Token) and seen.provisional >= reconnect_after)
        if cut_by_itself and not restored and reconnect_after and seen.provisional and enough:
            restored = True
            lines.restore()
        if now - shown >= _REFRESH_SECONDS or at_end or isinstance(event, (LineState, Withdrawn, Finished)):
            shown = now
            yield seen
    while not seen.plain.ended and seen.reason != "stopped":
        time.sleep(_REFRESH_SECONDS)
        seen.plain_bytes_up, seen.plain_bytes_down = lines.plain.bytes_up, lines.plain.bytes_down
        yield seen
