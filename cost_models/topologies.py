"""Slowdowns of topologies: how many times slower than its port a child sends, in each pattern of traffic.

    pattern     who sends to whom, in all groups of one form at once
    ring        every child to its neighbour in one ring, or in as many rings as the links make
    all-to-all  every child to every other of its group, evenly
    send        every child to one other

n children of a level work together, each `step` children from the next; B is the bandwidth of a port, all its links.

    switch, fat-tree, dragonfly   1, times `oversubscription` for traffic that leaves a leaf (all, without leaves)
    dragonfly                     all-to-all * 3/2: adaptive routing sends half of it by a third group (Kim et al. 2008)
    fully-connected               (size-1) / (n-1): a group sees only the links among its members
    hybrid-cube-mesh              6 / rings(n): the NVLinks among n of 8 form that many directed rings
    ring, torus, hammingmesh      below, by where the group lies

A level with `group_bandwidth` has the slowdown that was measured in groups of n; it includes the link's efficiency.

Rings, tori and HammingMesh: k dims give a child links of B/2k each way. The group covers `extent` of the `side`
children of a dim, each `gap` from the next, and the groups between share the links. A part of a dim is a line, not
a ring.

    ring         torus  k / sum over the dims covered of (1, of a line 1/2) / gap       hammingmesh  1
    all-to-all   torus  k n/(n-1) max over the dims of gap extent/4 (of a line twice)   hammingmesh  a (2 p2 + p1)
    send         torus  2 k gap, one of 2k links                                        hammingmesh  4

with p1 = (x+y-2)/xy, p2 = (x-1)(y-1)/xy of x x y boards of a x a devices (Hoefler et al., HammingMesh, SC 2022).
"""

from collections.abc import Callable, Mapping
from math import isqrt, prod
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.cost_models.machine import Level

__all__ = ["CUBE_MESH_RINGS", "PATTERNS", "check_topology", "distance", "hamming_mesh", "hops", "slowdown", "torus"]

PATTERNS = ("ring", "all-to-all", "send")

CUBE_MESH_RINGS: Mapping[int, float] = MappingProxyType({2: 1, 3: 2, 4: 4, 5: 1.6, 6: 2, 7: 4, 8: 6})
"""Directed rings of one NVLink each that the first n of 8 V100 form, two per Hamiltonian cycle of the link graph
{01 02 13 26 37 45 46 57: 1, 03 04 12 15 23 47 56 67: 2 links} (p3.16xlarge, `nvidia-smi topo -m`). The fifth GPU has
one neighbour among the first four: no ring but a chain that passes the buffer up and down, 2 (n-1)/n = 1.6 links.
"""


def slowdown(level: Level, ways: int, step: int, pattern: str) -> float:
    """How many times longer a child sends in `pattern` than on its port alone: at least 1."""
    if pattern not in PATTERNS:
        raise InputError(f"{pattern!r} is no pattern of traffic; the patterns are {', '.join(PATTERNS)}")
    measured = dict(level.group_bandwidth).get(2 if pattern == "send" else ways)
    if measured is not None:
        return max(1.0, level.bandwidth / measured)
    thinner = 1.0 if _TOPOLOGIES[level.topology] in (_tree, _dragonfly) else level.oversubscription
    return max(1.0, thinner * _TOPOLOGIES[level.topology](level, ways, step, pattern))


def hops(level: Level, ways: int, step: int) -> float:
    """Links that a message between two members passes on average; 1 where a switch is between."""
    return distance(level, ways, step) if level.topology in ("ring", "torus") else 1.0


def check_topology(level: Level) -> None:
    """Raises InputError where the keys of a topology contradict the size of the level."""
    boards = level.board**2 if level.topology == "hammingmesh" else 1
    if level.dims and prod(level.dims) * boards != level.size:
        raise InputError(f"dims {list(level.dims)}{f' of boards of {boards}' if boards > 1 else ''} make "
                         f"{prod(level.dims) * boards} children, but the size is {level.size}; let them multiply to it")
    if level.topology == "hammingmesh" and len(level.dims) != 2:
        raise InputError("a hammingmesh has dims: [x, y], its boards, and board: a, for boards of a x a devices")
    if level.topology == "torus" and not 0 <= len(level.dims) <= 3:
        raise InputError(f"dims {list(level.dims)}: a torus has up to three")
    if level.topology == "hybrid-cube-mesh" and not level.size <= len(CUBE_MESH_RINGS) + 1:
        known = dict(level.group_bandwidth)
        missing = [n for n in range(2, level.size + 1) if level.size % n == 0 and n not in known]
        if missing:
            raise InputError(f"a hybrid-cube-mesh has 2 to 8 children, not {level.size}; write what another one "
                             f"reaches among {', '.join(map(str, missing))} as group_bandwidth: {{2: 20 GB/s, ...}}")
    if level.leaf is not None and level.size % level.leaf:
        raise InputError(f"leaf {level.leaf} does not divide the size {level.size}")


