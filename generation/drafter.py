"""What decoding asks of a MoA drafter.

A drafter's class is this project's, or its copy in the drafter's repository that transformers loaded as remote code:
one file, two classes. So decoding names neither, and the modules that travel to the Hub import nothing outside of their
folder.
"""

from typing import Any, Protocol

import torch

KeyValue = tuple[torch.Tensor, torch.Tensor]  # keys and values, each (B, kv_heads, T, head_dim)


class DraftContext(Protocol):
    """What the drafter keeps about verified tokens; a dataclass."""

    self_attention: KeyValue
    cross_attention: KeyValue
    target_layers: list[KeyValue]
    memory: torch.Tensor | None  # (B, T, E), of the tokens encoded last

    @property
    def length(self) -> int: ...


class Drafter(Protocol):
    """The calls of `MoADrafterForCausalLM`, which documents them."""

    @property
    def config(self) -> Any: ...

    @property
    def generation_config(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    def layer_states(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], last_hidden: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def encode(
        self,
        input_ids: torch.Tensor,
        layer_states: torch.Tensor,
        position_ids: torch.Tensor,
        target_layers: list[KeyValue] | None = None,
    ) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def to_token_ids(self, columns: torch.Tensor) -> torch.Tensor: ...
