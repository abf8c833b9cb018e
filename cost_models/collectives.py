"""Seconds of a collective: the cheapest algorithm that the backend of the cluster has.

    price = startup + min over the algorithms and wire protocols of the backend of start + seconds by `FORMULAS`

With gloo a collective also takes the rank's CPU. Where a calibration timed that (`Host`), it replaces startup and
start. An algorithm whose steps pass from thread to thread then takes turn * steps at least:

    host  = call + message * steps + byte * bytes sent       steps = phases (n - 1), each with a message
    alone = host + wait * steps                              the receiver of a step is woken while nothing computes
    price = max(seconds by `FORMULAS`, alone)                the host works while bytes are on their way
    busy  = max(seconds by `FORMULAS` + 2 busy, alone + busy * steps) - price      more seconds while the ranks compute:
                                                             the sender waits for a core at its start and at its end
    drag  = drag * bytes sent                                computation meanwhile takes host + drag seconds longer

A sparse all-reduce (`core.sparse`) is five exchanges of all with all, of which three are of a count for each rank. A
renewal, in one of RENEWED steps, tells bounds, ties and ROUNDS times BINS counts besides:

    sparse = 2 price of an all-to-all of its entries + 3 price of one of 4 bytes for each rank + renewal / RENEWED
    renewal = 2 price of an all-to-all of 4 (n-1), or 8, bytes for each rank + ROUNDS price of one of 4 BINS

All disjoint groups of the same form run the collective at the same time, so they divide shared links among them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2, prod

from autoddl.core.errors import InputError
from autoddl.core.sparse import BINS, RENEWED, ROUNDS, SPARSE
from autoddl.cost_models.backends import BACKENDS, KINDS, Algorithm, Backend
from autoddl.cost_models.call import CollectiveCall, sent_bytes
from autoddl.cost_models.groups import Crossing, Group, crossings
from autoddl.cost_models.hierarchy import FORMULAS
from autoddl.cost_models.machine import Cluster

__all__ = ["KINDS", "Group", "Price", "cheapest_price", "collective", "link_of", "moved_by", "sent_bytes",
           "step_count",
           "wire_seconds"]


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a collective.

        seconds      until it is done, while nothing else runs
        algorithm    the cheapest algorithm
        level        name of the outermost level that is crossed
        host         seconds of the rank's own CPU
        busy         seconds more while the ranks compute
        drag         seconds that this computation loses besides `host`
        sent         bytes that each rank sends: those of a ring, or all N to the switches that reduce
    """

    seconds: float
    algorithm: Algorithm
    level: str
    host: float = 0.0
    busy: float = 0.0
    drag: float = 0.0
    sent: float = 0.0


@lru_cache(maxsize=200_000)
def collective(cluster: Cluster, kind: str, group: Group, nbytes: float) -> Price:
    """The price of running `kind` in every group of this form at once; `nbytes` are those of the full buffer.

        all-reduce, broadcast    the tensor
        all-gather               the result
        reduce-scatter           the input
        all-to-all               all that a rank sends
        sparse all-reduce        its entries
        send                     the message of each rank to one other
        shift                    the message of each rank to the next of its group
        halo                     all that a rank sends to those beside it
        exchange                 all that a rank sends, in parts of sizes that differ

    Raises InputError for an unknown kind, impossible sizes, and a group that lies unevenly over the cluster.
    """
    if kind == SPARSE:
        return _sparse(cluster, group, nbytes)
    sent_bytes(kind, group.size, nbytes)  # raises on an unknown kind and on impossible sizes
    backend, device, crossed = BACKENDS[cluster.backend], cluster.device, crossings(cluster, group)
    found = cheapest_price(backend, kind, crossed, nbytes, device.host.turn if device.host else 0.0)
    ways = tuple(crossing.ways for crossing in crossed)
    sent = moved_by(found.algorithm, kind, group.size, nbytes, ways)
    found = replace(found, sent=sent)
    if cluster.backend != "gloo" or device.host is None:
        return found
    count = {Algorithm.SWITCH_TREE: 2 * len(crossed), Algorithm.STAGES: sum(ways) - len(ways)}.get(
        found.algorithm, step_count(kind, group.size))
    host = device.host.call + device.host.message * count + device.host.byte * sent
    network, alone = _network(backend, found), host + device.host.wait * count
    seconds, computing = max(network, alone), max(network + 2 * device.host.busy, alone + device.host.busy * count)
    return replace(found, seconds=seconds, host=host, busy=max(0.0, computing - seconds), drag=device.host.drag * sent)


