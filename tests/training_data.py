"""A tiny target with a word-level tokenizer and chat template, and rows that it answered itself."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .tiny import VOCAB, tiny_target

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} "
    "{% if not (loop.last and continue_final_message is defined and continue_final_message) %}<end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0`, `w1`, ... up to the tiny targets' vocabulary."""
    names = ["<pad>", "<bos>", "<end>", "<user>", "<assistant>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*names, *(f"w{i}" for i in range(VOCAB - len(names)))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    )


def tiny_chat_target(family: str = "llama") -> PreTrainedModel:
    """A tiny target that may end its answers."""
    target = tiny_target(family)
    target.generation_config.eos_token_id = 2
    return target


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"w{i % 40} w{i * 7 % 50} w{i * 3 % 45}", "kind": "even" if i % 2 == 0 else "odd"}
        for i in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
