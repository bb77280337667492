"""How much to draft in the next round, and which of the drafted tokens the target shall judge.

`FixedPolicy` does as the options say. `AutoPolicy` goes for tokens per second: it knows what passes and drafts cost
here (costs), keeps count of what was accepted, and chooses between a plain step, lookup alone, a chain and a tree.
Whatever it decides, the output is the same; only the speed changes.
"""

import copy
import math
import threading
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from .costs import TREE_BREADTH, Costs, measure_costs
from .draft import Draft
from .options import DraftOptions
from .sources import DraftPlan, DraftSource

_SHORTEST_WAIT, _LONGEST_WAIT = 8, 128  # rounds between tries of a way of drafting that is behind


class Policy(Protocol):
    def lookup_tokens(self) -> int:
        """The longest draft to look up; 0: none."""
        ...

    def plan(self, found: list[Draft]) -> DraftPlan:
        """What the drafter shall draft, given what lookup found for each row. No levels: do not ask it."""
        ...

    def choose(self, plan: DraftPlan, drafted: list[Draft], found: list[Draft]) -> list[Draft]:
        """What the target judges, per row."""
        ...

    def learn(self, plan: DraftPlan, judged: list[Draft], paths: list[list[int]], seconds: tuple[float, float]) -> None:
        """Takes in how a round went; `seconds` went into drafting and into the target's pass."""
        ...

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only; the others have finished."""
        ...


def together(drafted: Draft, found: Draft, chains_only: bool) -> Draft:
    """Both drafts as one; where only chains can be judged, the one that promises more."""
    if not len(found) or not len(drafted):
        return drafted if len(drafted) else found
    if chains_only:
        return max(drafted.best_chain(), found, key=Draft.expected_tokens)
    return drafted.merged(found)


class FixedPolicy:
    """Every round drafts as the options say, and everything drafted is judged."""

    def __init__(self, options: DraftOptions, chains_only: bool):
        self.chains_only = chains_only
        self.lookup = options.prompt_lookup_num_tokens or 0
        breadth = 1 if chains_only else options.draft_breadth or 1
        levels = options.num_assistant_tokens
        nodes = options.draft_nodes or (levels if breadth == 1 else 8 * breadth)
        self.fixed = DraftPlan(levels, breadth, nodes, options.assistant_confidence_threshold)

    def lookup_tokens(self) -> int:
        return self.lookup

    def plan(self, found: list[Draft]) -> DraftPlan:
        return self.fixed

    def choose(self, plan: DraftPlan, drafted: list[Draft], found: list[Draft]) -> list[Draft]:
        return [together(mine, other, self.chains_only) for mine, other in zip(drafted, found, strict=True)]

    def learn(self, plan: DraftPlan, judged: list[Draft], paths: list[list[int]], seconds: tuple[float, float]) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass


@dataclass
class Arm:
    """One way of doing a round, and how it has been doing. Starts hopeful, so that it gets tried.

    `tokens` that a round yields per row, and what it costs in plain decoding steps: plain decoding has 1 and 1.
    """

    tokens: float
    steps: float
    rounds: int = 0
    wait: int = _SHORTEST_WAIT  # rounds until it is tried again while it is behind

    @property
    def rate(self) -> float:
        return self.tokens / self.steps

    def saw(self, tokens: float, steps: float) -> None:
        self.rounds += 1
        weight = max(1 / (self.rounds + 2), 0.08)
        self.tokens += weight * (tokens - self.tokens)
        self.steps += weight * (steps - self.steps)


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
class Experience:
    """What calls with one source have learnt; handed from call to call."""

    arms: dict[str, Arm] = field(default_factory=dict)
    trust: Trust = field(default_factory=Trust)


class Memory:
    """What is known about one source on one target: costs per dtype and device, and experience. Shared by threads."""

    def __init__(self) -> None:
        self._costs: dict[tuple[torch.dtype, str], Costs] = {}
        self._experience = Experience()
        self._lock = threading.Lock()

    def costs(self, target: PreTrainedModel, source: DraftSource) -> tuple[Costs, float]:
        """This call's own copy of the costs, and the seconds it took to measure them now (0 when they were known)."""
        key = (target.dtype, str(target.device))
        with self._lock:
            new = key not in self._costs
            if new:
                self._costs[key] = measure_costs(target, source)
            costs = self._costs[key]
            return replace(costs, passes=dict(costs.passes)), costs.measured_in if new else 0.0

    def experience(self) -> Experience:
        """This call's own copy. The next text may be of another kind, so it weighs little against what is seen."""
        with self._lock:
            experience = copy.deepcopy(self._experience)
        for arm in experience.arms.values():
            arm.rounds, arm.wait = min(arm.rounds, 4), _SHORTEST_WAIT
        return experience

    def remember(self, experience: Experience) -> None:
        """The latest call's experience counts: texts change, and so do machines."""
        with self._lock:
            self._experience = experience


