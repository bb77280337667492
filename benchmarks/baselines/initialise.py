"""Where the baselines start from: the target's own layers, as far as shapes allow, as MoA does."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...training.initialisation import copy_layer


@torch.no_grad()
def initialise_eagle(drafter: Any, target: PreTrainedModel) -> None:
    """The layer is the target's last one; the map passes the hidden state on and adds the embedding."""
    width = drafter.config.hidden_size
    copy_layer(target.get_decoder().layers[-1], drafter.layer)
    drafter.layer.mlp.down_proj.weight.zero_()
    drafter.fc.weight[:, width:].add_(torch.eye(width))
    _initialise_norm(drafter, target)


@torch.no_grad()
def initialise_medusa(drafter: Any, target: PreTrainedModel) -> None:
    """Every head starts as the identity, as published."""
    for head in drafter.heads:
        for layer in head.layers:
            layer.weight.zero_()
            layer.bias.zero_()
    _initialise_norm(drafter, target)


@torch.no_grad()
def initialise_glide(drafter: Any, target: PreTrainedModel) -> None:
    """Self-attention is the target's first layer's, cross-attention its last one's with its outputs at zero."""
    layers = target.get_decoder().layers
    copy_layer(layers[0], drafter.self_attention)
    copy_layer(layers[-1], drafter.cross_attention)
    drafter.cross_attention.self_attn.o_proj.weight.zero_()
    drafter.cross_attention.mlp.down_proj.weight.zero_()
    _initialise_norm(drafter, target)


def _initialise_norm(drafter: Any, target: PreTrainedModel) -> None:
    if drafter.config.head_norm:
        drafter.head_norm.weight.copy_(target.get_decoder().norm.weight)
