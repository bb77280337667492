"""The records beside a checkpoint: how it was trained (`moa train`) and how it was measured (`moa bench run`).

Knows their files and which figures a card takes from them. Does not know cards.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TRAINING_RECORD = "training_record.json"
BENCHMARK_RECORDS = "benchmark*.json"
_DRAFTER_METHODS = "moa"  # methods of the benchmark that decode with the drafter begin so


@dataclass(frozen=True)
class Figures:
    """One method on one task.

    Attributes:
        task: "SUITE/TASK", or "SUITE" for all of its tasks.
        tau: mean accepted tokens, bonus included.
        conditional_acceptance: by depth, from 1.
        speedup: over plain decoding, end to end: [median, lowest, highest] over the repetitions.
        identical_rate: share of greedy answers equal to plain decoding's; None when sampling.
    """

    task: str
    method: str
    questions: int
    tau: float
    conditional_acceptance: list[float]
    speedup: list[float]
    identical_rate: float | None


@dataclass(frozen=True)
class Benchmark:
    """One run of the benchmark: where and how, and what came out."""

    file: str
    options: dict[str, Any]
    session: dict[str, Any]
    figures: list[Figures]
    complete: bool

    @property
    def hardware(self) -> str:
        machine = self.session["machine"]
        parts = [machine["processor"], f"{machine['cores']} cores"]
        if machine.get("gpu"):
            parts.append(machine["gpu"])
        return ", ".join(parts) + f", {self.session['threads']} threads"


def read_training(folder: Path) -> dict[str, Any] | None:
    """The training record, or None when there is none.

    Raises:
        ValueError: it is not JSON.
    """
    path = folder / TRAINING_RECORD
    return _read_json(path) if path.is_file() else None


def read_benchmarks(folder: Path) -> list[Benchmark]:
    """All benchmark results, by file name.

    Raises:
        ValueError: one of them is not a result of `moa bench run`.
    """
    return [_benchmark(path) for path in sorted(folder.glob(BENCHMARK_RECORDS))]


def _benchmark(path: Path) -> Benchmark:
    result = _read_json(path)
    try:
        figures = [
            Figures(
                task,
                method,
                int(values["questions"]),
                float(values["tau"]),
                [float(rate) for rate in values["conditional_acceptance"]],
                [float(value) for value in values["speedup"]],
                values["identical_rate"],
            )
            for task, methods in result["summary"].items()
            for method, values in methods.items()
            if method.startswith(_DRAFTER_METHODS) and values["tau"] is not None and values["speedup"] is not None
        ]
        benchmark = Benchmark(
            path.name, result["options"], result["sessions"][-1], figures, bool(result.get("complete", True))
        )
        _ = benchmark.hardware
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a finished result of `moa bench run` ({type(error).__name__}: {error}): measure again, or "
            "move it out of the checkpoint"
        ) from error
    return benchmark


def check_same_drafter(folder: Path, tensors: dict[str, torch.Tensor], benchmarks: Sequence[Benchmark]) -> None:
    """Figures belong to the weights they were measured with.

    Args:
        folder: where the records lie; when it is a checkpoint, its weights must be these.
        tensors: of the drafter that is to be published.

    Raises:
        ValueError: the records are another drafter's.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        return
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, not a dict
            if name not in tensors or not torch.equal(file.get_tensor(name), tensors[name].cpu()):
                raise ValueError(f"The records in {folder} are of another drafter than this one: {name} differs.")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    for benchmark in benchmarks:
        measured = benchmark.options.get("drafter_sha256")
        if measured is not None and measured != digest:
            raise ValueError(
                f"{folder / benchmark.file} was measured with other weights (sha256 {measured[:16]}, here "
                f"{digest[:16]}): measure again, or move it out of the checkpoint"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a record: it holds no object")
    return value
