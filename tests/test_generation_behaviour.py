"""What surrounds decoding: attaching, options, streams, stops, returned states, caches, threads, refusals."""

import copy
import json
import string
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import OracleSource
from tiny import VOCAB, prompt, tiny_drafter, tiny_target
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import moa_spec
from moa_spec.generation import LookupStore, attach_source, record_trace
from moa_spec.modeling_moa import MoADrafterForCausalLM, WrongTargetError

FIXED = {"draft_policy": "fixed"}
TREE = FIXED | {"draft_breadth": 3, "num_assistant_tokens": 5}
NEW = 30


def attached(**overrides: Any) -> tuple[PreTrainedModel, MoADrafterForCausalLM]:
    target = tiny_target()
    drafter = tiny_drafter(target, **overrides)
    moa_spec.attach(target, drafter)
    return target, drafter


def with_oracle(
    branches: int = 0, rows: int = 1, **target_options: Any
) -> tuple[PreTrainedModel, Any, torch.Tensor, torch.Tensor]:
    """Target, assistant whose drafts are mostly right, prompts, plain output."""
    target = tiny_target(**target_options)
    ids = prompt(10, rows=rows)
    plain = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    assistant = tiny_drafter(target)
    attach_source(target, assistant, OracleSource(plain.tolist(), 0.9, branches))
    return target, assistant, ids, plain


# -- attaching ---------------------------------------------------------------------------------------------------------


def test_attach_changes_one_object_and_detach_undoes_it() -> None:
    names_of_class = ("generate", "_get_candidate_generator", "_assisted_decoding", "_sample")
    before = [getattr(LlamaForCausalLM, name) for name in names_of_class]
    target, other = tiny_target(), tiny_target(seed=5)
    names = set(vars(target))
    drafter = tiny_drafter(target)
    moa_spec.attach(target, drafter)
    assert [getattr(LlamaForCausalLM, name) for name in names_of_class] == before
    assert other.generate.__func__ is LlamaForCausalLM.generate
    assert not any(p is q for p in target.parameters() for q in drafter.parameters())
    moa_spec.detach(target)
    assert set(vars(target)) == names
    assert drafter._lent is None
    moa_spec.detach(target)  # nothing left to undo


