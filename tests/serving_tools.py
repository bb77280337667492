"""For tests of serving: a server on tiny random models, and drafts that are right as often as told."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tiny import VOCAB, prompt, tiny_drafter, tiny_target
from transformers import PreTrainedModel

from moa_spec.generation import Draft, DraftPlan
from moa_spec.modeling_moa import MoADrafterForCausalLM
from moa_spec.serving.client import MoAClient
from moa_spec.serving.client_generation import ClientGeneration
from moa_spec.serving.client_memory import OfflineWriter, RemoteMemory
from moa_spec.serving.events import Event, Transcript
from moa_spec.serving.link import Link
from moa_spec.serving.server import MoAServer, serve_in_thread
from moa_spec.serving.sessions import Limits

QUICK = Limits(grace_seconds=30, heartbeat_seconds=0.2, drain_seconds=0.2, retry_seconds=0.1)
HASTY = Limits(grace_seconds=30, heartbeat_seconds=0.1, drain_seconds=0.05, retry_seconds=0.1)
IDS = prompt(9)
LENGTH = 40


class World:
    """A target, its drafter, the drafter's standalone copy for clients, and what the target says by itself."""

    def __init__(self, **drafter: Any):
        self.target: PreTrainedModel = tiny_target()
        # the tiny target's generate() stops at no token either
        self.drafter: MoADrafterForCausalLM = tiny_drafter(self.target, eos_token_id=None, **drafter)
        self.drafter.lend(self.target)
        self.alone: MoADrafterForCausalLM = self.drafter.standalone_copy()

    def answer(self, ids: torch.Tensor = IDS, length: int = LENGTH, **call: Any) -> list[int]:
        """Plain greedy decoding's new tokens."""
        return self.target.generate(ids, max_new_tokens=length, do_sample=False, **call)[0, ids.shape[1] :].tolist()

    @contextlib.contextmanager
    def serving(self, limits: Limits = QUICK, port: int = 0, **options: Any) -> Iterator[tuple[MoAServer, str]]:
        server = MoAServer(self.target, self.drafter, limits, **options)
        with serve_in_thread(server, port=port) as url:
            yield server, url

    def client(self, url: str, **options: Any) -> MoAClient:
        return MoAClient(url, self.alone, **({"cut_after": 1.0, "memory": "float32"} | options))


class Lab:
    """A server that can be restarted, behind a line that can be cut. `around` wraps the server's ASGI application."""

    def __init__(self, world: World, limits: Limits = HASTY, around: Callable[[Any], Any] = lambda app: app):
        self.world, self.limits, self.around = world, limits, around
        self.servers: list[MoAServer] = []  # all that there have been
        self._stack = contextlib.ExitStack()
        self._restarting = threading.Lock()
        self._serve(0)
        self.link = Link("127.0.0.1", self.port)
        self.timers: list[threading.Timer] = []

    def _serve(self, port: int) -> None:
        self.server = MoAServer(self.world.target, self.world.drafter, self.limits)
        self.server.app = self.around(self.server.app)
        self.servers.append(self.server)
        self.url = self._stack.enter_context(serve_in_thread(self.server, port=port))
        self.port = int(self.url.rsplit(":", 1)[1])

    def restart(self) -> None:
        with self._restarting:  # two faults may want it at the same time
            self._stack.close()
            self._serve(self.port)

    def evict(self) -> None:
        for session in self.server.sessions:
            self.server.sessions.drop(session)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        self.timers.append(timer)
        timer.start()

    def settle(self) -> None:
        """Waits for everything that was to happen later."""
        for timer in self.timers:
            timer.join()

    def close(self) -> None:
        self.settle()
        self.link.close()
        self._stack.close()

    def client(self, **options: Any) -> MoAClient:
        return self.world.client(f"ws://127.0.0.1:{self.link.port}", **({"cut_after": 0.4} | options))

    def generate(self, **options: Any) -> ClientGeneration:
        return self.client().generate(IDS, **({"num_assistant_tokens": 4} | options))


def read(generation: ClientGeneration, limit: int = 10_000) -> tuple[Transcript, list[Event]]:
    """The text and the events of a generation; a text that grows without end is an error."""
    transcript, events = Transcript(), []
    for event in generation:
        transcript.add(event)
        events.append(event)
        assert len(events) < limit
    return transcript, events


def nothing_left(server: MoAServer) -> bool:
    """Whether a server holds nothing any more, a moment after its clients have said goodbye, and never failed itself
    (which clients survive, so that a text being right does not tell)."""
    deadline = time.monotonic() + 5
    while len(server.sessions) or server.connections:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return server.sessions.places == server.sessions.kv_tokens == 0 and "error" not in server.metrics.refused


def guess_well(monkeypatch: Any, whole: list[int], accuracy: float = 0.8, seed: int = 0) -> None:
    """Makes clients draft, and write offline, the known text (prompt included), with mistakes."""
    chance = random.Random(seed)

    def guess(position: int) -> int:
        right = position < len(whole) and chance.random() < accuracy
        return whole[position] if right else chance.randrange(3, VOCAB)

    def draft(memory: RemoteMemory, plan: DraftPlan) -> list[Draft]:
        start = memory.held + 1
        chain = Draft.chain([guess(start + level) for level in range(plan.levels)])
        if plan.breadth > 1 and len(chain) > 1:
            other = (chain.tokens[1] + 1) % VOCAB
            chain.append(other, 0, -1.0, "drafter")
        return [chain]

    def write(writer: OfflineWriter) -> int:
        token = guess(writer.ids.shape[1])
        writer.ids = torch.cat([writer.ids, torch.tensor([[token]])], dim=1)
        return token

    monkeypatch.setattr(RemoteMemory, "draft", draft)
    monkeypatch.setattr(OfflineWriter, "write", write)
