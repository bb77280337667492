"""What distance costs: one text after another over an emulated line, drafted here, drafted there, or not drafted.

Knows how one answer is measured over a line, and the arithmetic. Does not know the server's process (link_server), how
other drafters draft (link_clients) or how results become tables (serving_report).

Every method answers the same questions over a line of its own with the same seed, one profile after the other, so that
black holes and bad moments come at the same time for all. The line counts every byte, whoever sends it.
"""

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from ..serving.client import MoAClient
from ..serving.events import Finished, LineState, Token, Transcript, Withdrawn
from ..serving.link import Link
from .metrics import mean
from .records import ResultFile, environment

STREAM, BESIDE = "stream", "beside"

DESCRIPTIONS = {
    STREAM: "plain decoding at the far end, each token sent as it comes; the reference for exact",
    BESIDE: "MoA and lookup beside the target, by measured cost, each token sent as it comes",
    "moa": "MoA and lookup at the client, by measured cost",
    "moa-alone": "the same without lookup",
    "moa-float32": "moa-alone with memory that travels as it is, four times the bytes: what int8 costs",
    "lookup": "lookup at the client, and nothing else",
    "eagle": "EAGLE-2 and lookup at the client, by measured cost; hidden states travel",
    "eagle-alone": "the same without lookup",
    "assistant": "an independent small model and lookup at the client; no memory travels",
}
WITH_EAGLE = ("eagle", "eagle-alone")
PROFILES = ["none", "5g", "4g", "slow4g", "bursty", "tunnel"]
PATIENCE = 600.0  # seconds that a client waits at the end of a text for its line


@dataclass
class Answer:
    """One text over a line.

    Attributes:
        token_ids: the new tokens.
        seconds: from asking to the last token; with a line that was cut, until the last one is the target's.
        first_token_seconds: until the first one.
        target_calls: of the target, without the reading of the prompt.
        offline, withdrawn: tokens written while the line was cut, and how many of them were taken back.
        bytes_up, bytes_down: over the line, handshake and prompt included.
        before_up, before_down: of them, until the first token was there and drafts could begin.
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    target_calls: int
    offline: int
    withdrawn: int
    bytes_up: int
    bytes_down: int
    before_up: int
    before_down: int


def drafted_answer(client: MoAClient, link: Link, prompt: Sequence[int], options: Mapping[str, Any]) -> Answer:
    """Lets a client write one text.

    Args:
        options: for `MoAClient.generate`.

    Raises:
        RuntimeError: the text did not come to its end.
    """
    up, down = link.bytes_up, link.bytes_down
    before = (0, 0)
    generation = client.generate(list(prompt), patience=PATIENCE, **options)
    transcript, offline, withdrawn = Transcript(), 0, 0
    began, first = time.monotonic(), 0.0
    for event in generation:
        transcript.add(event)
        if isinstance(event, Token):
            first = first or time.monotonic() - began
            offline += event.state == "provisional"
        elif isinstance(event, Withdrawn):
            withdrawn += event.count
        elif isinstance(event, LineState) and event.state == "connected" and before == (0, 0):
            before = (link.bytes_up - up, link.bytes_down - down)
        elif isinstance(event, Finished) and not event.exact:
            raise RuntimeError(f"The line did not come back in time ({event.reason})")
    seconds = time.monotonic() - began
    calls = generation.target_calls
    up, down = link.bytes_up - up, link.bytes_down - down
    return Answer(transcript.tokens, seconds, first, calls, offline, withdrawn, up, down, *before)


def streamed_answer(
    link: Link, path: str, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int], drafting: bool
) -> Answer:
    """Has the far end write one text, and takes its tokens as they come.

    Raises:
        RuntimeError: the far end failed.
    """
    asked = {"tokens": list(prompt), "max_new_tokens": max_new_tokens, "eos": list(eos), "drafting": drafting}
    up, down = link.bytes_up, link.bytes_down
    before = (0, 0)
    began, first = time.monotonic(), 0.0
    tokens: list[int] = []
    calls = 0
    connection = http.client.HTTPConnection("127.0.0.1", link.port)
    try:
        connection.request("POST", path, json.dumps(asked, separators=(",", ":")))
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"The server answered {response.status}")
        while line := response.readline():
            if line.startswith(b"calls"):
                calls = int(line.split()[1])
                break
            if not tokens:
                first, before = time.monotonic() - began, (link.bytes_up - up, link.bytes_down - down)
            tokens.append(int(line))
        seconds = time.monotonic() - began
    except http.client.HTTPException as error:
        raise RuntimeError(f"The server's answer ended early: {error}") from error
    finally:
        connection.close()
    up, down = link.bytes_up - up, link.bytes_down - down
    return Answer(tokens, seconds, first, calls, 0, 0, up, down, *before)


Writer = Callable[[Link, Sequence[int]], Answer]


@dataclass(frozen=True)
class Method:
    """One way of getting a text: its name, the far end's address, and what writes one text over a line to it."""

    name: str
    url: str
    writer: Callable[[Link], Writer]


