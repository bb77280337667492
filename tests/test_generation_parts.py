"""Drafts as data, the suffix index, the policy."""

import math
import random
from dataclasses import replace

import pytest
import torch
from oracle import OracleSource
from tiny import VOCAB, prompt, tiny_drafter, tiny_target

from moa_spec.generation import Draft, DraftOptions, DraftPlan, LookupStore, attach, attach_source, record_trace
from moa_spec.generation.costs import Costs, known_passes, measure_costs
from moa_spec.generation.experience import Experience
from moa_spec.generation.lookup import RowLookup, SuffixIndex
from moa_spec.generation.moa_source import MoASource
from moa_spec.generation.policy import AutoPolicy


def random_tree(r: random.Random, size: int) -> Draft:
    draft = Draft()
    while len(draft) < size:
        parent, token = r.randrange(-1, len(draft)), r.randrange(5)
        if (parent, token) not in draft.children():
            draft.append(token, parent, -r.random(), "drafter")
    return draft


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((() if parent < 0 else found[parent]) + (token,))
    return set(found)


@pytest.mark.parametrize("seed", range(20))
def test_draft_operations(seed: int) -> None:
    r = random.Random(seed)
    draft, other = random_tree(r, r.randrange(1, 15)), random_tree(r, r.randrange(1, 15))
    assert paths(draft.merged(other)) == paths(draft) | paths(other)
    count = r.randrange(1, 15)
    best = draft.best(count)
    assert paths(best) <= paths(draft)
    assert len(best) == min(count, len(draft))
    kept, whole = sorted(best.cumulative_log_probs()), sorted(draft.cumulative_log_probs())
    assert kept == pytest.approx(whole[len(whole) - len(kept) :])
    chain = draft.best_chain()
    assert chain.is_chain
    assert paths(chain) <= paths(draft)
    assert paths(draft.limited(2)) == {path for path in paths(draft) if len(path) <= 2}
    assert paths(draft.limited(9, vocab_size=3)) == {path for path in paths(draft) if max(path) < 3}


