"""The Space: assembled, complete, and started from a clean folder. The demo's place is taken by a stand-in."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub, front_matter_errors
from hub_setting import TARGET, local_hub, models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import moa_spec
from moa_spec.hub.remote import HubError
from moa_spec.hub.space import PACKAGE, needed_modules, pinned_requirements, push_space, write_space

DEMO = '''
"""Stands in for the demo: decodes once instead of showing a page."""

import json

import torch

from ..generation import record_trace


class Page:
    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter

    def launch(self):
        import moa_spec

        ids = torch.tensor([[5, 9, 17]])
        with record_trace() as trace:
            drafted = self.target.generate(ids, assistant_model=self.drafter, max_new_tokens=8, do_sample=False)
        plain = self.target.generate(ids, max_new_tokens=8, do_sample=False)
        print(json.dumps([moa_spec.__file__, torch.equal(plain, drafted), trace.new_tokens]))


def build(target, tokenizer, drafter, gpu=None):
    return Page(target, drafter)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """This project's modules with a stand-in for the demo."""
    package = tmp_path / "package"
    for name in ("generation", "hub", "modeling_moa", "serving", "benchmarks"):
        shutil.copytree(PACKAGE / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "targets.py", "py.typed"):
        shutil.copyfile(PACKAGE / name, package / name)
    (package / "demo").mkdir()
    (package / "demo" / "__init__.py").touch()
    (package / "demo" / "app.py").write_text(DEMO)
    (package / "demo" / "style.css").write_text("p {}")
    return package


@pytest.mark.parametrize("zero_gpu", [False, True], ids=["cpu", "zero_gpu"])
def test_folder(tmp_path: Path, package: Path, zero_gpu: bool) -> None:
    files = write_space(models()[1], tmp_path / "space", "alice/demo", zero_gpu=zero_gpu, package=package)
    names = {path.relative_to(tmp_path / "space").as_posix() for path in files}
    assert {"README.md", "app.py", "requirements.txt", "drafter/model.safetensors", "moa_spec/demo/style.css"} <= names
    assert "moa_spec/generation/loop.py" in names
    assert not any(name.startswith(("moa_spec/benchmarks", "moa_spec/serving")) for name in names)
    for path in files:
        if path.suffix == ".py" and "moa_spec" in path.parts and path.stat().st_size:
            assert path.read_bytes() == (package / path.relative_to(tmp_path / "space" / "moa_spec")).read_bytes()
    card = (tmp_path / "space" / "README.md").read_text()
    assert front_matter_errors(card, "space") == []
    assert f"- {TARGET}" in card
    app = (tmp_path / "space" / "app.py").read_text()
    ast.parse(app)
    assert ("spaces.GPU" in app) is zero_gpu
    if zero_gpu:
        assert app.index("import spaces") < app.index("moa_spec import")
    lines = (tmp_path / "space" / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("--") and line != "spaces"]
    assert all(line.count("==") == 1 and "+" not in line for line in pinned)
    assert {"torch", "transformers", "safetensors", "jinja2"} <= {line.split("==")[0] for line in pinned}
    assert ("spaces" in lines) is zero_gpu


def test_starts_from_a_clean_folder(tmp_path: Path, package: Path) -> None:
    """With its own modules only: the installed project is out of reach."""
    target, drafter = models()
    target.save_pretrained(tmp_path / "target")
    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "target")
    space = tmp_path / "space"
    write_space(drafter, space, "alice/demo", target_name=str(tmp_path / "target"), package=package)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=space, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    where, identical, tokens = json.loads(done.stdout.splitlines()[-1])
    assert Path(where) == space / "moa_spec" / "__init__.py"
    assert identical
    assert tokens == 8


def test_requirements_name_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import os\nimport no_such_thing\nfrom . import two\n")
    with pytest.raises(RuntimeError, match="needs no_such_thing"):
        pinned_requirements([tmp_path / "one.py"])


def test_imports_are_followed_wherever_they_stand(package: Path) -> None:
    (package / "serving" / "other.py").write_text("X = 1\n")
    (package / "demo" / "view.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..benchmarks import records\n"
        "def show():\n    from ..serving import other\n"
    )
    (package / "demo" / "app.py").write_text("from .view import show\n")
    names = {path.relative_to(package).as_posix() for path in needed_modules(package)}
    assert {"demo/view.py", "serving/other.py", "serving/__init__.py"} <= names
    assert "benchmarks/records.py" not in names


def test_push(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: Path) -> None:
    drafter = models()[1]
    with local_hub(monkeypatch, tmp_path) as hub:
        first = push_space(drafter, "alice/demo", private=True, package=package)
        assert first.url == f"{hub.url}/spaces/alice/demo"
        assert hub.repositories["space", "alice/demo"].private
        assert not push_space(drafter, "alice/demo", package=package).changed
        (package / "generation" / "stale.py").write_text("")
        _someone_elses_space(hub)
        with pytest.raises(HubError, match="not a Space of moa-spec"):
            push_space(drafter, "alice/theirs", package=package)


def _someone_elses_space(hub: FakeHub) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo("alice/theirs", repo_type="space", space_sdk="gradio")
    api.upload_file(path_or_fileobj=b"x = 1\n", path_in_repo="app.py", repo_id="alice/theirs", repo_type="space")


def test_without_a_demo(tmp_path: Path, package: Path) -> None:
    (package / "demo" / "app.py").unlink()
    with pytest.raises(FileNotFoundError, match="no demo"):
        write_space(models()[1], tmp_path / "space", "alice/demo", package=package)
    assert not (tmp_path / "space").exists()
    assert moa_spec.__file__ == str(PACKAGE / "__init__.py")
