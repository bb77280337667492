"""A source of drafts that knows what the target will say, and spoils it to order."""

import random

import torch
from tiny import VOCAB
from transformers import PreTrainedModel

from moa_spec.generation import Draft, DraftOptions, DraftPlan, Verified


class OracleSource:
    """Proposes the known continuation of each prompt, with mistakes, side branches and nonsense mixed in.

    Args:
        answers: whole sequences (prompt and continuation) that may be asked for, without padding.
        accuracy: chance that a proposed token is the known one.
        branches: most side branches added to the tree.
        nonsense: chance per draft of token ids that do not exist, of EOS tokens, or of no draft at all.
    """

    def __init__(
        self, answers: list[list[int]], accuracy: float = 0.8, branches: int = 0, nonsense: float = 0.0, seed: int = 0
    ):
        self.answers, self.accuracy, self.branches, self.nonsense = answers, accuracy, branches, nonsense
        self.seed = seed
        self.sessions: list[OracleSession] = []

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> "OracleSession":
        session = OracleSession(self, prompt_ids)
        self.sessions.append(session)
        return session


class OracleSession:
    hidden_states: tuple[int, ...] = ()

    def __init__(self, source: OracleSource, prompt_ids: list[list[int]]):
        self.source = source
        self.texts = [list(ids) for ids in prompt_ids]
        self.random = random.Random(source.seed)
        self.started = False

    def observe(self, verified: Verified) -> None:
        for row, text in enumerate(self.texts):
            tokens = verified.input_ids[row, : verified.counts[row]].tolist()
            if self.started and tokens:
                assert tokens[0] == text[-1], "the first verified token must be the last one known"
                text += tokens[1:]
            elif not self.started:
                assert tokens == text
            text.append(verified.next_tokens[row])
        self.started = True

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]

    def draft(self, plan: DraftPlan) -> list[Draft]:
        return [self._draft(text, plan) for text in self.texts]

    def _draft(self, text: list[int], plan: DraftPlan) -> Draft:
        r, source = self.random, self.source
        if r.random() < source.nonsense:
            kind = r.choice(["nothing", "impossible", "eos", "padding"])
            token = {"nothing": -1, "impossible": VOCAB + 5, "eos": 2, "padding": 0}[kind]
            return Draft() if kind == "nothing" else Draft.chain([token] * r.randint(1, plan.levels))
        known = next((a for a in source.answers if a[: len(text)] == text), None)
        future = [] if known is None else known[len(text) :]
        future += [r.randrange(VOCAB) for _ in range(plan.levels - len(future))]
        chain = [t if r.random() < source.accuracy else r.randrange(VOCAB) for t in future[: r.randint(1, plan.levels)]]
        draft = Draft.chain(chain, [-0.1] * len(chain))
        for _ in range(r.randint(0, source.branches)):
            parent = r.randrange(-1, len(draft))
            depth = 0 if parent < 0 else draft.depths[parent]
            right = future[depth] if depth < len(future) and r.random() < source.accuracy else r.randrange(VOCAB)
            if (parent, right) not in draft.children():
                draft.append(right, parent, -1.0, "drafter")
        return draft


def unpadded(sequences: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """Rows without the padding on their left."""
    rows = sequences.tolist()
    if mask is None:
        return rows
    return [row[int((m == 0).sum()) :] for row, m in zip(rows, mask, strict=True)]
