"""The training objective: which position may read what, and how predictions are scored (paper section 4.4).

Knows: synchronisation points, the T-step bounded and staircase masks, TLI replacement, the losses. Does not know the
optimizer, the data on disk or how drafts are decoded.

One forward pass trains drafts of every depth. A position `i` of an answer may read the memory up to `s(i)`, the last
synchronised position at or before it, which is exactly what it will have at inference `i - s(i)` tokens into a draft.
"""

import random
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..modeling_moa import MoADrafterForCausalLM
from ..modeling_moa.modeling_moa import rotary_tables
from .distillation_loss import distillation_loss


@dataclass
class ObjectiveConfig:
    """Weights and intervals of the objective. The defaults are the paper's.

    Attributes:
        feature_weight: of SmoothL1 between predicted and true hidden states; with TLI half goes to the layer input.
        kl_weight: of the forward KL divergence, as its soft cross entropy, over the draft vocabulary.
        acceptance_weight: of `1 - sum(min(p, q))`, the rejection rate of speculative sampling (LK loss).
        depth_decay: a position `d` tokens after the first of its block weighs `depth_decay ** d`.
        interval: synchronised positions of an answer lie `k` apart, `k` drawn per row from `range(*interval)`.
        bounded: a draft reads the memory up to the last synchronised position, as at inference (the T-step bound).
            Without it every position reads the memory of all tokens before it, as EAGLE is trained.
    """

    feature_weight: float = 1.0
    kl_weight: float = 0.1
    acceptance_weight: float = 0.0
    depth_decay: float = 1.0
    interval: tuple[int, int] = (6, 15)
    bounded: bool = True

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 2 <= low < high:
            raise ValueError(f"interval must be two integers with 2 <= low < high, not {self.interval}")


@dataclass
class ObjectiveOutput(ModelOutput):
    """`loss` is a scalar; the parts are detached means over loss-bearing positions, whose weights (depth decay) sum to
    `total_weight`. The positions are described one by one:
    `hidden` (N, E) and `true_hidden` (N, E) enter the head, `depth` (N,) is how deep in its block a position lies,
    `row` (N,) which row of the batch it belongs to.

    None of them is ever None: the default is what a `ModelOutput` asks for, and that is what DDP and FSDP can look
    through for the loss."""

    loss: torch.Tensor
    feature_loss: torch.Tensor | None = None
    layer_input_loss: torch.Tensor | None = None
    cross_entropy: torch.Tensor | None = None
    acceptance: torch.Tensor | None = None
    total_weight: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    true_hidden: torch.Tensor | None = None
    depth: torch.Tensor | None = None
    row: torch.Tensor | None = None


def draw_synchronised(
    lengths: torch.Tensor, prompt_lengths: torch.Tensor, width: int, interval: tuple[int, int], seeds: list[int]
) -> torch.Tensor:
    """Synchronised positions, (B, width) boolean: all of the prompt, and one in every `k` of the answer.

    The phase is drawn as well, so that every position is now and then trained at every depth. Each row has a seed of
    its own, so that what is drawn depends neither on how rows are spread over processes nor on where a run resumed.
    """
    drawn = [random.Random(seed) for seed in seeds]
    every = [chance.randrange(*interval) for chance in drawn]
    phase = [chance.randrange(k) for chance, k in zip(drawn, every, strict=True)]
    device = lengths.device
    into_answer = torch.arange(width, device=device)[None] - prompt_lengths[:, None]
    due = (into_answer + 1 + torch.tensor(phase, device=device)[:, None]) % torch.tensor(every, device=device)[:, None]
    return (into_answer < 0) | (due == 0)


