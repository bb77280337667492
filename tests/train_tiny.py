"""Trains a tiny drafter; started as a process of its own by test_training.py.

Usage: python -m tests.train_tiny ANSWERS FOLDER BATCH_PER_PROCESS [MAX_STEPS]
"""

import os
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from moa_spec.training.objective import ObjectiveConfig
from moa_spec.training.recipe import Recipe
from moa_spec.training.train import train

from .training_data import tiny_chat_target, tiny_tokenizer


def shard_on_processors() -> None:
    """accelerate takes up FSDP for processes with accelerators only, and silently trains with DDP on processors. torch
    itself shards over gloo: let the processes pass for GPUs whose device is the CPU."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if sharded:
        shard_on_processors()
    answers, folder, batch = sys.argv[1:4]
    steps = int(sys.argv[4]) if len(sys.argv) > 4 else 6
    recipe = Recipe(
        held_out=5,
        max_length=64,
        drafter={"layer_self_attention_layers": [0, 2]},
        # one interval and every position of it: the two runs differ only in how rows are spread over processes
        objective=ObjectiveConfig(interval=(6, 7)),
        training={
            "max_steps": steps,
            "per_device_train_batch_size": int(batch),
            "learning_rate": 0.005,
            "logging_steps": 1,
            "eval_strategy": "no",
            "save_steps": 3,
            "disable_tqdm": True,
            "use_cpu": not sharded,
        },
    )
    train(
        recipe,
        [answers],
        Path(folder) / "drafter",
        Path(folder) / "activations",
        target=tiny_chat_target(),
        tokenizer=tiny_tokenizer(),
    )
