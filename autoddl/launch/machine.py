"""Limits of this machine: how many ranks may start here, and how much memory is free."""

import os
from pathlib import Path

from autoddl.core.errors import InputError

__all__ = ["check_ranks", "free_bytes", "most_ranks"]


def free_bytes() -> float:
    """Returns the bytes of memory that processes may still allocate; the kernel's caches count as free."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(words["MemAvailable"].split()[0])


def most_ranks() -> int:
    """Returns how many ranks may start here: four per CPU core, and sixteen on any machine."""
    return max(16, 4 * (os.cpu_count() or 1))


def check_ranks(ranks: int, instead: str) -> None:
    """Raises InputError where `ranks` are more than may start here; `instead` says what to do."""
    most = most_ranks()
    if ranks > most:
        raise InputError(f"{ranks} ranks, and this machine takes {most}: {instead}, like "
                         "examples/clusters/rehearsal-4x1-200.yaml")
