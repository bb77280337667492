"""One prompt decoded while somebody watches: progress as it comes, and a stop that really stops.

Knows models, prompts and clocks. Does not know the page. The models run in a thread of their own; who iterates gets
snapshots from it, and leaving the iteration early ends the thread.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..generation import record_trace
from ..generation.trace import GenerationTrace, Trace
from ..serving.decoding import pass_seconds, unservable
from .request import BadRequest, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM

_REFRESH_SECONDS = 0.2  # more often would take time from the models


def encode(request: Request, target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Any:
    """The prompt as tensors, (1, P).

    Raises:
        BadRequest: it does not fit into the target's context together with the answer, or has no tokens.
    """
    inputs: Any
    if tokenizer.chat_template:
        message = {"role": "user", "content": request.prompt}
        inputs = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(request.prompt, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if length == 0:
        raise BadRequest("The prompt has no tokens: type something else.")
    if context is not None and length + request.max_new_tokens > context:
        raise BadRequest(
            f"The prompt is too long: its {length} tokens and {request.max_new_tokens} new ones exceed the model's "
            f"context of {context}. Shorten the prompt or ask for fewer tokens."
        )
    return inputs.to(target.device)


@dataclass
class Progress:
    """One way of decoding, so far.

    Attributes:
        token_ids: the new tokens.
        seconds: on its clock, prefill included; calibration (which happens once per server) is not.
        first_token_seconds: until the first token; None before it.
        target_calls: forward passes of the target, prefill included.
        generation: the trace, where there are drafts.
        finished: the clock stands.
        stopped: somebody stopped it.
    """

    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first_token_seconds: float | None = None
    target_calls: int = 0
    generation: GenerationTrace | None = None
    finished: bool = False
    stopped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


class _Watch(StoppingCriteria):
    """Notes every new token, and stops decoding when told to. Plain decoding asks once per target call."""

    def __init__(self, prompt_tokens: int, stop: threading.Event):
        self.prompt_tokens, self.stop = prompt_tokens, stop
        self.token_ids: list[int] = []
        self.first_token_at: float | None = None
        self.obeyed = self.abandoned = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.token_ids = input_ids[0, self.prompt_tokens :].tolist()
        self.first_token_at = self.first_token_at or time.perf_counter()
        self.obeyed = self.obeyed or self.stop.is_set()
        return torch.full((1,), self.obeyed or self.abandoned, dtype=torch.bool, device=input_ids.device)


def watch(
    target: "PreTrainedModel",
    inputs: Any,
    request: Request,
    drafter: "MoADrafterForCausalLM | None",
    stop: threading.Event,
) -> Iterator[Progress]:
    """Decodes with a drafter, or plainly without one, and yields how far it is a few times a second.

    The last value is the finished one. Setting `stop` ends decoding after the token being decided; so does closing the
    iterator. Errors of the decoding thread are raised here.
    """
    seen = _Watch(inputs["input_ids"].shape[1], stop)
    options = request.sampling() | {"max_new_tokens": request.max_new_tokens}
    if drafter is not None:
        options |= request.drafting() | {"assistant_model": drafter}
    running = _Running(target, inputs, options, request.seed, seen)
    running.thread.start()
    try:
        while running.thread.is_alive():
            running.thread.join(_REFRESH_SECONDS)
            if running.thread.is_alive():
                yield running.progress()
        if running.error is not None:
            raise running.error
        yield running.progress()
    finally:
        seen.abandoned = True
        running.thread.join()


class _Running:
    """The thread that decodes, and what can be seen of it from outside."""

    def __init__(self, target: Any, inputs: Any, options: dict[str, Any], seed: int, seen: _Watch):
        self.target, self.inputs, self.options, self.seed, self.seen = target, inputs, options, seed, seen
        self.thread = threading.Thread(target=self._run, name="moa-decoding", daemon=True)
        self.trace = Trace()
        self.error: Exception | None = None
        self.started = self.ended = 0.0

    def _run(self) -> None:
        try:
            torch.manual_seed(self.seed)
            with record_trace() as self.trace:
                self.started = time.perf_counter()
                self.target.generate(**self.inputs, **self.options, stopping_criteria=StoppingCriteriaList([self.seen]))
        except Exception as error:
            self.error = error
        finally:
            self.ended = time.perf_counter()

    def progress(self) -> Progress:
        generation = self.trace.generations[0] if self.trace.generations else None
        calibration = generation.calibration_seconds if generation else 0.0
        started, ended, first = self.started, self.ended, self.seen.first_token_at
        token_ids = list(self.seen.token_ids)
        return Progress(
            token_ids,
            max(0.0, (ended or time.perf_counter()) - started - calibration) if started else 0.0,
            None if first is None else max(0.0, first - started - calibration),
            generation.target_calls if generation else len(token_ids),
            generation,
            bool(ended),
            self.seen.obeyed,
        )


def warm_up(
    target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", drafters: Iterable["MoADrafterForCausalLM"]
) -> None:
    """Decodes a few tokens with every drafter and plainly, and measures the target's passes, so that the first visitor
    does not wait for calibrations and first calls."""
    request = Request("Hello", max_new_tokens=8)
    inputs = encode(request, target, tokenizer)
    for assistant in (*drafters, None):
        for _ in watch(target, inputs, request, assistant, threading.Event()):
            pass
    if unservable(target) is None:
        pass_seconds(target)