def _sparse(cluster: Cluster, group: Group, nbytes: float) -> Price:
    """The price of a sparse all-reduce of `nbytes` of entries; on gloo the runtime sends its messages.

    It is the mean over the RENEWED steps between two renewals. `sent` are the bytes of a step without.
    """
    n = group.size
    words = (nbytes / 4 / n, 1.0, n - 1.0, 2.0, float(BINS))
    large, small, bounds, ties, counts = (collective(cluster, "exchange", group, 4.0 * n * each) for each in words)

    def both(name: str) -> float:
        again = sum(float(getattr(one, name)) for one in (bounds, ties, *(counts,) * ROUNDS)) / RENEWED
        return 2.0 * float(getattr(large, name)) + 3.0 * float(getattr(small, name)) + again * (name != "sent")

    algorithm = Algorithm.ROUNDS if cluster.backend == "gloo" else large.algorithm
    return Price(both("seconds"), algorithm, large.level, both("host"), both("busy"), both("drag"),
                 both("sent"))


def moved_by(algorithm: str, kind: str, n: int, nbytes: float, ways: tuple[int, ...]) -> float:
    """Bytes that each of n ranks sends by an algorithm: all N to switches that reduce, else those of a ring.

    In stages a rank sends (w-1)/w N in each of the levels, which have `ways` members. They must be known for these:
    raises InputError where their product is not n.
    """
    if algorithm == Algorithm.STAGES:
        if prod(ways) != n:
            raise InputError(f"{kind} of {n} ranks in stages over levels of {'x'.join(map(str, ways)) or 'unknown'} "
                             f"members: their product is {n}; a plan that keeps its cluster knows them")
        return sum((w - 1) / w for w in ways) * nbytes
    return float(nbytes) if algorithm == Algorithm.SWITCH_TREE else sent_bytes(kind, n, nbytes)


def _network(backend: Backend, price: Price) -> float:
    """The seconds of a price by `FORMULAS` alone: without startup and start."""
    return price.seconds - backend.startup - backend.starts.get(price.algorithm, 0.0)


@lru_cache(maxsize=20_000)
def wire_seconds(cluster: Cluster, kind: str, group: Group, nbytes: float) -> float:
    """Seconds for which the collective's bytes keep the links busy: those beyond a buffer of one byte per rank."""
    if kind == SPARSE:
        return 2.0 * wire_seconds(cluster, "exchange", group, nbytes)
    backend, crossed = BACKENDS[cluster.backend], crossings(cluster, group)
    whole, least = (_network(backend, cheapest_price(backend, kind, crossed, n)) for n in (nbytes, float(group.size)))
    return max(0.0, whole - least)


def step_count(kind: str, n: int) -> int:
    """Number of messages of a rank among `n` that must follow one another in a ring, or in a broadcast's tree."""
    return {"send": 1, "shift": 1, "halo": 1, "broadcast": ceil(log2(n)), "all-reduce": 2 * (n - 1)}.get(kind, n - 1)


def cheapest_price(backend: Backend, kind: str, crossed: tuple[Crossing, ...], nbytes: float, turn: float = 0.0
                   ) -> Price:
    """The least price over the algorithms and wire protocols of a backend, including its startup.

    `turn` are the least seconds of a step that passes from thread to thread.
    """
    n = prod(crossing.ways for crossing in crossed)
    least = {name: turn * step_count("all-reduce" if name is Algorithm.AS_ALL_REDUCE else kind, n)
             for name in backend.threaded}
    seconds, algorithm = min((backend.starts.get(name, 0.0) + max(least.get(name, 0.0), FORMULAS[name](
        CollectiveCall(backend, kind, crossed, nbytes, wire, name))), name)
        for name in backend.algorithms[kind] for wire in backend.wires)
    return Price(backend.startup + seconds, algorithm, crossed[-1].level.name)


def link_of(cluster: Cluster, group: Group) -> str:
    """Name of the outermost level that the group crosses."""
    return crossings(cluster, group)[-1].level.name
