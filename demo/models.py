"""The models behind the page, or the wait for them.

Knows that they may still be loading. Does not know how they are loaded: that is up to whoever calls `put`. Imports
nothing that brings torch along.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_moa import MoADrafterForCausalLM


@dataclass(frozen=True)
class Loaded:
    """A target with its drafter attached, and their tokenizer."""

    target: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    drafter: "MoADrafterForCausalLM"


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
