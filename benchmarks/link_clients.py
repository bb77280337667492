"""Clients that draft by other means than MoA, over the same protocol and with the same policy."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..generation.draft import Draft
from ..generation.sources import DraftPlan
from ..serving.client import MoAClient
from ..serving.client_memory import NoDrafts, RemoteMemory
from .baselines.eagle import EagleDrafter, EagleSession


class ModelDrafts(NoDrafts):
    """Chains by an independent language model with the target's vocabulary, which reads the text and nothing else."""

    def __init__(self, drafter: Any, model: PreTrainedModel):
        super().__init__(drafter)
        self.model = model
        self.cache = DynamicCache()
        self.cached: list[int] = []
        self.text: list[int] = []

    def follow(self, text: list[int]) -> None:
        self.text = list(text)

    @torch.no_grad()
    def draft(self, plan: DraftPlan) -> list[Draft]:
        shared = 0
        for mine, theirs in zip(self.cached, self.text[:-1], strict=False):
            if mine != theirs:
                break
            shared += 1
        if shared < len(self.cached):
            self.cache.crop(shared - len(self.cached))
        draft, queries, total = Draft(), self.text[shared:], 0.0
        self.cached = list(self.text)
        for _ in range(min(plan.levels, plan.nodes)):
            ids = torch.tensor([queries], device=self.model.device)
            logits = self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            scores = logits.float().log_softmax(dim=-1)
            token = int(scores.argmax())
            total += float(scores[token])
            draft.append(token, len(draft) - 1, float(scores[token]), "drafter")
            if plan.confidence and total < torch.tensor(plan.confidence).log():
                break
            queries = [token]
            self.cached.append(token)
        self.cached = self.cached[: self.cache.get_seq_length()]
        return [draft]


class ModelClient(MoAClient):
    """Args: as `MoAClient`, and the independent model."""

    def __init__(self, url: str, drafter: Any, model: PreTrainedModel, **options: Any):
        super().__init__(url, drafter, memory="none", **options)
        self.model = model

    def new_memory(self) -> RemoteMemory:
        return ModelDrafts(self.drafter, self.model)


class HiddenStates:
    """Stands where a server expects a drafter: a token's memory is the target's last hidden state, as EAGLE reads it.

    A memory that the drafter "adds" is what travels as it is; here nothing is added to it.
    """

    def __init__(self, target: PreTrainedModel):
        text = target.config.get_text_config(decoder=True)
        self.config = SimpleNamespace(
            lsa_layers=[],
            layer_width=0,
            memory_hidden_state="add",
            target_layer_inference=0,
            target_num_hidden_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
        )

    def lend(self, target: PreTrainedModel) -> None:
        """Borrows nothing."""

    def eval(self) -> None:
        """Has no other mode."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def layer_states(self, keys: list[Any], values: list[Any], hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def memory(self, states: torch.Tensor) -> torch.Tensor:
        return states


class EagleMemory(EagleSession):
    """EAGLE's context of one text, from hidden states that a server sends. Used as `RemoteMemory` is."""

    def __init__(self, drafter: EagleDrafter):
        super().__init__(drafter, None, 1)  # type: ignore[arg-type]  # there is no target here, and none is asked

    @property
    def held(self) -> int:
        return self.lengths[0]

    @torch.no_grad()
    def take(self, tokens: list[int], vectors: list[torch.Tensor]) -> None:
        hidden = vectors[0][None].to(self.drafter.device, self.drafter.compute_dtype)  # (1, n, E)
        if self.feature is None:
            self.feature = torch.zeros_like(hidden[:, :1])
        start, count = self.held, len(tokens)
        positions = torch.arange(start, start + count, device=hidden.device)[None]
        features = torch.cat([self.feature, hidden[:, :-1]], dim=1)
        new = self.drafter.encode(torch.tensor([tokens], device=hidden.device), features, positions)
        self.extend(new, positions, [start], [count], self.next_tokens)
        self.feature = hidden[:, -1:]

    def follow(self, text: list[int]) -> None:
        self.next_tokens = [text[-1]]


class EagleClient(MoAClient):
    """Args: as `MoAClient`; the drafter is an EAGLE one that its target, also here, has lent its parts."""

    def __init__(self, url: str, drafter: EagleDrafter, target: PreTrainedModel, **options: Any):
        from ..serving.identity import drafter_identity

        super().__init__(url, drafter, **options)
        hidden: Any = HiddenStates(target)
        self.identity, self.widths = drafter_identity(hidden), [drafter.config.hidden_size]

    def new_memory(self) -> Any:
        return EagleMemory(self.drafter)  # type: ignore[arg-type]
