"""What a round costs a client, line and target together, and when silence means a cut.

How much to draft follows from it: the client decides with the policy that also decides beside the target
(generation/policy.py), only that every pass costs the line's round trip on top. The longer the line, the more is
drafted, and no faster than with its logarithm (arXiv 2606.20591). Knows nothing of drafts or connections.
"""

import time
from dataclasses import dataclass

import torch

from ..generation.costs import Costs
from ..generation.sources import DraftPlan
from .client_memory import RemoteMemory

_CALIBRATION_TOKENS, _LEVELS = 64, 3


@dataclass
class LineCosts(Costs):
    """Costs where the target is far away: what a pass takes there, as the server says, and the line's round trip.

    Attributes:
        line: seconds of a round that are not the target's work.
    """

    line: float = 0.0

    def pass_seconds(self, tokens: int) -> float:
        return self.line + super().pass_seconds(tokens)

    def saw_pass(self, tokens: int, seconds: float) -> None:
        """A policy sees whole rounds; `saw_round` knows what they are made of."""

    def saw_round(self, tokens: int, seconds: float, work: float) -> None:
        """Follows line and server: a round over so many tokens took so long, `work` of it on the server."""
        self.line += (max(seconds - work, 0.0) - self.line) / 4
        self.scale *= min(max(work / max(super().pass_seconds(tokens), 1e-9), 0.5), 2.0) ** 0.2


class RoundTrip:
    """Follows how long rounds take, the server's work included, as TCP does (RFC 6298)."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.variation = 0.0

    def saw(self, seconds: float) -> None:
        if self.seconds is None:
            self.seconds, self.variation = seconds, seconds / 2
        else:
            self.variation += (abs(seconds - self.seconds) - self.variation) / 4
            self.seconds += (seconds - self.seconds) / 8

    def patience(self, least: float) -> float:
        """Seconds of silence after which a line counts as cut."""
        return least if self.seconds is None else max(least, self.seconds + 4 * self.variation)


@torch.no_grad()
def drafting_seconds(memory: RemoteMemory, widths: list[int], tree_breadth: int) -> tuple[float, float]:
    """Seconds of one level of a chain, and of a tree of that breadth; the quicker of two tries.

    Args:
        memory: an empty one, to be thrown away.
        widths: of the vectors that it takes in.
    """
    tokens = [0] * _CALIBRATION_TOKENS
    memory.take(tokens, [torch.zeros(len(tokens), width) for width in widths])
    memory.follow([*tokens, 0])
    best = []
    for breadth, nodes in ((1, _LEVELS), (tree_breadth, 16)):
        tries = []
        for _ in range(2):
            began = time.perf_counter()
            memory.draft(DraftPlan(_LEVELS, breadth, nodes))
            tries.append(time.perf_counter() - began)
        best.append(min(tries) / _LEVELS)
    return best[0], best[1]
