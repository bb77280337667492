"""What a draft is: a tree of guessed tokens. A chain is a tree without branches.

Knows nothing of models, caches or of who made the guesses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Origin = Literal["drafter", "lookup"]


@dataclass
class Draft:
    """Guesses that follow one token that is already final (the bonus token).

    Node `i` guesses `tokens[i]` right after node `parents[i]`, or after the bonus token when that is -1. A parent comes
    before its children, and no parent has two children with the same token.

    Attributes:
        tokens: token ids of the target.
        parents: index of each node's parent, -1 for the first level.
        log_probs: log-probability that the source gave the token, its parents being given.
        origins: who guessed: the drafter or lookup.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)

    @classmethod
    def chain(
        cls, tokens: Sequence[int], log_probs: Sequence[float] | None = None, origin: Origin = "drafter"
    ) -> "Draft":
        """Guesses one after another. Without `log_probs` every one counts as certain."""
        count = len(tokens)
        scores = [0.0] * count if log_probs is None else list(log_probs)
        return cls(list(tokens), list(range(-1, count - 1)), scores, [origin] * count)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether no node has more than one child."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        """Level of each node; the children of the bonus token are at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def cumulative_log_probs(self) -> list[float]:
        """Log-probability of the whole path that ends in each node."""
        sums: list[float] = []
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            sums.append(log_prob if parent < 0 else sums[parent] + log_prob)
        return sums

    def children(self) -> dict[tuple[int, int], int]:
        """Node by (parent, token)."""
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }

    def append(self, token: int, parent: int, log_prob: float, origin: Origin) -> int:
        """Adds a node and returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        self.origins.append(origin)
        return len(self.tokens) - 1

    def keep(self, nodes: Sequence[int]) -> "Draft":
        """The draft of these nodes only, in this order; every kept node's parent must be kept before it."""
        renamed = {-1: -1} | {old: new for new, old in enumerate(nodes)}
        return Draft(
            [self.tokens[i] for i in nodes],
            [renamed[self.parents[i]] for i in nodes],
            [self.log_probs[i] for i in nodes],
            [self.origins[i] for i in nodes],
        )

    def limited(self, depth: int, vocab_size: int | None = None) -> "Draft":
        """Without nodes deeper than `depth`, without impossible token ids, and without what hangs on either."""
        keep: list[int] = []
        kept: set[int] = {-1}
        for node, (level, parent, token) in enumerate(zip(self.depths, self.parents, self.tokens, strict=True)):
            possible = token >= 0 and (vocab_size is None or token < vocab_size)
            if level <= depth and parent in kept and possible:
                keep.append(node)
                kept.add(node)
        return self if len(keep) == len(self) else self.keep(keep)

    def best(self, count: int) -> "Draft":
        """The `count` nodes with the most probable paths. Always connected: a parent is never less probable."""
        if len(self) <= count:
            return self
        scores = self.cumulative_log_probs()
        ranked = sorted(range(len(self)), key=lambda node: (-scores[node], node))[:count]
        return self.keep(sorted(ranked))

    def best_chain(self) -> "Draft":
        """The path from the bonus token down that promises the most tokens."""
        if self.is_chain:
            return self
        promise = [math.exp(score) for score in self.cumulative_log_probs()]
        heir = [-1] * len(self)
        first, most = -1, 0.0
        for node in range(len(self) - 1, -1, -1):  # children come after their parents
            if heir[node] >= 0:
                promise[node] += promise[heir[node]]
            parent = self.parents[node]
            if parent < 0:
                if promise[node] >= most:
                    first, most = node, promise[node]
            elif heir[parent] < 0 or promise[node] >= promise[heir[parent]]:
                heir[parent] = node
        path = []
        while first >= 0:
            path.append(first)
            first = heir[first]
        return self.keep(path)

    def merged(self, other: "Draft") -> "Draft":
        """Both drafts as one tree. A node that both have keeps this draft's source and the higher probability."""
        result = Draft(list(self.tokens), list(self.parents), list(self.log_probs), list(self.origins))
        children = result.children()
        renamed = {-1: -1}
        for node, (token, parent) in enumerate(zip(other.tokens, other.parents, strict=True)):
            key = (renamed[parent], token)
            if key in children:
                mine = children[key]
                result.log_probs[mine] = max(result.log_probs[mine], other.log_probs[node])
            else:
                mine = result.append(token, key[0], other.log_probs[node], other.origins[node])
                children[key] = mine
            renamed[node] = mine
        return result

    def expected_tokens(self) -> float:
        """Tokens a round yields if the probabilities are right, the bonus token included."""
        return 1.0 + sum(math.exp(score) for score in self.cumulative_log_probs())
