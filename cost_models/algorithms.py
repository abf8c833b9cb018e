"""Seconds of each algorithm on a hierarchical network: one function per line.

n members, N bytes of full buffer, r_i members per child of level i, a_i latency and b_i bandwidth there, h_i hops of a
ring across level i (sum h_i = n - 1), phases = 2 for all-reduce and 1 otherwise, e the efficiency of the backend:

    V            = phases (n-1)/n N                                            bytes that a rank sends in a ring
    ring         = phases sum h_i a_i + max_i flows_i V / (e b_i)              Patarasuk & Yuan 2009
    doubling     = sum log2(ways_i) a_i + sum sent_i crowd_i / (e" b_i)       Thakur, Rabenseifner & Gropp 2005
    two-level    = reduce-scatter(N) inside + collective(N / r) across + all-gather(N) inside
    in-network   = 2 sum a_i + max_i flows_i (n+1)/n N / (e' b_i)              nccl-tests, PERFORMANCE.md
    pairwise     = sum (peers across i) a_i + max_i (n-r_i)/n N crowd_i / (e b_i)
    binomial     = sum ceil(log2 ways_i) (a_i + flows_i N / (e b_i))

flows_i is the number of rings that one port of level i carries, crowd_i = devices per port * oversubscription.
The efficiencies e, e' of in-network reduction and e" of the low-latency protocol are in `backends`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, log2, prod
from types import MappingProxyType

from autoddl.cost_models.backends import IN_NETWORK_EFFICIENCY, KINDS, LOW_LATENCY_EFFICIENCY, Backend
from autoddl.cost_models.groups import Crossing
from autoddl.errors import InputError

__all__ = ["FORMULAS", "Call", "sent_bytes"]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one group: what a formula sees."""

    backend: Backend
    kind: str
    crossings: tuple[Crossing, ...]
    nbytes: float

    @property
    def size(self) -> int:
        return prod(crossing.ways for crossing in self.crossings)

    @property
    def phases(self) -> int:
        return 2 if self.kind == "all-reduce" else 1

    def over(self, crossing: Crossing) -> float:
        """Seconds per byte on one port: 1 / (e b_i)."""
        return 1 / (self.backend.efficiency[self.kind] * crossing.level.bandwidth)


def sent_bytes(kind: str, n: int, nbytes: float) -> float:
    """Bytes that each of n ranks sends: (n-1)/n N, twice that for an all-reduce; a broadcast passes on all N."""
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no collective; the collectives are {', '.join(KINDS)}")
    if n < 1 or nbytes < 0 or not isfinite(nbytes):
        raise InputError(f"{kind} of {nbytes} bytes among {n} ranks: there is at least 1 rank and at least 0 bytes")
    if kind == "broadcast":
        return nbytes if n > 1 else 0.0
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n * nbytes


def ring(call: Call) -> float:
    """phases sum h_i a_i + max_i flows_i V / (e b_i); every phase passes each hop once (Patarasuk & Yuan 2009)."""
    latency, beyond = 0.0, call.size
    for crossing in call.crossings:
        hops, beyond = beyond - beyond // crossing.ways, beyond // crossing.ways
        latency += hops * crossing.level.latency
    volume = sent_bytes(call.kind, call.size, call.nbytes)
    return call.phases * latency + max(c.flows(call.backend.rails) * volume * call.over(c) for c in call.crossings)


def doubling(call: Call) -> float:
    """sum log2(ways_i) a_i + sum sent_i crowd_i / (e" b_i); all send in every step (Thakur et al. 2005).

    An all-reduce sends N in each step; an all-gather r_i/n N, 2 r_i/n N ..., that is (ways_i - 1) r_i/n N in all.
    """
    seconds = 0.0
    for crossing in call.crossings:
        steps = log2(crossing.ways)
        if not steps.is_integer():
            return inf
        pieces = steps if call.kind == "all-reduce" else (crossing.ways - 1) * crossing.members / call.size
        volume = pieces * call.nbytes * crossing.crowd / LOW_LATENCY_EFFICIENCY
        seconds += steps * crossing.level.latency + volume / crossing.level.bandwidth
    return seconds


def two_level(call: Call) -> float:
    """reduce-scatter inside, the collective across on a share of the bytes, all-gather inside; at the best level.

    A reduce-scatter leaves out the last part and an all-gather the first.
    """
    return min((_split_at(call, at) for at in range(1, len(call.crossings))), default=inf)


def _split_at(call: Call, at: int) -> float:
    inner, outer = call.crossings[:at], call.crossings[at:]
    share = prod(crossing.ways for crossing in inner)
    across = tuple(replace(crossing, members=crossing.members // share) for crossing in outer)
    seconds = _flat(replace(call, crossings=across, nbytes=call.nbytes / share))
    for part in ("reduce-scatter", "all-gather"):
        if call.kind in (part, "all-reduce"):
            seconds += call.backend.startup + _flat(replace(call, kind=part, crossings=inner))
    return seconds


def _flat(call: Call) -> float:
    """The best of one stage."""
    stages = (ring, doubling, in_network) if call.kind == "all-reduce" else (ring, doubling)
    return min(stage(call) for stage in stages)


def in_network(call: Call) -> float:
    """2 sum a_i + max_i flows_i (n+1)/n N / (e' b_i): up once, reduced, and down once, if all switches crossed can."""
    if not all(crossing.level.in_network_reduction for crossing in call.crossings):
        return inf
    volume = (call.size + 1) / call.size * call.nbytes / IN_NETWORK_EFFICIENCY
    return (2 * sum(c.level.latency for c in call.crossings)
            + max(c.flows(call.backend.rails) * volume / c.level.bandwidth for c in call.crossings))


def pairwise(call: Call) -> float:
    """One message of N/n to every peer (Thakur et al. 2005, section 4.3): all but r_i of n leave a child of level i."""
    latency = sum((c.ways - 1) * c.members * c.level.latency for c in call.crossings)
    return latency + max((call.size - c.members) / call.size * call.nbytes * c.crowd * call.over(c)
                         for c in call.crossings)


def binomial(call: Call) -> float:
    """sum ceil(log2 ways_i) (a_i + flows_i N / (e b_i)): each step doubles who has it (Thakur et al. 2005)."""
    return sum(ceil(log2(c.ways)) * (c.level.latency + c.flows(call.backend.rails) * call.nbytes * call.over(c))
               for c in call.crossings)


def as_all_reduce(call: Call) -> float:
    """A reduce-scatter that is an all-reduce of which each rank keeps its part."""
    return ring(replace(call, kind="all-reduce"))


FORMULAS: Mapping[str, Callable[[Call], float]] = MappingProxyType({
    "ring": ring, "doubling": doubling, "two-level": two_level, "in-network": in_network, "pairwise": pairwise,
    "binomial": binomial, "as all-reduce": as_all_reduce,
})
