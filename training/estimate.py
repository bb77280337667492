"""What a training run will need, worked out before anything is loaded or written.

Knows: parameter counts, bytes, rows and steps that follow from a recipe, a target's configuration and the data's size.
Does not know how fast a machine is: hours come from a measured rate or not at all.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from ..modeling_moa import MoADrafterConfig
from ..targets import DEFAULT_TARGET, quiet, where_from
from .activations import prompt_ids
from .footprint import step_bytes
from .kind import DrafterKind
from .objective import ObjectiveConfig
from .recipe import Recipe
from .train import split

PARTS = {
    "layer_self_attention": "LSA",
    "self_attention": "SA",
    "cross_attention": "CA",
    "Ekv2E": "maps",
    "hidden_state_map": "maps",
    "newest_memory_map": "maps",
    "newest_memory_norm": "norms",
    "head_norm": "norms",
}


@dataclass
class DataSize:
    """How much data a run reads. `tokens` counts prompts and answers as `max_length` cuts them, and a row's length is
    (tokens, tokens of the answer) where the rows are known."""

    rows: int | None = None
    tokens: int | None = None
    answer_tokens: int | None = None
    lengths: list[tuple[int, int]] | None = None


@dataclass
class Estimate:
    """Sizes in numbers and bytes. None: what it follows from is not known.

    Attributes:
        trainable_parameters: of the drafter, by part; the norms inside LSA, SA and CA count as theirs.
        lent_parameters: of the target's parts that the drafter uses, frozen.
        cache_bytes_per_token, cache_bytes: of the activation cache on disk.
        steps_per_epoch, steps: of the optimizer.
        memory_bytes: of one process, part by part. `activations` is the peak of one step over the gradients, of the
            longest batch that the data, or without rows `max_length`, allows.
        target_bytes: the whole target, which each process holds until the cache is built.
        hours: from `tokens_per_second`, of training only.
    """

    target: str
    processes: int
    trainable_parameters: dict[str, int]
    lent_parameters: dict[str, int]
    cache_bytes_per_token: int
    cache_bytes: int | None
    rows: int | None
    held_out_rows: int | None
    tokens: int | None
    answer_tokens: int | None
    global_batch: int
    steps_per_epoch: int | None
    steps: int | None
    batch: dict[str, int]
    memory_bytes: dict[str, int]
    target_bytes: int
    hours: float | None


def target_config(recipe: Recipe) -> PreTrainedConfig:
    """The target's configuration: the recipe's own, else the target's.

    Raises:
        ValueError: it can be had from neither.
    """
    if recipe.target_config is not None:
        return AutoConfig.for_model(**recipe.target_config)
    place, how = where_from(recipe.target)
    try:
        with quiet():
            return AutoConfig.from_pretrained(place, **how)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The configuration of {recipe.target} cannot be read ({str(error).strip().splitlines()[0]}): give it as "
            "`target_config` in the recipe"
        ) from error


def measure(recipe: Recipe, rows: list[dict[str, Any]], tokens: int | None = None) -> DataSize:
    """The size of some rows from `moa distill`. `tokens` is used where the target's tokenizer cannot be had.

    Raises:
        ValueError: neither it nor `tokens` is there to count the prompts' tokens.
    """
    answers = [len(row["response_ids"]) for row in rows]
    if tokens is not None:
        return DataSize(len(rows), tokens, sum(answers))
    place, how = where_from(recipe.target)
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **how)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Without the tokenizer of {recipe.target} the prompts' tokens cannot be counted: say with --tokens how "
            "many the rows have, prompts and answers together"
        ) from error
    lengths = []
    for row, answer in zip(rows, answers, strict=True):
        prompt = len(prompt_ids(tokenizer, row))
        whole = min(prompt + answer, recipe.max_length)
        lengths.append((whole, max(0, whole - prompt)))
    return DataSize(len(rows), sum(n for n, _ in lengths), sum(n for _, n in lengths), lengths)


def estimate(
    recipe: Recipe,
    kind: DrafterKind,
    data: DataSize,
    *,
    overrides: dict[str, Any] | None = None,
    processes: int = 1,
    tokens_per_second: float | None = None,
) -> Estimate:
    """What `train` would need.

    Args:
        recipe, overrides, kind: as for `train`.
        data: how much there is to train on.
        processes: that train together, one per device.
        tokens_per_second: tokens, prompts included, that one process was measured to train on per second.

    Raises:
        ValueError: the target's configuration cannot be had, or cannot have such a drafter.
    """
    target = target_config(recipe)
    arguments: dict[str, Any] = recipe.training | (overrides or {})
    config = _drafter_config(recipe, target, kind)
    with torch.device("meta"), quiet():
        drafter = kind.model(config)
        whole = AutoModelForCausalLM.from_config(target, dtype=getattr(torch, recipe.target_dtype))
    parts: Counter[str] = Counter()
    for name, parameter in drafter.named_parameters():
        parts[PARTS.get(name.partition(".")[0], name.partition(".")[0])] += parameter.numel()
    trainable = parts.total()
    lent = _lent_parameters(whole, config)
    target_bytes = sum(p.numel() * p.element_size() for p in whole.parameters())

    numbers = len(config.lsa_layers) * config.layer_width
    numbers += config.hidden_size * (1 + config.target_layer_inference)
    rows_per_step = arguments.get("per_device_train_batch_size", 8)
    accumulated = arguments.get("gradient_accumulation_steps", 1)
    global_batch = rows_per_step * accumulated * processes
    trained, held_out = (None, None) if data.rows is None else _split(data.rows, data.lengths, recipe)
    per_epoch = None
    if trained is not None:
        batches = math.ceil(math.ceil(trained / rows_per_step) / processes)
        per_epoch = max(1, math.ceil(batches / accumulated))
    steps = arguments.get("max_steps", -1)
    if steps <= 0:
        steps = None if per_epoch is None else math.ceil(per_epoch * arguments.get("num_train_epochs", 3.0))

    batch = _longest_batch(recipe, data, rows_per_step)
    memory = {
        "weights": 4 * trainable,
        "gradients": 4 * trainable,
        "adamw_states": 8 * trainable,
        "lent_parts": sum(lent.values()) * whole.dtype.itemsize,
    }
    if kind.name == "moa":  # the baselines' objectives draft step by step, as far as their data say
        peak = step_bytes(
            config,
            recipe.objective,
            target,
            **batch,
            autocast=bool(arguments.get("bf16")),
            target_dtype=whole.dtype,
        )
        memory["activations"] = max(0, peak - 4 * trainable)
    if processes > 1:
        memory["ddp_buckets"] = 4 * trainable
    hours = None
    if tokens_per_second and steps is not None and data.rows and data.tokens is not None:
        hours = steps * rows_per_step * accumulated * data.tokens / data.rows / tokens_per_second / 3600
    return Estimate(
        target=recipe.target or DEFAULT_TARGET,
        processes=processes,
        trainable_parameters=dict(parts),
        lent_parameters=lent,
        cache_bytes_per_token=2 * numbers,
        cache_bytes=None if data.tokens is None else 2 * numbers * data.tokens,
        rows=trained,
        held_out_rows=held_out,
        tokens=data.tokens,
        answer_tokens=data.answer_tokens,
        global_batch=global_batch,
        steps_per_epoch=per_epoch,
        steps=steps,
        batch=batch,
        memory_bytes=memory,
        target_bytes=target_bytes,
        hours=hours,
    )


def _drafter_config(recipe: Recipe, target: PreTrainedConfig, kind: DrafterKind) -> Any:
    if recipe.start_from:
        started = kind.config.from_pretrained(recipe.start_from).to_dict()
        return kind.config.from_dict(started | recipe.drafter)
    return kind.config.for_target(target, **recipe.drafter)


def _lent_parameters(target: PreTrainedModel, config: MoADrafterConfig) -> dict[str, int]:
    embeddings, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    lent = {"embeddings": embeddings.numel()}
    if config.draft_vocab_size is not None:
        lent["head"] = config.draft_vocab_size * config.hidden_size  # its rows are copied
    else:
        lent["head"] = 0 if head is embeddings else head.numel()
    if config.target_layer_inference:
        layers = list(target.get_decoder().layers)[-config.target_layer_inference :]
        lent["last_layers"] = sum(p.numel() for layer in layers for p in layer.parameters())
    return lent


def _split(rows: int, lengths: list[tuple[int, int]] | None, recipe: Recipe) -> tuple[int, int]:
    """As the Trainer is given them: rows whose answer is shorter than two tokens are left out."""
    trained, held_out = split(rows, recipe.held_out)
    if lengths is None:
        return len(trained), len(held_out)
    return sum(lengths[i][1] >= 2 for i in trained), sum(lengths[i][1] >= 2 for i in held_out)


def _longest_batch(recipe: Recipe, data: DataSize, rows: int) -> dict[str, int]:
    """The widest batch: the longest rows of the data, or where they are not known rows of `max_length`, all answer."""
    lengths = [(recipe.max_length, recipe.max_length - 1)] * rows
    if data.lengths is not None:
        lengths = sorted(data.lengths)[-rows:]
    answers = [answer for _, answer in lengths]
    return {
        "rows": len(lengths),
        "width": max(whole for whole, _ in lengths),
        "answer": max(answers),
        "loss_bearing": round(sum(answers) * loss_bearing_share(recipe.objective)),
    }


def loss_bearing_share(objective: ObjectiveConfig) -> float:
    """Of an answer's positions: all but one in every `k`."""
    low, high = objective.interval
    return sum(1 - 1 / k for k in range(low, high)) / (high - low)
