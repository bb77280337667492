"""What decoding with a source of drafts has shown so far, and what is handed from call to call.

Knows figures, not what follows from them: that is the policy's business.
"""

import copy
import threading
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from .costs import Costs, measure_costs
from .sources import DraftSource

PROMISES = (0.001, 0.5, 1.5)
"""Bounds of tokens expected of lookup in a round: none, few, about one, and more are four situations."""

_KEPT = 0.95  # of a sum when a round is added: some 20 rounds count
_MEASURED = 0  # in the place of the number of rows: costs as they were measured


@dataclass
class Ratio:
    """A sum over another sum, such as tokens per step, in which what was seen long ago counts less."""

    above: float
    below: float

    @property
    def value(self) -> float:
        return self.above / self.below if self.below else 0.0

    def saw(self, above: float, below: float = 1.0) -> None:
        self.above = _KEPT * self.above + above
        self.below = _KEPT * self.below + below


@dataclass
class Trust:
    """How drafted probabilities compare with what was accepted, by depth (the last entry: that deep or deeper)."""

    claimed: list[float] = field(default_factory=lambda: [4.0] * 4)
    right: list[float] = field(default_factory=lambda: [4.0] * 4)

    def factor(self, depth: int) -> float:
        i = min(depth, len(self.claimed)) - 1
        return self.right[i] / self.claimed[i]

    def saw(self, depth: int, claimed: float, right: float) -> None:
        i = min(depth, len(self.claimed)) - 1
        self.claimed[i] = 0.98 * self.claimed[i] + claimed
        self.right[i] = 0.98 * self.right[i] + right


@dataclass
class Situation:
    """What drafting did where lookup promised about so much. Starts hopeful, so that it gets tried.

    Attributes:
        gain: tokens per round that lookup alone would not have brought.
        cost: plain decoding steps per round that lookup alone would not have taken.
        onward: how much of what a level promised the next one brought, beyond lookup.
    """

    gain: Ratio = field(default_factory=lambda: Ratio(2.0, 3.0))
    cost: Ratio = field(default_factory=lambda: Ratio(0.0, 0.0))
    onward: Ratio = field(default_factory=lambda: Ratio(2.0, 4.0))


@dataclass
class Experience:
    """What calls with one source have learnt; handed from call to call. `speed` is in tokens per plain step."""

    speed: Ratio = field(default_factory=lambda: Ratio(3.0, 3.0))
    situations: list[Situation] = field(default_factory=lambda: [Situation() for _ in range(len(PROMISES) + 1)])
    trust: Trust = field(default_factory=Trust)


class Memory:
    """What is known about one source on one target. Shared by threads.

    Several rows at once cost and gain differently from one: every number of rows has figures of its own, which begin
    with what was measured for one.
    """

    def __init__(self) -> None:
        self._costs: dict[tuple[torch.dtype, str, int], Costs] = {}
        self._experience: dict[int, Experience] = {}
        self._lock = threading.Lock()

    def costs(self, target: PreTrainedModel, source: DraftSource, rows: int) -> tuple[Costs, float]:
        """This call's own copy of the costs, and the seconds it took to measure them now (0 when they were known)."""
        place = (target.dtype, str(target.device))
        with self._lock:
            new = (*place, _MEASURED) not in self._costs
            if new:
                self._costs[*place, _MEASURED] = measure_costs(target, source)
            costs = self._costs.get((*place, rows), self._costs[*place, _MEASURED])
            return replace(costs, passes=dict(costs.passes)), costs.measured_in if new else 0.0

    def remember_costs(self, target: PreTrainedModel, rows: int, costs: Costs) -> None:
        """What the latest call has seen counts: machines change."""
        with self._lock:
            self._costs[target.dtype, str(target.device), rows] = costs

    def experience(self, rows: int = 1) -> Experience:
        """This call's own copy."""
        with self._lock:
            return copy.deepcopy(self._experience.get(rows, Experience()))

    def remember(self, experience: Experience, rows: int = 1) -> None:
        """The latest call's experience counts: texts change."""
        with self._lock:
            self._experience[rows] = experience
