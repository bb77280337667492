"""The loss on the head's outputs, computed without ever holding a batch of vocabulary-sized rows.

Knows: the frozen head, two hidden states per position, how far apart the two next-token distributions are. Does not
know where the hidden states come from.

The head is frozen and both losses have closed-form gradients, so the gradient for the drafter's hidden states is
worked out in the forward pass, some rows at a time, while the rows are still in the processor's cache. Automatic
differentiation would write and read a (positions, vocabulary) matrix a dozen times, which on a CPU was most of a step.
"""

import torch
from torch import nn

from ..modeling_moa import MoADrafterForCausalLM

CHUNK = 256  # positions worked on at a time


class _DistillationLoss(torch.autograd.Function):
    """Weighted sums over positions of the soft cross entropy and of the acceptance rate `sum(min(p, q))`.

    With target `p`, drafter `q = softmax(z)` and weight `w`: d CE / dz = w (q - p), and with `m = [q < p]`
    d acceptance / dz = w q (m - sum(m q)).
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        true_hidden: torch.Tensor,
        weight: torch.Tensor,
        drafter: MoADrafterForCausalLM,
        with_acceptance: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, bias = drafter.lent.head_weight, drafter.lent.head_bias
        cap, scale = drafter.config.final_logit_softcapping, drafter.config.logit_scale
        cross_entropy, acceptance = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
        gradients = [torch.empty_like(hidden), torch.empty_like(hidden) if with_acceptance else None]

        def logits_of(states: torch.Tensor) -> torch.Tensor:
            raw = scale * nn.functional.linear(states.to(rows.dtype), rows, bias).float()
            return raw if cap is None else cap * torch.tanh(raw / cap)

        def through_head(gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if cap is not None:
                gradient = gradient * (1 - (logits / cap).square())
            return scale * (gradient.to(rows.dtype) @ rows).to(hidden.dtype)

        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            w = weight[part, None]
            logits = logits_of(hidden[part])
            target = logits_of(true_hidden[part]).softmax(-1)
            normaliser = logits.logsumexp(-1)
            cross_entropy += (weight[part] * (normaliser - (target * logits).sum(-1))).sum()
            drafted = (logits - normaliser[:, None]).exp_()
            if with_acceptance:
                acceptance += (w * torch.minimum(drafted, target)).sum()
                below = torch.where(drafted < target, drafted, 0)
                slope = below - drafted * below.sum(-1, keepdim=True)
                gradients[1][part] = through_head(slope * w, logits)
            gradients[0][part] = through_head(drafted.sub_(target).mul_(w), logits)
        ctx.save_for_backward(*(g for g in gradients if g is not None))
        return cross_entropy, acceptance

    @staticmethod
    def backward(ctx, grad_cross_entropy, grad_acceptance):
        saved = ctx.saved_tensors
        gradient = saved[0] * grad_cross_entropy.to(saved[0].dtype)
        if len(saved) > 1:
            gradient = gradient + saved[1] * grad_acceptance.to(saved[1].dtype)
        return gradient, None, None, None, None


def distillation_loss(
    drafter: MoADrafterForCausalLM,
    hidden: torch.Tensor,
    true_hidden: torch.Tensor,
    weight: torch.Tensor,
    with_acceptance: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft cross entropy and acceptance rate between the target's and the drafter's next-token distributions.

    Args:
        drafter: with the target's head lent; both distributions are over its draft vocabulary.
        hidden: (N, E) what enters the head. Gradients flow into it alone.
        true_hidden: (N, E) the target's last hidden states at the same positions.
        weight: (N,) of each position, float32.
        with_acceptance: whether the acceptance rate `sum(min(p, q))`, the LK loss's alpha, is wanted; else it is 0.

    Returns:
        Two scalars, the weighted sums over positions. The soft cross entropy differs from the forward KL divergence by
        the target's own entropy, which no drafter changes.
    """
    return _DistillationLoss.apply(hidden, true_hidden, weight, drafter, with_acceptance)
