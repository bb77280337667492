"""Verified tokens that the source of drafts has not taken in yet.

Taking tokens in costs the drafter time, so it is put off while nothing is drafted. The target's keys and values stay in
its cache; hidden states, which the cache does not hold, are kept here meanwhile.
"""

import torch

from .sources import DraftSession, Verified
from .target_pass import TargetPass


class Backlog:
    """Implements `TargetStates` for the tokens it holds. Rows are those of the target pass, which may shrink."""

    def __init__(self, target: TargetPass, session: DraftSession, most: int | None):
        """`most`: tokens that may wait; a cache with a window forgets the oldest."""
        self.target, self.session = target, session
        self.most = 256 if most is None else min(most, 256)
        self._clear(target.rows)

    def _clear(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.positions: list[list[int]] = [[] for _ in range(rows)]
        self.starts = [0] * rows
        self.pieces: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(rows)]

    def add(
        self, row: int, tokens: list[int], start: int, positions: list[int], hidden: tuple[torch.Tensor, ...]
    ) -> None:
        """Tokens of one row that became final.

        Args:
            start: the cache slot of the first.
            positions: in the text.
            hidden: what the session asked for, in its order, each (n, E).
        """
        if not self.tokens[row]:
            self.starts[row] = start
        self.tokens[row] += tokens
        self.positions[row] += positions
        if hidden:
            self.pieces[row].append(hidden)

    @property
    def is_full(self) -> bool:
        return max(map(len, self.tokens)) >= self.most

    def hand_over(self, next_tokens: list[int]) -> None:
        """Has the session take in all that waits. `next_tokens`: the last token of every row, not yet in the cache."""
        self.counts = [len(row) for row in self.tokens]
        if not max(self.counts):
            return
        device = self.target.device
        verified = Verified(
            torch.tensor(_rectangle(self.tokens), device=device),
            torch.tensor(_rectangle(self.positions), device=device),
            self.counts,
            self.starts,
            next_tokens,
            self,
        )
        self.session.observe(verified)
        self._clear(len(self.tokens))

    def select(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        self.tokens = [self.tokens[row] for row in rows]
        self.positions = [self.positions[row] for row in rows]
        self.starts = [self.starts[row] for row in rows]
        self.pieces = [self.pieces[row] for row in rows]

    # -- TargetStates --------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.target.read(index, self.starts, self.counts)

    def whole_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.target.whole_layer(index)

    def hidden(self, index: int) -> torch.Tensor:
        which = self.session.hidden_states.index(index)
        rows = [torch.cat([piece[which] for piece in pieces]) for pieces in self.pieces]
        if len(rows) == 1:
            return rows[0][None]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _rectangle(rows: list[list[int]]) -> list[list[int]]:
    """Rows filled up to the longest."""
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]
