"""Sampling with drafts has the target's distribution, by chi-square over many draws; and the tests can tell."""

import math
from typing import Any

import pytest
import torch
from oracle import OracleSource
from tiny import prompt, tiny_drafter, tiny_target
from transformers import PreTrainedModel

import moa_spec
from moa_spec.generation import attach_source
from moa_spec.generation.moa_source import MoASession

SMALL = 6
DRAWS = 4000


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = tiny_target(vocab_size=SMALL, bos_token_id=1, pad_token_id=0, seed=3)
    with torch.no_grad():  # flat enough that most two-token sequences are met, uneven enough to tell
        model.lm_head.weight.mul_(0.4)
    return model


@pytest.fixture(scope="module")
def start() -> torch.Tensor:
    return prompt(5) % (SMALL - 1) + 1  # without the padding token, which generate would hide


def probabilities(target: PreTrainedModel, start: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    """Exact distribution of the second and third new token given the first's, (V, V, V) joint over three tokens."""

    @torch.no_grad()
    def next_token(ids: torch.Tensor) -> torch.Tensor:
        logits = target(ids).logits[:, -1].float() / temperature
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
        return logits.softmax(-1)

    v = torch.arange(SMALL)
    one = next_token(start)[0]
    two = next_token(torch.cat([start.expand(SMALL, -1), v[:, None]], 1))
    pairs = torch.cartesian_prod(v, v)
    three = next_token(torch.cat([start.expand(SMALL**2, -1), pairs], 1)).view(SMALL, SMALL, SMALL)
    return one[:, None, None] * two[:, :, None] * three


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square; cells expected fewer than five times are pooled."""
    counts, expected = counts.flatten().double(), expected.flatten().double() * counts.sum()
    assert counts[expected == 0].sum() == 0, "an impossible token was drawn"
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def worst_p_value(draws: torch.Tensor, exact: torch.Tensor) -> float:
    """`draws` (n, 3): tests each position's marginal and both two-token sequences; the smallest p-value of the five."""
    counts = torch.zeros(SMALL, SMALL, SMALL)
    counts.index_put_(tuple(draws.T), torch.ones(len(draws)), accumulate=True)
    views = [(1, 2), (0, 2), (0, 1), (2,), (0,)]
    return min(p_value(counts.sum(view), exact.sum(view)) for view in views)


def draw(target: PreTrainedModel, start: torch.Tensor, rows: int, **call: Any) -> torch.Tensor:
    """Three new tokens, `DRAWS` times."""
    torch.manual_seed(0)
    parts = []
    for _ in range(DRAWS // rows):
        out = target.generate(start, do_sample=True, max_new_tokens=3, num_return_sequences=rows, **call)
        parts.append(out[:, start.shape[1] :])
    return torch.cat(parts)


@pytest.mark.parametrize(("temperature", "top_k", "breadth"), [(1.0, 0, 1), (0.7, 4, 3)])
def test_our_loop(target: PreTrainedModel, start: torch.Tensor, temperature: float, top_k: int, breadth: int) -> None:
    drafter = tiny_drafter(target)
    moa_spec.attach(target, drafter)
    exact = probabilities(target, start, temperature, top_k)
    options = {"draft_policy": "fixed", "draft_breadth": breadth, "num_assistant_tokens": 3}
    draws = draw(target, start, 200, temperature=temperature, top_k=top_k, assistant_model=drafter, **options)
    assert worst_p_value(draws, exact) > 1e-3


def test_a_verifier_that_favours_drafts_is_caught(
    target: PreTrainedModel, start: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moa_spec.generation import loop

    honest = loop.judge

    def biased(row: Any, draft: Any, logits: torch.Tensor) -> Any:
        """Adds a little to the first drafted token's score."""
        if len(draft):
            logits = logits.clone()
            logits[0, draft.tokens[0]] += 0.4
        return honest(row, draft, logits)

    drafter = tiny_drafter(target)
    moa_spec.attach(target, drafter)
    monkeypatch.setattr(loop, "judge", biased)
    draws = draw(target, start, 200, assistant_model=drafter, top_k=0, draft_policy="fixed")
    assert worst_p_value(draws, probabilities(target, start, 1.0, 0)) < 1e-3


def stock_draws(target: PreTrainedModel, start: torch.Tensor, drafter: Any) -> torch.Tensor:
    """The stock loop is for one row, so this takes longer per draw."""
    torch.manual_seed(0)
    call = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "assistant_model": drafter}
    outs = [type(target).generate(target, start, **call)[0, start.shape[1] :] for _ in range(400)]
    return torch.stack(outs)


def test_stock_loop(target: PreTrainedModel, start: torch.Tensor) -> None:
    drafter = tiny_drafter(target)
    moa_spec.attach(target, drafter)
    assert worst_p_value(stock_draws(target, start, drafter), probabilities(target, start, 1.0, 0)) > 1e-3


def test_a_drafter_that_reports_another_distribution_is_caught(
    target: PreTrainedModel, start: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = MoASession.sample_chain

    def lies(self: MoASession, levels: int, temperature: float) -> Any:
        """Draws nearly greedily and claims to have sampled."""
        tokens, logits = honest(self, levels, 0.02)
        return tokens, logits * 0.02

    monkeypatch.setattr(MoASession, "sample_chain", lies)
    drafter = tiny_drafter(target)
    moa_spec.attach(target, drafter)
    assert worst_p_value(stock_draws(target, start, drafter), probabilities(target, start, 1.0, 0)) < 1e-3


def test_same_seed_same_text_as_plain_sampling(target: PreTrainedModel, start: torch.Tensor) -> None:
    assistant = tiny_drafter(target)
    attach_source(target, assistant, OracleSource([], 0.5, branches=4))
    for seed in range(10):
        texts = []
        for extra in ({}, {"assistant_model": assistant, "draft_breadth": 2}):
            torch.manual_seed(seed)
            texts.append(target.generate(start, do_sample=True, max_new_tokens=30, **extra).tolist())
        assert texts[0] == texts[1]