def test_a_drafter_of_another_dtype_is_attached_with_a_warning() -> None:
    target = tiny_target()
    with pytest.warns(UserWarning, match=r"dtype=target\.dtype"):
        moa_spec.attach(target, tiny_drafter(target).to(torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moa_spec.attach(target, tiny_drafter(target))


def test_a_drafter_that_is_not_attached_says_what_to_call() -> None:
    target, drafter = attached()
    stranger = tiny_drafter(target, seed=9)
    with pytest.raises(RuntimeError, match=r"moa_spec\.attach\(target, drafter\)"):
        target.generate(prompt(4), assistant_model=stranger, max_new_tokens=3)
    other = tiny_target()
    moa_spec.attach(other, drafter)
    with pytest.raises(RuntimeError, match="attached to another target"):
        target.generate(prompt(4), assistant_model=drafter, max_new_tokens=3)


def test_two_drafters_and_a_foreign_assistant_on_one_target() -> None:
    target, first = attached()
    second = tiny_drafter(target, seed=7)
    moa_spec.attach(target, second)
    plain = target.generate(prompt(6), max_new_tokens=NEW, do_sample=False)
    for assistant in (first, second, tiny_target(seed=3)):
        assert torch.equal(
            target.generate(prompt(6), max_new_tokens=NEW, do_sample=False, assistant_model=assistant), plain
        )


def test_wrong_target_and_wrong_type() -> None:
    target, drafter = attached()
    with pytest.raises(WrongTargetError):
        moa_spec.attach(tiny_target("qwen3"), drafter)
    with pytest.raises(TypeError, match="MoA drafter"):
        moa_spec.attach(target, target)


def test_a_copied_target_decodes_with_its_own_weights() -> None:
    target, _ = attached()
    twin = copy.deepcopy(target)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    plain = type(twin).generate(twin, prompt(6), max_new_tokens=9, do_sample=False)
    assert torch.equal(twin.generate(prompt(6), max_new_tokens=9, do_sample=False), plain)
    moa_spec.attach(twin, drafter := tiny_drafter(twin))
    assert torch.equal(twin.generate(prompt(6), max_new_tokens=9, do_sample=False, assistant_model=drafter), plain)


def test_an_instance_generate_is_called_for_plain_calls_and_put_back() -> None:
    target = tiny_target()
    target.generate = lambda *args, **kwargs: "mine"
    moa_spec.attach(target, tiny_drafter(target))
    assert target.generate(prompt(3)) == "mine"
    moa_spec.detach(target)
    assert target.generate(prompt(3)) == "mine"


def test_load_drafter(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.draft_breadth = 2
    drafter.save_pretrained(tmp_path / "good")
    loaded = moa_spec.load_drafter(tmp_path / "good", target)
    assert loaded.generation_config.draft_breadth == 2
    target.generate(prompt(3), assistant_model=loaded, max_new_tokens=3)
    with pytest.raises(OSError, match="No MoA drafter could be loaded from"):
        moa_spec.load_drafter(tmp_path / "missing", target)
    weights = tmp_path / "good" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(OSError, match="No MoA drafter could be loaded from"):
        moa_spec.load_drafter(tmp_path / "good", target)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_assistant_tokens", 0),
        ("draft_breadth", 1.5),
        ("draft_nodes", -1),
        ("draft_policy", "best"),
        ("assistant_confidence_threshold", 2.0),
        ("prompt_lookup_num_tokens", -3),
    ],
)
def test_impossible_options_are_refused(option: str, value: Any) -> None:
    target, drafter = attached()
    with pytest.raises(ValueError, match=option):
        target.generate(prompt(4), assistant_model=drafter, **{option: value})


def test_options_come_from_the_call_then_the_drafter_then_defaults() -> None:
    target, drafter = attached()
    drafter.generation_config.num_assistant_tokens = 2
    drafter.generation_config.draft_policy = "fixed"

    def longest(**call: Any) -> int:
        with record_trace() as trace:
            target.generate(prompt(4), max_new_tokens=20, do_sample=False, assistant_model=drafter, **call)
        return max(len(r.nodes) for r in trace.rounds)

    assert longest() == 2
    assert longest(num_assistant_tokens=3) == 3
    assert longest(generation_config=GenerationConfig(num_assistant_tokens=4)) == 4
    drafter.generation_config.num_assistant_tokens = None
    assert longest() == 6


def test_low_confidence_ends_a_draft() -> None:
    target, drafter = attached()
    with record_trace() as trace:
        target.generate(
            prompt(4),
            max_new_tokens=20,
            do_sample=False,
            assistant_model=drafter,
            assistant_confidence_threshold=0.99,
            **FIXED,
        )
    assert all(len(r.nodes) <= 1 for r in trace.rounds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"num_beams": 2}, "Beam search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive search"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"inputs": prompt(4)[:, :0]}, "prompt is empty"),
        ({"inputs": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
    ],
)
def test_what_cannot_work_is_refused_by_name(call: dict[str, Any], message: str) -> None:
    target, drafter = attached()
    with pytest.raises(ValueError, match=message):
        target.generate(**({"inputs": prompt(4)} | call), assistant_model=drafter, max_new_tokens=5)


# -- streams and stops -------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [FIXED, TREE])
def test_streamers_get_the_same_values(rows: int, options: dict[str, Any]) -> None:
    target, assistant, ids, plain = with_oracle(branches=3, rows=rows)
    eos = plain[0, 25].item()
    records = []
    for extra in ({}, {"assistant_model": assistant, **options}):
        streamer = Recorder()
        target.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, streamer=streamer, **extra)
        records.append(streamer.values)
    assert records[0] == records[1]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One letter or digit per token."""
    letters = string.ascii_letters + string.digits + ".,"
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a")


@pytest.mark.parametrize("where", ["call", "config", "model"])
def test_stop_strings_cut_exactly(tokenizer: PreTrainedTokenizerFast, where: str) -> None:
    target, assistant, ids, plain = with_oracle()
    stop = {"stop_strings": [tokenizer.decode(plain[0, 25:28])]}
    call: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    if where == "call":
        call |= stop
    elif where == "config":
        call = {"generation_config": GenerationConfig(**call, **stop, pad_token_id=0)}
    else:
        target.generation_config.stop_strings = stop["stop_strings"]
    expected = target.generate(ids, tokenizer=tokenizer, **call)
    assert expected.shape[1] < plain.shape[1]
    found = target.generate(ids, tokenizer=tokenizer, **call, assistant_model=assistant, num_assistant_tokens=8)
    assert torch.equal(found, expected)


class Cancel(StoppingCriteria):
    """Raises when the text reaches a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyboardInterrupt
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("after", [11, 14, 23])
@pytest.mark.parametrize("options", [FIXED, TREE, {}])
def test_a_cancelled_call_leaves_the_next_one_clean(after: int, options: dict[str, Any]) -> None:
    target, drafter = attached()
    ids = prompt(10)
    call = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": drafter, **options}
    plain = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    with pytest.raises(KeyboardInterrupt):
        target.generate(ids, **call, stopping_criteria=StoppingCriteriaList([Cancel(after)]))
    assert torch.equal(target.generate(ids, **call), plain)
    assert torch.equal(target.generate(ids, **call), plain)


# -- returned states and caches ----------------------------------------------------------------------------------------


