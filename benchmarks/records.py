"""Results on disk: appended question by question, so that a killed run goes on, and written whole when it is done.

Knows files, the machine and the versions. Does not know what the results say. Beside `NAME.json`, the result,
`NAME.jsonl` holds what a run in progress has so far: a first line with the run's options, a line for every time it was
started, and a line for every question.
"""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
EXTENDABLE = "per_task"
"""The option that may grow when a run goes on: a larger choice of questions contains the smaller one."""

_PACKAGES = ("moa-spec", "torch", "transformers", "tokenizers", "numpy")


class ResultError(ValueError):
    """A result file cannot be read or continued; the message says why and what to do."""


class ResultFile:
    """The results of one run.

    Args:
        path: of the result, NAME.json.
        options: everything that the figures depend on, as JSON would give it back.
        overwrite: begin anew whatever is there.

    Attributes:
        questions: what has been measured, this time or before, in order.
        sessions: one entry for every time the run was started, see `environment`.

    Raises:
        ResultError: what is there was measured with other options, or is not a result.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any], overwrite: bool = False):
        self.path = Path(path)
        if self.path.suffix != ".json":
            raise ResultError(f"A result is a .json file, not {self.path}")
        self.partial = self.path.with_suffix(".jsonl")
        self.options = dict(options)
        self.questions: list[dict[str, Any]] = []
        self.sessions: list[dict[str, Any]] = []
        if overwrite:
            self.partial.unlink(missing_ok=True)
        elif self.path.exists():
            finished = read_result(self.path)
            self._check(self.path, finished["options"])
            self.questions, self.sessions = finished["questions"], finished["sessions"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists():
            self._continue()

    def _check(self, path: Path, before: Mapping[str, Any]) -> None:
        had, wanted = before.get(EXTENDABLE), self.options.get(EXTENDABLE)
        if wanted is not None and (had is None or had > wanted):
            raise ResultError(
                f"{path} already has {'all' if had is None else had} questions per task, more than {wanted}: give "
                "another --output, or --overwrite"
            )
        names = sorted((set(before) | set(self.options)) - {EXTENDABLE})
        missing = object()
        for name in names:
            old, new = before.get(name, missing), self.options.get(name, missing)
            if old != new:
                raise ResultError(
                    f"{path} was measured with {name} = {'nothing' if old is missing else json.dumps(old)}, now it is "
                    f"{'nothing' if new is missing else json.dumps(new)}: give another --output, or --overwrite"
                )

    def _continue(self) -> None:
        """Takes in what an interrupted run has written. A last line that was cut short is removed."""
        content = self.partial.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with open(self.partial, "r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.decode().splitlines(), start=1):
            try:
                row = json.loads(line)
                kind, value = next(iter(row.items()))
            except (json.JSONDecodeError, AttributeError, StopIteration):
                raise ResultError(f"{self.partial}, line {number} is damaged: remove it, or --overwrite") from None
            if kind == "options":
                self._check(self.partial, value)
            elif kind == "session":
                self.sessions.append(value)
            elif kind == "question":
                self.questions.append(value)

    def begin(self, session: Mapping[str, Any]) -> None:
        """Notes that the run was started (again)."""
        if not self.partial.exists():
            self._append("options", self.options)
        self.sessions.append(dict(session))
        self._append("session", self.sessions[-1])

    def add(self, question: Mapping[str, Any]) -> None:
        """Keeps one question's results for good."""
        self.questions.append(dict(question))
        self._append("question", self.questions[-1])

    def _append(self, kind: str, value: Mapping[str, Any]) -> None:
        with open(self.partial, "a", encoding="utf-8") as file:
            file.write(json.dumps({kind: value}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, **more: Any) -> dict[str, Any]:
        """Writes the result beside and renames it; the lines of the run in progress are then in it, and go.

        Returns:
            The result: `more`, and what was kept.
        """
        result = {
            "format": FORMAT,
            "options": self.options,
            **more,
            "sessions": self.sessions,
            "questions": self.questions,
        }
        write_json(self.path, result)
        self.partial.unlink(missing_ok=True)
        return result


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Writes beside and renames. Lists of numbers stay on one line, so that a result can be read and compared."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as beside:
        try:
            beside.write(_layout(value) + "\n")
            beside.close()
            os.chmod(beside.name, 0o644)
            os.replace(beside.name, path)
        finally:
            Path(beside.name).unlink(missing_ok=True)


def _layout(value: Any, indent: str = "") -> str:
    """JSON with a line for every entry of an object; whatever holds no object stays on one line."""
    deeper = indent + " "
    if isinstance(value, Mapping) and value:
        inside = ",\n".join(f"{deeper}{json.dumps(str(key))}: {_layout(entry, deeper)}" for key, entry in value.items())
        return f"{{\n{inside}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, (Mapping, list)) for entry in value):
        inside = ",\n".join(deeper + _layout(entry, deeper) for entry in value)
        return f"[\n{inside}\n{indent}]"
    return json.dumps(value)


def read_result(path: str | Path) -> dict[str, Any]:
    """
    Raises:
        ResultError: there is no result there, or one of another format.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultError(f"There is no result {path}: `moa bench run --output {path}` writes one") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} is not a result: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ResultError(f"{path} is not a result of `moa bench` in format {FORMAT}")
    return result


def environment() -> dict[str, Any]:
    """What ran, where, when, and how busy the machine was with other things."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_revision": git_revision(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "versions": {name: metadata.version(name) for name in _PACKAGES} | {"python": platform.python_version()},
    }


def git_revision() -> str | None:
    """Of this package's checkout, with "+changes" where files differ from it; None outside of one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        revision, changes = (
            subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.strip() + ("+changes" if changes.strip() else "")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and GPU."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "system": platform.platform(),
        "processor": processor,
        "cores": cores,
        "memory": memory,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def checkpoint_digest(path: str | Path | None) -> str | None:
    """SHA-256 of a local checkpoint's weights, so that another drafter of the same name is not taken for this one."""
    weights = Path(path) / "model.safetensors" if path else None
    if weights is None or not weights.is_file():
        return None
    with open(weights, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
