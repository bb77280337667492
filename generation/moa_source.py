"""Drafts by a MoA drafter: keeps its context in step with the verified text and drafts chains or trees from it.

Knows the drafter's two calls and the order of states it reads. Does not know how drafts are judged.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from .draft import Draft
from .drafter import DraftContext, Drafter
from .options import DraftOptions
from .sources import DraftPlan, Verified


class _Growing:
    """Keys and values that grow at the end, (B, heads, capacity, head_dim). Capacity doubles, so growth is linear."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def write(self, pieces: tuple[torch.Tensor, ...], row: int, start: int, count: int) -> None:
        """Puts the first `count` columns of one row of `pieces`, (B, heads, n, head_dim), at `start`."""
        end = start + count
        if not self.tensors:
            self.tensors = [piece.new_zeros(*piece.shape[:2], end + 128, piece.shape[3]) for piece in pieces]
        if end > self.tensors[0].shape[2]:
            extra = max(end, 2 * self.tensors[0].shape[2]) - self.tensors[0].shape[2]
            self.tensors = [torch.cat([t, t.new_zeros(*t.shape[:2], extra, t.shape[3])], dim=2) for t in self.tensors]
        for tensor, piece in zip(self.tensors, pieces, strict=True):
            tensor[row, :, start:end] = piece[row, :, :count]

    def select(self, rows: list[int]) -> None:
        self.tensors = [tensor[rows] for tensor in self.tensors]


