"""Measures the device and the links of a cluster on this machine, and writes the results into the cluster's file.

    alone            the kernels of the device, in one process of `threads` threads
    ranks = N        the same in N processes at once, which share cores and memory; then the links of every level
    shaped           ranks in network namespaces, on links as slow as the cluster's, as in a rehearsal
    under torchrun   the same by the ranks that torchrun started

The file receives only measured numbers. Nothing is invented for another device, and a kind of link that does not exist
here is not timed. Ranks are started by `launch`, as in a run of a plan.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autoddl.calibrate.request import Request
from autoddl.core.errors import InputError
from autoddl.core.files import write_atomically
from autoddl.core.processes import is_rank
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.launch.launch import launch, python_module
from autoddl.launch.machine import check_ranks
from autoddl.launch.places import placed
from autoddl.launch.temporary import temporary_folder

__all__ = ["SECONDS", "Measured", "measure", "strip_measured", "with_measured"]

SECONDS = 140.0
"""Seconds that measuring takes by default."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """The block `measured:` that was written, and the path of the file."""

    path: str
    measured: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return {"path": self.path, "measured": dict(self.measured)}


def measure(path: str | Path, *, output: str | Path | None = None, ranks: int = 1, threads: int = 1,
            seconds: float = SECONDS, shaped: bool = False, small: bool = False, progress: Progress | None = None
            ) -> Measured | None:
    """Measures the cluster of file `path` and writes it to `output`, by default the same file.

    Measuring takes about `seconds`, with `threads` threads in each of `ranks` processes. With `shaped` there are as
    many ranks as the cluster has, on links as slow as it says; `small` takes small grids, for tests. Returns None on
    ranks other than the first.

    Raises InputError where this machine does not have the cluster's device, or where `ranks` is neither 1 nor the
    cluster's number of devices.
    """
    text = strip_measured(_read(Path(path)))
    cluster = parse_cluster(text, str(path))
    ranks = cluster.size if shaped and ranks == 1 else ranks
    world, here = (int(os.environ.get(name, "1")) if is_rank() else ranks
                   for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    request = Request(text, str(path), seconds, threads, world, here, shaped, small)
    _check(cluster, request)
    found = _join(request, progress) if is_rank() else _start(request, cluster if shaped else None, progress)
    if found is None:
        return None
    target = Path(output or path)
    write_atomically(target, with_measured(text, cluster, found, str(path)))
    return Measured(str(target), found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read cluster file {str(path)!r}: {getattr(error, 'strerror', None) or error}; "
                         "give the path of a YAML file") from None


def _check(cluster: Cluster, request: Request) -> None:
    if request.shaped and is_rank():
        raise InputError("shaped links are for ranks that start here: measure outside torchrun and srun")
    if request.shaped:
        check_ranks(request.ranks, "measure a smaller cluster of the kind")
    if request.seconds <= 0 or request.threads < 1 or request.ranks < 1:
        raise InputError(f"{request.seconds:g} seconds, {request.threads} threads, {request.ranks} ranks: measuring "
                         "takes more than 0 seconds and at least one of each")
    if cluster.parts:
        raise InputError(f"{request.source}: its devices differ; describe and measure each kind in a file of its own")
    if request.ranks not in (1, cluster.size):
        raise InputError(f"cluster {cluster.name} has {cluster.size} devices, not {request.ranks}: measure with "
                         f"{cluster.size} ranks, or with one for the device alone")


def _join(request: Request, progress: Progress | None) -> dict[str, Any] | None:
    """Measures on this process, which is a rank already; None on ranks other than the first."""
    from autoddl.calibrate.rank import measure_on_rank
    found = measure_on_rank(request, progress)
    return found if os.environ["RANK"] == "0" else None


def _start(request: Request, links: Cluster | None, progress: Progress | None) -> dict[str, Any]:
    """Starts the ranks on this machine, on links shaped as those of `links`; returns the result of the first."""
    tell, began = progress or (lambda what, done, total: None), time.monotonic()
    with temporary_folder("measure") as folder, placed(links) as (_, places):
        job = folder / "job.json"
        job.write_text(json.dumps({**asdict(request), "folder": str(folder)}), encoding="utf-8")
        command = python_module("autoddl.calibrate.rank", str(job))
        launch(request.ranks, command, places=places, tick=lambda: tell(
            "measuring", min(int(time.monotonic() - began), int(request.seconds)), int(request.seconds)))
        found = json.loads((folder / "result-0.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict), found
    return found


def strip_measured(text: str) -> str:
    """Returns the text of a cluster file without its block `measured:`."""
    return re.sub(r"(?ms)^measured:.*?(?=^[^\s#]|\Z)", "", text)


def with_measured(text: str, cluster: Cluster, found: Mapping[str, Any], source: str) -> str:
    """Returns `text` with its comments, and with the block `measured:` at its end.

    Where the file's style does not allow that, the text is `cluster.to_yaml()` with the block. Both can be parsed."""
    block = yaml.safe_dump({"measured": dict(found)}, sort_keys=False, default_flow_style=None, width=120)
    whole = f"{text.rstrip()}\n{block}"
    try:
        parse_cluster(whole, source)
    except InputError:
        whole = f"{cluster.to_yaml().rstrip()}\n{block}"
        parse_cluster(whole, source)
    return whole

