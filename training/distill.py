"""Prompts in, the target's own answers out: the training data of a drafter.

Knows: how conversations become token ids and answers become rows of a JSON-lines file. Does not know how rows are
decoded together (`batched_decoding`) or what a drafter is.

A row: `{"kind", "messages", "greedy", "finished", "response_ids"}`. Rows are appended one by one, so a killed run
loses at most the answers under way, and a second run with the same file goes on where the first ended.
"""

import json
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .batched_decoding import TOP_K, Answer, BatchedDecoder, Request, end_token_ids
from .prompts import Conversation, SelfPrompts

TEMPERATURE = 0.8  # of sampled answers
USER_TEMPERATURE = 1.0  # of user turns, for variety
USER_TURN_TOKENS = 96


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file. A last line cut short by a kill is left out.

    Raises:
        ValueError: any other line is not a JSON object; the message names file and line.
    """
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
        yield row


def conversations(
    rows: Iterator[dict[str, Any]], seed: int = 0, greedy_share: float = 0.6, every_turn: bool = False
) -> Iterator[Conversation]:
    """Given prompts as conversations to be answered, greedily or sampled.

    Args:
        rows: each with `messages` or `prompt`; `kind` and `greedy` are kept where given. Where `messages` end with the
            assistant's turn, as in data sets of whole conversations, that turn is left out and answered anew.
        every_turn: answer each of the user's turns, not only the last; the turns before it stay as they are given.

    Raises:
        ValueError: a row has neither, or no user's turn to answer.
    """
    chance = random.Random(seed)
    for number, row in enumerate(rows, 1):
        messages = row.get("messages") or ([{"role": "user", "content": row["prompt"]}] if row.get("prompt") else [])
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]  # data sets of whole conversations: the last answer is ours to write
        if not messages or messages[-1]["role"] != "user":
            raise ValueError(f"prompt {number}: needs `prompt`, or `messages` that end with the user's turn")
        ends = [i for i, message in enumerate(messages, 1) if message["role"] == "user"]
        for end in ends if every_turn else ends[-1:]:
            greedy = row.get("greedy")
            if greedy is None:
                greedy = chance.random() < greedy_share
            yield Conversation(row.get("kind", "given"), messages[:end], "", False, greedy)


class Distiller:
    """Feeds a `BatchedDecoder` and collects rows.

    Args:
        model, tokenizer: the target, with a chat template.
        output: JSON-lines file; existing rows are kept, and their prompts are not asked again.
        slots, max_length, max_new_tokens: of the decoder; answers are cut at `max_new_tokens`.
        prompts: conversations to answer. None: the target writes its own (`SelfPrompts`).
        seed: of prompts and sampling.
        **own: of `SelfPrompts`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        output: str | Path,
        *,
        slots: int = 96,
        max_length: int = 768,
        max_new_tokens: int = 256,
        prompts: Iterator[Conversation] | None = None,
        seed: int = 0,
        **own: Any,
    ) -> None:
        self.model, self.tokenizer, self.output = model, tokenizer, Path(output)
        self.max_length, self.max_new_tokens = max_length, max_new_tokens
        self.prompts = prompts
        self.seen: set[str] = set()
        self.ready: deque[Conversation] = deque()
        self.rows = self.tokens = 0
        rows = list(read_rows(self.output)) if self.output.exists() else []
        self.own = SelfPrompts(seed + len(rows), **own)
        for row in rows:
            self._count(row)
            answer = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
            self.own.learn(Conversation(row["kind"], row["messages"]), answer, row["finished"])
        self.own.follow_ups.clear()
        self.decoder = BatchedDecoder(model, slots, max_length, end_token_ids(model), seed + len(rows))

    def run(self, answer_tokens: int, progress: Callable[[int, int], None] = lambda rows, tokens: None) -> None:
        """Goes on until the file holds `answer_tokens` tokens of answers, or the given prompts are used up."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._drop_partial_line()
        with open(self.output, "a", encoding="utf-8") as file:
            for answer in self.decoder.run(lambda: self._next_request(answer_tokens)):
                row = self._take(answer)
                if row is not None:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()
                    self._count(row)
                    progress(self.rows, self.tokens)
                if self.tokens >= answer_tokens:
                    break

    def _count(self, row: dict[str, Any]) -> None:
        self.seen.add(json.dumps(row["messages"]))
        self.rows += 1
        self.tokens += len(row["response_ids"])

    def _next_request(self, answer_tokens: int) -> Request | None:
        while self.tokens < answer_tokens:
            if self.ready:
                conversation = self.ready.popleft()
            elif self.prompts is None:
                conversation = self.own.next_conversation()
            else:
                conversation = next(self.prompts, None)
                if conversation is None:
                    return None
            request = self._request(conversation)
            if request is not None:
                return request
        return None

    def _request(self, conversation: Conversation) -> Request | None:
        """None when the conversation is a repetition or too long."""
        if conversation.writes_user_turn:
            opening = [{"role": "user", "content": conversation.opening or "?"}]
            text = self.tokenizer.apply_chat_template(
                conversation.messages + opening, tokenize=False, continue_final_message=True
            )
            if not conversation.opening:
                text = text.removesuffix("?")
            new_tokens, temperature = USER_TURN_TOKENS, USER_TEMPERATURE
            ids = self.tokenizer(text.rstrip(" "), add_special_tokens=False)["input_ids"]
        else:
            if json.dumps(conversation.messages) in self.seen:
                return None
            ids = self.tokenizer.apply_chat_template(
                conversation.messages, add_generation_prompt=True, return_dict=False
            )
            new_tokens, temperature = self.max_new_tokens, 0.0 if conversation.greedy else TEMPERATURE
        if len(ids) + new_tokens > self.max_length:
            return None
        return Request(ids, new_tokens, temperature, conversation)

    def _take(self, answer: Answer) -> dict[str, Any] | None:
        """A finished user turn is queued to be answered; a finished answer becomes a row."""
        conversation: Conversation = answer.request.tag
        text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        if conversation.writes_user_turn:
            content = (conversation.opening.rstrip(" ") + text).strip()
            if answer.finished and content:
                turn = {"role": "user", "content": content}
                self.ready.append(
                    Conversation(conversation.kind, [*conversation.messages, turn], "", False, conversation.greedy)
                )
            return None
        self.own.learn(conversation, text, answer.finished)
        return {
            "kind": conversation.kind,
            "messages": conversation.messages,
            "greedy": conversation.greedy,
            "finished": answer.finished,
            "response_ids": answer.token_ids,
        }

    def _drop_partial_line(self) -> None:
        """Cuts what a killed run left after the last newline."""
        if not self.output.exists():
            return
        with open(self.output, "rb+") as file:
            content = file.read()
            end = content.rfind(b"\n") + 1
            if end != len(content):
                file.truncate(end)
                os.fsync(file.fileno())


def write_record(
    distiller: Distiller, target: str, dtype: str, seed: int, prompts: str, licence: str | None = None
) -> Path:
    """Writes how a file of answers was made beside it: `NAME.record.json` for `NAME.jsonl`."""
    rows = list(read_rows(distiller.output))
    record = {
        "target": target,
        "dtype": dtype,
        "prompts": prompts,
        "license": licence,
        "seed": seed,
        "rows": len(rows),
        "answer_tokens": sum(len(row["response_ids"]) for row in rows),
        "greedy_rows": sum(row["greedy"] for row in rows),
        "finished_rows": sum(row["finished"] for row in rows),
        "rows_by_kind": dict(Counter(row["kind"] for row in rows).most_common()),
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "max_new_tokens": distiller.max_new_tokens,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    path = distiller.output.with_suffix(".record.json")
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path
