"""`generate` with a drafter, from its arguments to the decoding loop.

Two ways lead here: `target.generate(..., assistant_model=drafter)` after `attach`, and, where this project is not
installed, the same call with `custom_generate="the drafter's repository"`, for which transformers calls `generate`
below from the copy of this file in the repository. Knows arguments, not how decoding works.
"""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from .experience import Memory
from .loop import AssistedDecoding
from .moa_source import MoASource
from .options import OPTION_NAMES, check_supported, resolve_options
from .sources import DraftSource

# transformers hands the arguments for fetching this code on to it
_FETCHING = ("cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "revision", "token")

# what is kept between calls that come through `custom_generate`: the target's latest drafter, and its costs here
_kept: "WeakKeyDictionary[PreTrainedModel, tuple[MoASource, Memory]]" = WeakKeyDictionary()


def generate(
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *args: Any,
    model: Any,
    assistant_model: Any = None,
    **kwargs: Any,
) -> Any:
    """What `custom_generate` runs: lends the drafter the target's parts when they are new to each other, and decodes.

    transformers also makes this the `generate` of a drafter that it loads from the repository; that call, which names
    no other drafter, goes to the drafter's own.

    Raises:
        ValueError: no drafter was given.
        WrongTargetError: the drafter was made for another target.
    """
    for name in _FETCHING:
        kwargs.pop(name, None)
    if is_drafter(model) and assistant_model is None:
        return type(model).generate(model, inputs, generation_config, *args, **kwargs)
    if not is_drafter(assistant_model):
        raise ValueError(
            "This custom_generate decodes with a MoA drafter: load it from the same repository with "
            "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True) and pass assistant_model=drafter."
        )
    found = _kept.get(model)
    if found is None or found[0].drafter is not assistant_model or not is_lent(assistant_model, model):
        assistant_model.lend(model)
        assistant_model.eval()
        found = _kept[model] = (MoASource(assistant_model), Memory())
    return generate_with(*found, assistant_model, model, inputs, generation_config, *args, **kwargs)


def generate_with(
    source: DraftSource,
    memory: Memory,
    assistant: Any,
    target: Any,
    inputs: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`target.generate` with drafts from a source. `assistant` is what was passed, for its generation_config."""
    if args:
        raise TypeError("With a drafter, pass arguments after generation_config to generate() by name.")
    own = {name: kwargs.pop(name) for name in OPTION_NAMES if name in kwargs}
    store = kwargs.pop("draft_lookup_store", None)
    options = resolve_options(own, generation_config, assistant.generation_config)

    model_config, _ = target._prepare_generation_config(
        generation_config, **{k: v for k, v in kwargs.items() if k in GenerationConfig().to_dict()}
    )
    check_supported(target, model_config, kwargs | {"inputs": inputs})
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
        _unset("stop_strings", target, generation_config, kwargs)
    _unset("prompt_lookup_num_tokens", target, generation_config, kwargs)
    decoding = AssistedDecoding(source, memory, options, streamer, store)
    return type(target).generate(target, inputs, generation_config, custom_generate=decoding, **kwargs)


def _unset(name: str, target: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Keeps an option that we act on ourselves from transformers' `generate`, wherever it was set."""
    kwargs.pop(name, None)
    if config is not None:
        setattr(config, name, None)
    if getattr(target.generation_config, name) is not None:
        kwargs[name] = None


def is_drafter(assistant: Any) -> bool:
    """Whether this is a MoA drafter, wherever its class came from."""
    return isinstance(assistant, PreTrainedModel) and assistant.config.model_type == "moa_drafter"


def is_lent(drafter: Any, target: PreTrainedModel) -> bool:
    """Whether the drafter works with this target's parts."""
    return drafter._lent is not None and drafter._lent.embed_tokens is target.get_input_embeddings()
