"""What decoding with a drafter costs: passes, drafts, bookkeeping, memory, long prompts, batches, draft lengths.

Each probe is a function that returns plain numbers for a JSON record. Knows how to measure; what is good enough is said
in `goals`. Times are medians of interleaved repetitions unless said otherwise.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..generation import Draft, DraftOptions, DraftPlan, DraftSession, DraftSource, Verified, attach_source
from ..generation.moa_source import MoASession, MoASource
from ..modeling_moa import MoADrafterForCausalLM
from .measure import Answer, Clock, answer
from .methods import OPTIONS, PLAIN, Method
from .runner import encode
from .summary import decode_rate, end_to_end_rate

PASS_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
GREEDY = {"do_sample": False}


@torch.no_grad()
def pass_seconds(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    sizes: Sequence[int] = PASS_SIZES,
    repetitions: int = 7,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """Seconds of a target pass over k tokens, by k, with the prompt (1, P) in its cache; v(k) is this over k = 1's."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    cache.activate_past_recording()
    target(input_ids=prompt_ids, cache=cache, use_cache=True, logits_to_keep=1)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for repetition in range(repetitions + 1):
        for size in sizes:
            input_ids = prompt_ids[:, -size:]
            began = clock()
            target(input_ids=input_ids, cache=cache, use_cache=True).logits[0].argmax(dim=-1).tolist()
            if repetition:  # the first round is the warm-up
                times[size].append(clock() - began)
            cache.crop(-size)
    return {size: statistics.median(taken) for size, taken in times.items()}


class TimedSource:
    """Another source of drafts, with the time it takes. For one call after the other, not for several at once."""

    def __init__(self, source: DraftSource, drafter: MoADrafterForCausalLM, clock: Clock):
        self.source, self.clock = source, clock
        self.generation_config = drafter.generation_config
        self.session: TimedSession | None = None

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> "TimedSession":
        self.session = TimedSession(self.source.begin(target, prompt_ids, options), target, self.clock)
        return self.session


class TimedSession:
    """One call's times.

    Attributes:
        prompt_seconds: of taking the prompt in.
        observe_seconds: of taking in what the rounds settled.
        draft_seconds, levels: of drafting, and draft steps made.
        target_cache: bytes of the target's cache when the prompt was taken in.
    """

    def __init__(self, session: DraftSession, target: PreTrainedModel, clock: Clock):
        self.session, self.clock = session, clock
        self.layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.hidden_states = session.hidden_states
        self.prompt_seconds: float | None = None
        self.observe_seconds = self.draft_seconds = 0.0
        self.levels = 0
        self.target_cache = 0

    def observe(self, verified: Verified) -> None:
        began = self.clock()
        self.session.observe(verified)
        if self.prompt_seconds is not None:
            self.observe_seconds += self.clock() - began
            return
        layers = (verified.states.whole_layer(index) for index in range(self.layers))
        self.target_cache = sum(states.nbytes for layer in layers for states in layer)
        self.prompt_seconds = self.clock() - began

    def draft(self, plan: DraftPlan) -> list[Draft]:
        began = self.clock()
        drafts = self.session.draft(plan)
        self.draft_seconds += self.clock() - began
        self.levels += max(max(draft.depths, default=0) for draft in drafts)
        return drafts

    def select(self, rows: list[int]) -> None:
        self.session.select(rows)


