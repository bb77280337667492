"""Puts a folder into a repository on the Hub, in one commit, and takes care of what is there already.

Knows the Hub's client and its errors. Does not know what the folder holds: a drafter, answers, or a Space.

A push either changes the repository in one commit or not at all. What an interrupted one had uploaded is not sent
again: the Hub keeps large files by their hash, and the client asks before it sends.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NoReturn

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

try:  # what the client speaks HTTP with, from 2.4 on
    import httpx2 as http_client
except ImportError:
    import httpx as http_client  # type: ignore[no-redef]

RepoType = Literal["model", "dataset", "space"]


class HubError(RuntimeError):
    """The Hub could not do what was asked; the message says why, what is there now, and what to do."""


@dataclass(frozen=True)
class Pushed:
    """What a push did. `changed` is False when the repository held exactly this already."""

    url: str
    commit: str
    changed: bool


def push_folder(
    folder: Path,
    repo_id: str,
    repo_type: RepoType,
    *,
    is_ours: Callable[[HfApi, str, str], bool],
    what: str,
    owned: tuple[str, ...] = (),
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    force: bool = False,
    message: str | None = None,
) -> Pushed:
    """Makes a repository hold this folder.

    Args:
        repo_id: NAMESPACE/NAME; created when it does not exist.
        is_ours: (api, repository, commit) -> whether what is there may be overwritten.
        what: what `is_ours` looks for, such as "a MoA drafter".
        owned: patterns of files that earlier pushes wrote; those that the folder lacks are deleted in the same commit.
        private: of a new repository; None leaves it to the namespace's default.
        revision: a branch, made from the default one when it does not exist.
        token: as in `huggingface_hub`; None takes the one that is logged in.
        force: overwrite whatever is there.

    Raises:
        ValueError: the repository's name is none, or the card's front matter is refused.
        HubError: anything else; the repository is then as it was.
    """
    check_repo_id(repo_id)
    if token is None and get_token() is None:
        raise HubError("You are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN. Nothing was pushed.")
    api = HfApi(token=token, library_name="moa-spec")
    try:
        extra: dict[str, Any] = {"space_sdk": "gradio"} if repo_type == "space" else {}
        files, commit = _existing(api, repo_id, repo_type)
        if commit is None:
            api.create_repo(repo_id, repo_type=repo_type, private=private, exist_ok=True, **extra)
            files, commit = _existing(api, repo_id, repo_type)
        elif not force and set(files) - {".gitattributes"} and not is_ours(api, repo_id, commit):
            raise HubError(
                f"{repo_id} exists and is not {what}: nothing was changed. Choose another name, or overwrite it with "
                "--force (force=True)."
            )
        if revision is not None:
            if not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
            info = api.repo_info(repo_id, repo_type=repo_type, revision=revision)
            files, commit = _file_names(info), info.sha
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        stale = [name for name in files if name not in names and _matches(name, owned)]
        operations: list[Any] = [CommitOperationAdd(name, path) for name, path in names.items()]
        operations += [CommitOperationDelete(name) for name in stale]
        done = api.create_commit(
            repo_id,
            operations,
            commit_message=message or f"Upload {what} with moa-spec",
            repo_type=repo_type,
            revision=revision,
            parent_commit=commit,
        )
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        explain(error, repo_id)
    except (http_client.HTTPError, OSError, RuntimeError) as error:
        if isinstance(error, HubError):
            raise
        explain(error, repo_id)
    assert done.oid is not None
    return Pushed(str(done.repo_url), done.oid, done.oid != commit)


def check_repo_id(repo_id: str) -> None:
    """
    Raises:
        ValueError: it is not NAMESPACE/NAME as the Hub takes it.
    """
    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise HFValidationError("both parts are needed")
    except HFValidationError as error:
        raise ValueError(
            f"{repo_id!r} is not the name of a repository. It must be NAMESPACE/NAME, of letters, digits, '-', '_' and "
            f"'.', at most 96 characters. ({error})"
        ) from error


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """As a shell would: a star stays within one folder."""
    return any(name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns)


def _existing(api: HfApi, repo_id: str, repo_type: RepoType) -> tuple[list[str], str | None]:
    """Files and commit of the default branch; no commit when there is no such repository."""
    try:
        info = api.repo_info(repo_id, repo_type=repo_type)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 404:
            return [], None
        raise
    return _file_names(info), info.sha


def _file_names(info: Any) -> list[str]:
    return [file.rfilename for file in info.siblings or []]


def is_drafter(api: HfApi, repo_id: str, commit: str) -> bool:
    """Whether a model repository holds a MoA drafter."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = api.hf_hub_download(repo_id, "config.json", revision=commit, cache_dir=folder)
            settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (EntryNotFoundError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("model_type") == "moa_drafter"


def has_tag(repo_type: RepoType, tag: str) -> Callable[[HfApi, str, str], bool]:
    """For `is_ours`: whether the card of a repository carries a tag."""

    def check(api: HfApi, repo_id: str, commit: str) -> bool:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = api.hf_hub_download(repo_id, "README.md", repo_type=repo_type, revision=commit, cache_dir=folder)
                card = RepoCard.load(path, ignore_metadata_errors=True)
        except (EntryNotFoundError, ValueError):
            return False
        return tag in (card.data.to_dict().get("tags") or [])

    return check


def explain(error: Exception, repo_id: str) -> NoReturn:
    """Says in one line what went wrong and what to do. The client's own message holds no token; requests are not shown.

    Raises:
        HubError: always.
    """
    while isinstance(error.__cause__, Exception) and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    response = error.response if isinstance(error, HfHubHTTPError) else None
    status = response.status_code if response is not None else None
    again = "Nothing was changed there; run the same command again: what was uploaded is not sent twice."
    unknown = "Run the same command again: what arrived is not sent twice, and the same content changes nothing."
    says = _server_message(error)
    if status == 401:
        text = f"The Hub does not accept your token for {repo_id}: run `hf auth login` (or set HF_TOKEN)."
    elif status == 403:
        text = f"Your token may not write to {repo_id}: use one with write access to that namespace."
    elif isinstance(error, RevisionNotFoundError):
        text = f"{repo_id} has no such revision."
    elif status == 404:
        text = f"{repo_id} does not exist, or your token may not see it."
    elif status in (409, 412):
        text = f"{repo_id} was changed by somebody else meanwhile. {again}"
    elif status == 429:
        text = f"The Hub refuses more requests for a while (rate limit). {again} Wait a few minutes first."
    elif status is not None and status >= 500:
        text = f"The Hub had an error of its own ({status}). {unknown}"
    elif isinstance(error, OfflineModeIsEnabled):
        text = "HF_HUB_OFFLINE is set: unset it to push."
    elif status is None:
        text = f"The connection to the Hub failed ({type(error).__name__}). {unknown}"
    else:
        text = f"The Hub refused the push to {repo_id} ({status})."
    raise HubError(f"{text}{f' It says: {says}' if says else ''}") from error


def _server_message(error: Exception) -> str:
    message = error.server_message if isinstance(error, HfHubHTTPError) else None
    return " ".join((message or "").split())[:300]
