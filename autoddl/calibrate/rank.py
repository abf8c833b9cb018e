"""The program of a rank of a measurement: `python -m autoddl.calibrate.rank JOB.json`.

All ranks time the same kernels; a point is the median of the ranks. Where ranks outnumber the cores, they start at
different kernels, and a rank's seconds are its CPU seconds times the ranks per core.
"""

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoddl.calibrate.kernel_cases import LARGE, SMALL, USUAL
from autoddl.calibrate.kernel_timing import clock_of, curve_rows, measure_kernels
from autoddl.calibrate.link_timing import SIZES, measure_links, mesh_of
from autoddl.calibrate.request import Request, origin
from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.launch.jobs import Job, serve
from autoddl.runtime.collectives.told_values import gather_values
from autoddl.runtime.switches.offered import offered_switches, with_offered
from autoddl.runtime.world import device_of, join_processes, set_current_device

__all__ = ["measure_on_rank"]

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that are timed where the device lists a peak for them."""
KERNELS = 0.7
"""The share of the time for kernels where links are timed too."""

Progress = Callable[[str, int, int], None]


def measure_on_rank(request: Request, progress: Progress | None = None) -> dict[str, Any]:
    """Measures on this rank and returns the block `measured:`, which is the same on all ranks."""
    began, load = time.monotonic(), os.getloadavg()[0]
    cluster = with_offered(parse_cluster(request.text, request.source), offered_switches())
    device = _device(cluster, request)
    torch.set_num_threads(request.threads)
    mesh = mesh_of(cluster) if request.ranks > 1 else None
    if mesh is not None:
        join_processes(mesh, device, timedelta(seconds=600))
    share = request.seconds * (KERNELS if mesh is not None else 1.0)
    slowdown = max(1.0, request.here * request.threads / (os.cpu_count() or 1))
    slowdown = max(gather_values(slowdown)) if dist.is_initialized() else slowdown
    listed = [d for d in DTYPES if str(d).removeprefix("torch.") in dict(cluster.device.peaks)]
    first = dist.get_rank() / dist.get_world_size() if slowdown > 1 else 0.0
    scale = SMALL if request.small else LARGE if device.type == "cuda" else USUAL
    timed, usual = measure_kernels(device, listed, clock_of(device, request.threads, slowdown), share, scale, progress,
                                   first, dist.barrier if dist.is_initialized() else lambda: None)
    found = {**origin(cluster, request, _processor(device), {"torch": torch.__version__}, load),
             "seconds": 0.0, "pulse": _middle(usual), "curves": _shared(curve_rows(timed, slowdown > 1))}
    if mesh is not None:
        sizes = SIZES[:2] if request.small else SIZES
        found |= measure_links(cluster, mesh, device, request.seconds - share, sizes, slowdown, request.shaped,
                               progress)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _device(cluster: Cluster, request: Request) -> torch.device:
    """The device of this process, of the cluster's kind."""
    device = device_of("gloo" if cluster.device.kind == "cpu" else "nccl")
    if (device.type == "cuda") != (cluster.device.kind == "gpu"):
        raise InputError(f"{request.source}: its device {cluster.device.name} is a gpu, and this machine has none: "
                         "measure on the cluster")
    set_current_device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if cluster.device.name.split("-")[0].lower() not in name.lower():
            raise InputError(f"{request.source}: its device is {cluster.device.name}, and this machine has {name}: "
                             "measure on the cluster, or describe this device")
    return device


def _processor(device: torch.device) -> str:
    """The machine's own name of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _shared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median of the ranks at every point."""
    if not dist.is_initialized():
        return rows
    every = gather_values([row["seconds"] for row in rows])
    return [{**row, "seconds": [float(f"{statistics.median(point):.4g}") for point in zip(*seconds, strict=True)]}
            for row, *seconds in zip(rows, *every, strict=True)]


def _middle(value: float) -> float:
    """The median of the ranks."""
    return float(f"{statistics.median(gather_values(value) if dist.is_initialized() else [value]):.4g}")


def _work(job: Job, losses: Path) -> Any:
    return measure_on_rank(Request(**{key: value for key, value in job.items() if key != "folder"}))


if __name__ == "__main__":
    serve(_work)
