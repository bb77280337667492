"""Checkpoints in and out: push, model card, remote code, data sets, Spaces, the authors' published checkpoints.

`push_drafter` publishes a drafter, `read_published` and `write_published` convert the authors' checkpoints,
`push_answers` and `fetch_answers` move training data. Knows drafters as models, not how they decode or are trained.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..modeling_moa import MoADrafterForCausalLM
    from .answers import fetch_answers, push_answers
    from .published import MisfitError, read_published, write_published
    from .push import push_drafter, write_folder
    from .remote import HubError, Pushed
    from .space import push_space, write_space

__all__ = [
    "HubError",
    "MisfitError",
    "Pushed",
    "fetch_answers",
    "push_answers",
    "push_drafter",
    "push_space",
    "push_to_hub",
    "read_published",
    "write_folder",
    "write_published",
    "write_space",
]

_HOMES = {
    "answers": ["fetch_answers", "push_answers"],
    "published": ["MisfitError", "read_published", "write_published"],
    "push": ["push_drafter", "write_folder"],
    "remote": ["HubError", "Pushed"],
    "space": ["push_space", "write_space"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def push_to_hub(
    drafter: "MoADrafterForCausalLM", repo_id: str, *, commit_message: str | None = None, **options: Any
) -> str:
    """`drafter.push_to_hub(...)`: transformers' method, made to send all that `push_drafter` sends.

    Args:
        options: of `push_drafter`.

    Returns:
        The repository's address.
    """
    from .push import push_drafter

    return push_drafter(drafter, repo_id, commit_message=commit_message, **options).url
