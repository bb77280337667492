"""The figures, against arithmetic done by hand."""

import pytest

from moa_spec.benchmarks import metrics
from moa_spec.benchmarks.metrics import Difference, Spread


def test_tau_is_micro_and_al_is_macro() -> None:
    answers = [[4, 4], [1, 1, 1, 1, 1, 1]]  # 14 tokens in 8 steps; means 4 and 1
    assert metrics.mean_accepted_tokens(answers) == 14 / 8
    assert metrics.acceptance_length(answers) == 2.5


def test_plain_decoding_has_tau_one() -> None:
    assert metrics.mean_accepted_tokens([[1] * 20]) == 1.0
    assert metrics.acceptance_length([[1] * 20]) == 1.0
    assert metrics.conditional_acceptance([[1] * 20]) == []
    assert metrics.acceptance_histogram([[1] * 20]) == {1: 20}


def test_without_a_step_there_is_no_figure() -> None:
    assert metrics.mean_accepted_tokens([[]]) is None
    assert metrics.acceptance_length([[], []]) is None
    assert metrics.acceptance_length([[], [3]]) == 3
    assert metrics.conditional_acceptance([]) == []


def test_conditional_acceptance_and_histogram() -> None:
    answers = [[1, 2, 3], [3, 4, 1]]  # accepted drafts: 0 1 2 2 3 0
    assert metrics.conditional_acceptance(answers) == [4 / 6, 3 / 4, 1 / 3]
    assert metrics.acceptance_histogram(answers) == {1: 2, 2: 1, 3: 2, 4: 1}
    # tau is one more than the sum of the products of the conditional rates
    first, second, third = metrics.conditional_acceptance(answers)
    assert metrics.mean_accepted_tokens(answers) == pytest.approx(1 + first + first * second + first * second * third)


def test_rounds_from_the_calls_of_the_target() -> None:
    # prompt of 10, answer of 7: 1 from the prefill, then rounds of 3, 1 and 2
    assert metrics.rounds_from_lengths([0, 10, 13, 14], prompt_tokens=10, new_tokens=7) == [3, 1, 2]
    assert metrics.rounds_from_lengths([0], 10, 1) == []
    # the first call judged drafts along with the prompt and wrote three tokens
    assert metrics.rounds_from_lengths([0, 12, 14], 10, 6) == [2, 1]
    # one call too many, made before the stop was noticed
    assert metrics.rounds_from_lengths([0, 10, 11, 12], 10, 3) == [1, 1]


@pytest.mark.parametrize("lengths", [[], [0, 10, 10, 11], [0, 9, 12], [0, 10, 15]])
def test_impossible_calls_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot have written"):
        metrics.rounds_from_lengths(lengths, 10, 4)


def test_speedup_counts_tokens_not_seconds_alone() -> None:
    assert metrics.speedup(100, 2.0, 50, 2.0) == 2.0
    assert metrics.speedup(50, 1.0, 100, 2.0) == 1.0


def test_predicted_speedup() -> None:
    assert metrics.predicted_speedup(tau=3.0, verify_cost=1.2, draft_levels=5, draft_cost=0.06) == pytest.approx(2.0)


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]).to_list() == [2.0, 1.0, 3.0]
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


@pytest.mark.parametrize(
    ("plain", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_difference(plain: list[int], other: list[int], index: int | None) -> None:
    assert metrics.first_difference(plain, other) == index


def test_near_ties() -> None:
    spacing = metrics.dtype_spacing(20.0, mantissa_bits=7)
    assert spacing == 0.125  # bfloat16 has 128 steps between 16 and 32
    assert metrics.dtype_spacing(-0.75, 7) == 2**-8
    assert Difference(3, 5, 6, 0.25, spacing, True).near_tie
    assert not Difference(3, 5, 6, 0.25, spacing, False).near_tie
    assert not Difference(3, 5, 6, 0.75, spacing, True).near_tie


def test_identical_rate() -> None:
    assert metrics.identical_rate([True, True, False, True]) == 0.75
    assert metrics.identical_rate([]) is None