def round_parts(
    target: PreTrainedModel,
    drafter: MoADrafterForCausalLM,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    repetitions: int = 3,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Where a round's time goes with a chain of five, in plain decoding's one-token passes.

    Returns:
        verify: the target's pass. draft: all levels; draft_cost: one level, c. observe: taking verified tokens in.
        bookkeeping: everything else, Python included. tau. plain_step_seconds: what they are measured in.
        plain_bookkeeping: the same for plain decoding. prompt: taking the prompt in, once per answer.
    """
    source = TimedSource(MoASource(drafter), drafter, clock)
    attach_source(target, source, source)
    keywords = GREEDY | {"max_new_tokens": max_new_tokens}
    timed = Method("moa", OPTIONS["moa"], source)
    parts: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            parts.setdefault(name, []).append(value)

    for repetition in range(repetitions + 1):
        for prompt in prompts:
            plain = answer(target, prompt, keywords, clock=clock)
            drafted = answer(target, prompt, keywords | timed.keywords(), clock=clock)
            session = source.session
            if not repetition or not drafted.rounds or session is None or not session.levels:
                continue
            step, rounds = plain.pass_seconds / len(plain.rounds), len(drafted.rounds)
            first = session.prompt_seconds or 0.0
            used = drafted.pass_seconds + session.draft_seconds + session.observe_seconds
            note(
                verify=drafted.pass_seconds / rounds / step,
                draft=session.draft_seconds / rounds / step,
                draft_cost=session.draft_seconds / session.levels / step,
                observe=session.observe_seconds / rounds / step,
                bookkeeping=(drafted.decode_seconds - first - used) / rounds / step,
                plain_bookkeeping=(plain.decode_seconds - plain.pass_seconds) / len(plain.rounds) / step,
                prompt=first / step,
                tau=sum(drafted.rounds) / rounds,
                plain_step_seconds=step,
            )
    return {name: statistics.median(values) for name, values in parts.items()}


def memory(
    target: PreTrainedModel, drafter: MoADrafterForCausalLM, prompt: torch.Tensor, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Bytes of both models and of their caches, with the prompt (1, P) in them."""
    source = TimedSource(MoASource(drafter), drafter, clock)
    attach_source(target, source, source)
    target.generate(prompt, **GREEDY, max_new_tokens=8, **Method("moa", OPTIONS["moa"], source).keywords())
    session = source.session
    assert session is not None
    inner = session.session
    assert isinstance(inner, MoASession)
    context = inner.context()
    storages = [t.untyped_storage() for t in (*context.self_attention, *context.cross_attention)]
    weights = {
        name: sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        for name, model in (("target", target), ("drafter", drafter))
    }
    caches = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return {
        "prompt_tokens": prompt.shape[1],
        "target_weights": weights["target"],
        "target_cache": session.target_cache,
        "drafter_weights": weights["drafter"],
        "drafter_cache": caches,
        "added": (weights["drafter"] + caches) / (weights["target"] + session.target_cache),
    }


def compare(
    target: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    repetitions: int,
    clock: Clock = time.perf_counter,
) -> dict[str, dict[str, float | None]]:
    """Speedups of some methods over plain decoding on some prompts; the mean over prompts of the medians."""
    rates: dict[str, list[list[tuple[float | None, float | None]]]] = {method.name: [] for method in methods}
    for index, prompt in enumerate(prompts):
        answers: dict[str, list[Answer]] = {method.name: [] for method in methods}
        for repetition in range(repetitions):
            first = (index + repetition) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                keywords = GREEDY | {"max_new_tokens": max_new_tokens} | method.keywords()
                answers[method.name].append(answer(target, prompt, keywords, clock=clock))
        for name, given in answers.items():
            rates[name].append([(end_to_end_rate([a]), decode_rate([a])) for a in given])

    def speedup(name: str, column: int) -> float | None:
        of_prompts = []
        for mine, plain in zip(rates[name], rates[PLAIN], strict=True):
            pairs = [(m[column], p[column]) for m, p in zip(mine, plain, strict=True)]
            ratios = [m / p for m, p in pairs if m is not None and p is not None]
            if ratios:
                of_prompts.append(statistics.median(ratios))
        return statistics.fmean(of_prompts) if of_prompts else None

    return {m.name: {"speedup": speedup(m.name, 0), "decode_speedup": speedup(m.name, 1)} for m in methods}


def prompt_of_length(
    texts: Sequence[str], length: int, tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> torch.Tensor:
    """(1, about `length`) a request to summarise distinct texts, beginning with number `first`.

    Raises:
        ValueError: there is no text.
    """
    if not texts:
        raise ValueError("a long prompt needs texts to be made of")

    def prompt(words: Sequence[int]) -> torch.Tensor:
        content = "Summarize the following texts.\n\n" + tokenizer.decode(list(words), skip_special_tokens=True)
        return encode([{"role": "user", "content": content}], tokenizer)

    ids: list[int] = []
    index = first
    while len(ids) < length:
        ids += tokenizer(texts[index % len(texts)] + "\n\n", add_special_tokens=False)["input_ids"]
        index += 1
    spare = length - prompt([]).shape[1]
    return prompt(ids[: max(spare, 1)])


def batch(
    target: PreTrainedModel,
    method: Method,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    repetitions: int = 3,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Total new tokens per second of several prompts at once, against plain batched decoding; padding not counted."""
    config = target.generation_config
    ends = config.eos_token_id
    ends = set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
    pad = config.pad_token_id if config.pad_token_id is not None else min(ends, default=0)
    longest = max(prompt.shape[1] for prompt in prompts)
    input_ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=pad) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0), value=0) for p in prompts])

    def decode(keywords: dict[str, Any]) -> tuple[list[list[int]], float]:
        began = clock()
        sequences = target.generate(
            input_ids, attention_mask=mask, pad_token_id=pad, max_new_tokens=max_new_tokens, **GREEDY, **keywords
        )
        seconds = clock() - began
        return [_until_end(row, ends) for row in sequences[:, longest:].tolist()], seconds

    rates: dict[str, list[float]] = {PLAIN: [], method.name: []}
    texts: dict[str, list[list[int]]] = {}
    ways = [(PLAIN, {}), (method.name, method.keywords())]
    for repetition in range(repetitions + 1):
        for name, keywords in ways if repetition % 2 else reversed(ways):
            rows, seconds = decode(keywords)
            texts[name] = rows
            if repetition:
                rates[name].append(sum(map(len, rows)) / seconds)
    ratios = [mine / plain for mine, plain in zip(rates[method.name], rates[PLAIN], strict=True)]
    return {
        "rows": len(prompts),
        "plain_tokens_per_second": statistics.median(rates[PLAIN]),
        "tokens_per_second": statistics.median(rates[method.name]),
        "speedup": statistics.median(ratios),
        "identical_rows": sum(a == b for a, b in zip(texts[PLAIN], texts[method.name], strict=True)),
    }


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to and including the first end-of-sequence token; what follows is padding."""
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


def draft_lengths(
    target: PreTrainedModel,
    drafter: MoADrafterForCausalLM,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
    lengths: Sequence[int] = (1, 2, 3, 4, 5, 6, 8),
    repetitions: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[int, float | None]:
    """Decode-only speedup of fixed chains, by their length."""
    chains = [Method(str(n), OPTIONS["moa"] | {"num_assistant_tokens": n}, drafter) for n in lengths]
    figures = compare(target, [Method(PLAIN), *chains], prompts, max_new_tokens, repetitions, clock)
    return {n: figures[str(n)]["decode_speedup"] for n in lengths}


@dataclass(frozen=True)
class Amount:
    """How much the probes measure.

    Attributes:
        prompts: short prompts for the parts of a round and the draft lengths, and long ones of each length.
        max_new_tokens: of each answer.
        repetitions: of every timed answer, the warm-up not counted.
        contexts: lengths of the long prompts, in tokens; the last is also the one whose memory is counted.
    """

    prompts: int = 2
    max_new_tokens: int = 64
    repetitions: int = 2
    contexts: tuple[int, ...] = (400, 4000)

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: no context, or one given twice.
        """
        if not self.contexts or len(set(self.contexts)) < len(self.contexts):
            raise ValueError(f"Prompt lengths must be one or more different numbers, not {list(self.contexts)}")


BATCH = 4  # prompts at once


def probe(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: dict[str, Method],
    short_texts: Sequence[str],
    long_texts: Sequence[str],
    amount: Amount,
    clock: Clock = time.perf_counter,
    done: Mapping[str, Any] | None = None,
    keep: Callable[[str, Any], None] = lambda name, measured: None,
) -> dict[str, Any]:
    """All probes that are not done yet, one after the other.

    Args:
        methods: with "moa" and "moa-auto".
        short_texts: user turns.
        long_texts: passages that long prompts are made of.
        done: what `keep` was told in an earlier run, by name.
        keep: told the name and the figures of every probe as soon as it is done.

    Returns:
        The record, as JSON will give it back.
    """
    drafter, auto = methods["moa"].assistant, methods["moa-auto"]
    count, tokens, repetitions = amount.prompts, amount.max_new_tokens, amount.repetitions

    def short(number: int) -> list[torch.Tensor]:
        chats = ([{"role": "user", "content": text}] for text in short_texts[:number])
        return [encode(chat, tokenizer).to(target.device) for chat in chats]

    def long(length: int, first: int = 0) -> torch.Tensor:
        return prompt_of_length(long_texts, length, tokenizer, first).to(target.device)

    def context(length: int) -> dict[str, Any]:
        prompts = [long(length, 10 * number) for number in range(count)]
        chosen = [Method(PLAIN), methods["moa"], auto]
        figures = compare(target, chosen, prompts, tokens, repetitions, clock)
        return {"prompt_tokens": [prompt.shape[1] for prompt in prompts], **figures}

    def lengths() -> dict[str, float | None]:
        speeds = draft_lengths(target, drafter, short(count), tokens, clock=clock)
        return {str(length): speedup for length, speedup in speeds.items()}

    def passes() -> dict[str, float]:
        return {str(size): seconds for size, seconds in pass_seconds(target, long(400), clock=clock).items()}

    probes: dict[str, Callable[[], dict[str, Any]]] = {
        "pass_seconds": passes,
        "round": lambda: round_parts(target, drafter, short(count), tokens, repetitions, clock),
        "batch": lambda: batch(target, auto, short(BATCH), tokens, repetitions, clock),
        "memory": lambda: memory(target, drafter, long(amount.contexts[-1]), clock),
        **{f"context/{length}": partial(context, length) for length in amount.contexts},
        "draft_lengths": lengths,
    }
    done = done or {}
    measured: dict[str, Any] = {}
    for name, measure in probes.items():
        if name in done:
            measured[name] = done[name]
            continue
        measured[name] = measure()
        keep(name, measured[name])
    record: dict[str, Any] = {"context": {}}
    for name, figures in measured.items():
        kind, _, length = name.partition("/")
        if length:
            record[kind][length] = figures
        else:
            record[kind] = figures
    one = record["pass_seconds"]["1"]
    return record | {"verify_cost": {size: seconds / one for size, seconds in record["pass_seconds"].items()}}
