"""The Mixture-of-Attentions drafter as a transformers model.

This package imports nothing else of the project: it is copied to the Hub as remote code.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration_moa import MoADrafterConfig
from .modeling_moa import (
    DraftContext,
    LentParts,
    MoADrafterForCausalLM,
    MoADrafterOutput,
    WrongTargetError,
    weight_fingerprint,
)

AutoConfig.register(MoADrafterConfig.model_type, MoADrafterConfig, exist_ok=True)
AutoModelForCausalLM.register(MoADrafterConfig, MoADrafterForCausalLM, exist_ok=True)
# What `save_pretrained` writes then loads with trust_remote_code where this project is not installed.
MoADrafterConfig.register_for_auto_class()
MoADrafterForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "DraftContext",
    "LentParts",
    "MoADrafterConfig",
    "MoADrafterForCausalLM",
    "MoADrafterOutput",
    "WrongTargetError",
    "weight_fingerprint",
]
