"""Batched decoding in which a finished row is replaced at once.

Knows: one target and a fixed number of slots, each holding one row's KV cache. Does not know where requests come from,
what a chat is, or what happens to the answers.

`generate` pads a batch and runs it until its longest row ends; on answers of mixed length most of the work is then
spent on rows that are already done. Here every row has its own position in a preallocated slot, so a new request can
take over the slot of a finished one between two steps.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_utils import AttentionInterface

TOP_K = 50  # the default of transformers' sampling; the rest of the distribution is the tail nobody reads
CHUNKS = 10  # rows of like length are kept together, so that short ones need not attend over the width of the longest
LENGTH_STEP = 32  # attention reads the slots up to the longest row, rounded up to this many positions
SORT_EVERY = 16  # steps between looks at whether sorting the rows by length pays
SORT_GAIN = 0.9  # it does when it leaves less than this share of the positions to be read
PREFILL_ROWS = 8  # so many slots must be free, whose prompts are then run together
PREFILL_TOKENS = 2048  # in one pass at most, padding included; a longer prompt is run alone


@dataclass
class Request:
    """One row to decode. `temperature` 0 means greedy; `tag` is the caller's own and comes back untouched."""

    input_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    tag: Any = None


@dataclass
class Answer:
    """The new tokens of a request; `finished` is true when the last one is an end-of-sequence token."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False


def end_token_ids(model: PreTrainedModel) -> list[int]:
    """The tokens that end what `model` writes; none for a model that names none."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    visible_per_chunk: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that reads each key/value head once for its whole group of query heads.

    The stock path repeats the key/value heads first, which dominates batched decoding on a CPU.
    `query` is `[B, H, Q, D]`, `key` and `value` `[B, G, T, D]`, the additive mask `[B, 1, Q, T]`.
    With `visible_per_chunk`, the rows are cut into so many chunks and each reads only its own first positions.
    """
    mask = None if attention_mask is None else attention_mask.to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    if visible_per_chunk is None:
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
        )
    else:
        assert mask is not None
        size = -(-query.shape[0] // len(visible_per_chunk))
        output = torch.cat(
            [
                nn.functional.scaled_dot_product_attention(
                    query[rows],
                    key[rows, :, :n],
                    value[rows, :, :n],
                    mask[rows, ..., :n],
                    scale=scaling,
                    enable_gqa=grouped,
                )
                for i, n in enumerate(visible_per_chunk)
                for rows in [slice(i * size, (i + 1) * size)]
            ]
        )
    return output.transpose(1, 2).contiguous(), None


GROUPED_ATTENTION = "moa_grouped"
AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer for all slots, `[slots, kv_heads, max_length, head_dim]`."""

    is_sliding = False

    def __init__(self, slots: int, max_length: int, rows: dict[str, Any]):
        super().__init__()
        self.slots, self.max_length, self.rows = slots, max_length, rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.slots, key_states.shape[1], self.max_length, key_states.shape[3])
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def fill(self, slot: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Puts a prefilled row, `[kv_heads, T, head_dim]`, into a slot."""
        if not self.is_initialized:
            self.lazy_initialization(key_states[None], value_states[None])
        self.keys[slot, :, : key_states.shape[1]] = key_states
        self.values[slot, :, : value_states.shape[1]] = value_states

    def reorder(self, order: torch.Tensor, visible: int) -> None:
        """Puts what is in slot `order[i]` into slot `i`; only the first `visible` positions are in use."""
        for states in (self.keys, self.values):
            states[:, :, :visible] = states[order, :, :visible]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, positions, visible = self.rows["index"], self.rows["positions"], self.rows["visible"]
        self.keys[index, :, positions] = key_states[:, :, 0]
        self.values[index, :, positions] = value_states[:, :, 0]
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows["visible"], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.max_length


class BatchedDecoder:
    """Decodes a stream of requests on a fixed number of slots.

    Args:
        model: any causal LM with full attention in every layer and a per-layer KV cache.
        slots: rows decoded together.
        max_length: prompt and answer together, at most this many tokens per row.
        eos_token_ids: tokens that end a row.
        seed: of the sampled rows.

    Raises:
        ValueError: rows could become longer than the target's sliding window, which the slots do not follow.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, max_length: int, eos_token_ids: list[int], seed: int = 0
    ) -> None:
        windows = [layer.sliding_window for layer in DynamicCache(config=model.config).layers if layer.is_sliding]
        if windows and max_length > min(windows):
            raise ValueError(
                f"{type(model).__name__} has sliding attention over {min(windows)} tokens: rows of up to {max_length} "
                f"cannot be decoded in batches; ask for at most {min(windows)}"
            )
        self.model, self.slots, self.max_length = model, slots, max_length
        self.eos = set(eos_token_ids)
        self.generator = torch.Generator(device=model.device).manual_seed(seed)
        self.rows: dict[str, Any] = {"index": torch.arange(slots, device=model.device)}
        layers = [_SlotLayer(slots, max_length, self.rows) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=layers)

    @torch.inference_mode()
    def run(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        """Yields answers as they finish. `next_request` is asked whenever a slot is free and may return None for
        "nothing now"; the run ends when it does so while no row is being decoded.

        Raises:
            ValueError: a request leaves no room for an answer within `max_length`.
        """
        previous = self.model.config._attn_implementation
        self.model.config._attn_implementation = GROUPED_ATTENTION
        try:
            yield from self._run(next_request)
        finally:
            self.model.config._attn_implementation = previous

    def _run(self, next_request: Callable[[], Request | None]) -> Iterator[Answer]:
        device = self.model.device
        active: dict[int, Answer] = {}
        tokens = torch.zeros(self.slots, 1, dtype=torch.long, device=device)
        positions = torch.zeros(self.slots, dtype=torch.long, device=device)
        temperatures = torch.zeros(self.slots, device=device)
        columns = torch.arange(self.max_length, device=device)
        minus_infinity = torch.finfo(torch.float32).min
        for step in itertools.count():
            while self.slots - len(active) >= min(PREFILL_ROWS, self.slots) or not active:
                requests = list(itertools.islice(iter(next_request, None), self.slots - len(active)))
                for request, states, token in self._prefill(requests):
                    answer = Answer(request)
                    if self._append(answer, token):
                        yield answer
                        continue
                    is_long = len(request.input_ids) + request.max_new_tokens > self.max_length // 2
                    slot = (max if is_long else min)(set(range(self.slots)) - set(active))
                    for layer, (keys, values) in zip(self.cache.layers, states, strict=True):
                        layer.fill(slot, keys, values)
                    active[slot] = answer
                    tokens[slot, 0] = token
                    positions[slot] = len(request.input_ids)
                    temperatures[slot] = request.temperature
                if not requests:
                    break
            if not active:
                return
            if step % SORT_EVERY == 0:
                order = positions.argsort()
                if sum(self._visible(positions[order])) < SORT_GAIN * sum(self._visible(positions)):
                    visible = max(self._visible(positions))
                    for layer in self.cache.layers:
                        layer.reorder(order, visible)
                    tokens, positions, temperatures = tokens[order], positions[order], temperatures[order]
                    active = {new: active[old] for new, old in enumerate(order.tolist()) if old in active}
            visible_per_chunk = self._visible(positions)
            visible = max(visible_per_chunk)
            self.rows["positions"], self.rows["visible"] = positions, visible
            hidden_beyond = columns[None, :visible] > positions[:, None]
            mask = torch.zeros(self.slots, 1, 1, visible, device=device)
            mask.masked_fill_(hidden_beyond[:, None, None], minus_infinity)
            logits = self.model(
                tokens,
                attention_mask=mask,
                position_ids=positions[:, None],
                cache=self.cache,
                use_cache=True,
                visible_per_chunk=visible_per_chunk,
            ).logits[:, -1]
            chosen = self._choose(logits, temperatures)
            tokens.copy_(chosen[:, None])
            for slot, token in enumerate(chosen.tolist()):
                if slot not in active:
                    continue
                positions[slot] += 1
                if self._append(active[slot], token):
                    yield active.pop(slot)
                    positions[slot] = 0  # an idle slot must not keep the attention window long

    def _visible(self, positions: torch.Tensor) -> list[int]:
        """How many positions each chunk of rows attends over."""
        longest = [int(chunk.max()) + 1 for chunk in positions.split(-(-self.slots // CHUNKS))]
        return [min(self.max_length, -(-length // LENGTH_STEP) * LENGTH_STEP) for length in longest]

    def _prefill(
        self, requests: list[Request]
    ) -> Iterator[tuple[Request, list[tuple[torch.Tensor, torch.Tensor]], int]]:
        """Runs prompts, those of like length together. Yields each request with every layer's keys and values, each
        `[kv_heads, T, head_dim]`, and its first new token."""
        for request in requests:
            room = self.max_length - len(request.input_ids)
            if room < 1:
                raise ValueError(
                    f"a request of {len(request.input_ids)} tokens leaves no room in slots of {self.max_length}"
                )
            request.max_new_tokens = min(request.max_new_tokens, room)
        waiting = sorted(requests, key=lambda request: len(request.input_ids))
        while waiting:
            count = 1
            most = min(PREFILL_ROWS, len(waiting))
            while count < most and (count + 1) * len(waiting[count].input_ids) <= PREFILL_TOKENS:
                count += 1
            group, waiting = waiting[:count], waiting[count:]
            lengths = [len(request.input_ids) for request in group]
            width = lengths[-1]
            # what is to the right of a token cannot change it: the padding needs no mask but the causal one
            prompts = torch.tensor(
                [request.input_ids + [0] * (width - n) for request, n in zip(group, lengths, strict=True)],
                device=self.model.device,
            )
            mask = torch.full((width, width), torch.finfo(torch.float32).min, device=prompts.device).triu(1)
            ends = torch.tensor(lengths, device=prompts.device) - 1
            cache = DynamicCache()
            logits = self.model(
                prompts, attention_mask=mask[None, None], cache=cache, use_cache=True, logits_to_keep=ends
            ).logits  # (B, B, V): every row's logits at every row's end
            temperatures = torch.tensor([request.temperature for request in group], device=prompts.device)
            first = self._choose(logits.diagonal().T, temperatures).tolist()
            for row, (request, length) in enumerate(zip(group, lengths, strict=True)):
                states = [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in cache.layers]
                yield request, states, first[row]

    def _choose(self, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """Greedy where the temperature is 0, else sampled from the `TOP_K` most probable. `[B, V] -> [B]`."""
        values, candidates = logits.float().topk(min(TOP_K, logits.shape[-1]))
        sampled = (values / temperatures.clamp(min=1e-4)[:, None]).softmax(-1)
        picked = torch.multinomial(sampled, 1, generator=self.generator)
        picked[temperatures == 0] = 0
        return candidates.gather(1, picked)[:, 0]

    def _append(self, answer: Answer, token: int) -> bool:
        answer.token_ids.append(token)
        answer.finished = token in self.eos
        return answer.finished or len(answer.token_ids) >= answer.request.max_new_tokens


def requests_from(iterable: Iterator[Request]) -> Callable[[], Request | None]:
    """Turns an iterator into the callable that `BatchedDecoder.run` takes."""
    source = itertools.chain(iterable, itertools.repeat(None))
    return lambda: next(source)
