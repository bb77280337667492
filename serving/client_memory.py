"""What a client's drafter knows of the text: memory that came from the server, and how to write on without it.

`RemoteMemory` drafts exactly as `MoASession` does beside the target. Knows nothing of lines or messages.
"""

import torch

from ..generation.draft import Draft
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
    """

    def __init__(self, memory: RemoteMemory, tokens: list[int], sampling: Sampling, widths: list[int], seed: int):
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
        self.sampled = sampling.temperature > 0
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
        if self.sampled:
            self.queries = torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)
        else:
            self.queries = scores.argmax(dim=-1, keepdim=True)
        self.ids = torch.cat([self.ids, self.queries], dim=1)
        return int(self.queries)
