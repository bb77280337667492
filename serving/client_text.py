"""A text as the client has it: what is settled, what was written alone, and how the two are reconciled.

Knows the policies. Does not know connections, rounds or drafts.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from .events import Confirmed, Event, Kept, Token, Withdrawn
from .messages import Committed, PrefixDigest, ProtocolError

# what becomes of provisional tokens that the target would not have written: they are withdrawn, or they stand
Policy = Literal["revise", "keep"]


class ClientText:
    """
    Positions in events count from the first token after the prompt.

    Args:
        prompt: token ids.
        max_new_tokens: how many may follow.

    Attributes:
        final: the prompt and the tokens that will not change any more.
        provisional: tokens that follow them, written alone and not judged yet.
        kept: how many of `final` stand without having been judged.
        finished: why `final` is the whole text; None while it is not.
        max_length: tokens at most, the prompt's included.
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, policy: Policy):
        self.policy = policy
        self.prompt_length, self.max_length = len(prompt), len(prompt) + max_new_tokens
        self.final = list(prompt)
        self.provisional: list[int] = []
        self.kept = 0
        self.finished: Literal["eos", "length"] | None = None
        self._digest = PrefixDigest(prompt)

    @property
    def exact(self) -> bool:
        """Whether every token is one that the target would have written."""
        return self.kept == 0 and not self.provisional

    def digest(self) -> bytes:
        """Of `final`."""
        return self._digest.digest()

    def ended(self, eos: Sequence[int]) -> bool:
        """Whether nothing more can be written alone."""
        if self.provisional and self.provisional[-1] in eos:
            return True
        return len(self.final) + len(self.provisional) >= self.max_length

    def write_alone(self, token: int) -> Token:
        """Adds a provisional token."""
        self.provisional.append(token)
        return Token(self._position(len(self.final) + len(self.provisional) - 1), token, "provisional")

    def commit(self, base: int, tokens: list[int]) -> Iterator[Event]:
        """Makes tokens final, which the target wrote after the first `base` ones, and reconciles with them what was
        written alone.

        Raises:
            ProtocolError: they belong to another text.
        """
        known = len(self.final) - base
        if known < 0 or base < self.prompt_length or self.final[base : base + len(tokens)] != tokens[:known]:
            raise ProtocolError("the server's text is not this one")
        confirmed = 0
        first = self._position(len(self.final))
        for token in tokens[known:]:
            if self.provisional and self.provisional[0] == token:
                self.provisional.pop(0)
                confirmed += 1
            elif self.provisional and self.policy == "keep":
                break  # what was written alone stands: the server will be told
            else:
                if confirmed:
                    yield Confirmed(first, confirmed)
                    confirmed = 0
                position = self._position(len(self.final))
                if self.provisional:
                    yield Withdrawn(position, len(self.provisional))
                    self.provisional.clear()
                yield Token(position, token, "verified")
            self._settle([token])
        if confirmed:
            yield Confirmed(first, confirmed)

    def adopt(self, tokens: list[int], reply: Committed) -> Iterator[Event]:
        """Makes provisional tokens final that the server was told to take over.

        Raises:
            ProtocolError: it took over others.
        """
        if reply.base != len(self.final) or reply.tokens != tokens or self.provisional[: len(tokens)] != tokens:
            raise ProtocolError("other tokens were adopted than were sent")
        yield Kept(self._position(len(self.final)), len(tokens))
        del self.provisional[: len(tokens)]
        self.kept += len(tokens)
        self._settle(tokens)

    def _settle(self, tokens: list[int]) -> None:
        self.final += tokens
        self._digest.extend(tokens)

    def _position(self, index: int) -> int:
        return index - self.prompt_length
