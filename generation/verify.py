"""Judges drafts: writes one row's tokens one by one, exactly as plain decoding would, for as long as the draft agrees.

Every token is chosen from the target's own scores, by the target's own rule, and written through the same processors,
criteria and streamer in the same order as in plain decoding. A draft only decides how many tokens one target pass
yields. So the output is plain decoding's under greedy decoding, and has plain decoding's distribution under sampling,
for chains and trees and whatever a source proposes (token-wise verification, as in SpecInfer, arXiv 2305.09781).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .draft import Draft


class Row:
    """One sequence being written.

    Args:
        input_ids: (1, P) the prompt, padding included.
        capacity: the most tokens the sequence will have.
        processors, criteria: the lists that `generate` made, called with this row alone.
        do_sample: sample, or take the best.
        keep_scores, keep_logits: whether the processed scores and the raw logits of each token are to be returned.
        put: called with every new token, (1,).
        generator: draws the tokens when sampling; None: torch's own.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        capacity: int,
        processors: Any,
        criteria: StoppingCriteriaList,
        do_sample: bool,
        keep_scores: bool,
        keep_logits: bool,
        put: Callable[[torch.Tensor], None] | None,
        generator: torch.Generator | None = None,
    ):
        self.length = input_ids.shape[1]
        self.ids = input_ids.new_empty(1, max(capacity, self.length + 1))
        self.ids[:, : self.length] = input_ids
        self.processors, self.criteria = processors, criteria
        self.do_sample = do_sample
        self.scores: tuple[torch.Tensor, ...] | None = () if keep_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keep_logits else None
        self.put = put
        self.generator = generator
        self.finished = False
        self.new_tokens: list[int] = []

    @property
    def sequence(self) -> torch.Tensor:
        """(1, length)"""
        return self.ids[:, : self.length]

    @property
    def takes_argmax(self) -> bool:
        """Whether the next token is the best raw logit, so that all nodes of a draft can be decided at once."""
        return not self.do_sample and not self.processors and self.scores is None and self.logits is None

    def write(self, logits: Any, token: int | None = None) -> int:
        """Chooses, writes and returns the next token, from logits (1, V) or as decided before."""
        if token is None:
            raw = logits.to(dtype=torch.float32, device=self.ids.device, copy=True)
            scores = self.processors(self.sequence, raw)
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (raw,)
            if self.do_sample:
                probabilities = torch.nn.functional.softmax(scores, dim=-1)
                chosen = torch.multinomial(probabilities, num_samples=1, generator=self.generator).squeeze(1)
            else:
                chosen = scores.argmax(dim=-1)
            token = int(chosen)
        if self.length == self.ids.shape[1]:  # a criterion of the user's own may let the text grow past max_length
            self.ids = torch.cat([self.ids, torch.empty_like(self.ids)], dim=1)
        self.ids[0, self.length] = token
        self.length += 1
        self.new_tokens.append(token)
        self.finished = bool(self.criteria(self.sequence, self.scores).all())
        if self.put is not None:
            self.put(self.ids[0, self.length - 1 : self.length].cpu())
        return token


def judge(row: Row, draft: Draft, logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """Writes tokens into the row until the draft has no node for the last one, or the row is finished.

    Args:
        draft: follows the row's last token.
        logits: (1 + nodes, V) of the row's last token and of each node, given its ancestors.

    Returns:
        The accepted nodes in order, and the tokens written. A last token that ends the row is not counted as accepted,
        so the accepted nodes are those that must stay in the cache.
    """
    # a device is waited for once; a processor need not look at nodes that are not reached
    at_once = row.takes_argmax and logits.device.type != "cpu"
    decided = logits.float().argmax(dim=-1).tolist() if at_once else []
    children = draft.children()
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        here = node + 1
        if not row.takes_argmax:
            token = row.write(logits[here : here + 1])
        else:
            token = row.write(None, decided[here] if at_once else int(logits[here].float().argmax()))
        tokens.append(token)
        child = children.get((node, token))
        if row.finished or child is None:
            return path, tokens
        path.append(child)
        node = child


def processors_for_row(processors: LogitsProcessorList, row: int, copies: int = 1) -> LogitsProcessorList:
    """The processors of one row of a batch: copies, so that each row's have seen this row's tokens only.

    Args:
        row: index in the batch as expanded by `num_return_sequences`.
        copies: `num_return_sequences`.

    Raises:
        ValueError: a processor cannot be copied, or cannot work on one row.
    """
    mine = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            raise ValueError(
                "guidance_scale with several rows and a drafter is not supported: pass one prompt at a time."
            )
        if type(processor) is PrefixConstrainedLogitsProcessor:
            allowed = _allowed_for_row(processor._prefix_allowed_tokens_fn, row)
            mine.append(PrefixConstrainedLogitsProcessor(allowed, 1))
            continue
        try:
            own: Any = copy.deepcopy(processor)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{type(processor).__name__} cannot be copied, and with several rows and a drafter each row needs its "
                f"own: pass one prompt at a time. Cause: {error}"
            ) from error
        if isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
            prompt: Any = own.encoder_input_ids[row // copies : row // copies + 1]
            own.encoder_input_ids = prompt
        elif isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, torch.Tensor):
            own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
        elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
            own.generated_ngrams, own.batch_size = [own.generated_ngrams[row // copies]], 1
        mine.append(own)
    return mine


def _allowed_for_row(function: Callable[[int, torch.Tensor], Any], row: int) -> Callable[[int, torch.Tensor], Any]:
    return lambda _, sentence: function(row, sentence)
