"""Cluster files as measured here: `calibrated(files, folder, seconds)` yields their copies in `folder`.

Each is measured as a rehearsal runs (`autoddl measure --shaped`, for about `seconds`): all ranks at once, which share
the cores, on links as slow as the cluster's. What is timed are kernels and collectives, no model. Shaped links stay as
they are written. Copies of an earlier call serve again.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from autoddl.calibrate.measure import measure

__all__ = ["calibrated"]


def calibrated(files: Sequence[Path], folder: Path, seconds: float) -> Iterator[Path]:
    """The files themselves if `seconds` is 0 and there is no copy."""
    for path in files:
        copy = folder / path.name
        if not copy.exists() and seconds:
            measure(path, output=copy, seconds=seconds, shaped=True)
        yield copy if copy.exists() else path
