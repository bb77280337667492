"""Teaches one target object to decode with drafters: `attach`, `detach`, `load_drafter`.

Two attributes of that one object are set, `generate` and `_get_candidate_generator`; no class of transformers changes,
and other assistants go where they went before. Knows how calls reach the decoding loop, not how it works.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator, StoppingCriteriaList, StopStringCriteria

from ..modeling_moa import MoADrafterForCausalLM
from .candidate_generator import MoACandidateGenerator
from .loop import AssistedDecoding
from .moa_source import MoASource
from .options import OPTION_NAMES, check_supported, resolve_options
from .sources import DraftSource


@dataclass
class Attachment:
    """What `attach` leaves on a target, and what `detach` puts back."""

    drafters: list[MoADrafterForCausalLM] = field(default_factory=list)
    sources: list[DraftSource] = field(default_factory=list)
    previous: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def source_of(self, assistant: Any) -> DraftSource | None:
        """The source of an attached drafter, or None when `assistant` is none of ours."""
        for drafter, source in zip(self.drafters, self.sources, strict=True):
            if drafter is assistant:
                return source
        return None


_ATTRIBUTE = "_moa_attachment"


def attach(target: PreTrainedModel, drafter: MoADrafterForCausalLM) -> None:
    """Lets `target.generate(..., assistant_model=drafter)` decode with this drafter.

    Checks that the two fit, lends the drafter the target's frozen parts, and sets two attributes on this one object.
    Several drafters can be attached to one target; each call names the one it uses. `detach` undoes all of it.

    Raises:
        WrongTargetError: the drafter was made for another target.
        TypeError: `drafter` is not a MoA drafter.
    """
    target = _uncompiled(target)
    if not isinstance(drafter, MoADrafterForCausalLM):
        raise TypeError(f"attach() takes a MoA drafter, not a {type(drafter).__name__}; see moa_spec.load_drafter.")
    drafter.lend(target)
    drafter.eval()
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
            setattr(target, name, MethodType(function, target))
        setattr(target, _ATTRIBUTE, attachment)
    if attachment.source_of(assistant) is None:
        attachment.drafters.append(assistant)
        attachment.sources.append(source)


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
        if isinstance(drafter, MoADrafterForCausalLM) and _is_lent(drafter, target):
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
    return target._orig_mod if isinstance(target, torch._dynamo.OptimizedModule) else target


def _is_lent(drafter: MoADrafterForCausalLM, target: PreTrainedModel) -> bool:
    return drafter._lent is not None and drafter._lent.embed_tokens is target.get_input_embeddings()


def _is_drafter(assistant: Any) -> bool:
    return isinstance(assistant, PreTrainedModel) and assistant.config.model_type == "moa_drafter"


def _source_for(target: PreTrainedModel, assistant: Any) -> DraftSource | None:
    """The source to use for an assistant, or None to leave it to transformers."""
    source = vars(target)[_ATTRIBUTE].source_of(assistant)
    if source is None and _is_drafter(assistant):
        raise RuntimeError(
            "This MoA drafter is not attached to this target: call moa_spec.attach(target, drafter) first."
        )
    if isinstance(source, MoASource) and not _is_lent(source.drafter, target):
        raise RuntimeError(
            "This MoA drafter has been attached to another target or detached since: call "
            "moa_spec.attach(target, drafter) again."
        )
    return source


def _generate(
    self: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`generate` of an attached target: calls with an attached drafter are decoded by us, others as before."""
    attachment = vars(self)[_ATTRIBUTE]
    assistant = kwargs.get("assistant_model")
    source = None if assistant is None else _source_for(self, assistant)
    if source is None:
        plain = attachment.previous.get("generate") or MethodType(type(self).generate, self)
        return plain(inputs, generation_config, *args, **kwargs)
    if args:
        raise TypeError("With a drafter, pass arguments after generation_config to generate() by name.")
    if kwargs.get("custom_generate") is not None:
        raise ValueError("custom_generate and a drafter are two ways of decoding: use one of the two.")
    del kwargs["assistant_model"]
    own = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
    options = resolve_options(own, generation_config, assistant.generation_config)

    model_config, _ = self._prepare_generation_config(
        generation_config, **{k: v for k, v in kwargs.items() if k in GenerationConfig().to_dict()}
    )
    check_supported(self, model_config, kwargs | {"inputs": inputs})
    streamer = kwargs.get("streamer")
    generation_config = copy.deepcopy(generation_config)
    # transformers' generate makes neither of these when the decoding loop is not its own
    if model_config.stop_strings is not None:
        tokenizer = kwargs.get("tokenizer")
        if tokenizer is None:
            raise ValueError("stop_strings need the model's tokenizer: pass tokenizer=... to generate().")
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=model_config.stop_strings, tokenizer=tokenizer))
        kwargs["stopping_criteria"] = criteria
        _unset("stop_strings", self, generation_config, kwargs)
    _unset("prompt_lookup_num_tokens", self, generation_config, kwargs)
    decoding = AssistedDecoding(source, options, streamer)
    return type(self).generate(self, inputs, generation_config, custom_generate=decoding, **kwargs)


def _unset(name: str, target: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Keeps an option that we act on ourselves from transformers' `generate`, wherever it was set."""
    kwargs.pop(name, None)
    if config is not None:
        setattr(config, name, None)
    if getattr(target.generation_config, name) is not None:
        kwargs[name] = None


def _get_candidate_generator(self: PreTrainedModel, *args: Any, **kwargs: Any) -> CandidateGenerator:
    """For transformers' own assisted loop: a chain of drafts from an attached drafter, or what it would have used."""
    attachment = vars(self)[_ATTRIBUTE]
    assistant = kwargs.get("assistant_model")
    source = None if assistant is None else _source_for(self, assistant)
    if isinstance(source, MoASource):
        config = kwargs["generation_config"]
        options = resolve_options({}, assistant.generation_config)
        return MoACandidateGenerator(self, source.drafter, config, options, kwargs["model_kwargs"])
    plain = attachment.previous.get("_get_candidate_generator") or MethodType(type(self)._get_candidate_generator, self)
    return plain(*args, **kwargs)
