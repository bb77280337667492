"""What tests of the Hub share: a client that talks to the local one, a drafter to push, records to make cards from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from fake_hub import FakeHub
from transformers import PreTrainedModel

from moa_spec.modeling_moa import MoADrafterForCausalLM

TARGET = "someone/tiny-target"
TOKEN = "hf_alice"


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[FakeHub]:
    """A Hub that `huggingface_hub` in this process talks to, logged in as alice, without waits between retries."""
    import huggingface_hub.constants as constants
    import huggingface_hub.utils._http as http

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(http.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        assert not hub.strange, hub.strange


def models(**options: Any) -> tuple[PreTrainedModel, MoADrafterForCausalLM]:
    """A tiny target and a drafter for it that knows its name."""
    target = tiny.tiny_target()
    target.config._name_or_path = TARGET
    return target, tiny.tiny_drafter(target, **options)


def write_records(folder: Path) -> None:
    """A training record and a benchmark result as `moa train` and `moa bench run` write them, with made-up numbers."""
    training = {
        "recipe": {"max_length": 768},
        "data": [{"file": "answers.jsonl", "sha256": "ab" * 32, "license": "apache-2.0"}],
        "training_rows": 1234,
        "training_answer_tokens": 567_890,
        "steps": 4321,
        "epochs": 3.0,
        "hours_of_last_session": 1.25,
        "final_evaluation": {"eval_loss": 1.5},
        "log": [
            {"loss": 3.0, "step": 1},
            {"loss": 2.0, "step": 2},
            {"eval_loss": 2.1, "step": 2},
            {"loss": 1, "step": 3},
        ],
        "command": "train --data answers.jsonl",
        "machine": "a processor, 2 threads",
        "git_revision": "0123abc",
    }
    figures = {
        "questions": 8,
        "tau": 1.75,
        "conditional_acceptance": [0.5, 0.4, 0.3],
        "speedup": [1.21, 1.1, 1.3],
        "identical_rate": 1.0,
    }
    result = {
        "format": 1,
        "options": {"dtype": "float32", "temperature": 0},
        "summary": {
            group: {"plain": figures | {"tau": 1.0}, "moa": figures, "moa-auto": figures | {"tau": 2.5}}
            for group in ("spec_bench/qa", "spec_bench")
        },
        "sessions": [
            {
                "started": "2026-01-01T00:00:00Z",
                "machine": {"processor": "Test CPU", "cores": 2, "gpu": None},
                "threads": 2,
                "versions": {"torch": "2.13.0"},
                "command": "moa bench run --output benchmark.json",
            }
        ],
        "questions": [],
    }
    (folder / "training_record.json").write_text(json.dumps(training))
    (folder / "benchmark.json").write_text(json.dumps(result))
