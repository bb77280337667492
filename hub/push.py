"""`moa push` and `drafter.push_to_hub`: a checkpoint becomes a repository that needs nothing else of us.

Knows the order of the steps: load, write the folder, look at it or send it.
"""

import tempfile
from pathlib import Path

from ..modeling_moa import MoADrafterConfig, MoADrafterForCausalLM
from .bundle import write_bundle
from .files import written_beside
from .remote import Pushed, check_repo_id, is_drafter, push_folder

OWNED = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "custom_generate/*",
    "figures/*.svg",
    "training_record.json",
    "benchmark*.json",
)
"""Files of earlier pushes that a later one removes when it has none of that name. Whatever else lies there stays."""


def push_drafter(
    drafter: MoADrafterForCausalLM,
    repo_id: str,
    *,
    records: str | Path | None = None,
    standalone: bool = False,
    target_name: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    force: bool = False,
    commit_message: str | None = None,
) -> Pushed:
    """Publishes a drafter: weights, code to load it and decode with it, records, figures, model card. In one commit.

    Args:
        drafter: attached when `standalone`.
        repo_id: NAMESPACE/NAME.
        records: folder whose training record and benchmark results go into the repository and its card.
        standalone: with a copy of the parts that the target lends, for clients without the target.
        target_name: of the target on the Hub, where the drafter's configuration has another name.
        private, revision, token: as in `huggingface_hub`.
        force: overwrite a repository that is not a MoA drafter.

    Raises:
        ValueError: a bad name, or a target that nobody else could find.
        HubError: the Hub refused or failed; nothing was changed there.
    """
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory(prefix="moa-push-") as temporary:
        folder = Path(temporary)
        _write(drafter, folder, repo_id, records, standalone, target_name)
        return push_folder(
            folder,
            repo_id,
            "model",
            is_ours=is_drafter,
            what="a MoA drafter",
            owned=OWNED,
            private=private,
            revision=revision,
            token=token,
            force=force,
            message=commit_message,
        )


def write_folder(
    drafter: MoADrafterForCausalLM,
    folder: str | Path,
    repo_id: str,
    *,
    records: str | Path | None = None,
    standalone: bool = False,
    target_name: str | None = None,
) -> list[Path]:
    """What `push_drafter` would send, written to a folder. A folder that an earlier call wrote is replaced.

    Returns:
        Its files, sorted.

    Raises:
        FileExistsError: the folder exists and is something else.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    with written_beside(folder, replace=(folder / "custom_generate" / "generate.py").is_file()) as beside:
        _write(drafter, beside, repo_id, records, standalone, target_name)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write(
    drafter: MoADrafterForCausalLM,
    folder: Path,
    repo_id: str,
    records: str | Path | None,
    standalone: bool,
    target_name: str | None,
) -> None:
    before = drafter.config.target_name
    drafter.config.target_name = target_name or before
    try:
        write_bundle(drafter, folder, repo_id, Path(records) if records else None, standalone)
    finally:
        drafter.config.target_name = before


def load_checkpoint(path: str | Path) -> MoADrafterForCausalLM:
    """A checkpoint of this project, checked to be whole.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is no MoA drafter's, or damaged.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it holds no config.json. Train one with `moa train`.")
    config = MoADrafterConfig.get_config_dict(folder)[0]
    if config.get("model_type") != MoADrafterConfig.model_type:
        raise ValueError(f"{folder} holds a model of type {config.get('model_type')!r}, not a MoA drafter.")
    if not list(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no *.safetensors; other formats are not published.")
    return MoADrafterForCausalLM.from_pretrained(folder, use_safetensors=True)
