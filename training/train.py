"""From rows of the target's own answers to a trained drafter.

Knows: the order of the steps (target, drafter, activations, Trainer, record) and what a finished folder holds. Does not
know what happens inside a step.
"""

import contextlib
import hashlib
import itertools
import json
import os
import platform
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ..modeling_moa import MoADrafterForCausalLM, weight_fingerprint
from ..targets import default_target_weights, load_target
from .activations import ActivationCache, ActivationDataset
from .batched_decoding import end_token_ids
from .curve import draw_curve
from .distill import read_rows
from .initialisation import CHANGEABLE, frequent_tokens, with_options
from .kind import MOA, DrafterKind
from .recipe import Recipe
from .trainer import MoATrainer

RECORD = "training_record.json"


def load_rows(paths: list[str | Path]) -> list[dict[str, Any]]:
    """All rows of some JSON-lines files, in order.

    Raises:
        ValueError: a file has no rows, or a row no answer.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        found = list(read_rows(path))
        for number, row in enumerate(found, 1):
            if not row.get("response_ids") or not ("messages" in row or "prompt" in row):
                raise ValueError(f"{path}, row {number}: needs response_ids and messages (or prompt)")
        if not found:
            raise ValueError(f"{path} holds no rows")
        rows += found
    return rows


def new_drafter(
    recipe: Recipe, target: PreTrainedModel, rows: list[dict[str, Any]], kind: DrafterKind = MOA
) -> MoADrafterForCausalLM:
    """A drafter of the recipe's sizes, or the one it starts from, with the target's parts lent.

    Raises:
        ValueError: the recipe is for drafters of another kind, or contradicts the drafter that it starts from.
    """
    if recipe.drafter_type != kind.name:
        raise ValueError(f"The recipe is for a drafter of type {recipe.drafter_type}, not {kind.name}")
    if recipe.start_from:
        drafter = kind.model.from_pretrained(recipe.start_from, dtype=torch.float32)
        changed = {name: value for name, value in recipe.drafter.items() if name in CHANGEABLE}
        if any(getattr(drafter.config, name) != value for name, value in changed.items()):
            drafter = with_options(drafter, **changed)
        for name, value in recipe.drafter.items():
            if name != "draft_vocab_size" and getattr(drafter.config, name) != value:
                raise ValueError(f"{recipe.start_from} has {name} {getattr(drafter.config, name)}, the recipe {value}")
        size = recipe.drafter.get("draft_vocab_size", drafter.config.draft_vocab_size)
        if size != drafter.config.draft_vocab_size:  # the head is the target's: any of its rows will do
            if size is None:
                raise ValueError(f"{recipe.start_from} has a draft vocabulary; the recipe must give its size")
            drafter.config.draft_vocab_size = size
            drafter.register_buffer("draft_vocab_ids", _draft_vocabulary(size, target, rows))
        drafter.lend(target)
        drafter.generation_config = GenerationConfig(**recipe.generation)
        return drafter
    config = kind.config.for_target(
        target.config, **({"target_fingerprint": weight_fingerprint(target)} | recipe.drafter)
    )
    drafter = kind.model(config)
    if config.draft_vocab_size is not None:
        drafter.draft_vocab_ids.copy_(_draft_vocabulary(config.draft_vocab_size, target, rows))
    drafter.lend(target)
    if recipe.initialise_from_target:
        kind.initialise(drafter, target)
    drafter.generation_config = GenerationConfig(**recipe.generation)
    return drafter


def _check_target(recipe: Recipe, target: PreTrainedModel) -> None:
    """
    Raises:
        ValueError: the target has another configuration than the recipe says.
    """
    if recipe.target_config is None:
        return
    expected = AutoConfig.for_model(**recipe.target_config).to_dict()
    found = target.config.to_dict()
    for name in recipe.target_config:
        is_a_size = type(expected[name]) in (int, float)  # and not where a file came from or who wrote it
        if (is_a_size or name == "model_type") and found.get(name) != expected[name]:
            raise ValueError(f"The recipe is for a target with {name} {expected[name]}, not {found.get(name)}")


def _draft_vocabulary(size: int, target: PreTrainedModel, rows: list[dict[str, Any]]) -> torch.Tensor:
    return frequent_tokens((row["response_ids"] for row in rows), size, always=end_token_ids(target))


def split(count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on and to evaluate on: every `held_out`-th is evaluated."""
    evaluated = range(held_out - 1, count, held_out)
    chosen = set(evaluated)
    return [i for i in range(count) if i not in chosen], list(evaluated)


