"""Times collectives over every level of a cluster; `fits` turns the times into bandwidths and latencies.

    for each level, every group of its children at once, each collective, 4 kB .. 64 MB of full buffer that the level,
    as it is written, carries within LONGEST; where there are several, small ones of all ranks too, for the host's part

The collectives use the same transport as a plan: gloo on a CPU, NCCL on a GPU (which has not been run so far).

    seconds      from a barrier until the last rank is done: the low end of the rounds, or the median where ranks share
                 cores
    processor    CPU seconds of a rank meanwhile, all its threads together, times the ranks per core: the median

For shaped links only the host's part is written, because these links were made as slow as the file says.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autoddl.calibrate.contention import busyness, dragging, issuing, lateness, turning
from autoddl.calibrate.fits import FEW, Point, fit_level, host_of
from autoddl.calibrate.kernel_timing import FEWEST, low, spread
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster, Group, collective
from autoddl.cost_models.machine import Host
from autoddl.runtime.collectives.process_groups import Groups

__all__ = ["KINDS", "SIZES", "measure_links", "mesh_of"]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
SIZES = tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26))
LONGEST = 1.0
"""Predicted seconds above which a collective is not timed."""
VISIT, MOST = 0.02, 10
"""Seconds that a round spends on one collective, and repetitions at most; small collectives are the noisiest."""

Progress = Callable[[str, int, int], None]
Job = tuple[tuple[int, ...], str, int]


def mesh_of(cluster: Cluster) -> Mesh | None:
    """Returns a mesh with an axis per level with more than one child, outermost first; None for a single device."""
    text = ",".join(f"{level.name}={level.size}" for level in reversed(cluster.levels) if level.size > 1)
    return Mesh.parse(text) if text else None


def measure_links(cluster: Cluster, mesh: Mesh, device: torch.device, seconds: float, sizes: Sequence[int] = SIZES,
                  slowdown: float = 1.0, shaped: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Returns `links`, a row per level, and with gloo `host`; both are the same on every rank.

    Timing takes about `seconds`, and at least FEWEST rounds. The number of ranks per core is `slowdown`; `shaped` says
    that all levels but the innermost are shaped."""
    every: list[tuple[int, ...]] = [(a,) for a in range(len(mesh.axes))]
    whole = tuple(range(len(mesh.axes)))
    turn = _short(turning()) if cluster.backend == "gloo" else 0.0
    chosen = replace(cluster, device=replace(cluster.device, host=Host(0.0, 0.0, 0.0, turn=turn)))
    groups = Groups(mesh, every if whole in every else [*every, whole], cluster=chosen)
    foreseen = {(axes, kind, nbytes): _foreseen(cluster, mesh, axes, kind, nbytes)
                for axes in every for kind in KINDS for nbytes in sizes}
    jobs = [job for job, expected in foreseen.items() if expected <= LONGEST or job[2] == sizes[0]]
    jobs += [] if whole in every else [(whole, kind, nbytes) for kind in KINDS[:3] for nbytes in sizes if nbytes <= FEW]
    often = {job: max(1, min(MOST, int(VISIT / foreseen.get(job, VISIT / MOST)))) for job in jobs}
    found: dict[Job, list[tuple[float, float]]] = {job: [] for job in jobs}
    began, rounds, more = time.monotonic(), 0, True
    while more:
        for job in jobs:
            took = [_timed(groups, device, *job) for _ in range(often[job])]
            if rounds:
                found[job] += took
        rounds += 1
        spent = torch.tensor(time.monotonic() - began)
        dist.broadcast(spent, 0)
        more = rounds <= FEWEST or float(spent) * (rounds + 1) / rounds < seconds
        if progress is not None:
            progress("timing links", min(int(spent), int(seconds)), int(seconds))
    points = {(axes, kind, nbytes): _point(prod(mesh.sizes[a] for a in axes), kind, nbytes, took, slowdown)
              for (axes, kind, nbytes), took in found.items()}
    timed = host_of([*points.values()]) if cluster.backend == "gloo" else None
    host = Host(*map(_short, timed)) if timed is not None else None
    if host is not None:
        late = lateness(slowdown) if slowdown > 1 else 0.0
        host = replace(host, turn=turn, late=_short(late), busy=_short(busyness()), drag=_short(dragging(host)),
                       issue=_short(issuing(groups, whole, slowdown)))
    cluster = replace(cluster, device=replace(cluster.device, host=host))
    timed_axes = [a for a, name in enumerate(mesh.names) if not shaped or name == cluster.levels[0].name]
    rows = [_row(cluster, mesh, a, [p for job, p in points.items() if job[0] == (a,)]) for a in timed_axes]
    return {"links": rows} | ({"host": asdict(host)} if host is not None else {})


def _short(value: float) -> float:
    """Rounds to four digits."""
    return float(f"{value:.4g}")


def _foreseen(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...], kind: str, nbytes: int) -> float:
    """The seconds that the cluster file predicts."""
    group = Group(tuple((mesh.sizes[a], mesh.strides[a]) for a in axes))
    return collective(cluster, kind, group, float(nbytes)).seconds


def _point(ranks: int, kind: str, nbytes: int, took: Sequence[tuple[float, float]], slowdown: float) -> Point:
    walls, processors = zip(*took, strict=True)
    usual = median(walls) if slowdown > 1 else low(walls)
    return Point(kind, nbytes, _short(usual), round(spread(walls), 3),
                 _short(slowdown * median(processors)), ranks)


def _row(cluster: Cluster, mesh: Mesh, axis: int, points: Sequence[Point]) -> dict[str, Any]:
    """The row of a level in the cluster file."""
    return {"level": mesh.names[axis], "ranks": mesh.sizes[axis], **fit_level(cluster, mesh.names[axis], points),
            "points": [{"kind": p.kind, "nbytes": p.nbytes, "seconds": p.seconds, "spread": p.spread,
                        "processor": p.processor} for p in points]}


def _timed(groups: Groups, device: torch.device, axes: tuple[int, ...], kind: str, nbytes: int) -> tuple[float, float]:
    """Seconds until the last rank is done with one collective, and the mean of the ranks' CPU seconds."""
    n = prod(groups.mesh.sizes[a] for a in axes)
    whole = torch.ones(max(n, nbytes // 4 // n * n), device=device)
    part = torch.ones(whole.numel() // n, device=device)
    other = torch.empty_like(whole)
    buffers = {"all-reduce": (whole, whole), "all-gather": (whole, part), "reduce-scatter": (part, whole)}
    dist.barrier()
    start, computed = time.perf_counter(), time.process_time()
    if kind == "send":
        _pass_on(groups, axes, other, whole)
    else:
        groups.start(kind, axes, *buffers.get(kind, (other, whole)), asynchronous=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took, computed = time.perf_counter() - start, time.process_time() - computed
    slowest, mean = torch.tensor(took, device=device), torch.tensor(computed / dist.get_world_size(), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return float(slowest), float(mean)


def _pass_on(groups: Groups, axes: tuple[int, ...], got: torch.Tensor, given: torch.Tensor) -> None:
    """Every rank sends to the next of its group."""
    group = groups.of(axes)
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(groups.rank)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, given, ranks[(at + 1) % len(ranks)], group),
                                    dist.P2POp(dist.irecv, got, ranks[at - 1], group)])
    for work in works:
        work.wait()
