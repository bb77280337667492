"""What a comparison of methods needs, as the command line names it: questions, models, options, threads.

Knows no action of `moa bench`; `run` and `engine` share it, and the measurements of the serving side its threads.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from .arguments import DEFAULT_DRAFTER, shipped


class Bench:
    """Questions, models and options as the command line names them, in one dtype."""

    def __init__(self, args: argparse.Namespace, dtype: str):
        from .. import targets
        from ..benchmarks import datasets, methods
        from ..benchmarks.measure import clock_for

        self.assistant = args.assistant
        if "assistant" in args.methods and self.assistant is None:
            self.assistant = shipped("small-lm")
        methods.check_names(args.methods, self.assistant)
        self.checkpoints = checkpoints(args.methods, args.checkpoint)
        self.args, self.dtype = args, dtype
        self.folder = datasets.find_folder(args.data)
        self.everything = datasets.load(args.sets, self.folder)
        self.questions = datasets.choose(self.everything, args.per_task, args.seed)
        self.threads = pin_threads(args.threads)
        self.drafter = args.drafter or (DEFAULT_DRAFTER if DEFAULT_DRAFTER.is_dir() else None)
        self.target, self.tokenizer = targets.load_target(args.target, dtype)
        self.target.to(args.device)
        self.clock = clock_for(self.target.device)
        self.methods = methods.prepare(
            args.methods,
            self.target,
            self.drafter,
            self.assistant,
            args.seed,
            args.drafter_revision,
            self.checkpoints,
        )

    def options(self) -> dict[str, Any]:
        """All that the figures depend on, for the record."""
        from ..benchmarks import records

        args = self.args
        return {
            "target": self.target.config._name_or_path,
            "drafter": None if self.drafter is None else Path(self.drafter).name,
            "drafter_sha256": records.checkpoint_digest(self.drafter),
            "assistant": None if self.assistant is None else Path(self.assistant).name,
            **self._checkpoint_options(),
            "methods": [method.name for method in self.methods],
            "sets": args.sets,
            "per_task": args.per_task,
            "max_new_tokens": args.max_new_tokens,
            "repetitions": args.repetitions,
            "temperature": args.temperature,
            "seed": args.seed,
            "dtype": self.dtype,
            "device": args.device,
            "threads": self.threads,
        }

    def _checkpoint_options(self) -> dict[str, Any]:
        """The drafters of other kinds; nothing where there are none, as in records made before there were any."""
        from ..benchmarks import records

        others = self.checkpoints | ({} if self.assistant is None else {"assistant": self.assistant})
        if not others:
            return {}
        return {
            "checkpoints": {
                kind: {"name": Path(path).name, "sha256": records.checkpoint_digest(path)}
                for kind, path in sorted(others.items())
            }
        }

    def compare(self, output: Path, ends: float | None = None) -> dict[str, Any]:
        """Measures what the output does not have yet, until `time.monotonic()` reaches `ends`, and writes it."""
        from ..benchmarks import datasets, records, runner

        args = self.args
        results = records.ResultFile(output, self.options(), args.overwrite)
        comparison = runner.Comparison(
            self.target,
            self.tokenizer,
            self.methods,
            args.max_new_tokens,
            args.repetitions,
            args.temperature,
            args.seed,
            self.clock,
        )
        data = datasets.checksums(args.sets, self.folder)
        limit = None if ends is None else ends - time.monotonic()
        return runner.measure_all(comparison, self.questions, results, data, limit)


def checkpoints(names: list[str], given: list[list[str]]) -> dict[str, str | Path]:
    """Where the drafters of other kinds are, as far as these methods need them: as given, else those in checkpoints/.

    Raises:
        ValueError: there is no such kind, it is given twice, or a method's drafter is neither given nor there.
    """
    from ..benchmarks.methods import OWN_DRAFTER, own_checkpoint

    kinds = sorted(set(OWN_DRAFTER.values()))
    found: dict[str, str | Path] = {}
    for kind, path in given:
        if kind not in kinds:
            raise ValueError(f"--checkpoint {kind}: there is no such kind of drafter; there are {', '.join(kinds)}")
        if kind in found:
            raise ValueError(f"--checkpoint {kind} is given twice")
        found[kind] = path
    for kind in kinds:
        folder = shipped(kind)
        if kind not in found and folder is not None:
            found[kind] = folder
    return {OWN_DRAFTER[name]: own_checkpoint(name, found) for name in names if name in OWN_DRAFTER}


def recount_agrees(result: dict[str, Any]) -> bool:
    """Whether rounds counted from the traces are those counted from the target's calls, everywhere."""
    return all(figures["recount_agrees"] for group in result["summary"].values() for figures in group.values())


def pin_threads(count: int | None) -> int:
    """As many threads as told, or as cores this process may use, so that runs can be compared."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count or cores)
    return torch.get_num_threads()
