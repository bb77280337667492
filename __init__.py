"""Mixture-of-Attentions speculative decoding (arXiv 2410.03804) for transformers models.

    import moa_spec

    target, tokenizer = moa_spec.load_target()
    drafter = moa_spec.load_drafter("folder-or-repository", target)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)

This is the whole public interface. Importing the package makes `AutoConfig` and `AutoModelForCausalLM` know drafters.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generation import Trace, attach, detach, load_drafter, record_trace
    from .modeling_moa import MoADrafterConfig, MoADrafterForCausalLM, WrongTargetError
    from .targets import DEFAULT_TARGET, TargetNotFoundError, load_target

__all__ = [
    "DEFAULT_TARGET",
    "MoADrafterConfig",
    "MoADrafterForCausalLM",
    "TargetNotFoundError",
    "Trace",
    "WrongTargetError",
    "attach",
    "detach",
    "load_drafter",
    "load_target",
    "record_trace",
]

_HOMES = {
    "generation": ["Trace", "attach", "detach", "load_drafter", "record_trace"],
    "modeling_moa": ["MoADrafterConfig", "MoADrafterForCausalLM", "WrongTargetError"],
    "targets": ["DEFAULT_TARGET", "TargetNotFoundError", "load_target"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f".{module}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The command-line tool imports this package too, and `moa --help` should not wait seconds for torch.
if Path(sys.argv[0] if sys.argv else "").stem != "moa":
    # modeling_moa travels to the Hub and knows nothing of how it gets there
    _drafter = import_module(".modeling_moa", __name__).MoADrafterForCausalLM
    _drafter.push_to_hub = import_module(".hub", __name__).push_to_hub