def assert_states_equal(mine: Any, theirs: Any) -> None:
    assert len(mine) == len(theirs)
    for ours, plain in zip(mine, theirs, strict=True):
        assert len(ours) == len(plain)
        for a, b in zip(ours, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("memory", ["none", "add"])
@pytest.mark.parametrize("layers", [True, [1]])
@pytest.mark.parametrize("options", [FIXED, TREE, {}])
def test_hidden_states_are_returned_per_token(memory: str, layers: Any, options: dict[str, Any]) -> None:
    target, drafter = attached(memory_hidden_state=memory)
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": layers}
    plain = target.generate(prompt(10), **call)
    ours = target.generate(prompt(10), **call, assistant_model=drafter, **options)
    assert_states_equal(ours.hidden_states, plain.hidden_states)


def test_attentions_are_returned_per_token() -> None:
    target, assistant, ids, _ = with_oracle(branches=3)
    target.set_attn_implementation("eager")
    call = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(ids, **call)
    ours = target.generate(ids, **call, assistant_model=assistant, **TREE)
    assert_states_equal(ours.attentions, plain.attentions)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("new", [1, 2, 7, NEW])
def test_the_cache_equals_one_rebuilt_from_the_text(attention: str, rows: int, new: int) -> None:
    target, assistant, ids, _ = with_oracle(branches=4, rows=rows)
    target.set_attn_implementation(attention)
    out = target.generate(
        ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, assistant_model=assistant, **TREE
    )
    rebuilt = DynamicCache(config=target.config)
    with torch.no_grad():
        target(out.sequences[:, :-1], cache=rebuilt, use_cache=True)
    for mine, fresh in zip(out.cache.layers, rebuilt.layers, strict=True):
        torch.testing.assert_close(mine.keys, fresh.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mine.values, fresh.values, rtol=1e-3, atol=1e-4)


def test_a_returned_cache_has_the_rows_that_finished_early() -> None:
    target, assistant, ids, plain = with_oracle(branches=4, rows=4)
    ends = [plain[0, 14].item(), plain[2, 22].item()]
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "return_dict_in_generate": True}
    details = {"output_scores": True, "output_hidden_states": True}
    expected = target.generate(ids, **call, **details)
    found = target.generate(ids, **call, **details, assistant_model=assistant, **TREE)
    assert torch.equal(found.sequences, expected.sequences)
    written = (expected.sequences[:, ids.shape[1] :] != 0).long().cumsum(1)
    lengths = [min(int((row == int(row.max())).nonzero()[0]) + 1, NEW) for row in written]
    assert len(set(lengths)) > 1
    for row, length in enumerate(lengths):
        slots = ids.shape[1] + length - 1
        for mine, theirs in zip(found.cache.layers, expected.cache.layers, strict=True):
            torch.testing.assert_close(mine.keys[row, :, :slots], theirs.keys[row, :, :slots], rtol=1e-3, atol=1e-4)
        for step in range(length):
            torch.testing.assert_close(found.scores[step][row], expected.scores[step][row], rtol=1e-3, atol=1e-3)
            mine, theirs = found.hidden_states[step][-1][row], expected.hidden_states[step][-1][row]
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("memory", ["none", "add"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_conversation_goes_on_from_its_cache(memory: str, family: str) -> None:
    target = tiny_target(family)
    drafter = tiny_drafter(target, memory_hidden_state=memory)
    moa_spec.attach(target, drafter)
    texts = []
    for extra in ({}, {"assistant_model": drafter}):
        cache, text = DynamicCache(config=target.config), prompt(10)
        if extra:
            cache.activate_past_recording()
        for turn in range(3):
            text = target.generate(text, cache=cache, max_new_tokens=9, do_sample=False, **extra)
            text = torch.cat([text, prompt(4, seed=turn + 5)], dim=1)
        texts.append(text.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("cache", [{"cache_implementation": "static"}, {"prefill_chunk_size": 4}])
@pytest.mark.parametrize("memory", ["none", "add"])
def test_static_caches_and_prefill_in_chunks(cache: dict[str, Any], memory: str) -> None:
    target, drafter = attached(memory_hidden_state=memory)
    plain = target.generate(prompt(10), max_new_tokens=NEW, do_sample=False)
    for options in (TREE, {}):
        ours = target.generate(
            prompt(10), max_new_tokens=NEW, do_sample=False, assistant_model=drafter, **options, **cache
        )
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("length", [20, 30, 40])
def test_the_context_limit(length: int) -> None:
    target, assistant, ids, plain = with_oracle(branches=2, max_position_embeddings=32)
    expected = plain[:, :length]
    assert torch.equal(
        target.generate(ids, max_length=length, do_sample=False, assistant_model=assistant, **TREE), expected
    )


def test_rotary_embeddings_that_depend_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target, assistant, ids, plain = with_oracle(rope_parameters=rope, max_position_embeddings=24)
    found = target.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=assistant, **TREE)
    assert torch.equal(found, plain)
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    target = tiny_target("phi3", rope_parameters=factors, original_max_position_embeddings=24)
    moa_spec.attach(target, drafter := tiny_drafter(target))
    call = {"do_sample": False, "assistant_model": drafter}
    assert torch.equal(
        target.generate(ids, max_length=24, **call), target.generate(ids, max_length=24, do_sample=False)
    )
    ids = prompt(30)  # past the change from the start
    assert torch.equal(
        target.generate(ids, max_length=50, **call), target.generate(ids, max_length=50, do_sample=False)
    )
    ids = ids[:, :10]
    with pytest.raises(ValueError, match="keep max_length at 24"):
        target.generate(ids, max_length=40, **call)


def test_batches_on_windows_are_refused_by_name() -> None:
    target = tiny_target("mistral_sliding")
    moa_spec.attach(target, drafter := tiny_drafter(target))
    with pytest.raises(ValueError, match="one prompt at a time"):
        target.generate(prompt(5, rows=2), assistant_model=drafter, max_new_tokens=4)


def test_several_samples_per_prompt() -> None:
    target, drafter = attached()
    call = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "assistant_model": drafter}
    torch.manual_seed(0)
    first = target.generate(prompt(5), **call)
    torch.manual_seed(0)
    again = target.generate(prompt(5), **call)
    assert first.shape == (3, 17)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


def test_a_batch_calls_row_indexed_processors_with_the_right_row() -> None:
    target, assistant, ids, _ = with_oracle(rows=3)
    allowed = {row: list(range(3 + row, VOCAB, 3)) for row in range(3)}
    call = {
        "max_new_tokens": 12,
        "do_sample": False,
        "prefix_allowed_tokens_fn": lambda row, sentence: allowed[row],
        "encoder_repetition_penalty": 1.4,
        "encoder_no_repeat_ngram_size": 2,
    }
    assert torch.equal(target.generate(ids, **call, assistant_model=assistant, **TREE), target.generate(ids, **call))


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [FIXED, {}])
def test_threads_share_one_drafter(options: dict[str, Any]) -> None:
    target, drafter = attached()
    prompts = [prompt(8, seed) for seed in range(4)]
    plain = [target.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() for ids in prompts]
    before = drafter.config.to_dict(), drafter.generation_config.to_dict(), set(vars(drafter))
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        with record_trace() as trace:
            ids = target.generate(prompts[i], max_new_tokens=NEW, do_sample=False, assistant_model=drafter, **options)
        results[i] = ids.tolist(), trace.generations[0].token_ids()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i][0] for i in range(4)] == plain
    assert [results[i][1] for i in range(4)] == [p[0][8:] for p in plain]
    assert (drafter.config.to_dict(), drafter.generation_config.to_dict(), set(vars(drafter))) == before


