"""How the baselines are trained: at the same positions, at the same depths and with the same loss as MoA.

`draw_synchronised` cuts an answer into blocks; the first position of a block has everything up to the token before it,
as the first draft of a round has. MoA's masks make one pass of all depths. The drafters here need something else.
"""

from typing import Any

import torch

from ...modeling_moa.modeling_moa import KeyValue, rotate
from ...training.objective import ObjectiveConfig, ObjectiveOutput, scored


def blocks(synchronised: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of every row, (B, N) each, N the most that a row has.

    Args:
        synchronised: (B, T) boolean, from `draw_synchronised`.
        lengths: (B,) real tokens per row.

    Returns:
        First positions, and how many positions, 0 where a row has fewer blocks.
    """
    width = synchronised.shape[1]
    positions = torch.arange(width, device=synchronised.device)
    bearing = ~synchronised & (positions < lengths[:, None])
    after = torch.cat([torch.ones_like(synchronised[:, :1]), synchronised[:, :-1]], dim=1)
    first = bearing & after
    count = int(first.sum(dim=1).max())
    starts = torch.where(first, positions, width).sort(dim=1).values[:, :count]
    real = starts < width
    starts = starts.clamp(max=width - 1)
    # the first synchronised or missing position after each one
    ends = torch.where(bearing, width, positions).flip(1).cummin(dim=1).values.flip(1)
    sizes = ends.gather(1, starts) - starts
    return starts, torch.where(real, sizes, 0)


def eagle_objective(
    drafter: Any,
    batch: dict[str, torch.Tensor],
    config: ObjectiveConfig,
    synchronised: torch.Tensor,
    staircase: bool = False,
) -> ObjectiveOutput:
    """Loss of one batch, drafting as at inference: each depth reads what the one before it has predicted.

    The published drafter is trained on the target's true hidden states with noise added. Training on its own, step by
    step, was shown to be better by HASS (arXiv 2408.15766) and EAGLE-3; here it is done to the end of every block. The
    tokens are the true ones, as they are for MoA. Arguments as for `training_objective`.

    Raises:
        ValueError: a staircase mask is asked for, which is MoA's.
    """
    _refuse_staircase(staircase)
    ids, true = batch["input_ids"], batch["last_hidden"]
    rows, width = ids.shape
    positions = torch.arange(width, device=ids.device)
    before = torch.cat([torch.zeros_like(true[:, :1]), true[:, :-1]], dim=1)
    context = drafter.encode(ids, before, positions.expand(rows, width))
    starts, sizes = blocks(synchronised, batch["lengths"])
    visible = (positions <= starts[..., None])[:, None]  # (B, 1, N, T): verified tokens and the block's first one

    layer = drafter.layer
    row, block = torch.where(sizes > 0)  # M blocks; those that have ended are left out of deeper steps
    features = before[row, starts[row, block]]  # (M, E)
    drafted: list[KeyValue] = []  # of the block's own drafts, (M, kv_heads, head_dim) each
    predicted = []
    for depth in range(int(sizes.max())):
        at = starts[row, block] + depth
        hidden = drafter.joined(ids[row, at], features)
        normed, tables = layer.input_layernorm(hidden), drafter.tables(at[None])
        if depth:  # the first one's key is among the verified ones already
            key, value = layer.self_attn.key_value(normed[None], tables)
            drafted.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        attended = _attend(layer.self_attn, normed, tables, context.self_attention, drafted, visible, row, block)
        hidden = hidden + layer.self_attn.o_proj(attended)
        features = drafter.normed(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
        predicted.append((features, row, at))
        goes_on = depth + 1 < sizes[row, block]
        row, block, features = row[goes_on], block[goes_on], features[goes_on]
        drafted = [(key[goes_on], value[goes_on]) for key, value in drafted]
    return _scored_by_depth(drafter, config, true, predicted)


def _scored_by_depth(
    drafter: Any,
    config: ObjectiveConfig,
    true: torch.Tensor,
    predicted: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> ObjectiveOutput:
    """The loss of what was predicted at each depth: hidden states (M, E), and the row and position (M,) of each one."""
    chosen, row, position = (torch.cat(parts) for parts in zip(*predicted, strict=True))
    depth = torch.cat([torch.full_like(rows, depth) for depth, (_, rows, _) in enumerate(predicted)])
    return scored(drafter, config, chosen, true[row, position], depth, row)


def _refuse_staircase(staircase: bool) -> None:
    if staircase:
        raise ValueError("This drafter has no memory to be forced onto: leave staircase_epochs out of its recipe")


def _attend(
    attention: Any,
    normed: torch.Tensor,
    tables: KeyValue,
    verified: KeyValue,
    drafted: list[KeyValue],
    visible: torch.Tensor,
    row: torch.Tensor,
    block: torch.Tensor,
) -> torch.Tensor:
    """Attention of M queries, (M, E), to what is `visible` (B, 1, N, T) of their row and to their own block's drafts.

    Written out because a mask over all blocks' drafts would double what every query looks at.
    """
    keys, values = verified  # (B, kv_heads, T, head_dim)
    rows, groups, width, dim = keys.shape
    count = visible.shape[2]
    query = rotate(attention.q_proj(normed).view(1, len(row), -1, dim).transpose(1, 2), tables)[0].transpose(0, 1)
    query = query.reshape(len(row), groups, -1, dim)  # (M, kv_heads, shared, dim)
    shared = query.shape[2]
    padded = query.new_zeros(rows, count, groups, shared, dim).index_put((row, block), query)
    padded = padded.permute(0, 2, 3, 1, 4).reshape(rows, groups, shared * count, dim)
    scores = (padded @ keys.transpose(2, 3)).view(rows, groups, shared, count, width)
    scores = scores.masked_fill(~visible[:, :, None], torch.finfo(scores.dtype).min)
    scores = scores.permute(0, 3, 1, 2, 4)[row, block]  # (M, kv_heads, shared, T)
    if drafted:
        own = torch.stack([key for key, _ in drafted], dim=2)  # (M, kv_heads, depth, dim)
        scores = torch.cat([scores, query @ own.transpose(2, 3)], dim=-1)
    weights = (scores * attention.scaling).softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    spread = weights.new_zeros(rows, count, groups, shared, width).index_put((row, block), weights[..., :width])
    spread = spread.permute(0, 2, 3, 1, 4).reshape(rows, groups, shared * count, width)
    attended = (spread @ values).view(rows, groups, shared, count, dim).permute(0, 3, 1, 2, 4)[row, block]
    if drafted:
        attended = attended + weights[..., width:] @ torch.stack([value for _, value in drafted], dim=2)
    return attended.reshape(len(row), -1)


def medusa_objective(
    drafter: Any,
    batch: dict[str, torch.Tensor],
    config: ObjectiveConfig,
    synchronised: torch.Tensor,
    staircase: bool = False,
) -> ObjectiveOutput:
    """Loss of one batch: each head at the positions of its depth, from the hidden state before their block.

    Positions deeper than there are heads are left out. Arguments as for `training_objective`.

    Raises:
        ValueError: a staircase mask is asked for, which is MoA's.
    """
    _refuse_staircase(staircase)
    true = batch["last_hidden"]
    starts, sizes = blocks(synchronised, batch["lengths"])
    newest = true.gather(1, (starts - 1).clamp(min=0)[..., None].expand(-1, -1, true.shape[-1]))
    predicted = []
    for depth in range(min(int(sizes.max()), drafter.config.num_heads)):
        row, block = torch.where(depth < sizes)
        predicted.append((drafter.predicted(newest[row, block], depth), row, starts[row, block] + depth))
    return _scored_by_depth(drafter, config, true, predicted)
