"""Fits the constants of a level and of a host to the times of collectives.

    (bandwidth, latency) = argmin  mean over the points  |log(predicted / measured)|
    call, message        through the medians of  processor  over the small buffers with the fewest and the most steps
    byte                 = median of  (processor - call - message * steps) / bytes sent  over the large ones
    wait                 the slope through the medians of  seconds - processor;  the part that is the same for any
                         number of steps is the time in which ranks leave the barrier, where the clock starts, one by
                         one

Here predicted is `cost_models.collective` with that bandwidth and latency, which is the price that planning uses. The
`processor` of a point is the CPU seconds of a rank during a collective, all its threads together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from autoddl.cost_models import Cluster, Group, collective, sent_bytes, step_count

__all__ = ["FEW", "Point", "fit_level", "host_of"]

FEW, MANY = 2**16, 2**20
"""Bytes up to which messages dominate a collective's time, and from which on bytes do."""


@dataclass(frozen=True, slots=True)
class Point:
    """The measured time of one collective of one size."""

    kind: str
    """The kind of collective, as in `cost_models`."""
    nbytes: int
    """Bytes of the full buffer."""
    seconds: float
    """Seconds until the last rank is done."""
    spread: float
    """(80th - 20th percentile) / 20th percentile of the rounds."""
    processor: float = 0.0
    """CPU seconds of one rank, all its threads together."""
    ranks: int = 2
    """Ranks of the group."""


def host_of(points: Sequence[Point]) -> tuple[float, float, float, float] | None:
    """Returns (call, message, byte, wait) by the formulas above, or None without CPU times of small collectives.

    The first three are CPU seconds of a rank per collective, step and byte. The last is the seconds per step in which
    its CPU is idle."""
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


def fit_level(cluster: Cluster, level: str, points: Sequence[Point]) -> dict[str, float]:
    """Returns the bandwidth (bytes/s) and latency (s) that come nearest to the points, and the mean error left.

    The search takes finer and finer steps. Where the host is the limit, the points do not determine a bandwidth. It is
    then at most that of the device's memory, through which all messages pass."""
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
