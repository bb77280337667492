"""Whatever is drafted, the output is that of plain `generate`: random models, prompts, options and drafts."""

import random
from typing import Any

import pytest
import torch
from oracle import OracleSource, unpadded
from tiny import FAMILIES, VOCAB, prompt, tiny_drafter, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import moa_spec
from moa_spec.generation import attach_source, record_trace

FULL_ATTENTION = [f for f in FAMILIES if f not in ("mistral_sliding", "gemma2")]


def random_call(r: random.Random) -> dict[str, Any]:
    """Options of plain `generate`."""
    call: dict[str, Any] = {"max_new_tokens": r.choice([1, 2, 5, 17, 40])}
    if r.random() < 0.4:
        call["repetition_penalty"] = r.choice([1.1, 1.5])
    if r.random() < 0.2:
        call["no_repeat_ngram_size"] = r.choice([2, 3])
    if r.random() < 0.3:
        call["eos_token_id"] = r.sample(range(VOCAB), r.choice([1, 4]))
        if r.random() < 0.5:
            call["min_new_tokens"] = min(call["max_new_tokens"], 4)
    if r.random() < 0.2:
        call["bad_words_ids"] = [[r.randrange(VOCAB)], [r.randrange(VOCAB), r.randrange(VOCAB)]]
    if r.random() < 0.2:
        call["suppress_tokens"] = r.sample(range(VOCAB), 3)
    if r.random() < 0.1:
        call["exponential_decay_length_penalty"] = (3, 1.2)
        call.setdefault("eos_token_id", [5])
    if r.random() < 0.1:
        call["forced_eos_token_id"] = 7
    call["do_sample"] = r.random() < 0.4
    if call["do_sample"]:
        call["temperature"] = r.choice([0.3, 1.0, 1.7])
        call["top_k"] = r.choice([0, 5, 50])
        call["top_p"] = r.choice([0.7, 1.0])
        if r.random() < 0.3:
            call["min_p"] = 0.05
    return call


def random_draft(r: random.Random) -> dict[str, Any]:
    """Options of ours."""
    breadth = r.choice([1, 1, 2, 4])
    return {
        "num_assistant_tokens": r.choice([1, 3, 6, 9]),
        "draft_breadth": breadth,
        "draft_nodes": r.choice([None, 4, 15]),
        "assistant_confidence_threshold": r.choice([0.0, 0.0, 0.05, 0.5]),
        "prompt_lookup_num_tokens": r.choice([0, 0, 4]),
        "draft_policy": r.choice(["fixed", "fixed", "auto"]),
    }


