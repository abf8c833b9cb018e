"""Where a verb will write is looked at before its work: what was found should not be lost for want of a folder.

    check_file(path)      a file that is written beside its place and then renamed: the folder is there, and takes
                          files; what is no file, like /dev/stdout, takes what is written
    check_opened(path)    a file that is written where it is: that one, where it is there, else as above
    check_folder(path)    a folder that is made, with those above it: the nearest that is there takes files
"""

import os
import tempfile
from pathlib import Path

from autoddl.errors import InputError

__all__ = ["check_file", "check_folder", "check_opened"]


def check_file(path: Path | None) -> None:
    """InputError where `path` could not be written; None is written nowhere."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        return check_opened(path)
    _try(Path(os.path.realpath(path)).parent, path)


def check_opened(path: Path | None) -> None:
    """The same, where it is not renamed."""
    if path is None or not path.exists() or path.is_dir():
        return check_file(path)
    if not os.access(path, os.W_OK):
        raise InputError(f"cannot write {path}: Permission denied; give another place")


def check_folder(path: Path | None) -> None:
    """InputError where the folder `path` could not be made; None is made nowhere."""
    if path is None:
        return
    nearest = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    _try(nearest, path)


def _try(folder: Path, path: Path) -> None:
    """Make a file in `folder`, which is gone at once."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=path.name):
            pass
    except OSError as error:
        way_out = "give another place" if folder.exists() else f"make the folder {folder}, or give another place"
        raise InputError(f"cannot write {path}: {error.strerror or error}; {way_out}") from None
