"""Seconds of a collective: the cheapest algorithm that the backend of the cluster has.

    price = startup + min over the algorithms of the backend for this kind of their seconds in `algorithms`

Every disjoint group of the same form runs the collective at the same time, so shared links are divided among them.
"""

from dataclasses import dataclass
from functools import lru_cache

from autoddl.cost_models.algorithms import FORMULAS, Call, sent_bytes
from autoddl.cost_models.backends import BACKENDS, KINDS
from autoddl.cost_models.groups import Group, crossings
from autoddl.cost_models.machine import Cluster

__all__ = ["KINDS", "Group", "Price", "collective", "link_of", "sent_bytes"]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, how they are reached, and the outermost level crossed."""

    seconds: float
    algorithm: str
    level: str


@lru_cache(maxsize=200_000)
def collective(cluster: Cluster, kind: str, group: Group, nbytes: float) -> Price:
    """The cheapest way to run `kind` in every group of this form at once; nbytes is the full buffer.

    Full is: the tensor of an all-reduce, the result of an all-gather, the input of a reduce-scatter, the whole send
    buffer of a rank in an all-to-all, the tensor of a broadcast.
    """
    sent_bytes(kind, group.size, nbytes)  # raises on an unknown kind and on impossible sizes
    backend = BACKENDS[cluster.backend]
    call = Call(backend, kind, crossings(cluster, group), nbytes)
    seconds, algorithm = min((FORMULAS[name](call), name) for name in backend.algorithms[kind])
    return Price(backend.startup + seconds, algorithm, call.crossings[-1].level.name)


def link_of(cluster: Cluster, group: Group) -> str:
    """The outermost level that the group crosses."""
    return crossings(cluster, group)[-1].level.name
