"""Times collectives over every level of a cluster, and fits what the levels reach.

    for each level, every group of its children at once, each collective, 4 kB .. 64 MB of full buffer
    (bandwidth, latency) = argmin  mean over the points  |log(predicted / measured)|

predicted is `cost_models.collective` with that bandwidth and latency: the price that planning asks for, by the very
transport that a plan runs on. A measurement begins at a barrier and ends when the last rank is done; of its rounds the
low end counts. By gloo on a CPU; by NCCL on a GPU, which has not been run so far.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import torch
import torch.distributed as dist

from autoddl.cost_models import Cluster, Group, collective
from autoddl.groups import Groups
from autoddl.layout import Mesh
from autoddl.measure_device import FEWEST, low, spread

__all__ = ["KINDS", "SIZES", "Point", "fitted", "measure_links", "mesh_of"]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
SIZES = tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26))

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One collective of `nbytes` of full buffer, as `cost_models.collective` has it."""

    kind: str
    nbytes: int
    seconds: float
    spread: float


def mesh_of(cluster: Cluster) -> Mesh | None:
    """One axis per level with more than one child, outermost first; None where there is nobody to talk to."""
    text = ",".join(f"{level.name}={level.size}" for level in reversed(cluster.levels) if level.size > 1)
    return Mesh.parse(text) if text else None


def measure_links(cluster: Cluster, mesh: Mesh, device: torch.device, seconds: float, sizes: Sequence[int] = SIZES,
                  progress: Progress | None = None) -> list[dict[str, Any]]:
    """A row per level, alike on every rank; it takes about `seconds` and at least FEWEST rounds."""
    groups = Groups(mesh, [(a,) for a in range(len(mesh.axes))], cluster=cluster)
    jobs = [(a, kind, nbytes) for a in range(len(mesh.axes)) for kind in KINDS for nbytes in sizes]
    found: dict[tuple[int, str, int], list[float]] = {job: [] for job in jobs}
    began, rounds, more = time.monotonic(), 0, True
    while more:
        for job in jobs:
            took = _timed(groups, device, *job)
            if rounds:
                found[job].append(took)
        rounds += 1
        spent = torch.tensor(time.monotonic() - began)
        dist.broadcast(spent, 0)
        more = rounds <= FEWEST or float(spent) * (rounds + 1) / rounds < seconds
        if progress is not None:
            progress("timing links", min(int(spent), int(seconds)), int(seconds))
    rows = []
    for a, name in enumerate(mesh.names):
        points = [Point(kind, nbytes, float(f"{low(found[a, kind, nbytes]):.4g}"), round(spread(
            found[a, kind, nbytes]), 3)) for kind in KINDS for nbytes in sizes]
        rows.append({"level": name, "ranks": mesh.sizes[a], **fitted(cluster, name, points),
                     "points": [{"kind": p.kind, "nbytes": p.nbytes, "seconds": p.seconds, "spread": p.spread}
                                for p in points]})
    return rows


def _timed(groups: Groups, device: torch.device, axis: int, kind: str, nbytes: int) -> float:
    """Seconds until the last rank has its part of one collective."""
    n = groups.mesh.sizes[axis]
    whole = torch.ones(max(n, nbytes // 4 // n * n), device=device)
    part = torch.ones(whole.numel() // n, device=device)
    other = torch.empty_like(whole)
    buffers = {"all-reduce": (whole, whole), "all-gather": (whole, part), "reduce-scatter": (part, whole)}
    dist.barrier()
    start = time.perf_counter()
    if kind == "send":
        _pass_on(groups, axis, other, whole)
    else:
        groups.start(kind, (axis,), *buffers.get(kind, (other, whole)), asynchronous=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = torch.tensor(time.perf_counter() - start, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _pass_on(groups: Groups, axis: int, got: torch.Tensor, given: torch.Tensor) -> None:
    """Every rank sends to the next of its group."""
    group = groups.of((axis,))
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(groups.rank)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, given, ranks[(at + 1) % len(ranks)], group),
                                    dist.P2POp(dist.irecv, got, ranks[at - 1], group)])
    for work in works:
        work.wait()


def fitted(cluster: Cluster, level: str, points: Sequence[Point]) -> dict[str, float]:
    """The bandwidth and latency with which the model comes nearest to the points, and the mean error that is left: a
    search over finer and finer steps."""
    at = [one.name for one in cluster.levels].index(level)
    group = Group(((cluster.levels[at].size, cluster.units[at]),))
    bare = replace(cluster.levels[at], protocol=None, efficiency=1.0)

    def error(bandwidth: float, latency: float) -> float:
        levels = (*cluster.levels[:at], replace(bare, bandwidth=bandwidth, latency=latency), *cluster.levels[at + 1:])
        tried = replace(cluster, levels=levels)
        return sum(abs(log(collective.__wrapped__(tried, p.kind, group, float(p.nbytes)).seconds / p.seconds))
                   for p in points) / len(points)

    best, step = (1e9, 1e-4), 2.0
    while step > 0.01:
        around = [(best[0] * exp(i * step), best[1] * exp(j * step)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        nearest = min(around, key=lambda pair: error(*pair))
        step, best = (step / 2, best) if nearest == best else (step, nearest)
    return {"bandwidth": float(f"{best[0]:.4g}"), "latency": float(f"{best[1]:.4g}"), "error": round(error(*best), 4)}