# -- traces and lookup -------------------------------------------------------------------------------------------------


def test_a_trace_tells_what_happened() -> None:
    target, assistant, ids, plain = with_oracle(branches=3)
    with record_trace() as trace:
        target.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=assistant, **TREE)
    (generation,) = trace.generations
    assert generation.token_ids() == plain[0, 10:].tolist()
    assert generation.target_calls == trace.target_calls == 1 + len(trace.rounds)
    assert trace.new_tokens == NEW
    assert trace.mean_accepted_tokens == pytest.approx((NEW - 1) / len(trace.rounds))
    assert trace.mean_accepted_tokens > 2
    for r in trace.rounds:
        path = [node for node in r.nodes if node.accepted]
        assert [node.token for node in path] == r.tokens[: len(path)]
        assert all(node.parent < i for i, node in enumerate(r.nodes))
        assert min(r.draft_seconds, r.verify_seconds, r.bookkeeping_seconds) >= 0
    assert json.loads(json.dumps(trace.to_dict()))["target_calls"] == trace.target_calls
    target.generate(ids, max_new_tokens=3, do_sample=False, assistant_model=assistant)
    assert len(trace.generations) == 1


def test_lookup_drafts_from_the_text_and_from_earlier_answers() -> None:
    target, drafter = attached(draft_vocab_size=2)  # a drafter that is of no use
    ids = prompt(10)
    answer = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    store = LookupStore()
    store.add(prompt(20, seed=4)[0].tolist())
    store.add(answer[0].tolist())
    call = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "assistant_model": drafter,
        "prompt_lookup_num_tokens": 8,
        **FIXED,
    }
    with record_trace() as trace:
        assert torch.equal(target.generate(ids, **call, draft_lookup_store=store), answer)
    assert trace.mean_accepted_tokens > 4
    accepted = {node.origin for r in trace.rounds for node in r.nodes if node.accepted}
    assert accepted == {"lookup"}