def measure(method: Method, profile: str, seed: int, prompts: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """One method's answers to all prompts, over one line."""
    address = urlsplit(method.url)
    with Link(str(address.hostname), int(address.port or 0), profile, seed) as link:
        write = method.writer(link)
        return [{"question": key} | asdict(write(link, prompt)) for key, prompt in prompts.items()]


def run(
    methods: Sequence[Method],
    profiles: Sequence[str],
    prompts: Mapping[str, Sequence[int]],
    results: ResultFile,
    seed: int,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """Measures what the results do not have yet, keeps each method's answers over each profile as soon as they are
    done, and writes the whole result.

    Args:
        prompts: token ids by the question's key.
        data: for the record.
    """
    results.begin(environment())
    done = {entry["key"] for entry in results.questions}
    blocks = [(profile, method) for profile in profiles for method in methods]
    missing = [block for block in blocks if f"{block[0]}/{block[1].name}" not in done]
    if missing:
        first = dict(list(prompts.items())[:1])
        for method in methods:  # first calls allocate and learn what things cost
            measure(method, "none", seed, first)
    for profile, method in tqdm(missing, unit=" blocks", disable=None):
        answers = measure(method, profile, seed, prompts)
        results.add({"key": f"{profile}/{method.name}", "profile": profile, "method": method.name, "answers": answers})
    return results.finish(complete=True, data=dict(data), link=summarise(results.questions, profiles))


def summarise(blocks: Sequence[Mapping[str, Any]], profiles: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by profile and method. Tokens per second are all tokens over all seconds; shares and calls likewise.

    `exact` is the share of answers that are plain decoding's, as its stream over any line has them; None without one.
    """
    reference: dict[str, list[int]] = {}
    for block in blocks:
        if block["method"] == STREAM:
            for answer in block["answers"]:
                reference.setdefault(answer["question"], answer["token_ids"])
    found: dict[str, dict[str, dict[str, Any]]] = {profile: {} for profile in profiles}
    for block in blocks:
        answers = block["answers"]
        tokens = sum(len(answer["token_ids"]) for answer in answers)
        seconds = sum(answer["seconds"] for answer in answers)
        calls = [answer["target_calls"] for answer in answers]
        later = sum(len(answer["token_ids"]) - 1 for answer in answers)
        after = sum(answer["seconds"] - answer["first_token_seconds"] for answer in answers)
        offline = sum(answer["offline"] for answer in answers)
        known = [answer for answer in answers if answer["question"] in reference]
        found[block["profile"]][block["method"]] = {
            "tokens_per_second": tokens / seconds,
            "decode_tokens_per_second": later / after if after > 0 else None,
            "first_token_seconds": mean(answer["first_token_seconds"] for answer in answers),
            "calls_per_100_tokens": 100 * sum(calls) / later if later else None,
            "bytes_up": sum(answer["bytes_up"] for answer in answers) / tokens,
            "bytes_down": sum(answer["bytes_down"] for answer in answers) / tokens,
            "bytes_up_later": sum(a["bytes_up"] - a["before_up"] for a in answers) / max(later, 1),
            "bytes_down_later": sum(a["bytes_down"] - a["before_down"] for a in answers) / max(later, 1),
            "offline": offline,
            "withdrawn": sum(answer["withdrawn"] for answer in answers),
            "exact": mean(float(a["token_ids"] == reference[a["question"]]) for a in known),
        }
    return found
