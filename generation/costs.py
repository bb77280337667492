"""What a round costs on this machine: passes are timed once per target and dtype, drafts once per source on it; then
both are kept in step with what is seen.

Knows how to time passes and drafts; what to do with the figures is the policy's business.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, GenerationConfig

from .backlog import Backlog
from .draft import Draft
from .options import DraftOptions
from .sources import DraftPlan, DraftSource
from .target_pass import TargetPass

TREE_BREADTH = 4  # of the tree level that is timed
_LEVELS = 3  # of the drafts that are timed
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 33)  # tokens; kernels change between them: 4 can be cheaper than 3, 16 than 12
_REPEATS = 3  # the quickest counts

_passes: "WeakKeyDictionary[Any, dict[tuple[torch.dtype, str], dict[int, float]]]" = WeakKeyDictionary()


@dataclass
class Costs:
    """Seconds per step.

    Attributes:
        passes: of a target pass over so many tokens.
        level: of one level of a chain.
        tree_level: of one level of a tree of breadth `TREE_BREADTH`.
        observe: of taking verified tokens in before drafting.
        scale, draft_scale: what target passes and drafts cost now, against what was measured.
    """

    passes: dict[int, float]
    level: float
    tree_level: float
    observe: float
    scale: float = 1.0
    draft_scale: float = 1.0
    measured_in: float = 0.0
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = sorted(self.passes)

    def pass_seconds(self, tokens: int) -> float:
        """Of a target pass over so many tokens, by straight lines between and beyond the measured sizes."""
        sizes = self._sizes
        if tokens <= sizes[0] or len(sizes) == 1:
            return self.passes[sizes[0]] * self.scale
        upper = next((i for i, size in enumerate(sizes) if size >= tokens), len(sizes) - 1)
        left, right = sizes[upper - 1], sizes[upper]
        slope = (self.passes[right] - self.passes[left]) / (right - left)
        if tokens > right:  # more tokens may cost less, where another kernel begins, but not for ever
            return (self.passes[right] + max(slope, 0.0) * (tokens - right)) * self.scale
        return (self.passes[left] + slope * (tokens - left)) * self.scale

    def drafting_seconds(self, levels: int, breadth: int) -> float:
        """Of taking in what is new and drafting so many levels."""
        share = (min(breadth, TREE_BREADTH) - 1) / (TREE_BREADTH - 1)
        level = self.level + (self.tree_level - self.level) * share
        return (self.observe + levels * level) * self.draft_scale

    def saw_pass(self, tokens: int, seconds: float) -> None:
        """Follows slow changes (a longer context slows all passes) and corrects what was measured in a busy moment."""
        ratio = min(max(seconds / max(self.pass_seconds(tokens), 1e-9), 0.8), 1.25)
        self.scale *= ratio**0.06
        nearest = min(self._sizes, key=lambda size: abs(size - tokens))
        self.passes[nearest] *= ratio**0.06

    def saw_drafting(self, expected: float, seconds: float) -> None:
        """The same for drafts, whose cost also grows with the number of rows."""
        self.draft_scale *= min(max(seconds / max(expected, 1e-9), 0.7), 1.4) ** 0.1

    def to_dict(self) -> dict[str, Any]:
        """For reports: seconds per step, v(k) and c (field's names) relative to a one-token pass."""
        one = self.passes[1]
        return {
            "pass_seconds": self.passes,
            "v": {size: seconds / one for size, seconds in self.passes.items()},
            "c": self.level / one,
            "tree_c": self.tree_level / one,
            "observe": self.observe / one,
            "measured_in": self.measured_in,
        }


def known_passes(target: Any) -> dict[int, float] | None:
    """Seconds of a target's passes over so many tokens, if they have been timed in its present dtype and place."""
    return _passes.get(target, {}).get((target.dtype, str(target.device)))


def measure_costs(target: Any, source: DraftSource) -> Costs:
    """Times passes of a target, a `PreTrainedModel`, and drafts, on a scratch cache. Takes about fifty target steps, or
    ten where the passes are known from another source on this target.

    Touches neither the random state nor anything of a call in progress.
    """
    began = time.perf_counter()
    device = target.get_input_embeddings().weight.device
    length = 64
    input_ids = torch.arange(length, device=device)[None] % target.get_input_embeddings().num_embeddings
    positions = torch.arange(length, device=device)[None]
    session = source.begin(target, input_ids.tolist(), DraftOptions())
    kwargs = {
        "cache": DynamicCache(config=target.config.get_text_config(decoder=True)),
        "position_ids": positions,
        "attention_mask": None,
        "use_cache": True,
        "logits_to_keep": 1,
    }
    scratch = TargetPass(target, input_ids, kwargs, GenerationConfig(), session.hidden_states, keep_rows=False)
    outputs = scratch.prefill(input_ids, kwargs)
    wanted = [outputs.hidden_states[index] for index in session.hidden_states]
    backlog = Backlog(scratch, session, None)

    def hand_over(tokens: list[int]) -> None:
        """Hands these over as the last tokens in the cache; the token after them is always 1."""
        at = scratch.length - len(tokens)
        hidden = tuple(h[0, -1:].expand(len(tokens), -1) for h in wanted)
        backlog.add(0, tokens, at, list(range(at, scratch.length)), hidden)
        backlog.hand_over([1])

    hand_over(input_ids[0].tolist())
    scratch.after_prefill()

    deepest = 32 if scratch.max_depth is None else min(32, scratch.max_depth)
    sizes = [tokens for tokens in _SIZES if tokens <= 1 + deepest]
    chain_plan = DraftPlan(_LEVELS, 1, _LEVELS)
    tree_plan = DraftPlan(_LEVELS, TREE_BREADTH, 16) if scratch.trees else chain_plan
    known = known_passes(target)
    actions: dict[int | str, Callable[[], Any]] = {
        tokens: partial(_pass, scratch, Draft.chain([1] * (tokens - 1))) for tokens in sizes if known is None
    }
    actions |= {"observe": lambda: hand_over([1, 1])}
    actions |= {"chain": lambda: session.draft(chain_plan), "tree": lambda: session.draft(tree_plan)}
    best: dict[int | str, float] = {}
    for _ in range(_REPEATS):  # in turns, so that a busy moment does not fall on one of them alone
        for name, action in actions.items():
            best[name] = min(best.get(name, math.inf), _seconds(action))
    costs = Costs(
        dict(known or {tokens: best[tokens] for tokens in sizes}),
        best["chain"] / _LEVELS,
        best["tree"] / _LEVELS,
        best["observe"],
        measured_in=time.perf_counter() - began,
    )
    _passes.setdefault(target, {})[target.dtype, str(target.device)] = dict(costs.passes)
    return costs


def _pass(scratch: TargetPass, draft: Draft) -> None:
    logits = scratch.run([1], [draft]).logits
    int(logits[0, 0].float().argmax())  # choosing tokens belongs to a pass, and waits for the device
    scratch.commit([[]])


def _seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
