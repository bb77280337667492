"""One answer, timed: what a target was asked, what it wrote, and how long each part took.

Knows how to watch a target's calls from outside, in the same way for every method, those of transformers included. Does
not know what is compared with what.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation import record_trace
from .metrics import Difference, dtype_spacing, rounds_from_lengths

Clock = Callable[[], float]


def clock_for(device: torch.device | str) -> Clock:
    """Seconds; on a GPU only after all work given to it is done, or its time would be charged to the wrong part."""
    if torch.device(device).type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronised


@dataclass
class Answer:
    """One timed call of `generate` for one prompt.

    Attributes:
        token_ids: the new tokens.
        seconds: of the whole call, prefill included.
        first_token_seconds: until the first new token was handed out.
        rounds: tokens that each round made final, see `metrics`.
        pass_seconds: of the target's passes in all rounds together; the prefill is not in it.
        draft_seconds: of drafting in all rounds together; None for methods that write no trace.
        draft_levels: draft steps of the drafter in all rounds together; None likewise.
        traced_rounds: the rounds as the trace has them, a second count; None likewise.
        peak_memory: bytes that the process had in use at most (on a GPU: that torch had allocated there); None where
            the system does not tell.
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    rounds: list[int]
    pass_seconds: float
    draft_seconds: float | None = None
    draft_levels: int | None = None
    traced_rounds: list[int] | None = None
    peak_memory: int | None = None

    @property
    def decode_seconds(self) -> float:
        """Without the prefill."""
        return self.seconds - self.first_token_seconds

    @property
    def recount_agrees(self) -> bool:
        """Whether the trace, where there is one, tells the same rounds as the target's calls."""
        return self.traced_rounds is None or self.traced_rounds == self.rounds

    def to_dict(self) -> dict[str, Any]:
        """For JSON. The second count is left out where it agrees."""
        fields = asdict(self)
        fields["traced_rounds"] = None if self.recount_agrees else self.traced_rounds
        fields["recounted"] = self.traced_rounds is not None
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Answer":
        """What `to_dict` gave."""
        fields = dict(fields)
        if fields.pop("recounted") and fields["traced_rounds"] is None:
            fields["traced_rounds"] = fields["rounds"]
        return cls(**fields)


class TargetCalls:
    """Watches a target's forward passes while it is entered.

    A method may run the target on the side, to learn what a pass costs. The answer is written in the cache that is used
    last; passes over any other are not told.
    """

    def __init__(self, target: PreTrainedModel, clock: Clock):
        self.target, self.clock = target, clock
        self._calls: list[tuple[Cache, int, float]] = []
        self._began = 0.0
        self._length = 0

    @property
    def cache_lengths(self) -> list[int]:
        """Per call, the tokens in the cache when it began."""
        return [length for cache, length, _ in self._calls if cache is self._calls[-1][0]]

    @property
    def seconds(self) -> list[float]:
        """Per call."""
        return [seconds for cache, _, seconds in self._calls if cache is self._calls[-1][0]]

    def __enter__(self) -> "TargetCalls":
        self._hooks = [
            self.target.register_forward_pre_hook(self._before, with_kwargs=True),
            self.target.register_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._length = int(kwargs["cache"].get_seq_length())
        self._began = self.clock()

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._calls.append((kwargs["cache"], self._length, self.clock() - self._began))


class _FirstToken(BaseStreamer):
    """Notes when the first new token is handed out; `generate` hands out the prompt before it."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.puts = 0
        self.at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = self.clock()

    def end(self) -> None:
        pass


def answer(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    keywords: Mapping[str, Any],
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Answer:
    """Lets the target answer one prompt (1, P) through `generate(**keywords)`, and measures it.

    Raises:
        ValueError: the target's calls do not add up to the answer.
    """
    first_token = _FirstToken(clock)
    torch.manual_seed(seed)
    memory = PeakMemory(target.device)
    with TargetCalls(target, clock) as calls, record_trace() as trace:
        started = clock()
        sequence = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), streamer=first_token, **keywords
        )
        ended = clock()
    prompt_tokens = input_ids.shape[1]
    token_ids = sequence[0, prompt_tokens:].tolist()
    result = Answer(
        token_ids,
        ended - started,
        first_token.at - started,
        rounds_from_lengths(calls.cache_lengths, prompt_tokens, len(token_ids)),
        sum(calls.seconds[1:]),
        peak_memory=memory.peak(),
    )
    if trace.generations:
        rounds = trace.rounds
        result.draft_seconds = sum(entry.draft_seconds for entry in rounds)
        result.draft_levels = sum(
            max((node.depth for node in entry.nodes if node.origin == "drafter"), default=0) for entry in rounds
        )
        result.traced_rounds = [len(entry.tokens) for entry in rounds]
    return result


class PeakMemory:
    """The most memory in use from now on, in bytes."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.resets = True
        else:
            self.resets = _reset_high_water_mark()

    def peak(self) -> int | None:
        """None where the system keeps no mark that can be reset: one from before would be another run's."""
        if not self.resets:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _high_water_mark()


def _reset_high_water_mark() -> bool:
    """Lets Linux start its mark of this process's memory anew (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


@torch.no_grad()
def explain_difference(
    target: PreTrainedModel, prompt_ids: torch.Tensor, plain: list[int], other: list[int], position: int
) -> Difference:
    """What the target says where two greedy answers part: one pass over the prompt (1, P) and what they share."""
    shared = torch.tensor([plain[:position]], dtype=prompt_ids.dtype, device=prompt_ids.device)
    input_ids = torch.cat([prompt_ids, shared], dim=1)
    logits = target(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    mine, theirs = (text[position] if position < len(text) else -1 for text in (plain, other))
    mantissa_bits = -round(torch.tensor(torch.finfo(target.dtype).eps).log2().item())
    return Difference(
        position,
        mine,
        theirs,
        first - second,
        dtype_spacing(first, mantissa_bits),
        min(mine, theirs) >= 0 and bool((logits[[mine, theirs]] >= second).all()),  # more than two may share the top
    )
