"""A target, a drafter and a clock whose every step is known, so that what the benchmark must report is arithmetic."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_target
from transformers import GenerationConfig, PreTrainedModel

from moa_spec.benchmarks.datasets import Question
from moa_spec.benchmarks.methods import Method
from moa_spec.generation import Draft, DraftOptions, DraftPlan, Verified, attach_source

PREFILL, STEP, VERIFY, DRAFT = 2.0, 1.0, 1.5, 0.5  # seconds: of the prompt, of one token, of several, of drafting
ACCEPTED = (3, 0, 1)  # drafts accepted, round by round, over and over
CYCLE = sum(ACCEPTED) + len(ACCEPTED)
FIXED = {"draft_policy": "fixed", "num_assistant_tokens": 5, "prompt_lookup_num_tokens": 0}


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MockTokenizer:
    """Numbers as text. No chat template."""

    chat_template = None

    def __call__(self, text: str, return_tensors: str) -> SimpleNamespace:
        ids = [int(word) if word.isdigit() else 3 + len(word) for word in text.split()]
        return SimpleNamespace(input_ids=torch.tensor([ids]))

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class ScriptedSource:
    """Drafts as many right tokens as the script says, then a wrong one. Drafting takes `DRAFT` seconds."""

    def __init__(self, target: PreTrainedModel, clock: FakeClock, tokens: int, accepted: tuple[int, ...] = ACCEPTED):
        self.target, self.clock, self.tokens, self.accepted = target, clock, tokens, accepted
        self.generation_config = GenerationConfig()
        self.texts: dict[tuple[int, ...], list[int]] = {}  # what the target says, by prompt

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> "ScriptedSession":
        prompt = tuple(prompt_ids[0])
        if prompt not in self.texts:
            before, ids = self.clock.now, torch.tensor(prompt_ids)
            text = type(target).generate(target, ids, do_sample=False, max_new_tokens=self.tokens + 8)
            self.texts[prompt] = text[0].tolist()
            self.clock.now = before
        return ScriptedSession(self, self.texts[prompt], len(prompt) + 1)

    def parameters(self) -> list[torch.Tensor]:
        return []


class ScriptedSession:
    hidden_states: tuple[int, ...] = ()

    def __init__(self, source: ScriptedSource, text: list[int], written: int):
        self.source, self.text, self.written = source, text, written
        self.round = 0
        self.started = False

    def observe(self, verified: Verified) -> None:
        if self.started:
            self.written += verified.counts[0]
        self.started = True

    def draft(self, plan: DraftPlan) -> list[Draft]:
        self.source.clock.now += DRAFT
        right = self.source.accepted[self.round % len(self.source.accepted)]
        self.round += 1
        future = self.text[self.written :]
        return [Draft.chain([*future[:right], (future[right] + 1) % 64])]

    def select(self, rows: list[int]) -> None:
        pass


def mock_target(clock: FakeClock, prompt_tokens: int = 12) -> PreTrainedModel:
    """A tiny target whose passes take `PREFILL`, `STEP` or `VERIFY` seconds of the clock."""
    target = tiny_target()

    def spend(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        tokens = kwargs["input_ids"].shape[1]
        clock.now += PREFILL if tokens >= prompt_tokens else STEP if tokens == 1 else VERIFY

    target.register_forward_hook(spend, with_kwargs=True)
    return target


def mock_methods(
    target: PreTrainedModel, clock: FakeClock, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> list[Method]:
    """Plain decoding and the scripted drafter; the traces read the same clock."""
    monkeypatch.setattr("moa_spec.generation.loop.time", SimpleNamespace(perf_counter=clock))
    source = ScriptedSource(target, clock, tokens)
    attach_source(target, source, source)
    return [Method("plain"), Method("moa", dict(FIXED), source)]


def mock_question(number: int, task: str = "qa", turns: int = 1) -> Question:
    generator = torch.Generator().manual_seed(number)
    texts = [" ".join(map(str, torch.randint(3, 64, (12,), generator=generator).tolist())) for _ in range(turns)]
    return Question("spec_bench", task, number, task, tuple(texts))