def longest_repeat(text: list[int]) -> int:
    """Length of the longest end of the text that occurs earlier, by trying."""
    for length in range(len(text) - 1, 0, -1):
        end = text[-length:]
        if any(text[i : i + length] == end for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_suffix_index_finds_the_longest_match(seed: int) -> None:
    r = random.Random(seed)
    index, text = SuffixIndex(), []
    for _ in range(60):
        text.append(r.randrange(r.choice([1, 2, 4])))
        index.append(text[-1])
        assert index.match_length == longest_repeat(text)
        if index.match_length:
            end, length = index.match_end, index.match_length
            assert end < len(text) - 1
            assert text[end - length + 1 : end + 1] == text[-length:]


def test_lookup_continues_a_repetition_and_does_not_cross_answers() -> None:
    lookup = RowLookup([7, 1, 2, 3, 1, 2, 3, 1], None)
    assert lookup.draft(7).tokens == [2, 3, 1, 2, 3, 1, 2]
    store = LookupStore()
    store.add([5, 6, 7])
    store.add([8, 9])
    assert RowLookup([1, 5, 6], store).draft(5).tokens == [7]
    assert len(store) == 7


def test_lookup_odds_follow_what_happens() -> None:
    lookup = RowLookup([1, 2, 3, 4, 1, 2], None)
    before = lookup.odds.odds(2)
    lookup.draft(4)
    lookup.learn([9])
    assert lookup.odds.odds(2) < before


def costs(level: float) -> Costs:
    return Costs({1: 1.0, 5: 1.05, 9: 1.2, 17: 1.5}, level, level * 1.2, 0.02)


def simulate(right: float, level: float, rounds: int = 400) -> tuple[float, float]:
    """A drafter whose tokens are right with one probability and that says so; returns speedup and share drafted."""
    r = random.Random(0)
    policy = AutoPolicy(DraftOptions(prompt_lookup_num_tokens=0), False, 1, costs(level), Experience())
    tokens = time = drafted = 0.0
    for _ in range(rounds):
        plan = policy.plan([Draft()])
        length = plan.levels
        while length and right**length < plan.confidence:
            length -= 1
        draft = Draft.chain([0] * length, [torch.tensor(right).log().item()] * length)
        (judged,) = policy.choose(plan, [draft], [Draft()])
        accepted = 0
        while accepted < len(judged) and r.random() < right:
            accepted += 1
        seconds = policy.costs.pass_seconds(1 + len(judged))
        drafting = 0.02 + min(plan.levels, length + 1) * level if plan.levels else 0.0
        policy.learn(plan, [judged], [list(range(accepted))], (drafting, seconds))
        tokens += 1 + accepted
        time += seconds + drafting
        drafted += plan.levels > 0
    return tokens / time, drafted / rounds


def test_policy_drafts_when_it_pays_and_stops_when_it_does_not() -> None:
    speedup, share = simulate(right=0.8, level=0.08)
    assert speedup > 1.7
    assert share > 0.9
    speedup, share = simulate(right=0.02, level=0.08)
    assert speedup > 0.97
    assert share < 0.15
    speedup, _ = simulate(right=0.5, level=0.6)  # a drafter too slow to be worth it
    assert speedup > 0.95


def share_drafted(accepted: int, found: Draft, drafted: Draft, rounds: int = 200) -> tuple[float, AutoPolicy]:
    """Rounds that all go alike: lookup finds this, the drafter drafts that, so many tokens of the two are right."""
    policy = AutoPolicy(DraftOptions(), False, 1, costs(0.08), Experience())
    asked = 0
    for _ in range(rounds):
        plan = policy.plan([found])
        (judged,) = policy.choose(plan, [drafted if plan.levels else Draft()], [found])
        path = list(range(min(accepted, len(judged))))
        spent = 0.02 + 0.08 * len(drafted) if plan.levels else 0.0
        policy.learn(plan, [judged], [path], (spent, policy.costs.pass_seconds(1 + len(judged))))
        asked += plan.levels > 0
    return asked / rounds, policy


def test_drafting_is_judged_by_what_it_adds_to_lookup() -> None:
    tokens, sure = list(range(8)), [math.log(0.95)] * 8
    found = Draft.chain(tokens, sure, "lookup")
    alike = Draft.chain(tokens[:3], sure[:3])
    assert share_drafted(8, found, alike)[0] < 0.15  # right, and nothing new
    assert share_drafted(3, Draft(), alike)[0] > 0.9  # right where there is nothing to look up


def test_levels_follow_what_further_levels_bring() -> None:
    """A drafter that is sure of every token, and right about the first one only or about all."""
    tokens, sure = list(range(5)), [math.log(0.9)] * 5

    def plan(accepted: int) -> DraftPlan:
        _, policy = share_drafted(accepted, Draft(), Draft.chain(tokens, sure))
        return policy.plan([Draft()])

    assert plan(1).confidence == 1.0  # stops after one level
    assert plan(5).confidence < 0.5


def test_tokens_of_the_slowest_row_count_most() -> None:
    policy = AutoPolicy(DraftOptions(), False, 2, costs(0.08), Experience())
    found = [Draft.chain(list(range(8)), [math.log(0.95)] * 8, "lookup"), Draft()]
    for _ in range(20):
        plan = policy.plan(found)
        judged = policy.choose(plan, [Draft(), Draft()], found)
        policy.learn(plan, judged, [list(range(len(judged[0]))), []], (0.0, 1.0))
    fast, slow = policy._weights
    assert fast < 0.5 < 1.5 < slow
    assert fast + slow == pytest.approx(2.0)


def test_costs_between_and_beyond_what_was_measured() -> None:
    c = costs(0.1)
    assert c.pass_seconds(1) == 1.0
    assert c.pass_seconds(7) == pytest.approx(1.125)
    assert c.pass_seconds(25) == pytest.approx(1.8)
    for _ in range(200):
        c.saw_pass(5, 2.1)
    assert c.pass_seconds(5) == pytest.approx(2.1, rel=0.05)


def test_passes_where_more_tokens_cost_less() -> None:
    """Kernels change between sizes: three tokens can take longer than four."""
    c = Costs({1: 1.0, 3: 2.0, 4: 1.4, 8: 1.4, 16: 1.3}, 0.1, 0.1, 0.0)
    assert c.pass_seconds(2) == pytest.approx(1.5)
    assert c.pass_seconds(4) == c.pass_seconds(6) == 1.4
    assert c.pass_seconds(64) == 1.3  # not ever cheaper beyond what was measured
    policy = AutoPolicy(DraftOptions(num_assistant_tokens=5), True, 1, c, Experience())
    found = Draft.chain([1, 2, 3, 4], [math.log(0.45)] * 4, "lookup")
    policy.plan([found])
    assert policy._worth([policy._chances(found)[:2]]) == [0]  # two tokens are not worth what they cost
    assert policy._worth([policy._chances(found)]) == [4]


def test_costs_are_measured_in_order() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    attach(target, drafter)
    with torch.no_grad():
        measured = measure_costs(target, MoASource(drafter))
    sizes = sorted(measured.passes)
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 33]
    assert min(measured.passes[1], measured.level, measured.tree_level, measured.measured_in) > 0
    again = measure_costs(target, MoASource(drafter))  # passes are the target's, whatever drafts for it
    assert known_passes(target) == again.passes == measured.passes
    assert again.level != measured.level
    measured.saw_pass(5, 1.0)
    assert known_passes(target) == again.passes  # what one call sees stays its own
    assert known_passes(tiny_target()) is None


def test_auto_policy_measures_once_per_target_and_drafts_with_a_good_source(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(target: object, source: object) -> Costs:
        measured.append(target)
        return replace(costs(0.05), measured_in=0.5)

    monkeypatch.setattr("moa_spec.generation.experience.measure_costs", measure)  # a tiny target's own are noise
    target = tiny_target()
    ids = prompt(10)
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    assistant = tiny_drafter(target)
    attach_source(target, assistant, OracleSource(plain.tolist(), 1.0))
    with record_trace() as trace:
        for _ in range(3):
            out = target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=assistant)
            assert torch.equal(out, plain)
    assert measured == [target]
    assert [g.calibration_seconds for g in trace.generations] == [0.5, 0.0, 0.0]
    assert trace.mean_accepted_tokens > 2
    assert max(trace.acceptance_histogram()) <= 40
    assert max(plain[0]) < VOCAB
