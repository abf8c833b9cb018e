"""Where a verb will write is looked at before its work: what was found should not be lost for want of a folder.

    check_file(path)      a file that is written beside its place and then renamed: the folder is there, and takes
                          files; what is no file, like /dev/stdout, takes what is written
    check_opened(path)    a file that is written where it is: that one, where it is there, else as above
    check_folder(path)    a folder that is made, with those above it: the nearest that is there takes files
"""

import os
import stat
import tempfile
from pathlib import Path

from autoddl.core.errors import InputError

__all__ = ["check_file", "check_folder", "check_opened", "write_atomically"]


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


def write_atomically(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, then rename: whoever reads sees the old text or the new one. Who may
    read it stays as it was, and is as for any new file where there was none. A link is followed; what is no file, like
    /dev/stdout, is written to."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, text: str) -> None:
    """Rename a new file with `text` to `path`; where that fails nothing is left of it."""
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
    """Give the file `new` the mode of `path`, and its owner if this process may."""
    if path.exists():
        before = path.stat()
        os.chmod(new, stat.S_IMODE(before.st_mode))
        if os.geteuid() == 0:
            os.chown(new, before.st_uid, before.st_gid)
    else:
        mask = os.umask(0o022)
        os.umask(mask)
        os.chmod(new, 0o666 & ~mask)
