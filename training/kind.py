"""What training needs to know of a kind of drafter, so that the baselines are trained by the same code as MoA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from .initialisation import initialise_from_target
from .objective import ObjectiveOutput, training_objective


@dataclass(frozen=True)
class DrafterKind:
    """
    Attributes:
        name: a recipe's `drafter_type`.
        config: with a `for_target` as `MoADrafterConfig` has.
        model: takes that configuration; lends itself a target's parts with `lend`.
        initialise: copies into a new drafter what fits of its target: `initialise(drafter, target)`.
        objective: called as `training_objective` is.
    """

    name: str
    config: Any
    model: Any
    initialise: Callable[..., None]
    objective: Callable[..., ObjectiveOutput]


MOA = DrafterKind("moa", MoADrafterConfig, MoADrafterForCausalLM, initialise_from_target, training_objective)