def prepare(
    recipe: Recipe,
    data: list[str | Path],
    output: str | Path,
    activations: str | Path,
    overrides: dict[str, Any] | None = None,
    target: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    kind: DrafterKind = MOA,
) -> MoATrainer:
    """Everything up to the first step: target, new drafter, activations, Trainer. Arguments as for `train`."""
    if target is None or tokenizer is None:
        target, tokenizer = load_target(recipe.target, recipe.target_dtype)
    _check_target(recipe, target)
    target.requires_grad_(False)
    rows = load_rows(data)
    defaults = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_total_limit": 2,
        "report_to": "none",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
        "use_cpu": not torch.accelerator.is_available(),
    }
    arguments = TrainingArguments(
        output_dir=str(Path(output) / "run"), **(defaults | recipe.training | (overrides or {}))
    )
    transformers.set_seed(arguments.seed)
    target.to(arguments.device)
    drafter = new_drafter(recipe, target, rows, kind)
    cache = ActivationCache(activations, drafter.config)
    with (
        arguments.main_process_first(desc="activations"),
        tqdm(desc="activations", unit=" tokens", unit_scale=True) as bar,
    ):
        cache.build(target, tokenizer, rows, recipe.max_length, bar.update)
    trained_on, held_out = split(len(rows), recipe.held_out)
    return MoATrainer(
        drafter,
        recipe.objective,
        recipe.staircase_epochs,
        kind.objective,
        args=arguments,
        train_dataset=ActivationDataset(activations, drafter, trained_on),
        eval_dataset=ActivationDataset(activations, drafter, held_out),
    )


