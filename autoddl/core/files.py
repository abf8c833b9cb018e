"""Writing of files: checked before the work that fills them, and never half done.

    write_atomically(path, text)    writes a new file next to `path`, then renames it
    check_file(path)                whether that will work: the folder exists and takes files
    check_in_place(path)            the check for a file that is opened and written where it is
    check_folder(path)              the check for a folder that will be made, with those above it

A long command checks its outputs first, so that its result is not lost for want of a folder. The checks raise
InputError with the way out; None stands for an output that was not asked for, and passes. A path that is not a regular
file, like /dev/stdout, is written in place.
"""

import os
import stat
import tempfile
from pathlib import Path

from autoddl.core.errors import InputError

__all__ = ["check_file", "check_folder", "check_in_place", "write_atomically"]


def check_file(path: Path | None) -> None:
    """Raise InputError where `write_atomically` could not write `path`."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        return check_in_place(path)
    _try(Path(os.path.realpath(path)).parent, path)


def check_in_place(path: Path | None) -> None:
    """Raise InputError where `path` could not be opened and written in place."""
    if path is None or not path.exists() or path.is_dir():
        return check_file(path)
    if not os.access(path, os.W_OK):
        raise InputError(f"cannot write {path}: Permission denied; give another place")


def check_folder(path: Path | None) -> None:
    """Raise InputError where the folder `path` could not be made."""
    if path is None:
        return
    nearest = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    _try(nearest, path)


def _try(folder: Path, path: Path) -> None:
    """Raise InputError, about `path`, where no file can be made in `folder`: one is made and removed at once."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=path.name):
            pass
    except OSError as error:
        way_out = "give another place" if folder.exists() else f"make the folder {folder}, or give another place"
        raise InputError(f"cannot write {path}: {error.strerror or error}; {way_out}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file next to `path`, then rename it: readers see the old text or the new one.

    The file keeps its mode and, where this process may set it, its owner; a new file gets the usual mode. Links are
    followed. Raises InputError where the system refuses.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, text: str) -> None:
    """Rename a new file with `text` to `path`; where that fails, remove the new file."""
    number, new = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        _as_before(new, path)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def _as_before(new: str, path: Path) -> None:
    """Give the file `new` the mode of `path`, and its owner if this process may; else the mode of a new file."""
    if path.exists():
        before = path.stat()
        os.chmod(new, stat.S_IMODE(before.st_mode))
        if os.geteuid() == 0:
            os.chown(new, before.st_uid, before.st_gid)
    else:
        mask = os.umask(0o022)
        os.umask(mask)
        os.chmod(new, 0o666 & ~mask)
