"""Teaches one target object to decode with drafters: `attach`, `detach`, `load_drafter`.

Two attributes of that one object are set, `generate` and `_get_candidate_generator`; no class of transformers changes,
and other assistants go where they went before. Knows how calls reach the decoding loop, not how it works.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator

from ..modeling_moa import MoADrafterForCausalLM
from .candidate_generator import MoACandidateGenerator
from .experience import Memory
from .generate import generate_with, is_drafter, is_lent
from .moa_source import MoASource
from .options import resolve_options
from .sources import DraftSource


@dataclass
class Attachment:
    """What `attach` leaves on a target, and what `detach` puts back."""

    drafters: list[MoADrafterForCausalLM] = field(default_factory=list)
    sources: list[DraftSource] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    previous: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled target has no drafters: they have been lent this one's parts."""
        return Attachment, ([], [], [], self.previous)

    def of(self, assistant: Any) -> tuple[DraftSource, Memory] | None:
        """What belongs to an attached drafter, or None when `assistant` is none of ours."""
        for drafter, source, memory in zip(self.drafters, self.sources, self.memories, strict=True):
            if drafter is assistant:
                return source, memory
        return None


_ATTRIBUTE = "_moa_attachment"


def attach(target: PreTrainedModel, drafter: MoADrafterForCausalLM) -> None:
    """Lets `target.generate(..., assistant_model=drafter)` decode with this drafter.

    Checks that the two fit, lends the drafter the target's frozen parts, and sets two attributes on this one object.
    Several drafters can be attached to one target; each call names the one it uses. `detach` undoes all of it. Warns
    when the two are of different dtypes.

    Raises:
        WrongTargetError: the drafter was made for another target.
        TypeError: `drafter` is not a MoA drafter.
    """
    target = _uncompiled(target)
    if not is_drafter(drafter):
        raise TypeError(f"attach() takes a MoA drafter, not a {type(drafter).__name__}; see moa_spec.load_drafter.")
    drafter.lend(target)
    drafter.eval()
    if drafter.dtype != target.dtype:
        warnings.warn(
            f"The drafter is in {drafter.dtype}, its target in {target.dtype}: the text stays exact, and drafting can "
            "be slower than in the target's dtype. Pass dtype=target.dtype to from_pretrained, or use load_drafter.",
            stacklevel=2,
        )
    attach_source(target, drafter, MoASource(drafter))


def attach_source(target: PreTrainedModel, assistant: Any, source: DraftSource) -> None:
    """As `attach`, for any source of drafts: `generate(assistant_model=assistant)` will decode with `source`."""
    target = _uncompiled(target)
    attachment = vars(target).get(_ATTRIBUTE)
    if attachment is None:
        attachment = Attachment()
        for name, function in (("generate", _generate), ("_get_candidate_generator", _get_candidate_generator)):
            if name in vars(target):
                attachment.previous[name] = vars(target)[name]
            setattr(target, name, partial(function, target))  # unlike a closure, follows copies of the target
        setattr(target, _ATTRIBUTE, attachment)
    if attachment.of(assistant) is None:
        attachment.drafters.append(assistant)
        attachment.sources.append(source)
        attachment.memories.append(Memory())


def detach(target: PreTrainedModel) -> None:
    """Makes a target what it was before `attach`. Does nothing to one that has no drafter."""
    target = _uncompiled(target)
    attachment = vars(target).get(_ATTRIBUTE)
    if attachment is None:
        return
    for name in ("generate", "_get_candidate_generator"):
        delattr(target, name)
        if name in attachment.previous:
            setattr(target, name, attachment.previous[name])
    delattr(target, _ATTRIBUTE)
    for drafter in attachment.drafters:
        if is_drafter(drafter) and is_lent(drafter, target):
            drafter.take_back()


def load_drafter(path_or_repo: str | Path, target: PreTrainedModel, **kwargs: Any) -> MoADrafterForCausalLM:
    """Loads a drafter and attaches it: `from_pretrained` and `attach` in one.

    Args:
        path_or_repo: a folder or a repository on the Hub.
        target: the model that it was made for.
        **kwargs: for `from_pretrained`. Dtype and device are the target's unless given.

    Raises:
        OSError: there is no checkpoint there, or it cannot be read.
        ValueError: the checkpoint is not a MoA drafter's.
        WrongTargetError: the drafter was made for another target.
    """
    kwargs.setdefault("dtype", _uncompiled(target).dtype)
    try:
        drafter = MoADrafterForCausalLM.from_pretrained(path_or_repo, **kwargs)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise OSError(
            f"No MoA drafter could be loaded from {str(path_or_repo)!r}. It must be a folder or a repository with a "
            f"config.json and model.safetensors written by save_pretrained. Cause: {error}"
        ) from error
    if "device_map" not in kwargs:
        drafter.to(target.device)
    attach(target, drafter)
    return drafter


def _uncompiled(target: PreTrainedModel) -> PreTrainedModel:
    """The module inside `torch.compile(model)`, which is the one whose `generate` runs."""
    return getattr(target, "_orig_mod", target)


def _source_for(target: PreTrainedModel, assistant: Any) -> tuple[DraftSource, Memory] | None:
    """What to draft with for an assistant, or None to leave it to transformers."""
    found = vars(target)[_ATTRIBUTE].of(assistant)
    if found is None and is_drafter(assistant):
        raise RuntimeError(
            "This MoA drafter is not attached to this target: call moa_spec.attach(target, drafter) first."
        )
    if found is not None and isinstance(found[0], MoASource) and not is_lent(found[0].drafter, target):
        raise RuntimeError(
            "This MoA drafter has been attached to another target or detached since: call "
            "moa_spec.attach(target, drafter) again."
        )
    return found


def _generate(
    self: Any,
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`generate` of an attached target: calls with an attached drafter are decoded by us, others as before."""
    attachment = vars(self)[_ATTRIBUTE]
    assistant = kwargs.get("assistant_model")
    found = None if assistant is None else _source_for(self, assistant)
    if found is None:
        plain = attachment.previous.get("generate") or MethodType(type(self).generate, self)
        return plain(inputs, generation_config, *args, **kwargs)
    if kwargs.get("custom_generate") is not None:
        raise ValueError("custom_generate and a drafter are two ways of decoding: use one of the two.")
    del kwargs["assistant_model"]
    return generate_with(*found, assistant, self, inputs, generation_config, *args, **kwargs)


def _get_candidate_generator(self: Any, *args: Any, **kwargs: Any) -> CandidateGenerator:
    """For transformers' own assisted loop: a chain of drafts from an attached drafter, or what it would have used."""
    attachment = vars(self)[_ATTRIBUTE]
    assistant: Any = kwargs.get("assistant_model")
    found = None if assistant is None else _source_for(self, assistant)
    if found is not None and isinstance(found[0], MoASource):
        config = kwargs["generation_config"]
        options = resolve_options({}, assistant.generation_config)
        return MoACandidateGenerator(self, found[0].drafter, config, options, kwargs["model_kwargs"])
    plain = attachment.previous.get("_get_candidate_generator") or MethodType(type(self)._get_candidate_generator, self)
    return plain(*args, **kwargs)
