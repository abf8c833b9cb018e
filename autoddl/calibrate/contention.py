"""Measures how computing and collectives slow each other down, and how long a step of the library's own rings takes.

    Host.late    how late the last rank comes where ranks share cores
    Host.busy    how much longer a step of a collective takes during computation
    Host.drag    how much longer computation takes during a collective
    Host.issue   the time that a collective takes from the computing thread
    Host.turn    the time of a step of the library's own rings

They are computed as follows:

    wall(n)   seconds of n products on every rank and a meeting of all     own(n)   those of a processor, times slowdown
    k = median over n, several times, of  (wall(n) - own(n) - (wall(0) - own(0))) / sqrt(own(n))

    busy = median over small all-reduces of  (wall while all compute - wall while all wait) / steps
    drag = median over large all-reduces of  (wall of the work done during it - wall of the same work after it - host)
                                             / bytes sent
    issue = median of  own of the thread that starts a bucket's reduction and waits for it
    turn  = median over small all-reduces and all-gathers of the library of  wall / steps

The disturbances of a rank add up like a random walk, so their sum grows with the square root of the time.
"""

import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional as F

from autoddl.core.conversion import Step
from autoddl.core.layout import B, Layout, P
from autoddl.cost_models import sent_bytes, step_count
from autoddl.cost_models.machine import Host
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.redistribute import make_moves

__all__ = ["busyness", "dragging", "issuing", "lateness", "turning"]

SIDE, PRODUCTS, ROUNDS, PASSES = 128, (10, 40, 160, 640), 15, 4
"""The matrices that ranks multiply before they meet: side, products per round, rounds, and passes over all."""
SMALL = (2**12, 2**13, 2**14)
"""Bytes of all-reduces whose time is that of their messages."""
LARGE, FLIGHTS = 2**21, 9
"""Bytes of an all-reduce during which work is done, and the number of such all-reduces."""
MEMBERS, TRIALS = 8, 40
"""Gradients of a bucket, and the number of buckets that are reduced."""


def lateness(slowdown: float) -> float:
    """Returns k (`Host.late`), in s^(1/2), the same on every rank; `slowdown` is the number of ranks per core."""
    square, word = torch.ones(SIDE, SIDE), torch.zeros(1)

    def met(products: int, rounds: int) -> tuple[float, float]:
        """Wall seconds of a round, and its CPU seconds as a mean over the ranks."""
        dist.barrier()
        start, own = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            for _ in range(products):
                square @ square
            dist.all_reduce(word)
        took, used = time.perf_counter() - start, torch.tensor((time.process_time() - own) * slowdown)
        dist.all_reduce(used)
        return took / rounds, float(used) / dist.get_world_size() / rounds

    met(1, 10)  # to warm up
    took, used = met(0, 50)
    least, found = max(0.0, took - used), []
    for products in PRODUCTS * PASSES:
        took, used = met(products, ROUNDS)
        found.append(max(0.0, took - used - least) / used**0.5)
    shared = torch.tensor(median(found))
    dist.broadcast(shared, 0)
    return float(shared)


def busyness() -> float:
    """Returns the seconds that computing adds to a step of an all-reduce, the same on every rank."""
    square, many = torch.ones(SIDE, SIDE), step_count("all-reduce", dist.get_world_size())

    def took(buffer: torch.Tensor, computing: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        work = dist.all_reduce(buffer, async_op=True)
        while computing and not work.is_completed():
            square @ square
        work.wait()
        return time.perf_counter() - start

    added = []
    for nbytes in SMALL:
        buffer = torch.zeros(nbytes // 4)
        pairs = [(took(buffer, False), took(buffer, True)) for _ in range(ROUNDS)]
        idle, busy = map(median, zip(*pairs, strict=True))
        added.append((busy - idle) / many)
    shared = torch.tensor(max(0.0, median(added)))
    dist.all_reduce(shared)
    return float(shared) / dist.get_world_size()


def turning() -> float:
    """Returns the seconds of a step of the library's own rings, the same on every rank."""
    ranks, found = dist.get_world_size(), []
    for nbytes in SMALL * ROUNDS:
        part = torch.zeros(max(1, nbytes // 4 // ranks))
        whole = torch.zeros(len(part) * ranks)
        for kind, run in (("all-reduce", partial(dist.all_reduce, whole)),
                          ("all-gather", partial(dist.all_gather_single, whole, part))):
            dist.barrier()
            start = time.perf_counter()
            run()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found.append(float(took) / step_count(kind, ranks))
    return median(found)


def issuing(groups: Groups, axes: tuple[int, ...], slowdown: float) -> float:
    """Returns the seconds of the thread that starts the reduction of a bucket over `axes` and waits for it.

    The thread does other work in between. The seconds are the same on every rank. The number of ranks per core is
    `slowdown`."""
    square, shape = torch.ones(2 * SIDE, 2 * SIDE), (64,)
    layout = Layout(tuple(P if a in axes else B for a in range(len(groups.mesh.axes))))
    (move,) = make_moves((Step(axes, P, B),), [shape] * MEMBERS, [layout] * MEMBERS, groups)
    gradients, found = [torch.ones(shape) for _ in range(MEMBERS)], []
    for _ in range(TRIALS):
        square @ square
        own = time.thread_time()
        handle = move.start(gradients)
        handle.wait()
        found.append(time.thread_time() - own)
    shared = torch.tensor(slowdown * median(found))
    dist.all_reduce(shared)
    return float(shared) / dist.get_world_size()


def dragging(host: Host) -> float:
    """Returns the seconds by which work takes longer per byte that a rank sends meanwhile, the same on every rank.

    The seconds that sending itself takes by `host` are subtracted. The work is like that between two collectives of a
    step: a product, a GELU, a normalisation and a sum."""
    square, rows, buffer = torch.ones(2 * SIDE, 2 * SIDE), torch.randn(4 * SIDE, 4 * SIDE), torch.ones(LARGE // 4)

    def work() -> None:
        square @ square
        F.layer_norm(F.gelu(rows), rows.shape[1:])
        rows + rows

    def lost() -> float:
        dist.barrier()
        start, times = time.perf_counter(), 0
        flight = dist.all_reduce(buffer, async_op=True)
        while not flight.is_completed():
            work()
            times += 1
        flight.wait()
        beside = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        return beside - (time.perf_counter() - start)

    lost()  # to warm up
    ranks = dist.get_world_size()
    shared = torch.tensor(median(lost() for _ in range(FLIGHTS)))
    dist.all_reduce(shared)
    sent = sent_bytes("all-reduce", ranks, float(LARGE))
    known = host.call + host.message * step_count("all-reduce", ranks) + host.byte * sent
    return max(0.0, float(shared) / ranks - known) / sent
