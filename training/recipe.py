"""A recipe: everything that decides what a training run produces, in one JSON file.

Knows: the names and defaults of the choices. Does not carry any of them out.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .objective import ObjectiveConfig

RECIPES = Path(__file__).parent / "recipes"


@dataclass
class Recipe:
    """Choices of one training run.

    Attributes:
        target: folder or repository of the target; None is the default target.
        target_config: the target's configuration, for a dry run where the target itself cannot be had. Training
            refuses a target that has another one.
        target_dtype: the teacher's dtype.
        max_length: rows are cut to so many tokens, prompt included.
        held_out: one row in so many is kept for evaluation and never trained on.
        drafter_type: "moa", or a baseline of `benchmarks/baselines`: "eagle", "medusa", "glide", or "small-lm", an
            independent language model, which has no use for `start_from`, `objective` and what follows from them.
        drafter: fields of the drafter's configuration that differ from its `for_target` (small-lm: of `LlamaConfig`
            from what `benchmarks/baselines/small_lm.py` sets).
        start_from: a trained drafter to go on from, with its sizes. `drafter` may differ in the draft vocabulary's
            size (chosen anew), `newest_memory`, `head_norm` and `target_layer_inference`.
        initialise_from_target: without `start_from`: start SA, CA and the head norm from the target's own layers.
        objective: weights and intervals of the loss.
        staircase_epochs: epochs over which the staircase mask fades out.
        training: arguments of transformers' `TrainingArguments`.
        generation: the drafter's drafting defaults, saved in its `generation_config`.
    """

    target: str | None = None
    target_config: dict[str, Any] | None = None
    target_dtype: str = "bfloat16"
    max_length: int = 1024
    held_out: int = 40
    drafter_type: str = "moa"
    drafter: dict[str, Any] = field(default_factory=dict)
    start_from: str | None = None
    initialise_from_target: bool = True
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    staircase_epochs: float = 0.0
    training: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str | Path) -> "Recipe":
        """Reads a recipe: a file, or the name of one in `training/recipes`.

        Raises:
            FileNotFoundError: neither exists; the message lists the names.
            ValueError: not JSON, or a field that no recipe has.
        """
        path = Path(name)
        if not path.exists():
            path = RECIPES / f"{name}.json"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.json")))
            raise FileNotFoundError(f"No recipe {name}: give a JSON file or one of {known}")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{path}: a recipe has no field {', '.join(sorted(unknown))}")
        objective = values.pop("objective", {})
        objective["interval"] = tuple(objective.get("interval", ObjectiveConfig().interval))
        return cls(objective=ObjectiveConfig(**objective), **values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
