"""`MoATrainer`: transformers' Trainer, taught the drafter's objective.

Knows: how a batch of cached activations becomes a loss, the staircase schedule, what a checkpoint holds. Everything
else (devices, precision, accumulation, several processes, resuming, logging) is transformers' and accelerate's.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..modeling_moa import MoADrafterForCausalLM
from .activations import ActivationDataset, collate
from .objective import ObjectiveConfig, ObjectiveOutput, agreement, draw_synchronised, training_objective

DEPTHS = 7  # agreement is reported for this many first positions of a block


class DrafterWithObjective(nn.Module):
    """The module that is trained: its forward is the loss, so that DDP and FSDP see the whole graph."""

    def __init__(
        self, drafter: Any, objective: ObjectiveConfig, compute: Callable[..., ObjectiveOutput] = training_objective
    ):
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self.compute = compute
        self.staircase_probability = 0.0
        self.step = 0  # with the row's number, the seed of what is drawn for a row

    def forward(self, **batch: torch.Tensor) -> ObjectiveOutput:
        width = batch["input_ids"].shape[1]
        seeds = [hash((self.step, row)) for row in batch["rows"].tolist()]
        synchronised = draw_synchronised(
            batch["lengths"], batch["prompt_lengths"], width, self.objective.interval, seeds
        )
        staircase = random.Random(self.step).random() < self.staircase_probability
        # judged by what a draft really sees, however it was trained
        objective = self.objective if self.training else replace(self.objective, bounded=True)
        return self.compute(self.drafter, batch, objective, synchronised, staircase)


class MoATrainer(Trainer):
    """Trains a drafter on cached activations.

    Args:
        drafter: with the target's parts lent; only its own parameters are trained.
        objective: weights and intervals of the loss.
        staircase_epochs: epochs over which the probability of the staircase mask falls from 1 to 0 (paper: half).
        compute: the objective itself, called as `training_objective` is.
        **kwargs: of transformers' Trainer; datasets are `ActivationDataset`s.

    Raises:
        FloatingPointError: the loss of a batch is not finite. The last checkpoint is left as it is.
    """

    def __init__(
        self,
        drafter: MoADrafterForCausalLM,
        objective: ObjectiveConfig,
        staircase_epochs: float = 0.0,
        compute: Callable[..., ObjectiveOutput] = training_objective,
        **kwargs: Any,
    ):
        self.staircase_epochs = staircase_epochs
        super().__init__(model=DrafterWithObjective(drafter, objective, compute), data_collator=collate, **kwargs)
        self.model_accepts_loss_kwargs = False  # ours is a mean: accumulated steps are to be averaged
        self.started, self.hours_before = time.monotonic(), 0.0
        self.add_callback(_Clock(self))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's, with `hours`: of training so far, those before a stop included."""
        hours = self.hours_before + (time.monotonic() - self.started) / 3600
        super().log(logs | {"hours": round(hours, 4)}, start_time)

    @property
    def drafter(self) -> MoADrafterForCausalLM:
        return self.accelerator.unwrap_model(self.model).drafter

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        wrapped = self.accelerator.unwrap_model(model)
        past = 1 - (self.state.epoch or 0.0) / self.staircase_epochs if self.staircase_epochs else 0.0
        wrapped.staircase_probability = max(0.0, past) if model.training else 0.0
        wrapped.step = self.state.global_step
        output = model(**inputs)
        if not torch.isfinite(output.loss):
            raise FloatingPointError(
                f"The loss became {output.loss.item()} in the batch after step {self.state.global_step} "
                f"(rows of {inputs['lengths'].tolist()} tokens). Resume from the last checkpoint with a lower "
                "learning rate."
            )
        loss = output.loss
        if self.args.world_size > 1:
            # Processes hold answers of different lengths: weigh them so that their mean is the mean over positions.
            loss = loss * output.total_weight / self.accelerator.reduce(output.total_weight, "mean")
        return (loss, output) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        dataset: ActivationDataset = self.train_dataset if train_dataset is None else train_dataset
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGroupedSampler(size, lengths=dataset.lengths, generator=self._sampler_generator())

    def _sampler_generator(self) -> torch.Generator:
        """One order per seed, whatever else draws random numbers."""
        return torch.Generator().manual_seed(self.args.data_seed if self.args.data_seed is not None else self.args.seed)

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Agreement with the target's first choice by depth and by kind of text, and the tokens per target call that a
        chain of five would reach if agreement at one depth did not depend on the others."""
        dataset: ActivationDataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        model = self.model.eval()
        by_depth: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        losses: list[tuple[float, int]] = []
        self.accelerator.unwrap_model(model).step = 0  # the same synchronised positions at every evaluation
        size = self.args.per_device_eval_batch_size
        order = sorted(range(len(dataset)), key=lambda i: dataset.lengths[i])
        for start in range(0, len(order), size):
            items = [dataset[i] for i in order[start : start + size]]
            batch = self._prepare_inputs(collate(items))
            with self.compute_loss_context_manager():
                output = model(**batch)
            losses.append((output.loss.item(), len(output.depth)))
            agrees = agreement(self.drafter, output)
            for depth, row, same in zip(output.depth.tolist(), output.row.tolist(), agrees.tolist(), strict=True):
                for table, key in ((by_depth, depth), (by_kind, items[row]["kind"])):
                    table[key][0] += same
                    table[key][1] += 1
        model.train()
        total = max(1, sum(n for _, n in losses))
        metrics = {f"{metric_key_prefix}_loss": sum(loss * n for loss, n in losses) / total}
        expected, product = 1.0, 1.0
        for depth in range(DEPTHS):
            same, count = by_depth[depth]
            if count:  # a depth that the interval never reaches has no agreement
                metrics[f"{metric_key_prefix}_agreement_{depth}"] = round(same / count, 4)
            if depth < 5:
                product *= same / max(1, count)
                expected += product
        metrics[f"{metric_key_prefix}_expected_tau"] = round(expected, 4)
        for kind, (same, count) in sorted(by_kind.items()):
            metrics[f"{metric_key_prefix}_agreement_{kind}"] = round(same / count, 4)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def drafter_weights(self) -> dict[str, torch.Tensor]:
        """The drafter's whole state dict. Where FSDP has spread it over the processes, all of them must call this, and
        only the first one is given it."""
        return _of_drafter(self.accelerator.get_state_dict(self.model))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """A checkpoint is a drafter that `from_pretrained` loads, beside the Trainer's own state."""
        if not self.args.should_save:  # the Trainer calls this in every process
            return
        folder = output_dir or self.args.output_dir
        own = self.drafter_weights() if state_dict is None else _of_drafter(state_dict)
        self.drafter.save_pretrained(folder, state_dict=own)
        torch.save(self.args, f"{folder}/training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        weights = load_file(f"{resume_from_checkpoint}/model.safetensors")
        set_model_state_dict(self.drafter, weights, options=StateDictOptions(full_state_dict=True))  # FSDP or not

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated: the Trainer's formula is for models that embed and unembed every token."""
        return 0


def _of_drafter(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k.removeprefix("drafter."): v for k, v in state_dict.items() if k.startswith("drafter.")}


class _Clock(TrainerCallback):
    """Adds the hours of a resumed run to those before it was stopped, which its log holds."""

    def __init__(self, trainer: MoATrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.trainer.started = time.monotonic()
        self.trainer.hours_before = max((entry.get("hours", 0.0) for entry in state.log_history), default=0.0)