def train(
    recipe: Recipe,
    data: list[str | Path],
    output: str | Path,
    activations: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    target: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sources: dict[Path, dict[str, Any]] | None = None,
    kind: DrafterKind = MOA,
) -> dict[str, float]:
    """Trains a drafter, or goes on with a run that was stopped, and returns the last evaluation.

    Args:
        recipe: see `Recipe`.
        data: JSON-lines files from `moa distill`.
        output: folder of the drafter; the run's checkpoints lie in `output/run`.
        activations: folder of the activation cache; built where it is missing, continued where it is short.
        overrides: of the recipe's `training` arguments.
        target, tokenizer: already loaded; else the recipe's are.
        sources: where files of `data` come from (data set, commit, licence), for the record. What `moa distill` noted
            beside a file is added.
        kind: of drafter; must be the recipe's.
    """
    versions = version_record()
    trainer = prepare(recipe, data, output, activations, overrides, target, tokenizer, kind)
    run = trainer.args.output_dir
    last = last_checkpoint(Path(run))
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    metrics = trainer.evaluate()
    weights = trainer.drafter_weights()
    if trainer.is_world_process_zero():
        record = _run_record(trainer, recipe, data, sources or {}, metrics, versions)
        if target is None and recipe.target is None:
            record["target_weights"] = default_target_weights()
        save_finished(trainer.drafter, record, output, weights)
    return metrics


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint that is whole. `trainer_state.json` is written last, so one that was being written when the
    run was killed lacks it, or has half of it."""
    found = {int(path.name.removeprefix("checkpoint-")): path for path in run.glob("checkpoint-*")}
    for _, path in sorted(found.items(), reverse=True):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return path
    return None


def profile(
    recipe: Recipe,
    data: list[str | Path],
    output: str | Path,
    activations: str | Path,
    *,
    overrides: dict[str, Any] | None = None,
    kind: DrafterKind = MOA,
    steps: int = 20,
) -> str:
    """Times some steps and says where the time goes. Nothing is saved. Arguments as for `train`."""
    trainer = prepare(recipe, data, output, activations, overrides, kind=kind)
    model = trainer.accelerator.prepare(trainer.model)
    optimizer = trainer.create_optimizer()
    loader = trainer.get_train_dataloader()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # a small file is read again and again
    record = torch.profiler.record_function

    def step() -> tuple[dict[str, torch.Tensor], int]:
        with record("moa: read batch"):
            batch = trainer._prepare_inputs(next(batches))
        with record("moa: forward"), trainer.compute_loss_context_manager():
            output_ = model(**batch)
        with record("moa: backward"):
            trainer.accelerator.backward(output_.loss)
        with record("moa: optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return batch, len(output_.depth)

    before, _ = _memory()
    step()  # the longest batch comes first; the profiler's own records would be most of the memory of those after it
    _, peak = _memory()
    timed = tokens = bearing = rows = 0
    watched = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        watched.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=watched) as report:
        for _ in range(steps):
            started = time.perf_counter()
            batch, positions = step()
            timed += time.perf_counter() - started
            tokens += int(batch["lengths"].sum())
            bearing += positions
            rows += len(batch["lengths"])
    table = report.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=44)
    return (
        f"{table}\n{tokens / timed:.0f} tokens/s, prompts included, {bearing / timed:.0f} loss-bearing tokens/s "
        f"under the profiler over {steps} steps of {rows / steps:.0f} rows, {torch.get_num_threads()} threads, "
        f"peak memory {peak:.2f} GiB, of which {before:.2f} GiB before the first step"
    )


def _memory() -> tuple[float, float]:
    """GiB held now, and at most so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / (1 << 30), torch.cuda.max_memory_allocated() / (1 << 30)
    held = psutil.Process().memory_info().rss / (1 << 30)
    return held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def save_finished(
    drafter: PreTrainedModel,
    record: dict[str, Any],
    output: str | Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """The drafter, `training_record.json` (what it was made from, how, and how it went) and its curve.

    `weights` are the drafter's, where it holds only a part of them itself.
    """
    drafter.eval().save_pretrained(output, state_dict=weights)
    path = Path(output) / RECORD
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(record, indent=1))
    os.replace(temporary, path)
    with contextlib.suppress(ImportError):  # matplotlib is optional; the record holds the same numbers
        draw_curve(output)


def _run_record(
    trainer: MoATrainer,
    recipe: Recipe,
    data: list[str | Path],
    sources: dict[Path, dict[str, Any]],
    metrics: dict[str, float],
    versions: dict[str, Any],
) -> dict[str, Any]:
    dataset: ActivationDataset = trainer.train_dataset
    record = {
        "recipe": recipe.to_dict(),
        "training_arguments": {k: v for k, v in trainer.args.to_dict().items() if k in recipe.training or k == "seed"},
        "data": data_record(data, sources),
        "training_rows": len(dataset),
        "training_answer_tokens": dataset.answer_tokens,
        "trainable_parameters": sum(p.numel() for p in trainer.drafter.parameters()),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "hours": trainer.state.log_history[-1]["hours"],
        "final_evaluation": metrics,
        "log": trainer.state.log_history,
        **versions,
    }
    if recipe.start_from:
        earlier = Path(recipe.start_from) / RECORD
        record["started_from"] = json.loads(earlier.read_text(encoding="utf-8")) if earlier.exists() else None
    return record


def data_record(data: list[str | Path], sources: dict[Path, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Every file of answers with its checksum and what is known of where it comes from."""
    return [
        {"file": Path(p).name, "sha256": hashlib.sha256(Path(p).read_bytes()).hexdigest()}
        | _noted_beside(Path(p))
        | (sources or {}).get(Path(p), {})
        for p in data
    ]


def version_record() -> dict[str, Any]:
    """What a model is about to be trained with."""
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "git_revision": _git_revision(),
    }


def _noted_beside(data: Path) -> dict[str, Any]:
    """What the record of a file of answers says about where they come from; empty without a record."""
    path = data.with_suffix(".record.json")
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: noted[name] for name in ("prompts", "license", "answer_tokens") if noted.get(name) is not None}


def _git_revision() -> str | None:
    here = Path(__file__).parent
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
