"""Folders that appear whole or not at all. Knows nothing of what lies in them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_beside(folder: str | Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and vanishes otherwise.

    Args:
        replace: an existing folder is moved away at the end, and deleted once the new one is in its place.

    Raises:
        FileExistsError: the folder exists, and is not to be replaced.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not replace:
        raise FileExistsError(f"{folder} exists: name another folder, or remove it first.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    beside.chmod(0o755)  # mkdtemp's are private
    try:
        yield beside
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.replace(folder, old / folder.name)
            try:
                os.replace(beside, folder)
            except OSError:
                os.replace(old / folder.name, folder)
                raise
            finally:
                shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
