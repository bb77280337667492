"""One prompt decoded while somebody watches: progress as it comes, and a stop that really stops.

Knows models, prompts and clocks. Does not know the page. The models run in a thread of their own; who iterates gets
snapshots from it, and leaving the iteration early ends the thread.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..generation import record_trace
from ..generation.trace import GenerationTrace, Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM

Shape = Literal["automatic", "chain", "tree"]
MOST_CHARACTERS = 20_000
MOST_NEW_TOKENS = 512
_TREE_BREADTH = 3
_LOOKUP_TOKENS = 16
_REFRESH_SECONDS = 0.2  # more often would take time from the models


class BadRequest(ValueError):
    """A prompt or setting that cannot be decoded; the message is for the person who gave it."""


@dataclass(frozen=True)
class Request:
    """What is to be decoded, and how.

    Attributes:
        prompt: goes through the chat template where the tokenizer has one.
        temperature: 0 is greedy.
        shape: "automatic" measures what pays, with chains, trees and lookup; the others do as told in every round.
        levels: tokens drafted one after another, at most.
        lookup: also copies drafts from the text so far.
    """

    prompt: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    shape: Shape = "automatic"
    levels: int = 6
    lookup: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise BadRequest("The prompt is empty: type something, or pick an example.")
        if len(self.prompt) > MOST_CHARACTERS:
            raise BadRequest(f"The prompt has {len(self.prompt)} characters; at most {MOST_CHARACTERS} can be used.")
        if any(0xD800 <= ord(character) < 0xE000 for character in self.prompt):
            raise BadRequest("The prompt is not valid text: it has half of a character pair in it.")
        if not 1 <= self.max_new_tokens <= MOST_NEW_TOKENS:
            raise BadRequest(f"The answer's length must be from 1 to {MOST_NEW_TOKENS} tokens.")
        if not 0 <= self.temperature <= 2:
            raise BadRequest("The temperature must be from 0 (greedy) to 2.")
        if self.shape not in ("automatic", "chain", "tree"):
            raise BadRequest('The draft must be "automatic", "chain" or "tree".')
        if not 1 <= self.levels <= 16:
            raise BadRequest("The depth must be from 1 to 16 drafted tokens.")

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`, the same for both ways of decoding."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}

    def drafting(self) -> dict[str, Any]:
        """Arguments of `generate` that say how to draft."""
        options: dict[str, Any] = {"num_assistant_tokens": self.levels}
        options["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS if self.lookup else 0
        if self.shape == "automatic":
            return options | {"draft_policy": "auto"}
        breadth = 1 if self.shape == "chain" else _TREE_BREADTH
        nodes = self.levels * breadth
        return options | {"draft_policy": "fixed", "draft_breadth": breadth, "draft_nodes": nodes}


def encode(request: Request, target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> Any:
    """The prompt as tensors, (1, P).

    Raises:
        BadRequest: it does not fit into the target's context together with the answer, or has no tokens.
    """
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


def warm_up(target: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", drafter: "MoADrafterForCausalLM") -> None:
    """Decodes a few tokens both ways, so that the first visitor does not wait for calibration and first calls."""
    request = Request("Hello", max_new_tokens=8)
    inputs = encode(request, target, tokenizer)
    for assistant in (drafter, None):
        for _ in watch(target, inputs, request, assistant, threading.Event()):
            pass
