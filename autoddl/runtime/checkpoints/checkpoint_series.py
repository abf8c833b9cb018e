"""A folder of checkpoints, one for each step that was kept, named so that they sort by their steps.

    FOLDER/step-00000100            a whole checkpoint: parameters, optimizer, other states after 100 steps
    FOLDER/step-00000200.writing    one that is being written, or was when the process died

A folder gets its name by one rename, after its metadata was written, which comes last. So what has a name is whole, and
a crash at any moment leaves the checkpoints from before as they were. What a crash left is removed by `settle`.

All ranks write into one folder. On several machines it lies on a file system that they share.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autoddl.core.errors import InputError
from autoddl.core.files import check_folder
from autoddl.runtime.checkpoints.checkpoint_folder import clear, is_left, is_whole, places, remove

__all__ = ["check_series", "kept_steps", "path_of", "prune", "settle"]

NAME = re.compile(r"step-(\d{8,})(\.writing)?")


def path_of(folder: str | Path, step: int) -> Path:
    """The checkpoint after `step` steps."""
    return Path(folder, f"step-{step:08d}")


def kept_steps(folder: str | Path) -> tuple[int, ...]:
    """The steps of which the folder has a whole checkpoint, ascending; () where there is no such folder."""
    return tuple(sorted(step for step, path in _entries(folder) if is_whole(path) and path.suffix != ".writing"))


def _entries(folder: str | Path) -> Iterator[tuple[int, Path]]:
    """Step and place of every checkpoint of the folder, whole or not."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in Path(folder).iterdir():
            if (found := NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                yield int(found[1]), path


def check_series(folder: str | Path, resuming: bool) -> None:
    """Raises InputError unless checkpoints may be written into `folder`: before training, so that none is lost.

    A folder that has checkpoints is taken where they are gone on from (`resuming`), and refused otherwise."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InputError(f"{folder} is a file, and checkpoints go into a folder: give another place")
    check_folder(path / "step")
    if (kept := kept_steps(folder)) and not resuming:
        raise InputError(f"{folder} has checkpoints up to step {kept[-1]}: go on from there (--resume, or "
                         "recovery.resume), or give another folder")


def settle(folder: str | Path) -> str:
    """Removes what a crash left in the folder; what was whole and had no name yet gets it. Returns the error, or ""."""
    for step, path in [*_entries(folder)]:
        final = path_of(folder, step)
        if path.suffix == ".writing":
            if why := clear(path, places(final)[0]) if is_left(path) else "":
                return why
        elif not is_whole(path) and is_left(path):
            try:
                remove(path)
            except OSError as error:
                return f"what a save left in {path} cannot be taken away ({error}): take it away"
    return ""


def prune(folder: str | Path, keep: int) -> None:
    """Deletes all checkpoints but the last `keep`."""
    for step in kept_steps(folder)[:-keep]:
        with suppress(OSError):  # it is tried again after the next save
            remove(path_of(folder, step))
