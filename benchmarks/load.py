"""Many clients at one server, for minutes: is every text right, is anything left behind, does memory stay flat?

The server is a process of its own. Clients come and go: each writes text after text, some hang up in the middle, and
the line that all share is reset now and then. Knows what clients do and what to look at; not how a server runs.
"""

import random
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..serving.client import MoAClient
from ..serving.events import Finished, Token, Transcript
from ..serving.link import Link
from .link_server import GRACE_SECONDS
from .records import environment

_HANGS_UP = 0.1  # share of texts whose reader goes away in the middle
_SAMPLES_EVERY = 2.0  # seconds


@dataclass
class Tally:
    """What the clients saw. Written under its lock."""

    texts: int = 0
    exact: int = 0
    hung_up: int = 0
    tokens: int = 0
    target_calls: int = 0
    offline: int = 0
    errors: list[str] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(
    url: str,
    pid: int,
    client: MoAClient,
    answers: Mapping[tuple[int, ...], list[int]],
    clients: int,
    seconds: float,
    seed: int,
    resets_every: float,
) -> dict[str, Any]:
    """Keeps so many clients busy for so long, then looks at what is left.

    Args:
        url, pid: of the server.
        client: its address is replaced by that of a line to the server.
        answers: plain decoding's new tokens, by prompt.
        resets_every: seconds between resets of the line; 0: never.

    Returns:
        Figures, see `serving_report.load_table`.
    """
    address, tally = urlsplit(url), Tally()
    with Link(str(address.hostname), int(address.port or 0), "5g", seed) as link:
        ends = time.monotonic() + seconds
        threads = [
            threading.Thread(target=_write_texts, args=(link.port, client, answers, ends, f"{seed} {number}", tally))
            for number in range(clients)
        ]
        memory: list[tuple[float, int]] = []
        began = last_reset = time.monotonic()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            now = time.monotonic()
            memory.append((now - began, resident(pid)))
            if resets_every and now < ends and now - last_reset >= resets_every:
                last_reset = now
                link.cut("rst")
                link.restore()
            threads[0].join(_SAMPLES_EVERY)
            time.sleep(0 if threads[0].is_alive() else 0.2)
        took = time.monotonic() - began
        for thread in threads:
            thread.join()
    left = _settled(url)
    figures = _metrics(url)
    first, last = _levels(memory)
    waits = sorted(tally.first_token_seconds)
    return {
        "session": environment(),
        "seconds": took,
        "clients": clients,
        "texts": tally.texts,
        "exact": tally.exact,
        "hung_up": tally.hung_up,
        "errors": tally.errors,
        "tokens_per_second": tally.tokens / took,
        "calls_per_100_tokens": 100 * tally.target_calls / max(tally.tokens, 1),
        "offline": tally.offline,
        "first_token_seconds": [waits[len(waits) // 2], waits[int(0.95 * (len(waits) - 1))]] if waits else None,
        "drafts_per_pass": figures["moa_drafts_judged_total"] / max(figures["moa_target_passes_total"], 1),
        "resumed": figures["moa_sessions_resumed_total"],
        "rebuilt": figures["moa_sessions_rebuilt_total"],
        "server_errors": figures.get('moa_refused_total{reason="error"}', 0.0),
        "left": left,
        "memory_mib": [first / 2**20, last / 2**20],
        "memory_samples": [[round(at, 1), size // 2**20] for at, size in memory],
    }


def _write_texts(
    port: int,
    client: MoAClient,
    answers: Mapping[tuple[int, ...], list[int]],
    ends: float,
    seed: str,
    tally: Tally,
) -> None:
    """One client's life: text after text until time is up."""
    chance, prompts = random.Random(seed), list(answers)
    client = client.at(f"ws://127.0.0.1:{port}")
    while time.monotonic() < ends:
        prompt = chance.choice(prompts)
        answer = answers[prompt]
        length = chance.randint(max(1, len(answer) // 3), len(answer))
        stop_after = chance.randrange(length) if chance.random() < _HANGS_UP else None
        transcript, offline, began, finished = Transcript(), 0, time.monotonic(), None
        generation = client.generate(prompt, max_new_tokens=length, eos_token_ids=[], patience=120.0)
        try:
            for event in generation:
                transcript.add(event)
                if isinstance(event, Token):
                    offline += event.state == "provisional"
                    if len(transcript.tokens) == 1:
                        with tally.lock:
                            tally.first_token_seconds.append(time.monotonic() - began)
                if isinstance(event, Finished):
                    finished = event
                if stop_after is not None and len(transcript.tokens) > stop_after:
                    break
        except Exception as error:
            with tally.lock:
                tally.errors.append(f"{type(error).__name__}: {error}")
            continue
        with tally.lock:
            tally.tokens += len(transcript.tokens)
            tally.target_calls += generation.target_calls
            tally.offline += offline
            if finished is None:
                tally.hung_up += 1
            else:
                tally.texts += 1
                tally.exact += finished.exact and transcript.tokens == answer[:length]


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use; 0 where the system does not tell."""
    path = Path(f"/proc/{pid}/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0


def _levels(memory: Sequence[tuple[float, int]]) -> tuple[int, int]:
    """The most memory in use in the second fifth of the time, when all have begun, and in the last."""
    fifth = max(len(memory) // 5, 1)
    early, late = memory[fifth : 2 * fifth] or memory, memory[-fifth:]
    return max(size for _, size in early), max(size for _, size in late)


def _settled(url: str) -> dict[str, float]:
    """What the server still holds when everybody has left and nobody can come back any more."""
    names = ("sessions", "connections", "kv_tokens_reserved")
    deadline = time.monotonic() + 2 * GRACE_SECONDS
    while True:
        figures = _metrics(url)
        left = {name: figures[f"moa_{name}"] for name in names}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url.replace("ws", "http", 1) + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def sound(figures: Mapping[str, Any]) -> bool:
    """Whether everything is as it has to be: texts exact, nothing failed or left, memory flat within a tenth."""
    first, last = figures["memory_mib"]
    return (
        figures["texts"] == figures["exact"] > 0
        and not figures["errors"]
        and not figures["server_errors"]
        and not any(figures["left"].values())
        and last <= 1.1 * first
    )
