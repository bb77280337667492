"""Answers a prompt with a drafter, and shows which tokens were drafted, kept and thrown away.

The prompt is the argument, or standard input, or a built-in one. The same prompt is decoded plainly as well, in turns
with the drafter and after a warm-up, so that the speedup is measured where and when it is claimed.
"""

import argparse
import json
import os
import platform
import stat
import statistics
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .arguments import (
    add_drafting_arguments,
    add_model_arguments,
    drafting_options,
    fraction,
    load_models,
    not_negative,
    positive,
)
from .trace_view import legend, render

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXAMPLE = 'moa generate "Write a short poem about the sea." --max-new-tokens 96'
DEFAULT_PROMPT = "Explain in a few sentences how a vaccine protects people from a disease."
WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help='"-" reads standard input, as does a pipe when it is left out')
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=fraction, default=1.0, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="timed runs of each kind (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_model_arguments(parser)
    add_drafting_arguments(parser)


def run(args: argparse.Namespace) -> None:
    prompt = read_prompt(args.prompt)
    target, drafter, tokenizer = load_models(args)
    inputs = encode(prompt, tokenizer, raw=args.raw).to(target.device)
    check_length(target, inputs["input_ids"].shape[1], args.max_new_tokens)

    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    plain = Contestant(target, inputs, args.seed, sampling)
    drafted = Contestant(target, inputs, args.seed, sampling | {"assistant_model": drafter} | drafting_options(args))
    for contestant in (drafted, plain):
        contestant.decode(min(WARM_UP_TOKENS, args.max_new_tokens))

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for repeat in range(args.repeats):
        drafted.time(args.max_new_tokens)
        if repeat == 0 and not args.json:
            print(legend(colour), end="\n\n")
            print(render(drafted.trace.generations[0], tokenizer, colour), end="\n\n", flush=True)
        plain.time(args.max_new_tokens)

    result = {
        "text": tokenizer.decode(drafted.token_ids, skip_special_tokens=True),
        "token_ids": drafted.token_ids,
        "mean_accepted_tokens": drafted.trace.mean_accepted_tokens,
        "target_calls": drafted.trace.target_calls,
        "tokens_per_second": drafted.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": drafted.tokens_per_second / plain.tokens_per_second,
        "identical": None if args.temperature else drafted.token_ids == plain.token_ids,
        "prompt": prompt,
        "prompt_tokens": inputs["input_ids"].shape[1],
        "acceptance_histogram": drafted.trace.acceptance_histogram(),
        "target": target.config._name_or_path,
        "drafter": str(args.drafter or drafter.config._name_or_path),
        "dtype": args.dtype,
        "device": args.device,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "repeats": args.repeats,
        "versions": versions(),
    }
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(summary(result))


class Contestant:
    """One way of decoding the prompt, timed run by run. Knows the last run's tokens and trace."""

    def __init__(self, target: Any, inputs: dict[str, "torch.Tensor"], seed: int, options: dict[str, Any]):
        self.target, self.inputs, self.seed, self.options = target, inputs, seed, options
        self.rates: list[float] = []

    def decode(self, max_new_tokens: int) -> None:
        """Decodes once; every run starts from the same seed."""
        import torch

        from ..generation import record_trace

        torch.manual_seed(self.seed)
        with record_trace() as trace:
            ids = self.target.generate(**self.inputs, max_new_tokens=max_new_tokens, **self.options)
        self.trace = trace
        self.token_ids = ids[0, self.inputs["input_ids"].shape[1] :].tolist()

    def time(self, max_new_tokens: int) -> None:
        """Decodes once and notes the speed, prefill included."""
        started = time.perf_counter()
        self.decode(max_new_tokens)
        self.rates.append(len(self.token_ids) / (time.perf_counter() - started))

    @property
    def tokens_per_second(self) -> float:
        """Median over the timed runs."""
        return statistics.median(self.rates)


def read_prompt(argument: str | None) -> str:
    """The prompt as given, or from standard input where something is piped in, or the built-in one.

    Raises:
        ValueError: an empty prompt was given.
    """
    piped = argument == "-"
    if argument is None:
        mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin else 0
        piped = stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    prompt = sys.stdin.read().strip() if piped else argument
    if prompt is None or (argument is None and not prompt):
        return DEFAULT_PROMPT
    if not prompt.strip():
        raise ValueError('The prompt is empty: give one, such as moa generate "Why is the sky blue?"')
    return prompt


def encode(prompt: str, tokenizer: "PreTrainedTokenizerBase", raw: bool) -> Any:
    """The prompt as tensors, through the chat template when the tokenizer has one."""
    if raw or not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    message = {"role": "user", "content": prompt}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)


def check_length(target: "PreTrainedModel", prompt_tokens: int, max_new_tokens: int) -> None:
    """
    Raises:
        ValueError: prompt and answer do not fit into the target's context.
    """
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and prompt_tokens + max_new_tokens > context:
        raise ValueError(
            f"The prompt's {prompt_tokens} tokens and {max_new_tokens} new ones exceed the target's context of "
            f"{context}: shorten the prompt or lower --max-new-tokens"
        )


def summary(result: dict[str, Any]) -> str:
    """The figures under the text."""
    lines = [
        f"{result['mean_accepted_tokens']:.2f} tokens per target call ({len(result['token_ids'])} tokens, "
        f"{result['target_calls']} calls, prefill included)",
        f"{result['speedup']:.2f}x plain decoding: {result['tokens_per_second']:.1f} against "
        f"{result['plain_tokens_per_second']:.1f} tokens/s (median of {result['repeats']}, in turns)",
    ]
    if result["identical"] is not None:
        lines.append(
            "the same tokens as plain decoding" if result["identical"] else "NOT the same tokens as plain decoding"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """What ran."""
    packages = {name: metadata.version(name) for name in ("moa-spec", "torch", "transformers")}
    return packages | {"python": platform.python_version()}
