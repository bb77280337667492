"""What MoA is compared with: drafters of the literature, trained by this project's pipeline on the same activations.

They draft through the same decoding loop and are judged by the same verifier:

    eagle = load_baseline("runs/eagle", target)
    target.generate(**inputs, assistant_model=eagle)
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...generation import attach_source
from .eagle import EagleConfig, EagleDrafter
from .glide import GlideConfig, GlideDrafter
from .lent import BaselineConfig, BaselineDrafter, BaselineSource
from .medusa import MedusaConfig, MedusaDrafter

_CLASSES: dict[type[BaselineConfig], type[BaselineDrafter]] = {
    EagleConfig: EagleDrafter,
    GlideConfig: GlideDrafter,
    MedusaConfig: MedusaDrafter,
}
for _config, _model in _CLASSES.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)


def attach_baseline(target: PreTrainedModel, drafter: BaselineDrafter) -> None:
    """As `moa_spec.attach`: lets `target.generate(..., assistant_model=drafter)` decode with a baseline.

    Raises:
        WrongTargetError: the drafter was made for another target.
    """
    drafter.lend(target)
    drafter.eval()
    attach_source(target, drafter, BaselineSource(drafter))


def load_baseline(path_or_repo: str | Path, target: PreTrainedModel, **kwargs: Any) -> BaselineDrafter:
    """`from_pretrained` and `attach_baseline` in one. Dtype and device are the target's.

    Raises:
        OSError: there is no checkpoint there.
        ValueError: the checkpoint is not a baseline's.
        WrongTargetError: the drafter was made for another target.
    """
    config = AutoConfig.from_pretrained(path_or_repo, **kwargs)
    model = next((_CLASSES[known] for known in _CLASSES if isinstance(config, known)), None)
    if model is None:
        known = ", ".join(config.model_type for config in _CLASSES)
        raise ValueError(f"{path_or_repo} holds a {config.model_type}, and the baselines are {known}")
    drafter = model.from_pretrained(path_or_repo, dtype=target.dtype, **kwargs).to(target.device)
    attach_baseline(target, drafter)
    return drafter


__all__ = [
    "BaselineDrafter",
    "EagleConfig",
    "EagleDrafter",
    "GlideConfig",
    "GlideDrafter",
    "MedusaConfig",
    "MedusaDrafter",
    "attach_baseline",
    "load_baseline",
]
