"""A record of what was drafted, kept and thrown away, round by round.

Knows nothing of models; the decoding loop fills it in.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

from .draft import Draft, Origin


@dataclass
class NodeTrace:
    """One drafted token. `parent` is the index of a node of the same round, -1 for the first level (depth 1)."""

    token: int
    parent: int
    depth: int
    probability: float
    accepted: bool
    origin: Origin


@dataclass
class RoundTrace:
    """One draft of one row, and what the target made of it.

    `tokens` are the tokens that became final: the accepted drafts, then one of the target's own (missing when decoding
    stopped inside the draft). The seconds are this row's equal share of the round.
    """

    row: int
    nodes: list[NodeTrace]
    tokens: list[int]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        return sum(node.accepted for node in self.nodes)


@dataclass
class GenerationTrace:
    """One call of `generate`. `first_tokens` came out of the prefill, one per row."""

    prompt_lengths: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    calibration_seconds: float = 0.0
    target_calls: int = 0
    rounds: list[RoundTrace] = field(default_factory=list)

    def token_ids(self, row: int = 0) -> list[int]:
        """The new tokens of one row."""
        return [self.first_tokens[row]] + [t for r in self.rounds if r.row == row for t in r.tokens]


@dataclass
class Trace:
    """What [`record_trace`] recorded: one entry per call of `generate`, and sums over all of them."""

    generations: list[GenerationTrace] = field(default_factory=list)

    @property
    def rounds(self) -> list[RoundTrace]:
        return [r for generation in self.generations for r in generation.rounds]

    @property
    def target_calls(self) -> int:
        """Forward passes of the target, prefills included."""
        return sum(generation.target_calls for generation in self.generations)

    @property
    def new_tokens(self) -> int:
        return sum(len(g.first_tokens) for g in self.generations) + sum(len(r.tokens) for r in self.rounds)

    @property
    def mean_accepted_tokens(self) -> float:
        """New tokens per decoding step (the prefill is none), bonus included, over all steps; plain decoding has 1."""
        rounds = self.rounds
        return sum(len(r.tokens) for r in rounds) / len(rounds) if rounds else 1.0

    def acceptance_histogram(self) -> dict[int, int]:
        """How many rounds yielded how many tokens."""
        counts: dict[int, int] = {}
        for r in self.rounds:
            counts[len(r.tokens)] = counts.get(len(r.tokens), 0) + 1
        return dict(sorted(counts.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts, ready for JSON."""
        return asdict(self) | {
            "target_calls": self.target_calls,
            "new_tokens": self.new_tokens,
            "mean_accepted_tokens": self.mean_accepted_tokens,
        }


_current: ContextVar[Trace | None] = ContextVar("moa_spec_trace", default=None)


@contextmanager
def record_trace() -> Iterator[Trace]:
    """Records every assisted `generate` call made inside the block, in this thread (or task) only."""
    trace = Trace()
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def begin_generation(prompt_lengths: list[int]) -> GenerationTrace | None:
    """A new entry in the trace being recorded, or None when none is."""
    trace = _current.get()
    if trace is None:
        return None
    generation = GenerationTrace(prompt_lengths)
    trace.generations.append(generation)
    return generation


def node_traces(draft: Draft, path: list[int]) -> list[NodeTrace]:
    """`path` lists the accepted nodes."""
    accepted = set(path)
    fields = zip(draft.tokens, draft.parents, draft.depths, draft.log_probs, draft.origins, strict=True)
    return [
        NodeTrace(token, parent, depth, math.exp(log_prob), node in accepted, origin)
        for node, (token, parent, depth, log_prob, origin) in enumerate(fields)
    ]