class MoASession:
    """One call's drafts. The context is laid out like the target's cache: its slot `base + i` is entry `i` here."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel | None, rows: int):
        config = drafter.config
        self.drafter = drafter
        self.rows = rows
        self.hidden_states: tuple[int, ...] = (
            () if config.memory_hidden_state == "none" else (config.target_num_hidden_layers,)
        )
        self.lsa_layers = config.lsa_layers
        last = config.target_num_hidden_layers
        self.tail_layers = range(last - config.target_layer_inference, last)
        self.newest: Any = None  # what the drafter last made of verified tokens
        self.base: Any = None  # first slot of the target's cache that the context covers
        self.lengths = [0] * rows
        self.self_attention = _Growing()
        self.cross_attention = _Growing()
        self.target_layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.memory: torch.Tensor | None = None  # (B, 1, E), of each row's newest verified token
        self.valid: torch.Tensor | None = None  # (B, capacity), kept only where rows differ
        self.next_tokens = [0] * rows
        self.next_positions = torch.zeros(rows, 1, dtype=torch.long, device=drafter.device)

    # -- following the text --------------------------------------------------------------------------------------------

    def observe(self, verified: Verified) -> None:
        device = self.drafter.device
        layers = [verified.states.layer(i) for i in self.lsa_layers]
        # a layer with a window may have forgotten the oldest tokens (of a single row): the context begins after them
        count = min([verified.input_ids.shape[1], *(keys.shape[2] for keys, _ in layers)])
        missing = verified.input_ids.shape[1] - count
        keys = [keys[:, :, keys.shape[2] - count :].to(device) for keys, _ in layers]
        values = [values[:, :, values.shape[2] - count :].to(device) for _, values in layers]
        hidden = verified.states.hidden(self.hidden_states[0])[:, missing:].to(device) if self.hidden_states else None
        input_ids = verified.input_ids[:, missing:].to(device)
        position_ids = verified.position_ids[:, missing:].to(device)

        states = self.drafter.layer_states(keys, values, hidden)
        starts = [start + missing for start in verified.starts]
        counts = [count - missing for count in verified.counts]
        new = self.drafter.encode(input_ids, states, position_ids)
        self.extend(new, position_ids, starts, counts, verified.next_tokens)
        end = self.base + max(self.lengths)
        self.target_layers = []
        for layer in self.tail_layers:
            key, value = verified.states.whole_layer(layer)
            self.target_layers.append((key[:, :, self.base : end].to(device), value[:, :, self.base : end].to(device)))

    def extend(
        self, new: Any, position_ids: torch.Tensor, starts: list[int], counts: list[int], next_tokens: list[int]
    ) -> None:
        """Takes in what the drafter made of verified tokens, (B, n) of them, wherever their memory came from.

        Args:
            new: from the drafter's `encode` or `encode_memory`; its `target_layers` are not read.
            starts, counts, next_tokens: as in `Verified`.
        """
        self.newest = new
        if self.base is None:
            self.base = min(starts)
        for row, (first, count) in enumerate(zip(starts, counts, strict=True)):
            start = first - self.base
            if count:
                self.self_attention.write(new.self_attention, row, start, count)
                self.cross_attention.write(new.cross_attention, row, start, count)
                self.lengths[row] = start + count
                self.next_positions[row] = position_ids[row, count - 1] + 1
                if new.memory is not None:
                    if self.memory is None:
                        self.memory = new.memory[:, :1].clone()
                    self.memory[row, 0] = new.memory[row, count - 1]
                if self.rows > 1:
                    self._mark_valid(row, start, start + count)
        self.next_tokens = list(next_tokens)

    def _mark_valid(self, row: int, start: int, end: int) -> None:
        if self.valid is None:
            self.valid = torch.zeros(self.rows, max(128, end), dtype=torch.bool, device=self.drafter.device)
        if end > self.valid.shape[1]:
            extra = max(end, 2 * self.valid.shape[1]) - self.valid.shape[1]
            self.valid = torch.cat([self.valid, self.valid.new_zeros(self.rows, extra)], dim=1)
        self.valid[row, start:end] = True

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.next_tokens = [self.next_tokens[row] for row in rows]
        self.next_positions = self.next_positions[rows]
        self.memory = None if self.memory is None else self.memory[rows]
        self.self_attention.select(rows)
        self.cross_attention.select(rows)
        end = max(self.lengths)
        self.target_layers = [(key[rows, :, :end], value[rows, :, :end]) for key, value in self.target_layers]
        self.valid = None if self.valid is None else self.valid[rows]

    def context(self) -> DraftContext:
        """What the drafter reads: (B, heads, longest row, head_dim)."""
        length = max(self.lengths)
        own_keys, own_values = (tensor[:, :, :length] for tensor in self.self_attention.tensors)
        cross_keys, cross_values = (tensor[:, :, :length] for tensor in self.cross_attention.tensors)
        return replace(
            self.newest,
            self_attention=(own_keys, own_values),
            cross_attention=(cross_keys, cross_values),
            target_layers=self.target_layers,
            memory=self.memory,
        )

    # -- drafting ------------------------------------------------------------------------------------------------------

    def draft(self, plan: DraftPlan) -> list[Draft]:
        if plan.levels < 1:
            return [Draft() for _ in range(self.rows)]
        return self._chains(plan) if plan.breadth == 1 else self._trees(plan)

    def _chains(self, plan: DraftPlan) -> list[Draft]:
        """The most probable token of each level."""
        context = self.context()
        valid = None if self.valid is None else self.valid[:, None, None, : context.length]  # (B, 1, 1, T)
        tokens = torch.tensor(self.next_tokens, device=self.drafter.device)[:, None]  # (B, 1)
        chosen: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        total = torch.zeros(self.rows, device=self.drafter.device)
        drafted, self_mask = None, valid
        for level in range(min(plan.levels, plan.nodes)):
            if valid is not None:
                self_mask = torch.cat([valid, valid.new_ones(self.rows, 1, 1, level + 1)], dim=-1)
            output = self.drafter(tokens, self.next_positions + level, context, drafted, self_mask, valid)
            logits = output.logits[:, -1].float()  # (B, draft vocabulary)
            best = logits.max(dim=-1)
            score = best.values - logits.logsumexp(dim=-1)
            tokens = self.drafter.to_token_ids(best.indices)[:, None]
            chosen.append(tokens)
            scores.append(score)
            if plan.confidence:
                total = total + score
                if float(total.exp().mean()) < plan.confidence:  # one more level costs all rows the same
                    break
            drafted = output.drafted
        rows = torch.cat(chosen, dim=1).tolist()
        log_probs = torch.stack(scores, dim=1).tolist()
        return [Draft.chain(tokens, scores) for tokens, scores in zip(rows, log_probs, strict=True)]

    def sample_chain(self, levels: int, temperature: float) -> tuple[list[int], torch.Tensor]:
        """A chain drawn from the drafter's distribution at a temperature, for one row.

        Returns:
            The tokens, and the logits (1, levels, draft vocabulary) they were drawn from.
        """
        context = self.context()
        tokens = torch.tensor([self.next_tokens], device=self.drafter.device)
        chosen, drawn_from = [], []
        drafted = None
        for level in range(levels):
            output = self.drafter(tokens, self.next_positions + level, context, drafted)
            logits = output.logits[:, -1].float() / temperature
            columns = torch.multinomial(logits.softmax(dim=-1), num_samples=1)
            tokens = self.drafter.to_token_ids(columns)
            chosen.append(tokens)
            drawn_from.append(logits)
            drafted = output.drafted
        return torch.cat(chosen, dim=1)[0].tolist(), torch.stack(drawn_from, dim=1)

    def _trees(self, plan: DraftPlan) -> list[Draft]:
        """The dynamic tree of EAGLE-2 (arXiv 2406.16858): on every level the most probable paths are expanded, each by
        its most probable tokens; of all tokens met, those with the most probable paths are kept."""
        context = self.context()
        rows, device = self.rows, self.drafter.device
        queries = torch.tensor(self.next_tokens, device=device)[:, None]  # (B, Q)
        visible = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)  # (B, Q, expanded): ancestors and itself
        valid = None if self.valid is None else self.valid[:, None, None, : context.length]
        totals = torch.zeros(rows, 1, device=device)  # (B, Q) cumulative log-probability
        beam_nodes = torch.full((rows, 1), -1, device=device)  # (B, Q) index among all tokens met
        met_tokens, met_parents, met_scores, met_totals = [], [], [], []
        met = 0
        drafted = None
        for level in range(plan.levels):
            width = queries.shape[1]
            before = (
                visible.new_ones(rows, width, context.length) if valid is None else valid[:, 0].expand(-1, width, -1)
            )
            self_mask = None if level == 0 and valid is None else torch.cat([before, visible], dim=-1)[:, None]
            positions = (self.next_positions + level).expand(-1, width)
            output = self.drafter(queries, positions, context, drafted, self_mask, valid)
            scores = output.logits.float().log_softmax(dim=-1)
            scores, columns = scores.topk(min(plan.breadth, scores.shape[-1]), dim=-1)  # (B, Q, breadth)
            children = scores.shape[-1]
            sums = totals[:, :, None] + scores
            met_tokens.append(self.drafter.to_token_ids(columns).flatten(1))
            met_parents.append(beam_nodes[:, :, None].expand(-1, -1, children).flatten(1))
            met_scores.append(scores.flatten(1))
            met_totals.append(sums.flatten(1))
            if level + 1 == plan.levels:
                break
            totals, best = met_totals[-1].topk(min(plan.breadth, width * children), dim=-1)  # (B, next Q)
            if plan.confidence and float(totals.exp().sum(dim=-1).mean()) < plan.confidence:
                break  # all paths together are less likely to go on than asked for
            parents = best // children
            queries = met_tokens[-1].gather(1, best)
            beam_nodes = met + best
            met += width * children
            own = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(rows, -1, -1)
            inherited = visible.gather(1, parents[:, :, None].expand(-1, -1, visible.shape[2]))
            visible = torch.cat([inherited, own], dim=-1)
            drafted = output.drafted
        # stable, so that among equals a parent (met earlier) is kept before its child
        ranked = torch.cat(met_totals, dim=1).sort(dim=1, descending=True, stable=True).indices
        kept = ranked[:, : plan.nodes].sort(dim=1).values
        fields = [torch.cat(parts, dim=1).gather(1, kept).tolist() for parts in (met_tokens, met_parents, met_scores)]
        drafts = []
        for row, nodes in enumerate(kept.tolist()):
            renamed = {-1: -1} | {node: index for index, node in enumerate(nodes)}
            parents = [renamed[parent] for parent in fields[1][row]]
            drafts.append(Draft(fields[0][row], parents, fields[2][row], ["drafter"] * len(nodes)))
        return drafts


class MoASource:
    """A MoA drafter as a source of drafts."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> MoASession:
        return MoASession(self.drafter, target, len(prompt_ids))
