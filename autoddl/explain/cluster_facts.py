"""Says what was understood of a cluster file: per port, per rank, per unit, who shares, and what a collective reaches.

    port        bytes/s in one direction, as the file says; both directions work at once
    rank        port / sharers: what a rank has where all of its port send
    unit        port * ports of a child / oversubscription: what goes out of a child of the level, in one direction
    effective   bytes of a tensor / seconds of its all-reduce, as the performance model prices it

Two groups of every level are priced. `across` has one rank of each child, and all such groups work at once. `inside`
has all ranks of one unit of the level.
"""

from dataclasses import asdict, dataclass
from typing import Any

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, Group, Price, collective
from autoddl.cost_models.groups import crossings
from autoddl.cost_models.machine import Switch
from autoddl.cost_models.switches import why_not

__all__ = ["GIGABYTE", "LevelFacts", "level_facts"]

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """Holds what was understood of a level.

        name         of the level
        size         children of a unit of the level
        child        name of a child: that of the level inside, or `rank`
        child_ranks  ranks of a child
        port         bytes/s of a port in one direction
        sharers      ranks that share a port
        rank         bytes/s of a rank in one direction where all send
        unit         bytes/s that leave a child in one direction
        latency      seconds of a message
        topology     of the level
        thinner      how many times less the trunk carries than the ports behind it
        across       seconds of an all-reduce of a gigabyte over one rank of each child; None for one child
        inside       seconds of one over all ranks of a unit of the level; None for one rank
        switch       what its switches reduce with; None where they do not
        by           algorithms of `across` and of `inside`; "" where there is no price
        no_room      why its switches do not reduce `across`; "" where they do
    """

    name: str
    size: int
    child: str
    child_ranks: int
    port: float
    sharers: int
    rank: float
    unit: float
    latency: float
    topology: str
    thinner: float
    across: float | None
    inside: float | None
    switch: Switch | None = None
    by: tuple[str, str] = ("", "")
    no_room: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, with the effective rates in bytes/s."""
        return asdict(self) | {"across_rate": self.across and GIGABYTE / self.across,
                               "inside_rate": self.inside and GIGABYTE / self.inside}


def level_facts(cluster: Cluster) -> tuple[LevelFacts, ...]:
    """The facts of every level, the innermost first."""
    found = []
    for i, level in enumerate(cluster.levels):
        inner, sharers = cluster.units[i], cluster.sharers(i)
        leaving = level.bandwidth * max(1, inner // sharers) / level.oversubscription
        across, inside = _price(cluster, level.size, inner), _price(cluster, cluster.units[i + 1], 1)
        found.append(LevelFacts(
            level.name, level.size, cluster.levels[i - 1].name if i else "rank", inner, level.bandwidth, sharers,
            level.bandwidth / sharers, leaving, level.latency, level.topology, level.oversubscription,
            across.seconds if across else None, inside.seconds if inside else None, level.reduces,
            (str(across.algorithm) if across else "", str(inside.algorithm) if inside else ""),
            _no_room(cluster, level.size, inner) if level.reduces else ""))
    return tuple(found)


def _no_room(cluster: Cluster, size: int, stride: int) -> str:
    return why_not(crossings(cluster, Group(((size, stride),)))) if size > 1 else ""


def _price(cluster: Cluster, size: int, stride: int) -> Price | None:
    """The price of an all-reduce of a gigabyte over such a group; None where it has one member, or none."""
    if size < 2:
        return None
    try:
        return collective(cluster, "all-reduce", Group(((size, stride),)), GIGABYTE)
    except InputError:
        return None
