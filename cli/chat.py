"""Talks with a target far away: drafts here, `moa serve` judges there, and the text goes on while the line is cut.

Text between ⟦ and ⟧ was written offline and is provisional. Without a prompt this is a conversation; an empty line ends
it.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import fraction, not_negative, positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..serving.client import MoAClient
    from ..serving.client_generation import ClientGeneration

EXAMPLE = "moa chat --server ws://127.0.0.1:8040 --drafter client/ --policy revise"
TOKEN_VARIABLE = "MOA_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="one message; without it, a conversation")
    parser.add_argument(
        "--server", default="ws://127.0.0.1:8040", metavar="URL", help="ws:// or wss:// (default: %(default)s)"
    )
    parser.add_argument(
        "--drafter", required=True, metavar="FOLDER", help="from `moa serve --export-client`, tokenizer included"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="where the drafter's folder has none")
    parser.add_argument("--token-file", metavar="FILE", help=f"holds the bearer token (default: ${TOKEN_VARIABLE})")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust instead of the system's")
    parser.add_argument("--allow-insecure", action="store_true", help="send the token without TLS to another machine")
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=fraction, default=1.0, metavar="P", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of sampling (default: the server draws one)")
    parser.add_argument(
        "--memory",
        choices=["int8", "bfloat16", "float32"],
        default="int8",
        help="how memory vectors travel (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=["revise", "keep"],
        default="revise",
        help="what becomes of text written offline when the line is back (default: %(default)s)",
    )
    parser.add_argument("--offline", action="store_true", help="begin even if there is no server")
    parser.add_argument("--wait", action="store_true", help="wait while the line is cut, write nothing offline")
    parser.add_argument(
        "--offline-no-repeat",
        type=int,
        default=0,
        metavar="N",
        help="text written offline repeats no N tokens in a row of the answer; 0 lets it (default: %(default)s)",
    )
    parser.add_argument(
        "--patience", type=not_negative, default=60.0, metavar="S", help="seconds to wait in the end for the server"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer instead")


def run(args: argparse.Namespace) -> None:
    client, tokenizer = load_client(args)
    if args.prompt is not None:
        if not args.prompt.strip():
            raise ValueError('The prompt is empty: give one, such as moa chat ... "Why is the sky blue?"')
        answer(client, tokenizer, [{"role": "user", "content": args.prompt}], args)
        return
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": answer(client, tokenizer, messages, args)})


def load_client(args: argparse.Namespace) -> tuple["MoAClient", "PreTrainedTokenizerBase"]:
    """
    Raises:
        OSError: there is no such drafter or tokenizer.
        ValueError: the drafter is not a client's, or the address is none.
    """
    from transformers import AutoTokenizer

    from ..modeling_moa import MoADrafterForCausalLM
    from ..serving.client import MoAClient
    from ..targets import quiet

    token = os.environ.get(TOKEN_VARIABLE)
    if args.token_file is not None:
        token = Path(args.token_file).read_text().strip()
    with quiet():
        drafter = MoADrafterForCausalLM.from_pretrained(args.drafter)
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.drafter)
    client = MoAClient(
        args.server,
        drafter,
        tokenizer,
        token=token,
        memory=args.memory,
        ca_file=args.ca_file,
        allow_insecure=args.allow_insecure,
    )
    return client, tokenizer


def answer(
    client: "MoAClient", tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]], args: argparse.Namespace
) -> str:
    """Writes one answer, shows it as it comes, and returns it."""
    prompt: Any = messages[-1]["content"]
    if tokenizer.chat_template:
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        prompt = encoded["input_ids"]
    generation = client.generate(
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        policy=args.policy,
        offline=not args.wait,
        offline_no_repeat_ngram_size=args.offline_no_repeat,
        start_offline=args.offline,
        patience=args.patience,
    )
    screen = Screen(tokenizer, quiet=args.json)
    for event in generation:
        screen.show(event)
    if args.json:
        print(json.dumps(result(generation, screen), ensure_ascii=False), flush=True)
    else:
        print(f"\n[{summary(generation, screen)}]", flush=True)
    return screen.text


class Screen:
    """Shows a text as it grows. What has been shown stays; a text that was withdrawn is begun again on a new line."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", quiet: bool):
        from ..serving.events import Transcript

        self.tokenizer, self.quiet = tokenizer, quiet
        self.transcript = Transcript()
        self.shown = ""  # of the text, without marks
        self.marked = False  # inside of ⟦ ⟧
        self.offline = self.withdrawn = 0
        self.reason = ""

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.transcript.tokens, skip_special_tokens=True))

    def show(self, event: Any) -> None:
        from ..serving.events import Finished, LineState, Token, Withdrawn

        self.transcript.add(event)
        if isinstance(event, Token):
            self.offline += event.state == "provisional"
            self._mark(event.state == "provisional")
            self._grow()
        elif isinstance(event, Withdrawn):
            self.withdrawn += event.count
            self._mark(False)
            self._say(f"\n[the line is back, {event.count} provisional tokens are withdrawn]\n")
            self.shown = ""
            self._grow()
        elif isinstance(event, LineState) and event.state == "offline" and event.detail:
            print(f"[offline: {event.detail}]", file=sys.stderr, flush=True)
        elif isinstance(event, Finished):
            self._mark(False)
            self._grow(last=True)
            self.reason = event.reason

    def _mark(self, provisional: bool) -> None:
        if provisional != self.marked:
            self._say("⟦" if provisional else "⟧")
            self.marked = provisional

    def _grow(self, last: bool = False) -> None:
        text = self.text
        if text.startswith(self.shown) and (last or not text.endswith("\ufffd")):  # half of a character waits
            self._say(text[len(self.shown) :])
            self.shown = text

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, end="", flush=True)


def result(generation: "ClientGeneration", screen: Screen) -> dict[str, Any]:
    """Everything about an answer, for --json."""
    states = screen.transcript.states
    return {
        "text": screen.text,
        "token_ids": screen.transcript.tokens,
        "states": states,
        "finished": screen.reason,
        "exact": set(states) <= {"verified"},
        "offline_tokens": screen.offline,
        "withdrawn_tokens": screen.withdrawn,
        "target_calls": generation.target_calls,
        "round_trip": generation.round_trip.seconds,
        "drafted": generation.drafted,
        "accepted": generation.accepted,
    }


def summary(generation: "ClientGeneration", screen: Screen) -> str:
    """The line under an answer."""
    states = screen.transcript.states
    parts = [f"{len(states)} tokens, {generation.target_calls} rounds"]
    if generation.round_trip.seconds is not None:
        parts.append(f"{1000 * generation.round_trip.seconds:.0f} ms per round")
    if screen.offline:
        parts.append(f"{screen.offline} written offline, {screen.withdrawn} of them withdrawn")
    parts.append("all the target's" if set(states) <= {"verified"} else f"{states.count('verified')} the target's")
    return "; ".join(parts)
