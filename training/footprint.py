"""How much memory a training step takes, found by running one on tensors without data.

Knows: how live bytes are counted while the real objective runs forward and backward. Does not know recipes or files.
"""

import contextlib
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel
from transformers.configuration_utils import PreTrainedConfig

from ..modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from ..modeling_moa.modeling_moa import LentParts, tail_config
from .objective import ObjectiveConfig, Queries, objective_at


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that operations create, until nothing holds it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.known:
            self.known.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def step_bytes(
    config: MoADrafterConfig,
    objective: ObjectiveConfig,
    target: PreTrainedConfig,
    *,
    rows: int,
    width: int,
    answer: int,
    loss_bearing: int,
    autocast: bool,
    target_dtype: torch.dtype = torch.bfloat16,
) -> int:
    """The most bytes that one step's batch, forward and backward pass hold at a time, gradients among them.

    What is there before the step, the drafter's weights, the optimizer's states and the lent parts, is not counted.
    Kernels are the CPU's; those of a GPU keep about the same tensors.

    Args:
        config: of the drafter.
        target: the configuration of its target, for the layers that TLI reuses.
        rows, width: of the padded batch.
        answer: tokens of its longest answer.
        loss_bearing: positions with loss in all rows together.
        autocast: whether the pass runs in bf16.
    """
    with FakeTensorMode():
        drafter = MoADrafterForCausalLM(config)
        tail = None
        if config.target_layer_inference:
            tail = AutoModel.from_config(tail_config(target, config.target_layer_inference), dtype=target_dtype)
            tail.requires_grad_(False)
        embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size, dtype=target_dtype)
        head = torch.empty(config.draft_vocab_size or config.vocab_size, config.hidden_size, dtype=target_dtype)
        drafter._lent = LentParts(embeddings.requires_grad_(False), head, None, tail)
        before = [*drafter.parameters(), *drafter.buffers(), embeddings.weight, head]
        before += [] if tail is None else [*tail.parameters(), *tail.buffers()]
        with _LiveBytes() as counted, torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            for tensor in before:
                counted.count(tensor)
            given, counted.peak = counted.live, counted.live
            batch = _batch(config, rows, width)
            queries = Queries(
                positions=torch.zeros(rows, answer, dtype=torch.long),
                self_mask=torch.ones(rows, 1, answer, width, dtype=torch.bool),
                cross_mask=torch.ones(rows, 1, answer, width, dtype=torch.bool),
                last=torch.zeros(rows, answer, dtype=torch.long),
                readable=torch.zeros(rows, answer, dtype=torch.long),
                row=torch.zeros(loss_bearing, dtype=torch.long),
                query=torch.zeros(loss_bearing, dtype=torch.long),
            )
            objective_at(drafter, batch, objective, queries).loss.backward()
    return counted.peak - given


def _batch(config: MoADrafterConfig, rows: int, width: int) -> dict[str, torch.Tensor]:
    states = len(config.lsa_layers) * config.layer_width
    states += config.hidden_size if config.memory_hidden_state != "none" else 0
    sizes = {"layer_states": states, "last_hidden": config.hidden_size}
    if config.target_layer_inference:
        sizes["layer_input"] = config.hidden_size
    batch = {name: torch.zeros(rows, width, size, dtype=torch.bfloat16) for name, size in sizes.items()}
    return batch | {"input_ids": torch.zeros(rows, width, dtype=torch.long)}
