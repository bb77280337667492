"""The baselines as training sees them."""

from ...training.kind import DrafterKind
from ...training.objective import training_objective
from .eagle import EagleConfig, EagleDrafter
from .glide import GlideConfig, GlideDrafter
from .initialise import initialise_eagle, initialise_glide, initialise_medusa
from .medusa import MedusaConfig, MedusaDrafter
from .objectives import eagle_objective, medusa_objective

KINDS = (
    DrafterKind("eagle", EagleConfig, EagleDrafter, initialise_eagle, eagle_objective),
    DrafterKind("medusa", MedusaConfig, MedusaDrafter, initialise_medusa, medusa_objective),
    DrafterKind("glide", GlideConfig, GlideDrafter, initialise_glide, training_objective),
)