class AutoPolicy:
    """Chooses what promises most tokens per second; the options are upper limits. Counts time in plain steps."""

    def __init__(self, options: DraftOptions, chains_only: bool, rows: int, costs: Costs, experience: Experience):
        self.costs, self.rows, self.chains_only, self.experience = costs, rows, chains_only, experience
        self.lookup = 16 if options.prompt_lookup_num_tokens is None else options.prompt_lookup_num_tokens
        self.levels = options.num_assistant_tokens
        self.nodes = options.draft_nodes or 32
        self.confidence = options.assistant_confidence_threshold
        self.breadths = {"chain": 1}
        if not chains_only and options.draft_breadth != 1:
            self.breadths["tree"] = options.draft_breadth or TREE_BREADTH
        self.arms = {}
        for name, breadth in self.breadths.items():
            steps = self._pass(4) + self._drafting(3, breadth)
            self.arms[name] = experience.arms.setdefault(f"{name} x{rows}", Arm(1.3 * steps, steps))
        self.due = {name: arm.wait for name, arm in self.arms.items()}
        self.arm: str | None = None
        self.round = 0
        self.spent = 0.0  # on drafting in this round
        self.expected = 1.0  # tokens of this round
        self.pace = [1.5] * rows  # tokens that each row's drafted rounds yield

    def _pass(self, tokens: int) -> float:
        """Cost of a target pass over so many tokens in every row."""
        return self.costs.pass_seconds(tokens * self.rows) / self.costs.pass_seconds(self.rows)

    def _drafting(self, levels: int, breadth: int) -> float:
        return self.costs.drafting_seconds(levels, breadth) / self.costs.pass_seconds(self.rows)

    @property
    def best_rate(self) -> float:
        return max([1.0, *(arm.rate for arm in self.arms.values())])

    def lookup_tokens(self) -> int:
        return self.lookup

    def plan(self, found: list[Draft]) -> DraftPlan:
        self.rows = len(found)
        self.round += 1
        self.arm = self._arm(found)
        if self.arm is None:
            return DraftPlan(0)
        breadth = self.breadths[self.arm]
        # another level is worth it while what it is expected to add beats what its time would yield otherwise; a draft
        # that is likely so far goes on being right with odds of about 0.7
        marginal = self._drafting(1, breadth) - self._drafting(0, breadth) + (self._pass(9) - 1) / 8
        floor = self.best_rate * marginal / max(0.7 * self.experience.trust.factor(2), 0.05)
        return DraftPlan(self.levels, breadth, self.nodes, min(max(floor, self.confidence), 0.9))

    def _arm(self, found: list[Draft]) -> str | None:
        """The drafter's arm to use in this round, or None: lookup alone, or a plain step."""
        name, best = max(self.arms.items(), key=lambda item: item[1].rate)
        if self.round <= (2 if best.rate > 1.0 else 1) and best.rate > 0.8:  # every text gets a chance
            return name
        # a batch is done when its slowest row is
        lag = min(self.pace) / (sum(self.pace) / len(self.pace))
        for other, arm in self.arms.items():
            # where nothing pays, only the least bad is tried now and then
            behind = arm.rate < best.rate if best.rate > 1.0 / lag else arm is best
            if arm.rounds < 3 or (behind and self.round >= self.due[other]):
                arm.wait = min(2 * arm.wait, _LONGEST_WAIT)
                self.due[other] = self.round + arm.wait
                return other
        counts = self._worth([self._chances(draft) for draft in found])
        expected = sum(1 + gain for _, gain in counts) / self.rows
        rate = expected / self._pass(1 + max(count for count, _ in counts))
        return name if best.rate > max(rate, 1.0 / lag) else None

    def choose(self, plan: DraftPlan, drafted: list[Draft], found: list[Draft]) -> list[Draft]:
        self.spent = 0.0
        if plan.levels:
            drawn = max((max(draft.depths, default=0) for draft in drafted), default=0)
            self.spent = self._drafting(min(plan.levels, drawn + 1), plan.breadth)
        both = [together(mine, other, self.chains_only) for mine, other in zip(drafted, found, strict=True)]
        chances = [self._chances(draft) for draft in both]
        worth = self._worth(chances)
        self.expected = 1 + sum(gain for _, gain in worth) / self.rows
        return [_likeliest(d, c, n) for d, c, (n, _) in zip(both, chances, worth, strict=True)]

    def _chances(self, draft: Draft) -> list[float]:
        """Chance that each node is accepted: its path's probabilities, corrected by experience."""
        chances: list[float] = []
        fields = zip(draft.parents, draft.depths, draft.log_probs, draft.origins, strict=True)
        for parent, depth, log_prob, origin in fields:
            odds = math.exp(log_prob)
            if origin == "drafter":
                odds = min(odds * self.experience.trust.factor(depth), 0.98)
            chances.append(odds if parent < 0 else odds * chances[parent])
        return chances

    def _worth(self, chances: list[list[float]]) -> list[tuple[int, float]]:
        """Per row how many of its likeliest nodes to judge, and the tokens they are expected to add.

        A pass costs what its longest row costs, so one number of nodes limits all rows.
        """
        ranked = [sorted(row, reverse=True)[: self.nodes] for row in chances]
        rate = self.best_rate
        best, best_value, gain = 0, -rate, 0.0
        for count in range(1, max((len(row) for row in ranked), default=0) + 1):
            gain += sum(row[count - 1] for row in ranked if len(row) >= count) / self.rows
            value = gain - self._pass(1 + count) * rate
            if value > best_value:
                best, best_value = count, value
        return [(min(best, len(row)), sum(row[:best])) for row in ranked]

    def select(self, rows: list[int]) -> None:
        self.pace = [self.pace[row] for row in rows]

    def learn(self, plan: DraftPlan, judged: list[Draft], paths: list[list[int]], seconds: tuple[float, float]) -> None:
        tokens = 1 + max(len(draft) for draft in judged)
        if self.spent:
            self.costs.saw_drafting(self.spent * self.costs.pass_seconds(self.rows), seconds[0])
        self.costs.saw_pass(tokens * self.rows, seconds[1])
        for draft, path in zip(judged, paths, strict=True):
            self._learn_trust(draft, path)
        if self.arm is not None:
            arm = self.arms[self.arm]
            # what was expected varies less from round to round than what came true; half of each
            seen = sum(1 + len(path) for path in paths) / len(paths)
            arm.saw((seen + self.expected) / 2, self.spent + self._pass(tokens))
            self.pace = [pace + 0.1 * (1 + len(path) - pace) for pace, path in zip(self.pace, paths, strict=True)]
            if arm.rate > 1.0:
                arm.wait = _SHORTEST_WAIT

    def _learn_trust(self, draft: Draft, path: list[int]) -> None:
        """Compares, for every node whose parent was accepted, its claim with what happened."""
        accepted = {-1, *path}
        for node, (parent, depth) in enumerate(zip(draft.parents, draft.depths, strict=True)):
            if parent in accepted and draft.origins[node] == "drafter":
                self.experience.trust.saw(depth, math.exp(draft.log_probs[node]), float(node in accepted))


def _likeliest(draft: Draft, chances: list[float], count: int) -> Draft:
    if count >= len(draft):
        return draft
    ranked = sorted(range(len(draft)), key=lambda node: (-chances[node], node))[:count]
    return draft.keep(sorted(ranked))
