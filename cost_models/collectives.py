"""Seconds of a collective: the cheapest algorithm that the backend of the cluster has.

    price = startup + min over the algorithms and wire protocols of the backend of start + seconds by `FORMULAS`

Every disjoint group of the same form runs the collective at the same time, so shared links are divided among them.
"""

from dataclasses import dataclass
from functools import lru_cache

from autoddl.cost_models.backends import BACKENDS, KINDS, Backend
from autoddl.cost_models.call import Call, sent_bytes
from autoddl.cost_models.groups import Crossing, Group, crossings
from autoddl.cost_models.hierarchy import FORMULAS
from autoddl.cost_models.machine import Cluster

__all__ = ["KINDS", "Group", "Price", "cheapest", "collective", "link_of", "sent_bytes"]


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
    buffer of a rank in an all-to-all, the tensor of a broadcast, the message of a send (of each rank to one other).
    """
    sent_bytes(kind, group.size, nbytes)  # raises on an unknown kind and on impossible sizes
    return cheapest(BACKENDS[cluster.backend], kind, crossings(cluster, group), nbytes)


def cheapest(backend: Backend, kind: str, crossed: tuple[Crossing, ...], nbytes: float) -> Price:
    """The least seconds over the algorithms and wire protocols of a backend."""
    seconds, algorithm = min((backend.starts.get(name, 0.0) + FORMULAS[name](
        Call(backend, kind, crossed, nbytes, wire, name)), name)
        for name in backend.algorithms[kind] for wire in backend.wires)
    return Price(backend.startup + seconds, algorithm, crossed[-1].level.name)


def link_of(cluster: Cluster, group: Group) -> str:
    """The outermost level that the group crosses."""
    return crossings(cluster, group)[-1].level.name
