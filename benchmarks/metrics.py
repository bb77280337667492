"""The field's figures, as pure functions of what was counted and timed.

Knows lengths and seconds, not models. Definitions are those of Spec-Bench (arXiv 2401.07851) and SPEED-Bench; where
they leave something open, the docstring says what is done here. A round is one decoding step: one call of the target
after the prefill. Its length is the number of tokens it made final: accepted drafts and the target's own token (the
bonus).
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Rounds = Sequence[int]


def rounds_from_lengths(cache_lengths: Sequence[int], prompt_tokens: int, new_tokens: int) -> list[int]:
    """Round lengths from what was in the target's cache when each of its calls began.

    A call begins with every final token but the last in the cache, so the next call's cache length tells what a round
    has added. This holds for any method and needs nothing but the target's calls: every method's rounds are counted
    this way, and the traces of those that write one are checked against it. The first call is the prefill and no round,
    whatever it yields: one token, or more where transformers' own loop judges drafts along with the prompt.

    Args:
        cache_lengths: one per call of the target, the prefill's first.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the answer.

    Raises:
        ValueError: the calls cannot have written that answer.
    """
    begins = [length + 1 for length in cache_lengths[1:]]  # final tokens when each round began
    marks = [*begins, prompt_tokens + new_tokens]
    rounds = [later - earlier for earlier, later in itertools.pairwise(marks)]
    if rounds and rounds[-1] == 0:  # transformers may run one call ahead of its own stop check
        rounds.pop()
    if not cache_lengths or marks[0] <= prompt_tokens or any(length < 1 for length in rounds):
        raise ValueError(
            f"{len(cache_lengths)} calls of the target with {list(cache_lengths)} tokens in its cache cannot have "
            f"written {new_tokens} tokens after {prompt_tokens}"
        )
    return rounds


def mean_accepted_tokens(answers: Iterable[Rounds]) -> float | None:
    """Tau, MAT: new tokens per decoding step, bonus included; micro mean over all steps. Plain decoding has 1.

    Returns:
        None when there was no step (every answer ended with its first token).
    """
    lengths = [length for rounds in answers for length in rounds]
    return sum(lengths) / len(lengths) if lengths else None


def acceptance_length(answers: Iterable[Rounds]) -> float | None:
    """AL: the mean round length of each request, then the mean over requests (macro). Every turn is a request."""
    means = [statistics.fmean(rounds) for rounds in answers if rounds]
    return statistics.fmean(means) if means else None


def acceptance_histogram(answers: Iterable[Rounds]) -> dict[int, int]:
    """How many rounds had which length."""
    return dict(sorted(Counter(length for rounds in answers for length in rounds).items()))


def conditional_acceptance(answers: Iterable[Rounds]) -> list[float]:
    """P(accepted >= k) / P(accepted >= k - 1) for k = 1, 2, ..., as deep as any round accepted drafts.

    Accepted drafts are a round's tokens less the bonus. Over all rounds, those that drafted less than k included.
    """
    accepted = [length - 1 for rounds in answers for length in rounds]
    at_least = [sum(count >= depth for count in accepted) for depth in range(max(accepted, default=0) + 1)]
    return [deeper / reached for reached, deeper in itertools.pairwise(at_least)]


def speedup(tokens: int, seconds: float, plain_tokens: int, plain_seconds: float) -> float:
    """Tokens per second over plain decoding's. Tokens are counted as ids, so both may have written different texts."""
    return (tokens / seconds) / (plain_tokens / plain_seconds)


def predicted_speedup(tau: float, verify_cost: float, draft_levels: float, draft_cost: float) -> float:
    """What tau is worth: tau / (v + gamma * c).

    Args:
        verify_cost: v, time of a round's target pass over a one-token pass.
        draft_levels: gamma, draft steps per round.
        draft_cost: c, time of one draft step over a one-token pass of the target.
    """
    return tau / (verify_cost + draft_levels * draft_cost)


@dataclass(frozen=True)
class Spread:
    """A figure measured several times."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """
        Raises:
            ValueError: there are no values.
        """
        values = sorted(values)
        if not values:
            raise ValueError("a spread needs at least one value")
        return cls(statistics.median(values), values[0], values[-1])

    def to_list(self) -> list[float]:
        return [self.median, self.low, self.high]


@dataclass(frozen=True)
class Difference:
    """Where a greedy answer parts from plain decoding's, and what the target says there.

    Attributes:
        position: index of the first differing new token.
        plain, other: the two tokens; -1 where that answer has ended.
        gap: the target's best logit less its second best there.
        spacing: distance between neighbouring numbers of the run's dtype at the best logit.
        among_best: whether both tokens are as good as the target's two best; in bf16 three may be equally good.
    """

    position: int
    plain: int
    other: int
    gap: float
    spacing: float
    among_best: bool

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it: the two best, and no further apart than `NEAR_TIE_SPACINGS` allows."""
        return self.among_best and self.gap <= NEAR_TIE_SPACINGS * self.spacing


NEAR_TIE_SPACINGS = 4.0
"""Passes over one and over k tokens sum in another order. Measured on whole models, a logit then moves by a few of the
last places of its dtype; more than this is not called rounding."""


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; None when the answers are identical. The end of an answer counts."""
    for index, (mine, theirs) in enumerate(zip(plain, other, strict=False)):
        if mine != theirs:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def dtype_spacing(value: float, mantissa_bits: int) -> float:
    """Distance between neighbouring floating-point numbers at `value`, with so many bits after the leading one."""
    return 0.0 if value == 0 else 2.0 ** (math.floor(math.log2(abs(value))) - mantissa_bits)


def identical_rate(same: Sequence[bool]) -> float | None:
    """Share of prompts whose greedy token ids equal plain greedy decoding's."""
    return sum(same) / len(same) if same else None


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None when there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
