"""The rows of the comparison: each method is an assistant and keywords for `generate`.

Knows how each method is called, not how it is measured. A drafter of another kind that is attached to the target with
`attach_source` becomes a row here by an entry in `DESCRIPTIONS` and a branch in `prepare`.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..generation import Draft, DraftOptions, DraftPlan, Verified, attach, attach_source, load_drafter
from ..modeling_moa import MoADrafterForCausalLM
from ..targets import quiet
from .baselines import load_baseline

PLAIN = "plain"

DESCRIPTIONS = {
    PLAIN: "plain `generate`, the baseline",
    "stock-lookup": "transformers' prompt lookup, 8 tokens",
    "lookup": "our lookup alone, by measured cost: moa-auto without its drafter",
    "moa": "MoA, a chain of 5",
    "moa-tree": "MoA, a tree of 5 levels, breadth 3, 10 nodes",
    "moa-auto": "MoA and lookup, chosen by measured cost",
    "moa-equal": "MoA, a chain of 5, trained on the data of the baselines for as long as they",
    "moa-tli1": "MoA that reuses the target's last layer, a chain of 5",
    "moa-tli3": "MoA that reuses the target's last three layers, a chain of 5",
    "eagle": "EAGLE's drafter, a chain of 5",
    "eagle2": "EAGLE-2: the same drafter, a tree of 5 levels, breadth 3, 10 nodes",
    "medusa": "Medusa heads, a chain of 5",
    "glide": "GLIDE, a chain of 5",
    "untrained": "as moa-auto without lookup, with a drafter that knows nothing",
    "assistant": "an independent small model as transformers' assistant",
}

_FIXED = {"draft_policy": "fixed", "assistant_confidence_threshold": 0.0, "prompt_lookup_num_tokens": 0}

_CHAIN = _FIXED | {"num_assistant_tokens": 5, "draft_breadth": 1}
_TREE = _FIXED | {"num_assistant_tokens": 5, "draft_breadth": 3, "draft_nodes": 10}

OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "stock-lookup": {"prompt_lookup_num_tokens": 8},
    "lookup": {"draft_policy": "auto"},
    "moa": _CHAIN,
    "moa-tree": _TREE,
    "moa-auto": {"draft_policy": "auto"},
    "moa-equal": _CHAIN,
    "moa-tli1": _CHAIN,
    "moa-tli3": _CHAIN,
    "eagle": _CHAIN,
    "eagle2": _TREE,
    "medusa": _CHAIN,
    "glide": _CHAIN,
    "untrained": {"draft_policy": "auto", "prompt_lookup_num_tokens": 0},
    "assistant": {},
}

_WITH_DRAFTER = ("moa", "moa-tree", "moa-auto")

OWN_DRAFTER = {
    "moa-equal": "moa-equal",
    "moa-tli1": "moa-tli1",
    "moa-tli3": "moa-tli3",
    "eagle": "eagle",
    "eagle2": "eagle",
    "medusa": "medusa",
    "glide": "glide",
}
"""Methods whose drafter is not the one of `--drafter`, and the name that `--checkpoint` gives it."""


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Attributes:
        name: one of `DESCRIPTIONS`.
        options: keywords for `generate`.
        assistant: its `assistant_model`, or None.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    assistant: Any = None

    def keywords(self) -> dict[str, Any]:
        """What to call `generate` with."""
        return self.options | ({} if self.assistant is None else {"assistant_model": self.assistant})

    @property
    def parameters(self) -> int:
        """Weights of the assistant's own."""
        return 0 if self.assistant is None else sum(p.numel() for p in self.assistant.parameters())


class NoDrafter:
    """A source that drafts nothing, so that lookup is all there is."""

    def __init__(self) -> None:
        self.generation_config = GenerationConfig()

    def begin(self, target: PreTrainedModel, prompt_ids: list[list[int]], options: DraftOptions) -> "NoDrafts":
        return NoDrafts(len(prompt_ids))

    def parameters(self) -> list[torch.Tensor]:
        return []


class NoDrafts:
    """Its session."""

    hidden_states: tuple[int, ...] = ()

    def __init__(self, rows: int):
        self.rows = rows

    def observe(self, verified: Verified) -> None:
        pass

    def draft(self, plan: DraftPlan) -> list[Draft]:
        return [Draft() for _ in range(self.rows)]

    def select(self, rows: list[int]) -> None:
        self.rows = len(rows)


