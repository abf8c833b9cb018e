"""Seconds of a collective: the cheapest algorithm that the backend of the cluster has.

    price = startup + min over the algorithms and wire protocols of the backend of start + seconds by `FORMULAS`

Where a calibration timed what a collective takes of a rank's processor (gloo), that stands for startup and start, and
what is handed from thread to thread takes turn * steps at least:

    host  = call + message * steps + byte * bytes sent       steps = phases (n - 1), each with a message
    alone = host + wait * steps                              a step's receiver is woken, and nothing computes then
    price = max(seconds by `FORMULAS`, alone)                while bytes are on their way the host does its part
    busy  = max(seconds by `FORMULAS` + 2 busy, alone + busy * steps) - price      more, while the ranks compute: what
                                                             sends waits for a core when it starts and when it ends
    drag  = drag * bytes sent                                what is computed meanwhile takes host + drag longer

Every disjoint group of the same form runs the collective at the same time, so shared links are divided among them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2, prod

from autoddl.cost_models.backends import BACKENDS, KINDS, Algorithm, Backend
from autoddl.cost_models.call import CollectiveCall, sent_bytes
from autoddl.cost_models.groups import Crossing, Group, crossings
from autoddl.cost_models.hierarchy import FORMULAS
from autoddl.cost_models.machine import Cluster

__all__ = ["KINDS", "Group", "Price", "cheapest_price", "collective", "link_of", "sent_bytes", "step_count",
           "wire_seconds"]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, how they are reached, the outermost level crossed, the seconds of the rank's own processor, those that
    are added while the ranks compute beside it, and those that this computation loses more than its processor's."""

    seconds: float
    algorithm: Algorithm
    level: str
    host: float = 0.0
    busy: float = 0.0
    drag: float = 0.0


@lru_cache(maxsize=200_000)
def collective(cluster: Cluster, kind: str, group: Group, nbytes: float) -> Price:
    """The cheapest way to run `kind` in every group of this form at once; nbytes is the full buffer.

    Full is: the tensor of an all-reduce, the result of an all-gather, the input of a reduce-scatter, the whole send
    buffer of a rank in an all-to-all, the tensor of a broadcast, the message of a send (of each rank to one other).
    """
    sent = sent_bytes(kind, group.size, nbytes)  # raises on an unknown kind and on impossible sizes
    backend, device = BACKENDS[cluster.backend], cluster.device
    found = cheapest_price(backend, kind, crossings(cluster, group), nbytes, device.host.turn if device.host else 0.0)
    if cluster.backend != "gloo" or device.host is None:
        return found
    many = step_count(kind, group.size)
    host = device.host.call + device.host.message * many + device.host.byte * sent
    network, alone = _network(backend, found), host + device.host.wait * many
    seconds, beside = max(network, alone), max(network + 2 * device.host.busy, alone + device.host.busy * many)
    return replace(found, seconds=seconds, host=host, busy=max(0.0, beside - seconds), drag=device.host.drag * sent)


def _network(backend: Backend, price: Price) -> float:
    """Its seconds by `FORMULAS`."""
    return price.seconds - backend.startup - backend.starts.get(price.algorithm, 0.0)


@lru_cache(maxsize=20_000)
def wire_seconds(cluster: Cluster, kind: str, group: Group, nbytes: float) -> float:
    """For how long its bytes keep the links busy: what the network takes beyond a byte of every rank."""
    backend, crossed = BACKENDS[cluster.backend], crossings(cluster, group)
    whole, least = (_network(backend, cheapest_price(backend, kind, crossed, n)) for n in (nbytes, float(group.size)))
    return max(0.0, whole - least)


def step_count(kind: str, n: int) -> int:
    """Messages that a rank sends one after the other, when each waits for the one before."""
    return {"send": 1, "broadcast": ceil(log2(n)), "all-reduce": 2 * (n - 1)}.get(kind, n - 1)


def cheapest_price(backend: Backend, kind: str, crossed: tuple[Crossing, ...], nbytes: float, turn: float = 0.0
                   ) -> Price:
    """The least seconds over the algorithms and wire protocols of a backend. `turn`: of a step that is handed on."""
    n = prod(crossing.ways for crossing in crossed)
    least = {name: turn * step_count("all-reduce" if name is Algorithm.AS_ALL_REDUCE else kind, n)
             for name in backend.handed}
    seconds, algorithm = min((backend.starts.get(name, 0.0) + max(least.get(name, 0.0), FORMULAS[name](
        CollectiveCall(backend, kind, crossed, nbytes, wire, name))), name)
        for name in backend.algorithms[kind] for wire in backend.wires)
    return Price(backend.startup + seconds, algorithm, crossed[-1].level.name)


def link_of(cluster: Cluster, group: Group) -> str:
    """The outermost level that the group crosses."""
    return crossings(cluster, group)[-1].level.name
