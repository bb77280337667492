"""A MoA drafter in transformers' own assisted loop: chains of drafts, one row.

Knows that loop's contract: what it passes, what it has cropped, and which logits it wants back. The decoding loop of
this package does not use it; `type(target).generate(target, assistant_model=drafter)` does.
"""

import math
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.generation import CandidateGenerator

from .drafter import Drafter
from .moa_source import MoASession
from .options import DraftOptions
from .sources import DraftPlan, Verified


class _StatesOfLastTokens:
    """What the stock loop leaves of the target's states: a cache cropped to the verified text, uncut hidden states."""

    def __init__(self, cache: Any, count: int, length: int, hidden_states: Any, padding: int):
        self.cache, self.count, self.length = cache, count, length
        self.hidden_states, self.padding = hidden_states, padding

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.whole_layer(index)
        start = max(keys.shape[2] - self.count, 0)
        return keys[:, :, start:], values[:, :, start:]

    def whole_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.cache.layers[index]
        end = self.length if isinstance(layer, StaticLayer) else layer.keys.shape[2]
        return layer.keys[:, :, :end], layer.values[:, :, :end]

    def hidden(self, index: int) -> torch.Tensor:
        return self.hidden_states[index][:, self.padding : self.padding + self.count]


class MoACandidateGenerator(CandidateGenerator):
    """Drafts chains for `transformers`' assisted decoding. State is per call; the drafter is not changed.

    Greedy decoding drafts the most probable tokens. Sampling draws them from the drafter's distribution, at the
    temperature of the call, and returns exactly the logits they were drawn from, as speculative sampling needs.

    Args:
        target: the model being assisted.
        drafter: attached to it.
        generation_config: of the call.
        options: how many tokens to draft.
        model_kwargs: as prepared by `generate`.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        generation_config: GenerationConfig,
        options: DraftOptions,
        model_kwargs: dict[str, Any],
    ):
        self.session = MoASession(drafter, target, rows=1)
        self.options = options
        self.max_length = generation_config.max_length
        self.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.temperature = generation_config.temperature if generation_config.do_sample else None
        self.model_kwargs_overrides: dict[str, Any] = {}
        if self.session.hidden_states:
            # a list selects layers; the loop cannot return those of a user who asked for all of them
            asked = generation_config.output_hidden_states
            self.model_kwargs_overrides["output_hidden_states"] = True if asked else list(self.session.hidden_states)
        self.seen = 0  # slots of the cache that the session knows

    def get_candidates(  # type: ignore[override]  # the loop passes these to generators that require model outputs
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The text followed by drafts, (1, T + drafts), and their logits (1, drafts, V) when sampling."""
        if is_first_iteration:  # the target has not run yet: there is no memory to draft from
            return input_ids, None
        cache = model_kwargs["cache"]
        length = int(cache.get_seq_length())
        new = length - self.seen if self.seen else min(length, input_ids.shape[1] - 1)
        self.seen = length
        positions = model_kwargs["position_ids"][:, -new - 1 : -1]
        mask = model_kwargs.get("attention_mask")
        padding = 0 if mask is None else int((mask[0, -new - 1 : -1].cumsum(0) == 0).sum())
        new -= padding
        states = _StatesOfLastTokens(cache, new, length, model_outputs.get("hidden_states"), padding)
        tokens, positions = input_ids[:, -new - 1 : -1], positions[:, padding:]
        last = [int(input_ids[0, -1])]
        self.session.observe(Verified(tokens, positions, [new], [length - new], last, states))
        levels = min(self.options.num_assistant_tokens, self.max_length - input_ids.shape[1] - 1)
        if levels < 1:
            return input_ids, None
        if self.temperature is None:
            plan = DraftPlan(levels, nodes=levels, confidence=self.options.assistant_confidence_threshold)
            drafts, logits = self.session.draft(plan)[0].tokens, None
        else:
            drafts, columns = self.session.sample_chain(levels, self.temperature)
            logits = self._over_vocabulary(columns)
        drafted = torch.tensor([drafts], dtype=input_ids.dtype, device=input_ids.device)
        return torch.cat([input_ids, drafted], dim=1), logits

    def _over_vocabulary(self, columns: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, (1, n, draft vocabulary), as logits over all tokens."""
        ids = self.session.drafter.to_token_ids(torch.arange(columns.shape[-1], device=columns.device))
        whole = columns.new_full((*columns.shape[:-1], self.vocab_size), -math.inf)
        return whole.index_copy(-1, ids, columns)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: lengths are fixed, or end by confidence."""
