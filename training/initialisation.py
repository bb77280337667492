"""Where a new drafter starts from: the target's own layers, and the tokens it writes most.

Knows: which weights of the target fit the drafter's blocks. Does not know the objective or the data's form.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling_moa import MoADrafterForCausalLM


def frequent_tokens(answers: Iterable[list[int]], size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The ids a draft vocabulary should hold, ascending: `always` and the most frequent of the target's own answers
    (FR-Spec, arXiv 2502.14856). Ids never seen fill up what is left, lowest first. (size,) int64."""
    counts = Counter(token for answer in answers for token in answer)
    ranked = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))
    chosen = set(ranked[:size])
    unseen = (token for token in range(1 << 31) if token not in chosen)
    while len(chosen) < size:
        chosen.add(next(unseen))
    return torch.tensor(sorted(chosen))


@torch.no_grad()
def initialise_from_target(drafter: MoADrafterForCausalLM, target: PreTrainedModel) -> None:
    """Copies the target's first layer into SA and its last one into CA, as far as shapes allow, and its final norm into
    the head norm. CA's and LSA's outputs start at zero: the drafter begins as a small language model and learns to
    trust the memory, instead of first unlearning noise from it."""
    layers = target.get_decoder().layers
    copy_layer(layers[0], drafter.self_attention)
    copy_layer(layers[len(layers) - 1 - drafter.config.target_layer_inference], drafter.cross_attention)
    through_zero = [drafter.cross_attention]
    through_zero += [drafter.layer_self_attention] if drafter.config.lsa_layers else []
    for block in through_zero:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    if drafter.config.newest_memory:
        drafter.newest_memory_map.weight.zero_()
    if drafter.config.head_norm:
        drafter.head_norm.weight.copy_(target.get_decoder().norm.weight)


# What may differ between a trained drafter and the one that goes on from it: none of these changes a weight's shape.
CHANGEABLE = ("newest_memory", "target_layer_inference", "head_norm")


@torch.no_grad()
def with_options(drafter: MoADrafterForCausalLM, **options: Any) -> MoADrafterForCausalLM:
    """A copy of a trained drafter with other `CHANGEABLE` options. A newest memory that is added is not read at first,
    so that the copy drafts as before; with another TLI it has to learn anew what it predicts, from what it reads."""
    config = type(drafter.config).from_dict(drafter.config.to_dict() | options)
    copy = type(drafter)(config).to(drafter.dtype)
    copy.load_state_dict(drafter.state_dict(), strict=False)
    if config.newest_memory and not drafter.config.newest_memory:
        copy.newest_memory_map.weight.zero_()
    return copy


def copy_layer(source: nn.Module, block: nn.Module) -> None:
    """Copies what has the same shape; of a wider MLP, the channels with the largest weights."""
    theirs = dict(source.named_parameters())
    ours = dict(block.named_parameters())
    up = theirs.get("mlp.up_proj.weight")
    our_up = ours.get("mlp.up_proj.weight")
    if up is not None and our_up is not None and up.shape[1:] == our_up.shape[1:]:
        keep = len(our_up)
        strength = up.float().norm(dim=1) * theirs["mlp.down_proj.weight"].float().norm(dim=0)
        channels = strength.topk(min(keep, len(strength))).indices.sort().values
        for name in ("gate_proj", "up_proj"):
            theirs[f"mlp.{name}.weight"] = theirs[f"mlp.{name}.weight"][channels]
        theirs["mlp.down_proj.weight"] = theirs["mlp.down_proj.weight"][:, channels]
    for name, parameter in ours.items():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])
