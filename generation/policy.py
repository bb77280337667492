"""How much to draft in the next round, and which of the drafted tokens the target shall judge.

`FixedPolicy` does as the options say. `AutoPolicy` goes for tokens per second: it knows what passes and drafts cost
here (costs) and what was accepted (experience), and chooses between a plain step, lookup alone, and drafts of so many
levels, in a tree where the target can judge one.
Whatever it decides, the output is the same; only the speed changes.
"""

import math
from bisect import bisect_right
from typing import Protocol

from .costs import TREE_BREADTH, Costs
from .draft import Draft
from .experience import PROMISES, Experience
from .options import DraftOptions
from .sources import DraftPlan

_SHORTEST_WAIT, _LONGEST_WAIT = 8, 128  # rounds between tries of drafting where it does not pay


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


class AutoPolicy:
    """Goes for tokens per second; the options are upper limits. Time is counted in plain decoding steps.

    A round is worth the tokens it yields less what its time would yield at the present speed: the rule that maximises a
    long-run average. What is drafted follows from that: whether to ask the drafter, by what asking it has brought in
    situations like this one beyond lookup; another level, by how likely the draft is so far; and how many nodes the
    target judges, by each one's chance. In a round with drafts it is known what lookup alone would have brought, so the
    comparison is fair. Where drafting does not pay it is tried again now and then.
    """

    def __init__(self, options: DraftOptions, chains_only: bool, rows: int, costs: Costs, experience: Experience):
        self.costs, self.rows, self.chains_only, self.experience = costs, rows, chains_only, experience
        self.levels = options.num_assistant_tokens
        self.nodes = options.draft_nodes or 32
        self.lookup = self.nodes if options.prompt_lookup_num_tokens is None else options.prompt_lookup_num_tokens
        self.confidence = options.assistant_confidence_threshold
        self.breadth = 1 if chains_only else options.draft_breadth or TREE_BREADTH
        self.wait = [_SHORTEST_WAIT] * len(experience.situations)
        self.due = [0] * len(experience.situations)  # rounds in which drafting is tried again
        self.round = 0
        self.pace = [1.5] * rows  # tokens that each row's rounds yield
        # of the round in progress:
        self.found: list[Draft] = []
        self.drafted: list[Draft] = []
        self.seen: list[int] = []  # every row's situation
        self.alone: list[int] = []  # nodes of lookup's that would be judged without the drafter
        self.spent = 0.0  # on drafting

    def _pass(self, tokens: int) -> float:
        """Cost of a target pass over so many tokens in every row."""
        return self.costs.pass_seconds(tokens * self.rows) / self.costs.pass_seconds(self.rows)

    def _drafting(self, levels: int, breadth: int) -> float:
        return self.costs.drafting_seconds(levels, breadth) / self.costs.pass_seconds(self.rows)

    @property
    def _speed(self) -> float:
        """Tokens that a step yields at present; plain decoding yields one."""
        return max(1.0, self.experience.speed.value)

    @property
    def _weights(self) -> list[float]:
        """How much a token counts in each row, 1 on average: a batch is done when its slowest row is."""
        slowness = [1 / pace for pace in self.pace]
        return [len(slowness) * slow / sum(slowness) for slow in slowness]

    def lookup_tokens(self) -> int:
        return self.lookup

    def plan(self, found: list[Draft]) -> DraftPlan:
        self.rows, self.found = len(found), found
        self.round += 1
        self.seen = [bisect_right(PROMISES, sum(self._chances(draft))) for draft in found]
        situations = [self.experience.situations[index] for index in self.seen]
        node = (self._pass(9) - 1) / 8
        first = self._drafting(1, self.breadth) + 2 * node  # a guess at the cost, until it was seen
        gain = sum(w * s.gain.value for w, s in zip(self._weights, situations, strict=True)) / self.rows
        cost = sum(s.cost.value or first for s in situations) / self.rows
        pays = gain > self._speed * cost
        if not pays and self.round < min(self.due[index] for index in self.seen):
            return DraftPlan(0)
        for index in set(self.seen):
            self.wait[index] = _SHORTEST_WAIT if pays else min(2 * self.wait[index], _LONGEST_WAIT)
            self.due[index] = self.round + self.wait[index]
        # another level is worth it while what it will bring beats what its time would
        level = self._drafting(2, self.breadth) - self._drafting(1, self.breadth) + node
        onward = sum(s.onward.value for s in situations) / self.rows
        floor = self._speed * level / max(onward, 0.01)
        return DraftPlan(self.levels, self.breadth, self.nodes, min(max(floor, self.confidence), 1.0))

    def choose(self, plan: DraftPlan, drafted: list[Draft], found: list[Draft]) -> list[Draft]:
        self.drafted, self.spent = drafted, 0.0
        if plan.levels:
            self.spent = self._drafting(
                max((max(draft.depths, default=0) for draft in drafted), default=0), plan.breadth
            )
        self.alone = self._worth([self._chances(draft) for draft in found])
        both = [together(mine, other, self.chains_only) for mine, other in zip(drafted, found, strict=True)]
        chances = [self._chances(draft) for draft in both]
        return [_likeliest(d, c, n) for d, c, n in zip(both, chances, self._worth(chances), strict=True)]

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

    def _worth(self, chances: list[list[float]]) -> list[int]:
        """How many of its likeliest nodes to judge in each row.

        A pass costs what its longest row costs, so one number of nodes limits all rows.
        """
        ranked = [sorted(row, reverse=True)[: self.nodes] for row in chances]
        weights, speed = self._weights, self._speed
        best, best_value, gain = 0, -speed, 0.0
        for count in range(1, max((len(row) for row in ranked), default=0) + 1):
            row_gains = (w * row[count - 1] for w, row in zip(weights, ranked, strict=True) if len(row) >= count)
            gain += sum(row_gains) / self.rows
            value = gain - self._pass(1 + count) * speed
            if value > best_value:
                best, best_value = count, value
        return [min(best, len(row)) for row in ranked]

    def select(self, rows: list[int]) -> None:
        self.pace = [self.pace[row] for row in rows]

    def learn(self, plan: DraftPlan, judged: list[Draft], paths: list[list[int]], seconds: tuple[float, float]) -> None:
        tokens = 1 + max(len(draft) for draft in judged)
        if self.spent:
            self.costs.saw_drafting(self.spent * self.costs.pass_seconds(self.rows), seconds[0])
        self.costs.saw_pass(tokens * self.rows, seconds[1])
        steps = self.spent + self._pass(tokens)
        weighted = sum(w * (1 + len(path)) for w, path in zip(self._weights, paths, strict=True))
        self.experience.speed.saw(weighted / self.rows, steps)
        self.pace = [pace + 0.1 * (1 + len(path) - pace) for pace, path in zip(self.pace, paths, strict=True)]
        if not plan.levels:
            return
        without = self._pass(1 + max(self.alone))
        for row, (draft, path) in enumerate(zip(judged, paths, strict=True)):
            self._learn_trust(draft, path)
            known = self._found_on(row, [draft.tokens[node] for node in path])
            situation = self.experience.situations[self.seen[row]]
            situation.gain.saw(len(path) - known)
            situation.cost.saw(steps - without)
            for depth, promised in enumerate(_promised(self.drafted[row], plan.breadth), start=1):
                situation.onward.saw(float(known <= depth < len(path)), promised)

    def _found_on(self, row: int, tokens: list[int]) -> int:
        """How many of the accepted tokens lookup alone would have brought."""
        children, node = self.found[row].children(), -1
        for count, token in enumerate(tokens):
            node = children.get((node, token), self.alone[row])
            if node >= self.alone[row]:
                return count
        return len(tokens)

    def _learn_trust(self, draft: Draft, path: list[int]) -> None:
        """Compares, for every node whose parent was accepted, its claim with what happened."""
        accepted = {-1, *path}
        for node, (parent, depth) in enumerate(zip(draft.parents, draft.depths, strict=True)):
            if parent in accepted and draft.origins[node] == "drafter":
                self.experience.trust.saw(depth, math.exp(draft.log_probs[node]), float(node in accepted))


def _promised(draft: Draft, breadth: int) -> list[float]:
    """Per level that another one was drafted after: how likely the paths were that it went on from."""
    levels: dict[int, list[float]] = {}
    for depth, total in zip(draft.depths, draft.cumulative_log_probs(), strict=True):
        levels.setdefault(depth, []).append(math.exp(total))
    return [sum(sorted(levels[depth], reverse=True)[:breadth]) for depth in range(1, len(levels))]


def _likeliest(draft: Draft, chances: list[float], count: int) -> Draft:
    if count >= len(draft):
        return draft
    ranked = sorted(range(len(draft)), key=lambda node: (-chances[node], node))[:count]
    return draft.keep(sorted(ranked))