def check_names(names: Iterable[str], assistant: str | None) -> None:
    """
    Raises:
        ValueError: an unknown method, one named twice, no plain decoding to compare with, or one that lacks its model.
    """
    names = list(names)
    for name in names:
        if name not in DESCRIPTIONS:
            raise ValueError(f"There is no method {name!r}; there are {', '.join(DESCRIPTIONS)}")
        if names.count(name) > 1:
            raise ValueError(f"The method {name!r} is named twice")
    if PLAIN not in names:
        raise ValueError(f"Every figure is a comparison with plain decoding: name {PLAIN!r} among the methods")
    if "assistant" in names and assistant is None:
        raise ValueError('The method "assistant" needs a model: name one with --assistant')


def prepare(
    names: Iterable[str],
    target: PreTrainedModel,
    drafter: str | Path | None = None,
    assistant: str | None = None,
    seed: int = 0,
    revision: str | None = None,
    checkpoints: Mapping[str, str | Path] | None = None,
) -> list[Method]:
    """Loads and attaches what the methods need.

    Args:
        drafter: folder or repository of the MoA drafter.
        revision: a branch, tag or commit of the drafter's repository.
        checkpoints: folders or repositories of the other drafters, by the names in `OWN_DRAFTER`.
        assistant: folder or repository of an independent model with the target's vocabulary.
        seed: of the untrained drafter's weights.

    Raises:
        ValueError: as for `check_names`, a method whose drafter is not named, or an assistant with another vocabulary.
        OSError: there is no such drafter or assistant.
        WrongTargetError: the drafter was made for another target.
    """
    names = list(names)
    check_names(names, assistant)
    trained = None
    if {"untrained", *_WITH_DRAFTER} & set(names):
        if drafter is None:
            raise ValueError("These methods need a drafter: name one with --drafter, or leave them out with --methods")
        with quiet():
            trained = load_drafter(drafter, target, revision=revision)
    own = {name: own_checkpoint(name, checkpoints or {}) for name in names if name in OWN_DRAFTER}
    loaded: dict[str, Any] = {}  # by name in `OWN_DRAFTER`, as methods may share one
    prepared = []
    for name in names:
        model: Any = None
        if name == "lookup":
            model = NoDrafter()
            attach_source(target, model, model)
        elif name in _WITH_DRAFTER:
            model = trained
        elif name in OWN_DRAFTER:
            kind = OWN_DRAFTER[name]
            if kind not in loaded:
                load = load_drafter if kind.startswith("moa") else load_baseline
                with quiet():
                    loaded[kind] = load(own[name], target)
            model = loaded[kind]
        elif name == "untrained":
            assert trained is not None
            model = untrained_like(trained, target, seed)
        elif name == "assistant":
            assert assistant is not None
            model = independent(assistant, target)
        prepared.append(Method(name, dict(OPTIONS[name]), model))
    return prepared


def own_checkpoint(name: str, checkpoints: Mapping[str, str | Path]) -> str | Path:
    """Where the drafter of a method in `OWN_DRAFTER` is.

    Raises:
        ValueError: nobody said; the message tells how to make one.
    """
    kind = OWN_DRAFTER[name]
    if kind not in checkpoints:
        raise ValueError(
            f"The method {name!r} needs a drafter of its own: name it with --checkpoint {kind} FOLDER, or train it "
            f"with `moa train --recipe smollm2-135m-instruct-{kind} --data ... --output FOLDER`"
        )
    return checkpoints[kind]


def untrained_like(drafter: MoADrafterForCausalLM, target: PreTrainedModel, seed: int) -> MoADrafterForCausalLM:
    """A drafter of the same sizes and draft vocabulary with random weights, attached."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        untrained = MoADrafterForCausalLM(copy.deepcopy(drafter.config))
    if drafter.config.draft_vocab_size is not None:
        untrained.draft_vocab_ids.copy_(drafter.draft_vocab_ids)
    untrained.generation_config = copy.deepcopy(drafter.generation_config)
    untrained.to(device=drafter.device, dtype=drafter.dtype)
    attach(target, untrained)
    return untrained


def independent(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """A small model of its own with the target's vocabulary.

    Raises:
        OSError: there is none of that name.
        ValueError: it has another vocabulary.
    """
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).to(target.device).eval()
    sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (model, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"The assistant {name} has a vocabulary of {sizes[0]}, the target one of {sizes[1]}")
    return model
