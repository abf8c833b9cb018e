"""Folders of a launcher, in the place for temporary files, which a killed launcher leaves and the next one removes.

    /tmp/autoddl-WHAT-XXXXXXXX/lock     locked while the launcher lives: the kernel gives the lock back when it dies

A folder whose lock can be had belongs to nobody any more. Folders without a lock are left alone.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autoddl.core.processes import signals_raise

__all__ = ["remove_abandoned", "temporary_folder"]

PREFIX, LOCK = "autoddl-", "lock"


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """A new folder, removed at the end; those of launchers that were killed are removed first."""
    remove_abandoned()
    with signals_raise(), tempfile.TemporaryDirectory(prefix=f"{PREFIX}{what}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = os.open(folder / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(folder / f"{LOCK}.new", folder / LOCK)
            yield folder
        finally:
            os.close(lock)


def remove_abandoned() -> None:
    """Removes folders of this user whose launcher is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    """Removes the folder if its lock can be had; BlockingIOError where its launcher lives."""
    lock = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