def bounded_masks(
    synchronised: torch.Tensor, query_positions: torch.Tensor, lengths: torch.Tensor, staircase: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SA's and CA's masks, (B, 1, Q, T) boolean, and `s(i)` of every query, (B, Q).

    Args:
        synchronised: (B, T).
        query_positions: (B, Q).
        lengths: (B,) real tokens per row.
        staircase: SA sees only the current block, which forces the drafter to use the memory.
    """
    positions = torch.arange(synchronised.shape[1], device=synchronised.device)
    last = torch.where(synchronised, positions, 0).cummax(dim=1).values
    last = last.gather(1, query_positions.clamp(max=len(positions) - 1))
    key = positions[None, None, :]
    exists = key < lengths[:, None, None]
    cross = (key <= last[..., None]) & exists
    own = (key <= query_positions[..., None]) & exists
    if staircase:
        own &= (key > last[..., None]) | (key == query_positions[..., None])
    return own[:, None], cross[:, None], last


@dataclass
class Queries:
    """The positions of a batch's answers, Q in the longest one, what each may read, and the N of them that bear loss.

    `positions` (B, Q); `self_mask`, `cross_mask` and `last` from `bounded_masks`; `readable` (B, Q) is the last
    position whose memory each may read; `row` and `query` (N,) say where in (B, Q) the loss-bearing ones are: real, and
    not synchronised.
    """

    positions: torch.Tensor
    self_mask: torch.Tensor
    cross_mask: torch.Tensor
    last: torch.Tensor
    readable: torch.Tensor
    row: torch.Tensor
    query: torch.Tensor


def answer_queries(
    batch: dict[str, torch.Tensor], synchronised: torch.Tensor, staircase: bool = False, bounded: bool = True
) -> Queries:
    """Queries are the answers only: a prompt token is always synchronised, so nothing is ever predicted from it.
    Arguments as for `training_objective`; `bounded` see `ObjectiveConfig`."""
    lengths, prompts = batch["lengths"], batch["prompt_lengths"]
    positions = prompts[:, None] + torch.arange(int((lengths - prompts).max()), device=lengths.device)
    real = positions < lengths[:, None]
    positions = positions.clamp(max=synchronised.shape[1] - 1)
    self_mask, cross_mask, last = bounded_masks(synchronised, positions, lengths, staircase)
    readable = last
    if not bounded:
        readable = torch.maximum(last, positions - 1)
        cross_mask = (torch.arange(synchronised.shape[1], device=last.device) <= readable[..., None])[:, None]
    row, query = torch.where(real & ~synchronised.gather(1, positions))
    return Queries(positions, self_mask, cross_mask, last, readable, row, query)


def training_objective(
    drafter: MoADrafterForCausalLM,
    batch: dict[str, torch.Tensor],
    config: ObjectiveConfig,
    synchronised: torch.Tensor,
    staircase: bool = False,
) -> ObjectiveOutput:
    """Loss of one batch.

    Args:
        drafter: with the target's parts lent.
        batch: `input_ids` (B, T), `lengths` (B,), `prompt_lengths` (B,), `layer_states` (B, T, S),
            `last_hidden` (B, T, E), with TLI `layer_input` (B, T, E); rows padded on the right.
        synchronised: (B, T), from `draw_synchronised`.
        staircase: see `bounded_masks`.
    """
    return objective_at(drafter, batch, config, answer_queries(batch, synchronised, staircase, config.bounded))


def objective_at(
    drafter: MoADrafterForCausalLM, batch: dict[str, torch.Tensor], config: ObjectiveConfig, queries: Queries
) -> ObjectiveOutput:
    """`training_objective` with its queries. The shapes in here depend on shapes alone, not on what tensors hold."""
    ids, row = batch["input_ids"], queries.row
    rows, width = ids.shape
    positions = torch.arange(width, device=ids.device)[None].expand(rows, width)
    memory = drafter.memory(batch["layer_states"])
    context = drafter.encode_memory(ids, memory, positions)
    tables = rotary_tables(queries.positions, drafter.config.head_dim, drafter.config.rope_theta, drafter.compute_dtype)
    hidden = drafter.lent.embed(ids.gather(1, queries.positions)).to(drafter.compute_dtype)
    hidden = drafter.self_attention(hidden, tables, *context.self_attention, queries.self_mask)
    if drafter.config.newest_memory:
        hidden = drafter.with_newest_memory(hidden, memory.gather(1, queries.readable[..., None].expand_as(hidden)))
    prediction = drafter.cross_attention(hidden, tables, *context.cross_attention, queries.cross_mask)

    chosen = prediction[row, queries.query]
    here = queries.positions[row, queries.query]
    inputs = None
    if drafter.config.target_layer_inference:
        inputs = (chosen, batch["layer_input"][row, here])
        chosen = _through_target_layers(drafter, batch["layer_input"], chosen, row, here)
    depth = here - queries.last[row, queries.query] - 1
    return scored(drafter, config, drafter.normed(chosen), batch["last_hidden"][row, here], depth, row, inputs)


def scored(
    drafter: MoADrafterForCausalLM,
    config: ObjectiveConfig,
    chosen: torch.Tensor,
    true_hidden: torch.Tensor,
    depth: torch.Tensor,
    row: torch.Tensor,
    layer_inputs: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> ObjectiveOutput:
    """The loss of predictions, whichever drafter they come from.

    Args:
        chosen: (N, E) predicted hidden states, as they enter the head.
        true_hidden: (N, E) the target's.
        depth, row: (N,) see `ObjectiveOutput`.
        layer_inputs: with TLI the predicted and the true input of the reused layers, each (N, E).
    """
    weight = config.depth_decay ** depth.float()
    total_weight = weight.sum()
    weight = weight / total_weight.clamp(min=1e-9)

    def feature_error(ours: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        error = nn.functional.smooth_l1_loss(ours.float(), true.float(), reduction="none").mean(-1)
        return (weight * error).sum()

    feature_loss = layer_input_loss = chosen.new_zeros(())
    if config.feature_weight:
        feature_loss = feature_error(chosen, true_hidden)
        if layer_inputs is not None:
            layer_input_loss = feature_error(*layer_inputs)
    cross_entropy, acceptance = distillation_loss(drafter, chosen, true_hidden, weight, config.acceptance_weight > 0)
    features = feature_loss if layer_inputs is None else (feature_loss + layer_input_loss) / 2
    loss = config.feature_weight * features + config.kl_weight * cross_entropy
    if config.acceptance_weight:
        loss = loss + config.acceptance_weight * (1 - acceptance)
    parts = [part.detach() for part in (feature_loss, layer_input_loss, cross_entropy, acceptance)]
    return ObjectiveOutput(loss, *parts, total_weight, chosen.detach(), true_hidden, depth, row)


@torch.no_grad()
def agreement(drafter: MoADrafterForCausalLM, output: ObjectiveOutput, chunk: int = 256) -> torch.Tensor:
    """Whether the drafter's first choice is the target's, (N,) boolean, over the draft vocabulary."""
    pairs = zip(output.hidden.split(chunk), output.true_hidden.split(chunk), strict=True)
    same = [drafter.head(ours).argmax(-1) == drafter.head(true.to(ours.dtype)).argmax(-1) for ours, true in pairs]
    return torch.cat(same) if same else output.depth.bool()


def _through_target_layers(
    drafter: MoADrafterForCausalLM, true: torch.Tensor, predicted: torch.Tensor, row: torch.Tensor, here: torch.Tensor
) -> torch.Tensor:
    """TLI: predictions (N, E) at the positions `here` of `row`, the true layer input (B, T, E) everywhere else, through
    the frozen layers. Back come the N."""
    rows, width = true.shape[:2]
    whole = true.to(predicted.dtype).index_put((row, here), predicted)
    positions = torch.arange(width, device=true.device)[None].expand(rows, width)
    causal = torch.ones(width, width, dtype=torch.bool, device=true.device).tril()[None, None]
    return drafter.run_target_layers(whole, positions, causal, None)[row, here]
