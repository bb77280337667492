"""How the baselines are trained: at the same positions, at the same depths and with the same loss as MoA.

`draw_synchronised` cuts an answer into blocks; the first position of a block has everything up to the token before it,
as the first draft of a round has. MoA's masks make one pass of all depths. The drafters here need something else.
"""

from typing import Any

import torch

from ...training.objective import ObjectiveConfig, ObjectiveOutput, scored


def blocks(synchronised: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The blocks of every row, (B, N) each, N the most that a row has.

    Args:
        synchronised: (B, T) boolean, from `draw_synchronised`.
        lengths: (B,) real tokens per row.

    Returns:
        First positions, how many positions, and which blocks are real.
    """
    width = synchronised.shape[1]
    positions = torch.arange(width, device=synchronised.device)
    bearing = ~synchronised & (positions < lengths[:, None])
    after = torch.cat([synchronised[:, :1] | True, synchronised[:, :-1]], dim=1)
    first = bearing & after
    count = int(first.sum(dim=1).max())
    starts = torch.where(first, positions, width).sort(dim=1).values[:, :count]
    real = starts < width
    starts = starts.clamp(max=width - 1)
    # the first synchronised or missing position after each one
    ends = torch.where(bearing, width, positions).flip(1).cummin(dim=1).values.flip(1)
    sizes = ends.gather(1, starts) - starts
    return starts, torch.where(real, sizes, 0), real


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
    """
    ids, lengths, true = batch["input_ids"], batch["lengths"], batch["last_hidden"]
    rows, width = ids.shape
    positions = torch.arange(width, device=ids.device)
    before = torch.cat([torch.zeros_like(true[:, :1]), true[:, :-1]], dim=1)
    context = drafter.encode(ids, before, positions.expand(rows, width))
    key, value = context.self_attention

    starts, sizes, _ = blocks(synchronised, lengths)
    count = starts.shape[1]
    # a query sees the verified tokens up to its block's first one, and what was drafted in its own block
    verified = (positions <= starts[..., None])[:, None]  # (B, 1, N, T)
    own_block = torch.eye(count, dtype=torch.bool, device=ids.device).expand(rows, 1, -1, -1)
    mask = verified
    wide = [-1, -1, true.shape[-1]]
    features = before.gather(1, starts[..., None].expand(*wide))
    chosen, found_rows, found_positions, depths = [], [], [], []
    for depth in range(int(sizes.max())):
        at = (starts + depth).clamp(max=width - 1)
        hidden = drafter.joined(ids.gather(1, at), features)
        tables = drafter.tables(at)
        if depth:
            new_key, new_value = drafter.layer.key_value(hidden, tables)
            key, value = torch.cat([key, new_key], dim=2), torch.cat([value, new_value], dim=2)
            mask = torch.cat([mask, own_block], dim=-1)
        features = drafter.normed(drafter.layer(hidden, tables, key, value, mask))
        row, block = torch.where(depth < sizes)
        chosen.append(features[row, block])
        found_rows.append(row)
        found_positions.append(at[row, block])
        depths.append(torch.full_like(row, depth))
    row, position = torch.cat(found_rows), torch.cat(found_positions)
    return scored(drafter, config, torch.cat(chosen), true[row, position], torch.cat(depths), row)


def medusa_objective(
    drafter: Any,
    batch: dict[str, torch.Tensor],
    config: ObjectiveConfig,
    synchronised: torch.Tensor,
    staircase: bool = False,
) -> ObjectiveOutput:
    """Loss of one batch: each head at the positions of its depth, from the hidden state before their block.

    Positions deeper than there are heads are left out. Arguments as for `training_objective`.
    """
    true = batch["last_hidden"]
    starts, sizes, _ = blocks(synchronised, batch["lengths"])
    newest = true.gather(1, (starts - 1).clamp(min=0)[..., None].expand(-1, -1, true.shape[-1]))
    chosen, found_rows, found_positions, depths = [], [], [], []
    for depth in range(min(int(sizes.max()), drafter.config.num_heads)):
        row, block = torch.where(depth < sizes)
        chosen.append(drafter.predicted(newest[row, block], depth))
        found_rows.append(row)
        found_positions.append(starts[row, block] + depth)
        depths.append(torch.full_like(row, depth))
    row, position = torch.cat(found_rows), torch.cat(found_positions)
    return scored(drafter, config, torch.cat(chosen), true[row, position], torch.cat(depths), row)