def compare(
    target: PreTrainedModel, assistant: Any, call: dict[str, Any], draft: dict[str, Any], seed: int = 0
) -> None:
    """Everything a call returns with drafts equals what it returns without."""
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    torch.manual_seed(seed)
    plain = target.generate(**call, **details)
    torch.manual_seed(seed)
    ours = target.generate(**call, **details, **draft, assistant_model=assistant)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert len(ours.scores) == len(plain.scores)
    for mine, theirs in zip(ours.scores + ours.logits, plain.scores + plain.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    torch.manual_seed(seed)
    assert target.generate(**call, **draft, assistant_model=assistant).tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_oracle_drafts_change_nothing(family: str, seed: int) -> None:
    r = random.Random(f"{family}{seed}")
    target = tiny_target(family, seed)
    assistant = tiny_drafter(target)
    call = {"inputs": prompt(r.choice([1, 2, 9, 30]), seed), **random_call(r)}
    torch.manual_seed(seed)
    answer = target.generate(**call)
    source = OracleSource(answer.tolist(), r.choice([0.6, 0.9, 1.0]), r.choice([0, 6]), r.choice([0.0, 0.2]), seed)
    attach_source(target, assistant, source)
    compare(target, assistant, call, random_draft(r), seed)


# what the memory is made of; the last is without LSA
MEMORIES: list[dict[str, Any]] = [
    {"layer_self_attention_layers": layers, "memory_hidden_state": hidden_state}
    for layers in (None, [0, 2])
    for hidden_state in ("none", "entry", "add")
] + 3 * [{"layer_self_attention_layers": [], "memory_hidden_state": "add"}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_untrained_drafter_changes_nothing(family: str, seed: int) -> None:
    r = random.Random(f"{family}{seed}!")
    target = tiny_target(family, seed)
    drafter = tiny_drafter(
        target,
        seed,
        target_layer_inference=0 if "sliding" in family or family == "gemma2" else r.choice([0, 1, 2]),
        **r.choice(MEMORIES),
        draft_vocab_size=r.choice([None, 30]),
        head_norm=r.random() < 0.5,
        newest_memory=seed % 2 == 1,
    )
    moa_spec.attach(target, drafter)
    call = {"inputs": prompt(r.choice([1, 9, 30]), seed), **random_call(r)}
    compare(target, drafter, call, random_draft(r), seed)


def batch(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts and their mask."""
    longest = max(lengths)
    ids = prompt(longest, seed, rows=len(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return {"inputs": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FULL_ATTENTION)
@pytest.mark.parametrize("seed", range(4))
def test_batch_rows_equal_rows_decoded_alone(family: str, seed: int) -> None:
    r = random.Random(f"{family}{seed}?")
    target = tiny_target(family, seed)
    call = random_call(r) | {"do_sample": False}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        call.pop(name, None)
    inputs = batch([r.choice([1, 4, 12, 20]) for _ in range(r.choice([2, 3, 5]))], seed)
    plain = target.generate(**inputs, **call)
    answers = unpadded(plain, inputs["attention_mask"])
    if seed % 2:
        assistant = tiny_drafter(
            target, seed, memory_hidden_state=r.choice(["none", "add"]), target_layer_inference=r.choice([0, 1])
        )
        moa_spec.attach(target, assistant)
    else:
        assistant = tiny_drafter(target)
        attach_source(target, assistant, OracleSource(answers, 0.8, r.choice([0, 6]), 0.1, seed))
    draft = random_draft(r)
    assert target.generate(**inputs, **call, **draft, assistant_model=assistant).tolist() == plain.tolist()
    for row, mask in enumerate(inputs["attention_mask"]):
        alone = {"inputs": inputs["inputs"][row : row + 1, mask.bool()]}
        single = target.generate(**alone, **call, **draft, assistant_model=assistant)[0].tolist()
        whole = plain[row, mask.shape[0] - int(mask.sum()) :].tolist()
        assert single == whole[: len(single)]
        assert set(whole[len(single) :]) <= {0}


class CountingProcessor(LogitsProcessor):
    """Has state: what it does depends on how often it was called and with what."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(input_ids[0].tolist()))
        scores = scores.clone()
        scores[:, len(self.seen) % VOCAB] += 3.0
        return scores


class StopAfter(StoppingCriteria):
    """Stops at a token, and remembers every prefix it was asked about."""

    def __init__(self, token: int, least: int):
        self.token, self.least = token, least
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(tuple(input_ids[0].tolist()))
        stop = input_ids.shape[1] >= self.least and int(input_ids[0, -1]) == self.token
        return torch.full((input_ids.shape[0],), stop)


@pytest.mark.parametrize("breadth", [1, 3])
def test_processors_and_criteria_see_the_same_calls(breadth: int) -> None:
    target = tiny_target()
    assistant = tiny_drafter(target)
    ids = prompt(8)
    answer = target.generate(
        ids, max_new_tokens=40, do_sample=False, logits_processor=LogitsProcessorList([CountingProcessor()])
    )
    attach_source(target, assistant, OracleSource(answer.tolist(), 1.0, branches=4 * (breadth > 1)))
    stop_at = answer[0, 25].item()
    records = []
    for extra in ({}, {"assistant_model": assistant, "num_assistant_tokens": 6, "draft_breadth": breadth}):
        processor, criterion = CountingProcessor(), StopAfter(stop_at, 20)
        with record_trace() as trace:
            out = target.generate(
                ids,
                max_new_tokens=40,
                do_sample=False,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList([criterion]),
                **extra,
            )
        records.append((out.tolist(), processor.seen, criterion.seen))
    assert records[0] == records[1]
    assert trace.mean_accepted_tokens > 2
