"""What a client's drafter knows of the text: memory that came from the server, and how to write on without it.

`RemoteMemory` drafts exactly as `MoASession` does beside the target. Knows nothing of lines or messages.
"""

import math

import torch
from transformers.generation import NoRepeatNGramLogitsProcessor

from ..generation.draft import Draft
from ..generation.lookup import RowLookup
from ..generation.moa_source import MoASession
from ..generation.sources import DraftPlan
from ..modeling_moa import DraftContext, MoADrafterForCausalLM
from .choosing import processors
from .messages import Sampling


class RemoteMemory(MoASession):
    """The context of one text. It covers the first `held` tokens."""

    def __init__(self, drafter: MoADrafterForCausalLM):
        super().__init__(drafter, None, rows=1)
        self.target_layers = []

    @property
    def held(self) -> int:
        return self.lengths[0]

    @torch.no_grad()
    def take(self, tokens: list[int], vectors: list[torch.Tensor]) -> None:
        """Takes in the memory of the next tokens: one (n, width) tensor per vector, as `MemoryCodec` gives them."""
        drafter, device, config = self.drafter, self.drafter.device, self.drafter.config
        memory = vectors[0][None].to(device, drafter.compute_dtype)
        if config.memory_hidden_state != "add":
            memory = drafter.Ekv2E(memory)
        start = self.held
        positions = torch.arange(start, start + len(tokens), device=device)[None]
        new = drafter.encode_memory(torch.tensor([tokens], device=device), memory, positions)
        self.extend(new, positions, [start], [len(tokens)], self.next_tokens)
        pieces = []
        for vector in vectors[1:]:  # (n, 2 * kv_heads * head_dim): key, then value
            heads = vector.view(len(tokens), 2, config.target_num_key_value_heads, config.target_head_dim)
            key, value = heads.permute(1, 2, 0, 3)[:, None].to(device, drafter.dtype)  # (1, kv_heads, n, head_dim)
            pieces.append((key, value))
        if self.target_layers:
            pairs = zip(self.target_layers, pieces, strict=True)
            pieces = [(torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2)) for a, b in pairs]
        self.target_layers = pieces

    def follow(self, text: list[int]) -> None:
        """The whole text so far; drafts follow its last token, the one after those held."""
        self.next_tokens = [text[-1]]


class NoDrafts(RemoteMemory):
    """For clients that take no memory: nothing is drafted but what lookup finds."""

    def draft(self, plan: DraftPlan) -> list[Draft]:
        return [Draft()]


class OfflineWriter:
    """Writes token after token with the drafter alone, reading the memory there is.

    Tokens that the memory does not cover are read by Self-Attention only. With no memory at all, a vector of zeros
    stands in for that of the first token: something comes out, and little can be expected of it.

    Args:
        tokens: the whole text so far.
        seed: of sampling.
        prompt: how many of the tokens are the prompt.
        no_repeat_ngram_size: no run of so many tokens is written that the answer has already; 0 allows all.
        lookup: of the whole text so far. When not sampling, what followed an earlier occurrence of the text's end is
            written where its odds are better than the drafter's. Only what is there now is copied from: a drafter that
            runs in circles would be sure of itself.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        tokens: list[int],
        sampling: Sampling,
        widths: list[int],
        seed: int,
        prompt: int = 0,
        no_repeat_ngram_size: int = 0,
        lookup: RowLookup | None = None,
    ):
        if memory.held == 0:
            memory = RemoteMemory(memory.drafter)
            memory.take(tokens[:1], [torch.zeros(1, width) for width in widths])
        self.drafter: MoADrafterForCausalLM = memory.drafter
        self.context: DraftContext = memory.context()
        held = min(memory.held, len(tokens) - 1)
        if held < memory.held:
            raise ValueError("memory covers the last token too; there is none to go on from")
        device = self.drafter.device
        self.queries = torch.tensor([tokens[held:]], device=device)
        self.ids = torch.tensor([tokens], device=device)
        self.drafted = None
        self.processors = processors(sampling)
        self.prompt = prompt
        self.unrepeated = NoRepeatNGramLogitsProcessor(no_repeat_ngram_size) if no_repeat_ngram_size else None
        self.sampled = sampling.temperature > 0
        self.lookup = None if self.sampled else lookup
        if self.lookup is not None:
            index = self.lookup.index
            self.state = index.link[index.last]
            self.matched = index.length[self.state]
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed + len(tokens))

    @torch.no_grad()
    def write(self) -> int:
        """The next token."""
        output = self.drafter(
            self.queries, context=self.context, drafted=self.drafted, whole_vocabulary=True
        )  # (1, Q, vocabulary)
        self.drafted = output.drafted
        scores = self.processors(self.ids, output.logits[:, -1].float())
        if self.unrepeated is not None:
            scores = self.unrepeated(self.ids[:, self.prompt :], scores)
        if self.sampled:
            self.queries = torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)
        else:
            self.queries = self._likelier(scores)
        self.ids = torch.cat([self.ids, self.queries], dim=1)
        return int(self.queries)

    def _likelier(self, scores: torch.Tensor) -> torch.Tensor:
        """The drafter's best token of (1, V) scores, or what lookup has where that promises more; (1, 1)."""
        best = scores.softmax(dim=-1).max(dim=-1, keepdim=True)
        token = best.indices
        if self.lookup is not None:
            index = self.lookup.index
            found = index.continuation(index.recent[self.state], 1) if self.matched else []
            allowed = [copied for copied in found if self.unrepeated is None or scores[0, copied] > -math.inf]
            if allowed and self.lookup.odds.odds(self.matched) > float(best.values):
                token = torch.full_like(token, allowed[0])
            self.state, self.matched = index.follow(self.state, self.matched, int(token))
        return token
