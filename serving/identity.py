"""Whether a client's drafter is the server's: both must have the same LSA, or its memory would mean nothing."""

import hashlib

import torch

from ..modeling_moa import MoADrafterForCausalLM


def drafter_identity(drafter: MoADrafterForCausalLM) -> str:
    """A hash of what makes memory and of what reads it: 32 hexadecimal digits.

    Over the parameters of LSA, its map and CA in the order of their names, as bfloat16, so that a drafter held in
    float32 on one side and in bfloat16 on the other is still the same.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(drafter.state_dict().items()):
        if name.startswith(("layer_self_attention.", "Ekv2E.", "cross_attention.", "hidden_state_map.")):
            digest.update(f"{name} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    settings = [drafter.config.lsa_layers, drafter.config.memory_hidden_state, drafter.config.target_layer_inference]
    digest.update(repr(settings).encode())
    return digest.hexdigest()
