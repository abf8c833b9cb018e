"""How much memory this machine still has to give."""

from pathlib import Path

__all__ = ["free_bytes"]


def free_bytes() -> float:
    """Memory that processes may still take, caches included."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024.0 * int(words["MemAvailable"].split()[0])
