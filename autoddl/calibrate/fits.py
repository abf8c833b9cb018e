"""What the times of collectives say of a level and of a host.

    (bandwidth, latency) = argmin  mean over the points  |log(predicted / measured)|
    call, message        through the medians of  processor  over the small buffers with the fewest and the most steps
    byte                 = median of  (processor - call - message * steps) / bytes sent  over the large ones
    wait                 the slope through those of  seconds - processor:  what is the same with any number of steps is
                         that ranks leave the barrier, where the clock starts, one after the other

predicted is `cost_models.collective` with that bandwidth and latency: the price that planning asks for. `processor` are
the seconds that a rank's process computed during a collective, all its threads together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from autoddl.cost_models import Cluster, Group, collective, sent_bytes, step_count

__all__ = ["FEW", "Point", "fitted", "host_of"]

FEW, MANY = 2**16, 2**20
"""Bytes up to which a collective is its messages, and from which on it is its bytes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One collective of `nbytes` of full buffer among `ranks`; `processor` are seconds of one rank's."""

    kind: str
    nbytes: int
    seconds: float
    spread: float
    processor: float = 0.0
    ranks: int = 2


def host_of(points: Sequence[Point]) -> tuple[float, float, float, float] | None:
    """(call, message, byte), seconds of a rank's processor, and wait, those for which a step waits for none; None where
    nothing small was timed, or no time passed."""
    by_steps: dict[int, list[tuple[float, float]]] = {}
    for p in points:
        if p.nbytes <= FEW and p.processor:
            by_steps.setdefault(step_count(p.kind, p.ranks), []).append((p.processor, p.seconds - p.processor))
    if not by_steps:
        return None
    least, most = min(by_steps), max(by_steps)
    low, high = (tuple(map(median, zip(*by_steps[many], strict=True))) for many in (least, most))
    message, wait = (max(0.0, b - a) / max(1, most - least) for a, b in zip(low, high, strict=True))
    call = max(0.0, low[0] - message * least)
    large = [(p.processor - call - message * step_count(p.kind, p.ranks)) / sent_bytes(p.kind, p.ranks, p.nbytes)
             for p in points if p.nbytes >= MANY]
    return call, message, max(0.0, median(large)) if large else 0.0, wait


def fitted(cluster: Cluster, level: str, points: Sequence[Point]) -> dict[str, float]:
    """The bandwidth and latency with which the model comes nearest to the points, and the mean error that is left: a
    search over finer and finer steps. A host that is the limit itself tells no bandwidth; what it moves passes through
    its memory."""
    at = [one.name for one in cluster.levels].index(level)
    group = Group(((cluster.levels[at].size, cluster.units[at]),))
    bare = replace(cluster.levels[at], protocol=None, efficiency=1.0)

    def error(bandwidth: float, latency: float) -> float:
        levels = (*cluster.levels[:at], replace(bare, bandwidth=bandwidth, latency=latency), *cluster.levels[at + 1:])
        tried = replace(cluster, levels=levels)
        return sum(abs(log(collective.__wrapped__(tried, p.kind, group, float(p.nbytes)).seconds / p.seconds))
                   for p in points) / len(points)

    most = cluster.device.bandwidth if cluster.device.host is not None else float("inf")
    best, step = (min(most, 1e9), 1e-4), 2.0
    while step > 0.01:
        around = [(min(most, best[0] * exp(i * step)), best[1] * exp(j * step)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        nearest = min(around, key=lambda pair: error(*pair))
        step, best = (step, nearest) if error(*nearest) < error(*best) - 1e-9 else (step / 2, best)
    return {"bandwidth": float(f"{best[0]:.4g}"), "latency": float(f"{best[1]:.4g}"), "error": round(error(*best), 4)}
