"""The checkpoints that ship: they are the target's, exact, and carry the library's own code."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import moa_spec
from moa_spec.benchmarks.baselines import load_baseline
from moa_spec.benchmarks.methods import independent

ROOT = Path(__file__).resolve().parents[1]
MOA = sorted(path.parent for path in (ROOT / "checkpoints").glob("*/modeling_moa.py"))
SMALL_LM = ROOT / "checkpoints" / "smollm2-135m-instruct-small-lm"
BASELINES = sorted(
    path.parent for path in (ROOT / "checkpoints").glob("*/config.json") if path.parent not in [*MOA, SMALL_LM]
)
CHAT = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
HOW = {"max_new_tokens": 32, "do_sample": False}


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return moa_spec.load_target()


@pytest.mark.parametrize("folder", MOA, ids=lambda path: path.name)
def test_a_checkpoint_carries_the_librarys_code(folder: Path) -> None:
    for name in ("configuration_moa.py", "modeling_moa.py"):
        assert (folder / name).read_bytes() == (ROOT / "modeling_moa" / name).read_bytes(), f"copy {name} anew"


@pytest.mark.parametrize("folder", [*MOA, *BASELINES], ids=lambda path: path.name)
def test_a_shipped_drafter_drafts_and_changes_nothing(
    folder: Path, models: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    target, tokenizer = models
    drafter = (moa_spec.load_drafter if folder in MOA else load_baseline)(folder, target)
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with moa_spec.record_trace() as trace:
        ids = target.generate(
            **inputs, **HOW, assistant_model=drafter, draft_policy="fixed", prompt_lookup_num_tokens=0
        )
    assert torch.equal(ids, target.generate(**inputs, **HOW))
    assert trace.mean_accepted_tokens > 1.2  # an untrained one has 1.0


def test_the_small_language_model_assists_and_changes_nothing(
    models: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    target, tokenizer = models
    small = independent(str(SMALL_LM), target)
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    passes = []
    hook = target.register_forward_hook(lambda *args: passes.append(1))
    ids = target.generate(**inputs, **HOW, assistant_model=small)
    hook.remove()
    assert torch.equal(ids, target.generate(**inputs, **HOW))
    assert len(passes) < ids.shape[1] - inputs["input_ids"].shape[1]  # at least one of its tokens was kept
