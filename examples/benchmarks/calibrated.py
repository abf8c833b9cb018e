"""Cluster files whose device is as measured here: `calibrated(files, folder, seconds)` yields their copies in `folder`.

A device is measured once (`autoddl measure`, for about `seconds`), with as many ranks running as the first cluster of
that device has: they share the cores, as in a run. What is timed are kernels, no model. Copies of an earlier call serve
again. Links stay as they are written: it is on loopback that the ranks of a measurement meet. What sending takes of a
rank's processor is kept: it is the device's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autoddl.cost_models import load_cluster
from autoddl.measure import measure, stated, with_measured

__all__ = ["calibrated"]


def calibrated(files: Sequence[Path], folder: Path, seconds: float) -> Iterator[Path]:
    """The files themselves if `seconds` is 0 and there is no copy."""
    known: dict[str, dict[str, Any]] = {}
    for path in files:
        cluster, copy = load_cluster(path), folder / path.name
        if not copy.exists() and seconds:
            if cluster.device.name not in known:
                found = measure(path, output=copy, ranks=cluster.size, seconds=seconds)
                assert found is not None, "this process is no rank"
                known[cluster.device.name] = {key: value for key, value in found.measured.items() if key != "links"}
            copy.write_text(with_measured(stated(path.read_text()), cluster, known[cluster.device.name], path.name))
        yield copy if copy.exists() else path
