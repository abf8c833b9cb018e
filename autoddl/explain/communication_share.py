"""Computes the share of communication in a data parallel step, by protocol of the network and number of ranks.

    C       = all-reduce of the gradients among the ranks                        F, B, U are in `data_parallel_work`
    step    = F + B + U + C,  share = C / step           without overlap: gradients are sent after backward, as one
            = end of the time line,                      with overlap: they are sent in buckets, one after the other,
              share = exposed / step                     while the rest of B runs

The batch is that of all ranks together (strong scaling), and a rank computes its part at once. The other ranks of the
cluster, beyond those asked for, do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoddl.core.errors import InputError
from autoddl.core.plan import BUCKET_BYTES
from autoddl.cost_models import Cluster, Group, Level, collective, parse_quantity
from autoddl.cost_models.links import expand_link, is_network, protocol_of
from autoddl.cost_models.software import HOST
from autoddl.cost_models.timelines.timeline import Task, simulate
from autoddl.explain.data_parallel_work import Traced, Work, work_of

__all__ = ["Network", "Share", "over", "shares"]


@dataclass(frozen=True, slots=True)
class Network:
    """A protocol of a network, on the link of this name or on that of the cluster, like `ipoib`, `tcp=Ethernet-10G`."""

    protocol: str
    link: str = ""

    @classmethod
    def parse(cls, text: str) -> "Network":
        """The network that a text names. Raises InputError for an unknown protocol or link."""
        name, _, link = text.partition("=")
        if not protocol_of(name).network:
            raise InputError(f"{name!r} is a protocol inside a host; name one of a network")
        if link:
            expand_link({"link": link})
        return cls(name, link)

    def __str__(self) -> str:
        return f"{self.protocol}={self.link}" if self.link else self.protocol


@dataclass(frozen=True, slots=True)
class Share:
    """A cell of the table: the share of communication on one network and number of ranks."""

    network: Network
    """The protocol and link."""
    ranks: int
    """The number of ranks."""
    batch: int
    """Rows of the batch that one rank computes."""
    compute: float
    """Seconds of a step in which a rank computes."""
    communication: float
    """Seconds of the collectives of a step."""
    exposed: float
    """Seconds of a step in which a rank communicates and does not compute."""
    step: float
    """Seconds of a step."""

    @property
    def share(self) -> float:
        """The part of the step in which the rank only communicates, between 0 and 1."""
        return self.exposed / self.step


def over(cluster: Cluster, network: Network) -> Cluster:
    """`cluster` with its network on this protocol and link. Raises InputError for a cluster without a network."""
    levels = tuple(_over(level, network) if is_network(level, i) else level for i, level in enumerate(cluster.levels))
    if not any(is_network(level, i) for i, level in enumerate(cluster.levels)):
        names = ", ".join(level.name for level in levels)
        raise InputError(f"cluster {cluster.name} has no network, only {names}; add a level")
    return replace(cluster, levels=levels)


def _over(level: Level, network: Network) -> Level:
    if not network.link:
        same = level.protocol == network.protocol
        return replace(level, protocol=network.protocol, efficiency=level.efficiency if same else None)
    facts = expand_link({"link": network.link, "protocol": network.protocol})
    return replace(level, protocol=network.protocol, bandwidth=parse_quantity(facts["bandwidth"], "bytes/s"),
                   latency=parse_quantity(facts["latency"], "seconds"), efficiency=facts.get("efficiency"))


def shares(model: Traced, cluster: Cluster, networks: Sequence[Network], ranks: Sequence[int], *, overlap: bool = True,
           gradient: int = 0, host: float = HOST) -> tuple[Share, ...]:
    """The share of communication for every network and every number of ranks, network by network.

    `overlap` says whether gradients are sent during backward. `gradient` is the bytes of an element sent, 0 for those
    of the parameter. `host` is seconds of the host per operator. Raises InputError for a number of ranks that the
    cluster lacks or that does not divide the batch.
    """
    parts = {n: _part(model, cluster, n) for n in ranks}
    work = {n: work_of(model.of(part), cluster, gradient, host) for n, part in parts.items()}
    found = []
    for network in networks:
        place = over(cluster, network)
        for n in ranks:
            sent, exposed, step = (_beside if overlap else _after)(work[n], place, n)
            found.append(Share(network, n, parts[n], work[n].seconds, sent, exposed, step))
    return tuple(found)


def _part(model: Traced, cluster: Cluster, ranks: int) -> int:
    if not 2 <= ranks <= cluster.size or model.batch % ranks:
        raise InputError(f"{ranks} ranks: cluster {cluster.name} has {cluster.size}, and a batch of {model.batch} is "
                         "cut evenly; ask for a number from 2 on that divides the batch")
    return model.batch // ranks


def _reduced(cluster: Cluster, ranks: int, nbytes: float) -> float:
    return collective(cluster, "all-reduce", Group(((ranks, 1),)), nbytes).seconds


def _after(work: Work, cluster: Cluster, ranks: int) -> tuple[float, float, float]:
    """Seconds of one all-reduce after backward, all of it exposed, and of the step."""
    seconds = _reduced(cluster, ranks, work.nbytes)
    return seconds, seconds, work.seconds + seconds


def _beside(work: Work, cluster: Cluster, ranks: int) -> tuple[float, float, float]:
    """Seconds of the buckets' all-reduces, what is exposed of them, and of the step."""
    tasks, filled, sent, left = [Task("forward", work.forward)], 0.0, list[int](), work.nbytes
    for seconds, nbytes in work.backward:
        tasks.append(Task("backward", seconds))
        filled, left = filled + nbytes, left - nbytes
        if filled >= BUCKET_BYTES or (filled and not left):
            sent.append(len(tasks))
            tasks.append(Task("gradients", _reduced(cluster, ranks, filled), stream="network", needs=(len(tasks) - 1,)))
            filled = 0.0
    tasks.append(Task("update", work.update, needs=tuple(sent)))
    line = simulate(tasks)
    return sum(tasks[k].seconds for k in sent), line.exposed(0), line.makespan
