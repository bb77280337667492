"""The demo with one drafter as a Gradio Space: a folder that starts with nothing but its own requirements installed.

Knows which modules the demo needs (those it imports, directly or not), which distributions they need, and what a Space
wants beside them. Does not know what the demo shows: it calls `demo.app.build(target, tokenizer, drafter, gpu=...)`,
which returns the Gradio app; `gpu` decorates whatever runs the models.

    README.md           front matter, and what this is
    app.py              loads target and drafter, starts the demo
    requirements.txt    exact versions
    moa_spec/           the modules that are needed, as they are in the library
    drafter/            the drafter's checkpoint
"""

import ast
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from huggingface_hub import SpaceCardData

from ..modeling_moa import MoADrafterForCausalLM
from .bundle import check_target_name
from .card import TAG, code_licence
from .files import written_beside
from .remote import Pushed, check_repo_id, has_tag, push_folder

PACKAGE = Path(__file__).resolve().parent.parent
_ENTRIES = (
    "__init__.py",
    "demo/app.py",
    "generation/__init__.py",
    "hub/__init__.py",
    "modeling_moa/__init__.py",
    "targets.py",
)  # what the package's own __init__ loads by name
_ALSO_NEEDED = ("jinja2",)  # transformers imports it when a chat template is used
_LAZY = ("hub",)  # its other modules load only when somebody pushes, which a Space does not
_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


