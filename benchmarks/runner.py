"""The comparison: every method answers every question, in turns, and nothing measured is lost.

Knows the order of measurement and what is kept of it. Does not know how one answer is timed (`measure`), how files are
written (`records`) or how figures are computed (`summary`).

For each turn of a question and each repetition all methods answer once, one after the other, and who begins changes
from question to question and from repetition to repetition, so that a machine that slows down or speeds up meanwhile
does so for all of them. All methods are given the same conversation: the answers in it are plain decoding's.
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .datasets import Question
from .measure import Answer, Clock, answer, explain_difference
from .methods import PLAIN, Method
from .metrics import first_difference
from .records import ResultFile, environment
from .summary import summarise

WARM_UP = "Name three rivers in Europe, then name them again."
WARM_UP_TOKENS = 24


def sampling_keywords(temperature: float) -> dict[str, Any]:
    """Greedy at 0, else the whole distribution at a temperature, as the paper and Spec-Bench sample."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def encode(conversation: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """(1, P) the conversation so far, ready for an answer; texts one after the other where there is no template."""
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return inputs["input_ids"]
    return tokenizer("\n\n".join(message["content"] for message in conversation), return_tensors="pt").input_ids


class Comparison:
    """One target, several methods, and the options that hold for every answer.

    Args:
        max_new_tokens: of each answer.
        repetitions: how often each answer is measured.
        temperature: 0 is greedy.
        seed: of sampling; every answer has its own, the same for all methods.
        clock: what seconds are read from.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        methods: Sequence[Method],
        max_new_tokens: int,
        repetitions: int,
        temperature: float = 0.0,
        seed: int = 0,
        clock: Clock = time.perf_counter,
    ):
        self.target, self.tokenizer, self.methods = target, tokenizer, list(methods)
        self.max_new_tokens, self.repetitions = max_new_tokens, repetitions
        self.temperature, self.seed, self.clock = temperature, seed, clock
        self.shared = sampling_keywords(temperature) | {"max_new_tokens": max_new_tokens}

    def warm_up(self) -> None:
        """Lets every method answer twice, unmeasured: first calls allocate, compile and learn what things cost."""
        input_ids = encode([{"role": "user", "content": WARM_UP}], self.tokenizer).to(self.target.device)
        for _ in range(2):
            for method in self.methods:
                self._answer(method, input_ids, 0, min(WARM_UP_TOKENS, self.max_new_tokens))

    def run(
        self,
        questions: Sequence[Question],
        results: ResultFile,
        time_limit: float | None = None,
        progress: bool = True,
    ) -> bool:
        """Measures the questions that the results do not have yet, and keeps each as soon as it is done.

        Args:
            time_limit: seconds after which no further question is begun.

        Returns:
            Whether all questions are done.
        """
        done = {entry["key"] for entry in results.questions}
        ends = None if time_limit is None else time.monotonic() + time_limit
        with tqdm(questions, unit=" questions", disable=None if progress else True) as bar:
            for index, question in enumerate(bar):
                if question.key in done:
                    continue
                if ends is not None and time.monotonic() >= ends:
                    return False
                bar.set_postfix_str(question.key)
                results.add(self.measure(question, index))
        return True

    def measure(self, question: Question, index: int = 0) -> dict[str, Any]:
        """One question's results: its key, category and turns; or why it was skipped.

        Each turn has `prompt_tokens`, `answers` (per method, one per repetition) and `differences` (per method whose
        greedy answer is not plain decoding's; None when sampling).

        Args:
            index: decides who begins.
        """
        entry: dict[str, Any] = {"key": question.key, "category": question.category, "turns": []}
        conversation: list[dict[str, str]] = []
        for number, text in enumerate(question.turns):
            conversation.append({"role": "user", "content": text})
            input_ids = encode(conversation, self.tokenizer).to(self.target.device)
            length, context = input_ids.shape[1], self._context()
            if context is not None and length + self.max_new_tokens > context:
                entry["skipped"] = (
                    f"turn {number + 1} has {length} tokens, with {self.max_new_tokens} new ones more than the "
                    f"target's {context}"
                )
                return entry
            answers = self._measure_turn(input_ids, f"{self.seed}/{question.key}/{number}", index)
            plain = answers[PLAIN][0].token_ids
            entry["turns"].append(
                {
                    "prompt_tokens": length,
                    "answers": {name: [a.to_dict() for a in given] for name, given in answers.items()},
                    "differences": None if self.temperature else self._differences(input_ids, plain, answers),
                }
            )
            reply = self.tokenizer.decode(plain, skip_special_tokens=True)
            conversation.append({"role": "assistant", "content": reply})
        return entry

    def _measure_turn(self, input_ids: torch.Tensor, name: str, index: int) -> dict[str, list[Answer]]:
        answers: dict[str, list[Answer]] = {method.name: [] for method in self.methods}
        for repetition in range(self.repetitions):
            seed = zlib.crc32(f"{name}/{repetition}".encode())
            first = (index + repetition) % len(self.methods)
            for method in self.methods[first:] + self.methods[:first]:
                answers[method.name].append(self._answer(method, input_ids, seed, self.max_new_tokens))
        return answers

    def _answer(self, method: Method, input_ids: torch.Tensor, seed: int, max_new_tokens: int) -> Answer:
        keywords = self.shared | {"max_new_tokens": max_new_tokens} | method.keywords()
        try:
            return answer(self.target, input_ids, keywords, seed, self.clock)
        except Exception as error:
            raise RuntimeError(f"The method {method.name} failed: {type(error).__name__}: {error}") from error

    def _differences(
        self, input_ids: torch.Tensor, plain: list[int], answers: dict[str, list[Answer]]
    ) -> dict[str, dict[str, Any]]:
        found = {}
        for name, given in answers.items():
            for other in given:
                position = first_difference(plain, other.token_ids)
                if position is not None:
                    difference = explain_difference(self.target, input_ids, plain, other.token_ids, position)
                    found[name] = asdict(difference) | {"near_tie": difference.near_tie}
                    break
        return found

    def _context(self) -> int | None:
        return getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)


def measure_all(
    comparison: Comparison,
    questions: Sequence[Question],
    results: ResultFile,
    data: Mapping[str, Any],
    time_limit: float | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measures what the results do not have yet, and writes the whole result with its figures.

    Args:
        data: `datasets.checksums` of the questions' files, for the record.
        time_limit: as for `Comparison.run`.
    """
    results.begin(environment())
    done = {entry["key"] for entry in results.questions}
    complete = all(question.key in done for question in questions)
    if not complete:
        comparison.warm_up()
        complete = comparison.run(questions, results, time_limit, progress)
    methods = comparison.methods
    return results.finish(
        complete=complete,
        questions_chosen=len(questions),
        data=dict(data),
        methods={method.name: {"options": method.options, "parameters": method.parameters} for method in methods},
        summary=summarise(results.questions, [method.name for method in methods]),
    )