def _tree(level: Level, ways: int, step: int, pattern: str) -> float:
    """oversubscription * fraction that leaves a leaf: one hop of a ring in each leaf, or the peers outside."""
    if level.leaf is None:
        return level.oversubscription
    inside = min(ways, max(1, level.leaf // step))
    if inside == ways:
        return 1.0
    leaving = (ways - inside) / (ways - 1) if pattern == "all-to-all" else 1 / inside
    return level.oversubscription * leaving


def _dragonfly(level: Level, ways: int, step: int, pattern: str) -> float:
    """A tree of groups, in which half of an even load that leaves its group goes by way of a third group."""
    within = level.leaf is not None and ways <= level.leaf // step
    return _tree(level, ways, step, pattern) * (1.5 if pattern == "all-to-all" and not within else 1.0)


def _full(level: Level, ways: int, step: int, pattern: str) -> float:
    """(size - 1) / (n - 1) of the links lead to members; one message takes one link."""
    return (level.size - 1) / (1 if pattern == "send" else ways - 1)


def _cube_mesh(level: Level, ways: int, step: int, pattern: str) -> float:
    """6 links in a port, of which rings(n) carry a group of n."""
    return 6 / CUBE_MESH_RINGS[2 if pattern == "send" else ways]


def distance(level: Level, ways: int, step: int) -> float:
    """Mean number of links between two members; at least 1."""
    return max(1.0, sum(_mean(extent) * gap for _, extent, gap in _box(level, ways, step) if extent > 1))


def torus(level: Level, ways: int, step: int, pattern: str) -> float:
    """Slowdown on k dims of 2 B/2k per child: a ring uses the dims it covers, the longest dim bounds an even load.

    An even load passes e/4 links of a closed dim on average, and twice that in the middle of a line. The `gap` groups
    that lie between each other share the links.
    """
    k, box = max(1, len(level.dims)), [part for part in _box(level, ways, step) if part[1] > 1]
    if pattern == "ring":
        return k / sum((1.0 if extent * gap == side else 0.5) / gap for side, extent, gap in box)
    if pattern == "send":
        return max((1 if side == 2 else 2) * k * gap for side, _, gap in box)
    return k * ways / (ways - 1) * max(gap * _mean(extent) * (1 if extent * gap == side else 2)
                                       for side, extent, gap in box)


def hamming_mesh(level: Level, ways: int, step: int, pattern: str) -> float:
    """Slowdown a (2 p2 + p1) of an all-to-all (Hoefler et al., SC 2022); two disjoint rings use all four ports."""
    if pattern != "all-to-all":
        return 1.0 if pattern == "ring" else 4.0
    x, y = level.dims if ways == level.size else _near_square(max(1, ways // level.board**2))
    p1, p2 = (x + y - 2) / (x * y), (x - 1) * (y - 1) / (x * y)
    return level.board * max(1.0, 2 * p2 + p1)  # the board itself is a mesh of a x a, whose bisection is 1/a


def _near_square(n: int) -> tuple[int, int]:
    side = next(side for side in range(isqrt(n), 0, -1) if n % side == 0)
    return side, n // side


def _mean(extent: int) -> float:
    """Mean number of links between two members of a ring of e: e/4, or (e - 1/e)/4 where e is odd."""
    return extent / 4 if extent % 2 == 0 else (extent - 1 / extent) / 4


def _box(level: Level, ways: int, step: int) -> list[tuple[int, int, int]]:
    """(side, members, gap) of each dim, the first dim fastest, for n children of which each is `step` from the next."""
    found = []
    for side in level.dims or (level.size,):
        gap, step = min(step, side), max(1, step // side)
        extent = max(1, min(ways, side // gap))
        ways = -(-ways // extent)
        found.append((side, extent, gap if extent > 1 else 1))
    return found


_TOPOLOGIES: Mapping[str, Callable[[Level, int, int, str], float]] = MappingProxyType({
    "switch": _tree, "fat-tree": _tree, "dragonfly": _dragonfly, "fully-connected": _full, "ring": torus,
    "torus": torus, "hybrid-cube-mesh": _cube_mesh, "hammingmesh": hamming_mesh,
})
