"""What this machine takes: how many ranks, and how much memory it still has to give."""

import os
from pathlib import Path

from autoddl.core.errors import InputError

__all__ = ["check_ranks", "free_bytes", "most_ranks"]


def free_bytes() -> float:
    """Memory that processes may still take, caches included."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(words["MemAvailable"].split()[0])


def most_ranks() -> int:
    """Ranks that may start here: four a processor, and sixteen on any machine."""
    return max(16, 4 * (os.cpu_count() or 1))


def check_ranks(ranks: int, instead: str) -> None:
    """InputError where so many ranks are more than this machine takes; `instead` says what to do."""
    most = most_ranks()
    if ranks > most:
        raise InputError(f"{ranks} ranks, and this machine takes {most}: {instead}, like "
                         "examples/clusters/rehearsal-4x1-200.yaml")