def write_space(
    drafter: MoADrafterForCausalLM,
    folder: str | Path,
    repo_id: str,
    *,
    zero_gpu: bool = False,
    target_name: str | None = None,
    package: Path = PACKAGE,
) -> list[Path]:
    """Writes the Space into a folder. One that an earlier call wrote is replaced.

    Args:
        repo_id: NAMESPACE/NAME of the Space.
        zero_gpu: for ZeroGPU hardware; else for a small CPU.
        target_name: of the target, a repository (or, to try the Space here, a folder); else the drafter's own.
        package: where this project's modules lie.

    Returns:
        Its files, sorted.

    Raises:
        FileNotFoundError: the demo is not part of this installation.
        FileExistsError: the folder exists and is something else.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    with written_beside(folder, replace=(folder / "moa_spec" / "demo" / "app.py").is_file()) as beside:
        _write(drafter, beside, repo_id, zero_gpu, target_name, package)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def push_space(
    drafter: MoADrafterForCausalLM,
    repo_id: str,
    *,
    zero_gpu: bool = False,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    force: bool = False,
    package: Path = PACKAGE,
) -> Pushed:
    """Publishes the demo with this drafter as a Space. See `write_space` and, for the rest, `push_drafter`."""
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory(prefix="moa-push-") as temporary:
        _write(drafter, Path(temporary), repo_id, zero_gpu, None, package)
        return push_folder(
            Path(temporary),
            repo_id,
            "space",
            is_ours=has_tag("space", TAG),
            what="a Space of moa-spec",
            owned=("moa_spec/*", "moa_spec/*/*", "drafter/*"),
            private=private,
            revision=revision,
            token=token,
            force=force,
        )


def _write(
    drafter: MoADrafterForCausalLM,
    folder: Path,
    repo_id: str,
    zero_gpu: bool,
    target_name: str | None,
    package: Path,
) -> None:
    if not (package / "demo" / "app.py").is_file():
        raise FileNotFoundError(
            f"This installation has no demo ({package / 'demo' / 'app.py'}): a Space cannot be made."
        )
    if target_name is None:
        check_target_name(drafter.config)
    target = target_name or drafter.config.target_name
    assert target is not None
    modules = needed_modules(package)
    for path in modules:
        destination = folder / "moa_spec" / path.relative_to(package)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
    for parent in {(folder / "moa_spec" / path.relative_to(package)).parent for path in modules}:
        (parent / "__init__.py").touch()
    for path in (package / "demo").rglob("*"):  # styles, examples, pictures
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            destination = folder / "moa_spec" / path.relative_to(package)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)
    drafter.save_pretrained(folder / "drafter")
    requirements = pinned_requirements(modules, zero_gpu)
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
    (folder / "app.py").write_text(_app(target, drafter.config.target_revision, zero_gpu), encoding="utf-8")
    (folder / "README.md").write_text(_card(target, repo_id, zero_gpu), encoding="utf-8")


# -- what the demo needs -----------------------------------------------------------------------------------------------


def needed_modules(package: Path = PACKAGE) -> list[Path]:
    """The files that the demo imports from this project, directly or not, wherever in a file the import stands."""
    found: set[Path] = set()
    queue = [package / entry for entry in _ENTRIES if (package / entry).is_file()]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        if path.parent.name not in _LAZY:
            queue += [needed for node in _imports(path) for needed in _files(node, path)]
    return sorted(found)


def pinned_requirements(modules: list[Path], zero_gpu: bool = False) -> list[str]:
    """Lines of requirements.txt: what these files import from outside, in the versions that are installed here.

    Raises:
        RuntimeError: one of them is not installed.
    """
    names = set(_ALSO_NEEDED)
    for path in modules:
        for node in _imports(path):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif not node.level:
                names.add((node.module or "").split(".")[0])
    names -= {*sys.stdlib_module_names, "moa_spec", "spaces"}
    distributions = metadata.packages_distributions()
    missing = sorted(name for name in names if name not in distributions)
    if missing:
        raise RuntimeError(f"The demo needs {', '.join(missing)}: pip install 'moa-spec[demo]'")
    pins = {distributions[name][0].lower(): metadata.version(distributions[name][0]) for name in names}
    lines = [f"{name}=={version.split('+')[0]}" for name, version in sorted(pins.items())]
    return [*lines, "spaces"] if zero_gpu else [_CPU_INDEX, *lines]  # ZeroGPU has its own version of `spaces`


def _imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """All import statements of a file but those for type checkers only."""
    queue: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            queue += node.orelse
        else:
            queue += ast.iter_child_nodes(node)


def _files(node: ast.Import | ast.ImportFrom, importer: Path) -> list[Path]:
    """The files that a relative import runs."""
    if isinstance(node, ast.Import) or not node.level:
        return []
    base = importer.parents[node.level - 1]
    module = base.joinpath(*(node.module or "").split("."))
    candidates = [module.with_suffix(".py"), module / "__init__.py"]
    candidates += [(module / alias.name).with_suffix(".py") for alias in node.names]
    return [path for path in candidates if path.is_file()]


# -- what a Space needs ------------------------------------------------------------------------------------------------


def _app(target: str, revision: str | None, zero_gpu: bool) -> str:
    before = "import spaces  # before torch\n\n" if zero_gpu else ""
    to_device = 'target = target.to("cuda")\n' if zero_gpu else ""
    return f'''"""The moa-spec demo: one target, one drafter, every drafted token told apart."""

{before}from pathlib import Path

from moa_spec import load_drafter, load_target
from moa_spec.demo.app import build

target, tokenizer = load_target({target!r}, {"bfloat16" if zero_gpu else "float32"!r}, revision={revision!r})
{to_device}drafter = load_drafter(Path(__file__).parent / "drafter", target)
demo = build(target, tokenizer, drafter, gpu={"spaces.GPU" if zero_gpu else None})

if __name__ == "__main__":
    demo.launch()
'''


def _card(target: str, repo_id: str, zero_gpu: bool) -> str:
    data = SpaceCardData(
        title="Mixture-of-Attentions speculative decoding",
        emoji="🪶",
        colorFrom="indigo",
        colorTo="green",
        sdk="gradio",
        sdk_version=metadata.version("gradio"),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        license=code_licence().lower(),
        models=None if os.path.exists(target) else [target],
        tags=[TAG, "speculative-decoding"],
        short_description="See which tokens were drafted, kept, thrown away",
        suggested_hardware="zero-a10g" if zero_gpu else "cpu-basic",
    )
    return f"""---
{data}
---

# {repo_id.split("/")[1]}

Speculative decoding with a Mixture-of-Attentions drafter ([arXiv 2410.03804](https://arxiv.org/abs/2410.03804)) on
`{target}`: every token is marked by who wrote it, beside plain decoding on the same machine.
"""
