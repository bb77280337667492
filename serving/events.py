"""What a client's generation tells its reader, event by event, and the text that the events add up to."""

from dataclasses import dataclass, field
from typing import Literal

State = Literal["verified", "provisional", "kept"]


@dataclass(frozen=True)
class Token:
    """A new token at the end of the text. `position` counts from the first token after the prompt.

    "verified": the target chose it. "provisional": written offline, the target has not seen it yet.
    """

    position: int
    token: int
    state: State


@dataclass(frozen=True)
class Confirmed:
    """Provisional tokens that the target would have written too; they are verified now."""

    position: int
    count: int


@dataclass(frozen=True)
class Withdrawn:
    """The text ends at `position` again: `count` provisional tokens are gone, the target's own follow."""

    position: int
    count: int


@dataclass(frozen=True)
class Kept:
    """Provisional tokens that stand by policy "keep" without having been judged."""

    position: int
    count: int


@dataclass(frozen=True)
class LineState:
    """The line to the server changed. `detail` says why, for people."""

    state: Literal["connecting", "connected", "offline"]
    detail: str = ""


@dataclass(frozen=True)
class Progress:
    """The server has read `done` of `total` tokens of the prompt."""

    done: int
    total: int


@dataclass(frozen=True)
class Finished:
    """Nothing follows.

    reason: "eos" or "length", as in plain decoding; "offline": the server did not come back in time, and what is
    provisional stays so; "stopped": by `stop`.
    exact: every token of the text is the target's.
    """

    reason: Literal["eos", "length", "offline", "stopped"]
    exact: bool


Event = Token | Confirmed | Withdrawn | Kept | LineState | Progress | Finished


@dataclass
class Transcript:
    """The text so far, without the prompt, and the state of each token."""

    tokens: list[int] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Takes in one event.

        Raises:
            ValueError: it does not fit the text; an event was left out.
        """
        if isinstance(event, Token):
            self._expect(event.position == len(self.tokens), event)
            self.tokens.append(event.token)
            self.states.append(event.state)
        elif isinstance(event, Withdrawn):
            self._expect(event.position + event.count == len(self.tokens), event)
            self._expect(set(self.states[event.position :]) == {"provisional"}, event)
            del self.tokens[event.position :], self.states[event.position :]
        elif isinstance(event, (Confirmed, Kept)):
            span = slice(event.position, event.position + event.count)
            self._expect(self.states[span] == ["provisional"] * event.count, event)
            self.states[span] = ["verified" if isinstance(event, Confirmed) else "kept"] * event.count

    @staticmethod
    def _expect(fits: bool, event: Event) -> None:
        if not fits:
            raise ValueError(f"{event} does not fit the text so far")
