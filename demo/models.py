"""The models behind the page, or the wait for them.

Knows that they may still be loading, and what each drafter is called. Does not know how they are loaded: that is up to
whoever calls `put`. Imports nothing that brings torch along.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .request import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM


@dataclass(frozen=True)
class Loaded:
    """A target, its tokenizer, and the drafters attached to it by name; the first of them is the default."""

    target: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    drafters: dict[str, "MoADrafterForCausalLM"]

    def choose(self, name: str) -> tuple[str, "MoADrafterForCausalLM"]:
        """The drafter of this name, or the default one for "", with its name.

        Raises:
            BadRequest: there is none.
        """
        name = name or next(iter(self.drafters))
        if name not in self.drafters:
            known = " or ".join(f'"{known}"' for known in self.drafters)
            raise BadRequest(f"The drafter must be {known}.")
        return name, self.drafters[name]


def name_drafters(drafters: Sequence["MoADrafterForCausalLM"]) -> dict[str, "MoADrafterForCausalLM"]:
    """Names drafters by how many of the target's layers they reuse (TLI), and by their folders where that is the same.

    Raises:
        ValueError: two have the same name even so.
    """
    alike = Counter(drafter.config.target_layer_inference for drafter in drafters)
    named: dict[str, MoADrafterForCausalLM] = {}
    for drafter in drafters:
        layers = drafter.config.target_layer_inference
        name = f"MoA, TLI {layers}"
        if alike[layers] > 1:
            name += f", {Path(drafter.name_or_path or 'unsaved').resolve().name}"
        if name in named:
            raise ValueError(f"Two drafters are both called {name!r}: rename the folder of one of them.")
        named[name] = drafter
    return named


class Models:
    """Shared by all visitors; there from the start, or put in later. Safe with several threads."""

    def __init__(self, loaded: Loaded | None = None):
        self.loaded = loaded
        self._began = time.monotonic()
        self._there = threading.Event()
        if loaded is not None:
            self._there.set()

    @property
    def waited(self) -> float:
        """Seconds since somebody began to wait for them."""
        return time.monotonic() - self._began

    def put(self, loaded: Loaded) -> None:
        """Here they are: everybody who waits goes on."""
        self.loaded = loaded
        self._there.set()

    def get(self) -> Loaded:
        """Waits until they are there."""
        self._there.wait()
        assert self.loaded is not None
        return self.loaded

    def loading(self, stop: threading.Event) -> Iterator[float]:
        """While they are not there: `waited`, twice a second. Ends early when `stop` is set."""
        while not self._there.is_set() and not stop.is_set():
            yield self.waited
            self._there.wait(0.5)
