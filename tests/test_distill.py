"""Distillation: answers are the target's own, batches stay full, runs resume."""

import json

import pytest
import torch

from moa_spec.training.batched_decoding import BatchedDecoder, Request, requests_from
from moa_spec.training.distill import Distiller, conversations, read_rows
from moa_spec.training.passages import read_passages
from moa_spec.training.prompts import KIND_WEIGHTS, Conversation, SelfPrompts

from .tiny import prompt, tiny_target
from .training_data import prompts, tiny_chat_target, tiny_tokenizer


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_greedy_answers_equal_plain_generate(slots: int) -> None:
    target = tiny_target()
    requests = [Request(prompt(3 + i, seed=i)[0].tolist(), 4 + i % 5, tag=i) for i in range(7)]
    decoder = BatchedDecoder(target, slots, 64, eos_token_ids=[])
    answers = {a.request.tag: a for a in decoder.run(requests_from(iter(requests)))}
    assert sorted(answers) == list(range(7))
    for i, request in enumerate(requests):
        ids = torch.tensor([request.input_ids])
        plain = target.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)[0, ids.shape[1] :]
        assert answers[i].token_ids == plain.tolist()


def test_rows_stay_themselves_when_they_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of every length, many chunks, sorted at every step: short rows read few positions, long ones all."""
    monkeypatch.setattr("moa_spec.training.batched_decoding.SORT_EVERY", 1)
    monkeypatch.setattr("moa_spec.training.batched_decoding.SORT_GAIN", 1.0)
    monkeypatch.setattr("moa_spec.training.batched_decoding.LENGTH_STEP", 4)
    target = tiny_target()
    requests = [Request(prompt(2 + i * 7 % 38, seed=i)[0].tolist(), 3 + i * 5 % 16, tag=i) for i in range(60)]
    decoder = BatchedDecoder(target, 20, 64, eos_token_ids=[])
    sorted_at = []
    reorder = decoder.cache.layers[0].reorder
    monkeypatch.setattr(decoder.cache.layers[0], "reorder", lambda *args: (sorted_at.append(args), reorder(*args)))
    answers = {a.request.tag: a for a in decoder.run(requests_from(iter(requests)))}
    assert len(sorted_at) > 5
    for i, request in enumerate(requests):
        ids = torch.tensor([request.input_ids])
        plain = target.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)[0, ids.shape[1] :]
        assert answers[i].token_ids == plain.tolist()


def test_rows_end_at_eos_and_free_their_slot() -> None:
    target = tiny_target()
    ids = prompt(4)[0].tolist()
    plain = target.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    decoder = BatchedDecoder(target, 2, 64, eos_token_ids=[plain[2]])
    answers = list(decoder.run(requests_from(iter([Request(ids, 8), Request(ids, 8), Request(ids, 8)]))))
    first = plain.index(plain[2]) + 1
    assert [a.token_ids for a in answers] == [plain[:first]] * 3
    assert all(a.finished for a in answers)


def test_the_targets_attention_is_given_back_even_after_an_error() -> None:
    target = tiny_target()
    before = target.config._attn_implementation
    decoder = BatchedDecoder(target, 2, 8, eos_token_ids=[])
    with pytest.raises(ValueError, match="leaves no room"):
        list(decoder.run(requests_from(iter([Request(list(range(3, 15)), 4)]))))
    assert target.config._attn_implementation == before


def test_sampling_follows_the_targets_distribution() -> None:
    """Chi-square over the first sampled token, at a temperature, restricted to the most probable 50."""
    target = tiny_target()
    ids = prompt(5)
    with torch.inference_mode():
        values, tokens = (target(ids).logits[0, -1] / 0.5).topk(50)
    expected = values.softmax(-1)
    draws = 6000
    decoder = BatchedDecoder(target, 1, 64, eos_token_ids=[], seed=1)
    with torch.inference_mode():
        logits = target(ids).logits[:, -1].expand(draws, -1)
        drawn = decoder._choose(logits, torch.full((draws,), 0.5))
    counts = torch.stack([(drawn == token).sum() for token in tokens]).float()
    assert counts.sum() == draws

    def chi_square(distribution: torch.Tensor) -> float:
        common = distribution * draws >= 5
        return ((counts - distribution * draws)[common] ** 2 / (distribution * draws)[common]).sum().item()

    assert chi_square(expected) < 90  # at most 49 degrees of freedom: exceeded once in 3000 times
    wrong = (values * 0.8).softmax(-1)
    assert chi_square(wrong) > 90  # a temperature off by a quarter is caught


def test_distill_resumes_and_never_repeats(tmp_path) -> None:
    target, tokenizer = tiny_chat_target(), tiny_tokenizer()
    output = tmp_path / "answers.jsonl"
    settings = {"slots": 3, "max_length": 48, "max_new_tokens": 12}
    Distiller(target, tokenizer, output, prompts=conversations(iter(prompts(20))), **settings).run(60)
    first = list(read_rows(output))
    assert 0 < len(first) < 20
    with open(output, "a") as file:
        file.write('{"kind": "odd", "mess')  # a kill in the middle of a line
    again = Distiller(target, tokenizer, output, prompts=conversations(iter(prompts(20))), **settings)
    again.run(10**6)
    rows = list(read_rows(output))
    assert rows[: len(first)] == first
    asked = [json.dumps(row["messages"]) for row in rows]
    assert len(asked) == len(set(asked)) == 20
    assert all(row["finished"] == (row["response_ids"][-1] == 2) for row in rows)
    greedy = next(row for row in rows if row["greedy"])
    ids = tokenizer.apply_chat_template(greedy["messages"], add_generation_prompt=True, return_dict=False)
    plain = target.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert greedy["response_ids"] == plain.tolist()


def test_the_target_can_write_its_own_prompts(tmp_path) -> None:
    output = tmp_path / "own.jsonl"
    distiller = Distiller(tiny_chat_target(), tiny_tokenizer(), output, slots=4, max_length=160, max_new_tokens=8)
    distiller.run(40)
    rows = list(read_rows(output))
    assert distiller.tokens >= 40
    assert all(row["messages"][-1]["role"] == "user" and row["response_ids"] for row in rows)


def test_self_prompts_cover_every_kind_and_reuse_texts() -> None:
    source = SelfPrompts(seed=0)
    article = "The bridge was built in 1920. It is long. People like it. " * 12
    for _ in range(4):
        source.learn(Conversation("article", [{"role": "user", "content": "x"}]), article, True)
    source.learn(Conversation("translate_out", [{"role": "user", "content": "x"}]), "Das ist ein Satz. " * 4, True)
    seen = [source.next_conversation() for _ in range(600)]
    assert set(KIND_WEIGHTS) <= {c.kind for c in seen}
    assert any("bridge" in c.messages[0]["content"] for c in seen if c.kind == "summary")
    assert any("bridge" in c.opening for c in seen if c.kind == "passage_qa")
    again = SelfPrompts(seed=0), SelfPrompts(seed=0)
    assert [c.kind for c in (again[0].next_conversation() for _ in range(9))] == [
        c.kind for c in (again[1].next_conversation() for _ in range(9))
    ]


def test_real_texts_take_the_place_of_the_targets_own(tmp_path) -> None:
    text = tmp_path / "text.txt"
    sentences = " ".join(f"The keeper of lighthouse number {i} wrote a letter home." for i in range(30))
    text.write_text(f"A heading\n\n{sentences}\n\n{sentences[:-1]}!\n\n17\n")
    passages = read_passages([text], characters=1000)
    assert len(passages) == 2
    assert not any("heading" in passage for passage in passages)
    source = SelfPrompts(0, 0.5, passages, ["Der Hund bellt laut. Die Katze schläft."], ["summary", "translate_in"])
    seen = [source.next_conversation() for _ in range(60)]
    assert {c.kind for c in seen} == {"summary", "translate_in"}
    assert all("lighthouse" in c.messages[0]["content"] for c in seen if c.kind == "summary")
    assert all(
        "Hund" in c.messages[0]["content"] or "Katze" in c.messages[0]["content"]
        for c in seen
        if c.kind == "translate_in"
    )
    with pytest.raises(ValueError, match="no kind poem"):
        SelfPrompts(kinds=["poem"])
    (tmp_path / "empty.txt").write_text("17\n\n18\n")
    with pytest.raises(ValueError, match=r"empty\.txt holds no paragraphs"):
        read_passages([tmp_path / "empty.txt"])
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not plain text"):
        read_passages([tmp_path / "binary.txt"])


def test_bad_input_is_named(tmp_path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\nnot json\n{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2: not JSON"):
        list(read_rows(broken))
    with pytest.raises(ValueError, match="prompt 1: needs"):
        list(conversations(iter([{"text": "no prompt"}])))


def test_of_whole_conversations_the_last_or_every_user_turn_is_answered() -> None:
    turns = [("user", "w1"), ("assistant", "w2"), ("user", "w3"), ("assistant", "w4")]
    messages = [{"role": role, "content": text} for role, text in turns]
    [last] = conversations(iter([{"messages": messages}]))
    assert last.messages == messages[:3]
    every = conversations(iter([{"messages": messages}]), every_turn=True)
    assert [c.messages for c in every] == [messages[:1], messages[:3]]
    with pytest.raises(ValueError, match="prompt 1: needs"):
        list(conversations(iter([{"messages": messages[1:2]}]), every_turn=True))


def test_a_sliding_window_shorter_than_a_row_is_refused() -> None:
    target = tiny_target("mistral_sliding")
    with pytest.raises(ValueError, match="at most 12"):
        BatchedDecoder(target, 2, 64, eos_token_ids=[])
    request = Request(prompt(5)[0].tolist(), 6)
    [answer] = BatchedDecoder(target, 2, 12, eos_token_ids=[]).run(requests_from(iter([request])))
    plain = target.generate(torch.tensor([request.input_ids]), max_new_tokens=6, do_sample=False)[0, 5:]
    assert answer.token_ids == plain.tolist()


def test_a_target_that_names_no_end_answers_to_the_full_length(tmp_path) -> None:
    target = tiny_chat_target()
    target.generation_config.eos_token_id = None
    rows = conversations(iter(prompts(3)))
    distiller = Distiller(
        target, tiny_tokenizer(), tmp_path / "a.jsonl", slots=2, max_length=64, max_new_tokens=9, prompts=rows
    )
    distiller.run(10**6)
    assert [len(row["response_ids"]) for row in read_rows(tmp_path / "a.jsonl")] == [9, 9, 9]
