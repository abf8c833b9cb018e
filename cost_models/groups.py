"""Where the members of a group sit: which levels a group crosses, and whom it shares the links with.

A group is {base + sum_k c_k * stride_k, 0 <= c_k < size_k}. Its cosets, one per base, are disjoint, cover the cluster
and work at the same time. With U_i devices in a unit of level i,

    m_i = prod_k inside(size_k, stride_k, U_i)      members of one group in a unit of level i, m_0 = 1
    ways_i = m_i / m_{i-1}                          children of one such unit that the group touches
    U_i / m_i                                       groups with members in one unit of level i

    step_i = min stride_k / U_{i-1} over the extents within unit i: children from one member's to the next

A level is crossed if ways_i > 1. Levels that a group does not cross do not slow it: inner links are no slower.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from autoddl.core.errors import InputError
from autoddl.cost_models.links import is_network, latency_of
from autoddl.cost_models.machine import Cluster, Level
from autoddl.cost_models.topologies import PATTERNS, check_topology, slowdown

__all__ = ["Crossing", "Group", "crossings"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that work together: (size, stride) pairs, outermost first. Text: `4@8,2@1`.

    Raises InputError where two index tuples would name one rank.
    """

    extents: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        reach = 1
        for size, stride in sorted(self.extents, key=lambda extent: extent[1]):
            if size < 1 or stride < 1 or (size > 1 and stride < reach):
                raise InputError(f"{self} is no group: sizes and strides are at least 1, "
                                 f"and each stride steps over all the members of the smaller ones")
            reach = max(reach, size * stride) if size > 1 else reach

    def __str__(self) -> str:
        return ",".join(f"{size}@{stride}" for size, stride in self.extents)

    @property
    def size(self) -> int:
        """Number of members."""
        return prod(size for size, _ in self.extents)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A level that a group crosses.

        level          the level
        ways           children of one unit that the group touches
        members        members of the group in each of these children
        sharers        devices that share one port; all of them belong to some group of the same form
        step           distance from one of the children to the next
        inside_host    whether messages stay inside a host: as the protocol says, else on the innermost level
        slowdowns      how many times longer than on its port alone a child sends, by pattern of traffic
        groups         groups of the form with members in one unit
    """

    level: Level
    ways: int
    members: int
    sharers: int
    step: int = 1
    inside_host: bool = True
    slowdowns: tuple[float, ...] = (1.0,) * len(PATTERNS)
    groups: int = 1

    @property
    def latency(self) -> float:
        """Seconds of a message between neighbours of the level."""
        return latency_of(self.level)

    def port_load(self, pattern: str) -> float:
        """Senders per port when every device sends in this pattern, each counted by the topology's slowdown."""
        return self.sharers * self.slowdowns[PATTERNS.index(pattern)]

    def port_rings(self, rails: bool) -> float:
        """Rings per port: the rings of U/m groups leave by U/sharers ports, or by their thinner trunk.

        Without `rails` a ring leaves a child by one port, however many there are, so some port carries a whole ring.
        """
        rings = self.port_load("ring") / self.members
        return rings if rails else max(1.0, rings)


def _inside(size: int, stride: int, unit: int) -> int | None:
    """Members of one extent in one aligned unit of `unit` ranks; None where units hold unequal numbers."""
    if stride % unit == 0:
        return 1
    if unit % (size * stride) == 0:
        return size
    return unit // stride if unit % stride == 0 and size * stride % unit == 0 else None


@lru_cache(maxsize=10_000)
def crossings(cluster: Cluster, group: Group) -> tuple[Crossing, ...]:
    """The levels that a group crosses, innermost first.

    Raises InputError where the group does not fit in the cluster, has one member, or lies unevenly over some units.
    """
    last = sum((size - 1) * stride for size, stride in group.extents)
    if last >= cluster.size:
        raise InputError(f"group {group} reaches {last} ranks beyond its first, but cluster {cluster.name} "
                         f"has {cluster.size} ranks; use fewer ranks or a larger cluster")
    if group.size < 2:
        raise InputError(f"group {group} has one member and nothing to exchange; price groups of at least 2")
    counts = [_members(cluster, group, index) for index in range(len(cluster.levels) + 1)]
    return tuple(_crossing(cluster, group, index, before, after // before)
                 for index, (before, after) in enumerate(pairwise(counts)) if after > before)


def ways_of(cluster: Cluster, group: Group) -> tuple[int, ...]:
    """How many children of each level a group touches, innermost first: what the ways of its crossings are."""
    return tuple(crossing.ways for crossing in crossings(cluster, group))


def _crossing(cluster: Cluster, group: Group, index: int, members: int, ways: int) -> Crossing:
    level, step = cluster.levels[index], _step(cluster, group, index)
    check_topology(level)
    slowed = tuple(slowdown(level, ways, step, pattern) for pattern in PATTERNS)
    return Crossing(level, ways, members, cluster.sharers(index), step, not is_network(level, index), slowed,
                    cluster.units[index + 1] // (members * ways))


def _step(cluster: Cluster, group: Group, index: int) -> int:
    """Distance, in children, from one that the group touches to the next."""
    unit, parent = cluster.units[index], cluster.units[index + 1]
    return min(max(1, stride // unit) for size, stride in group.extents
               if size > 1 and stride < parent and size * stride > unit)


def _members(cluster: Cluster, group: Group, index: int) -> int:
    """m_i for i = `index`. Raises InputError where a group has different numbers of members in different units."""
    if index == len(cluster.levels):
        return group.size
    unit, total = cluster.units[index], 1
    for size, stride in group.extents:
        inside = _inside(size, stride, unit) if size > 1 else 1
        if inside is None:
            raise InputError(f"group {group} lies unevenly over the units of {unit} ranks of level "
                             f"{cluster.levels[index - 1].name!r} of cluster {cluster.name}; "
                             f"choose axis sizes that divide the sizes of the levels")
        total *= inside
    return total
