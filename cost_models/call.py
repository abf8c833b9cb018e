"""One collective of one group, as every formula sees it, and the cost of crossing a level.

    wire_i(v)  = t + sqrt(w a_i t),  t = v / (e b_i)      seconds that v bytes take through one port of level i

The latency of level i is a_i, its bandwidth b_i. The link and the algorithm reach the fraction e of it, and w is the
`fill` of the library's wire protocol (`backends`).
"""

from dataclasses import dataclass
from math import isfinite, prod, sqrt

from autoddl.core.conversion import COLLECTIVES, ring_bytes
from autoddl.core.errors import InputError
from autoddl.core.sparse import SPARSE
from autoddl.cost_models.backends import KINDS, PLAIN, Algorithm, Backend, Wire
from autoddl.cost_models.groups import Crossing
from autoddl.cost_models.links import protocol_of

__all__ = ["CollectiveCall", "sent_bytes"]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective of one group, over one wire protocol of the backend.

        backend      the communication library
        kind         kind of the collective
        crossings    the levels that the group crosses, innermost first
        nbytes       bytes of the full buffer
        wire         the wire protocol
        algorithm    whose efficiency the links reach; None for all of it
    """

    backend: Backend
    kind: str
    crossings: tuple[Crossing, ...]
    nbytes: float
    wire: Wire = PLAIN
    algorithm: Algorithm | None = None

    @property
    def size(self) -> int:
        """Number of members."""
        return prod(crossing.ways for crossing in self.crossings)

    @property
    def phases(self) -> int:
        """How often the buffer goes round a ring: 2 for an all-reduce, else 1."""
        return 2 if self.kind == "all-reduce" else 1

    def latency(self, crossing: Crossing) -> float:
        """Seconds of a message between neighbours of a level."""
        return self.wire.latency * crossing.latency

    def rings(self, crossing: Crossing) -> float:
        """Rings that share a port of a level."""
        return crossing.port_rings(self.backend.rails)

    def seconds(self, crossing: Crossing, nbytes: float) -> float:
        """Seconds that `nbytes` take through one port of a level: t + sqrt(w a t), t = nbytes / (e b)."""
        own = self.backend.efficiency.get(self.algorithm, 1.0) if self.algorithm else 1.0
        reached = own * _reached(self.backend, crossing)
        seconds = nbytes / (reached * self.wire.efficiency * crossing.level.bandwidth)
        return seconds + sqrt(self.wire.fill * crossing.latency * seconds)


def _reached(backend: Backend, crossing: Crossing) -> float:
    """The fraction of a link that large transfers reach.

    The level says it, else its protocol, else the backend. A bandwidth measured in groups of this size is reached
    whole.
    """
    level = crossing.level
    if crossing.ways in dict(level.group_bandwidth):
        return 1.0
    if level.efficiency is not None:
        return level.efficiency
    return protocol_of(level.protocol).efficiency if level.protocol else backend.link_efficiency


def sent_bytes(kind: str, n: int, nbytes: float) -> float:
    """Bytes that each of n ranks sends: (n-1)/n N, twice that in an all-reduce; else all N, as in a send or a halo.

    Raises InputError for another kind, and for impossible numbers.
    """
    if kind not in KINDS and kind != SPARSE:
        raise InputError(f"{kind!r} is no collective; the collectives are {', '.join(KINDS)}")
    if n < 1 or nbytes < 0 or not isfinite(nbytes):
        raise InputError(f"{kind} of {nbytes} bytes among {n} ranks: there is at least 1 rank and at least 0 bytes")
    if kind == "exchange":
        return ring_bytes("all-to-all", n, nbytes)
    if kind not in COLLECTIVES and kind != SPARSE:
        return nbytes if n > 1 else 0.0
    return ring_bytes(kind, n, nbytes)
