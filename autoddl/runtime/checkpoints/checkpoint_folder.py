"""The folders of checkpoints: what may be replaced, what a save left that was cut off, and how a new one gets its name.

    NAME.writing    is written first; its .metadata comes last, so a folder that has one is whole
    NAME            is what NAME.writing is renamed to, once it is whole
    .replaced       in the new folder, is the one from before, until it is deleted

Only files that a save wrote are ever deleted (`OURS`); those of the user move into the new folder.
"""

import os
import re
import shutil
from pathlib import Path

__all__ = ["METADATA", "clear", "is_left", "is_whole", "places", "put", "refusal", "remove", "rename"]

METADATA, REPLACED = ".metadata", ".replaced"
OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|\.replaced")
"""Names of the files that a save puts into its folder."""


def places(path: str | Path) -> tuple[Path, Path]:
    """The folder itself, with links followed, and the one next to it that is written first."""
    final = Path(path).resolve()
    return final, final.parent / f"{final.name}.writing"


def refusal(path: str | Path) -> str:
    """Why `path` cannot be written, and the way out; "" if it can."""
    try:
        return _taken(path) or _closed(path)
    except OSError as error:
        return f"the checkpoint {path} cannot be written: {error}"


def _taken(path: str | Path) -> str:
    """Why whatever is at `path` must not be replaced; "" if it may."""
    final, writing = places(path)
    if Path.cwd().is_relative_to(final) or final.is_mount():
        return (f"the checkpoint {path} would replace the current folder, one that holds it, or a mount point: give it "
                f"a folder of its own, like {Path(path, 'checkpoint')}")
    if final.exists() and not (is_whole(final) or _empty(final)):
        return (f"{path} is there and is no checkpoint, so a checkpoint must not replace it: give a new folder, or one "
                "that `save` wrote")
    if os.path.lexists(writing) and not is_left(writing):
        return (f"{writing}, where the checkpoint {path} is written first, is there and no save left it: move it away, "
                "or save to another folder")
    return ""


def _closed(path: str | Path) -> str:
    """Why the folders at `path` let nothing be written; "" if they do."""
    final, _ = places(path)
    above = next(folder for folder in final.parents if folder.exists())
    closed = next((folder for folder in (above, final) if folder.exists() and not _open(folder)), None)
    return f"the checkpoint {path} cannot be written: this process may not write into {closed}" if closed else ""


def _open(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def is_whole(folder: Path) -> bool:
    """Whether the folder is a checkpoint; its metadata is written last."""
    return (folder / METADATA).is_file()


def _empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def is_left(folder: Path) -> bool:
    """Whether the folder was left by a save that was cut off."""
    return not folder.is_symlink() and folder.is_dir() and all(OURS.fullmatch(entry.name) for entry in folder.iterdir())


def clear(writing: Path, final: Path) -> str:
    """Removes the rest of a save that was cut off, or names it if it is the only checkpoint; returns the error."""
    try:
        if is_whole(writing) and not is_whole(final):
            put(writing, final)
        if writing.exists():
            shutil.rmtree(writing)
    except OSError as error:
        return f"what a save left in {writing} cannot be taken away ({error}): take it away"
    return ""


def rename(writing: Path, final: Path) -> str:
    """Puts the written folder in its place; returns the error, "" without one."""
    try:
        put(writing, final)
    except OSError as error:
        return str(error)
    return ""


def put(writing: Path, final: Path) -> None:
    """Renames the written folder. The replaced checkpoint goes along, then away, but for files that no save wrote."""
    if _empty(final):
        final.rmdir()
    elif final.exists():
        _give_back(final)
        os.rename(final, writing / REPLACED)
    os.rename(writing, final)
    _give_back(final)


def _give_back(folder: Path) -> None:
    """Deletes the replaced checkpoint, but for files that no save wrote: they move into the new one.

    Where the new one has a file of that name, they are called NAME.replaced.
    """
    replaced = folder / REPLACED
    if replaced.exists():
        for entry in [entry for entry in replaced.iterdir() if not OURS.fullmatch(entry.name)]:
            taken = os.path.lexists(folder / entry.name)
            os.rename(entry, folder / f"{entry.name}{REPLACED * taken}")
        shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Deletes a checkpoint; the user's own files in it stay, and then the folder too. Its metadata goes first."""
    (folder / METADATA).unlink(missing_ok=True)
    for entry in [entry for entry in folder.iterdir() if OURS.fullmatch(entry.name)]:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
