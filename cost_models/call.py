"""One collective of one group, as every formula sees it, and what crossing a level costs.

    wire_i(v)  = t + sqrt(w a_i t),  t = v / (e b_i)      seconds that v bytes take through one port of level i

a_i and b_i are latency and bandwidth of the level, e the fraction that the link and the algorithm reach, w how the
library's wire protocol fills.
"""

from dataclasses import dataclass
from math import isfinite, prod, sqrt

from autoddl.core.errors import InputError
from autoddl.cost_models.backends import KINDS, PLAIN, Algorithm, Backend, Wire
from autoddl.cost_models.groups import Crossing
from autoddl.cost_models.links import protocol_of

__all__ = ["CollectiveCall", "sent_bytes"]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective of one group, over one wire protocol of the backend."""

    backend: Backend
    kind: str
    crossings: tuple[Crossing, ...]
    nbytes: float
    wire: Wire = PLAIN
    algorithm: Algorithm | None = None

    @property
    def size(self) -> int:
        return prod(crossing.ways for crossing in self.crossings)

    @property
    def phases(self) -> int:
        return 2 if self.kind == "all-reduce" else 1

    def latency(self, crossing: Crossing) -> float:
        """Seconds of a message between neighbours."""
        return self.wire.latency * crossing.latency

    def seconds(self, crossing: Crossing, nbytes: float) -> float:
        """Seconds that nbytes take through one port: t + sqrt(w a t), t = nbytes / (e b)."""
        own = self.backend.efficiency.get(self.algorithm, 1.0) if self.algorithm else 1.0
        reached = own * _reached(self.backend, crossing)
        seconds = nbytes / (reached * self.wire.efficiency * crossing.level.bandwidth)
        return seconds + sqrt(self.wire.fill * crossing.latency * seconds)


def _reached(backend: Backend, crossing: Crossing) -> float:
    """The fraction of a link that large transfers reach: as the level says, else its protocol, else the backend; all
    of what was measured in groups of this size."""
    level = crossing.level
    if crossing.ways in dict(level.group_bandwidth):
        return 1.0
    if level.efficiency is not None:
        return level.efficiency
    return protocol_of(level.protocol).efficiency if level.protocol else backend.link_efficiency


def sent_bytes(kind: str, n: int, nbytes: float) -> float:
    """Bytes that each of n ranks sends: (n-1)/n N, twice that for an all-reduce; in a broadcast or send all N."""
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no collective; the collectives are {', '.join(KINDS)}")
    if n < 1 or nbytes < 0 or not isfinite(nbytes):
        raise InputError(f"{kind} of {nbytes} bytes among {n} ranks: there is at least 1 rank and at least 0 bytes")
    if kind in ("broadcast", "send"):
        return nbytes if n > 1 else 0.0
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n * nbytes
