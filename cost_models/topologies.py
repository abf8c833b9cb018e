"""What a topology leaves of the ports: how many times slower than its port a child sends, in each pattern of traffic.

    pattern     who sends to whom                                            all groups of the same form at once
    ring        every child to its neighbour in one ring, or in as many rings as the links make
    all-to-all  every child to every other of its group, evenly
    send        every child to one other

n children of a level work together, each `step` children from the next; B is the bandwidth of a port, all its links.

    switch, fat-tree, dragonfly   1, and `oversubscription` on what leaves a leaf (all, where no leaf is given)
    dragonfly                     all-to-all * 3/2: adaptive routing sends half of it by a third group (Kim et al. 2008)
    fully-connected               (size-1) / (n-1): a group sees only the links among its members
    hybrid-cube-mesh              6 / rings(n): the NVLinks among n of 8 form that many directed rings
    ring, torus, hammingmesh      in `grids`

A level with `group_bandwidth` takes what was measured in groups of n, and there the efficiency of the link is in it.
"""

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.cost_models.grids import distance, hamming_mesh, torus
from autoddl.cost_models.machine import Level

__all__ = ["CUBE_MESH_RINGS", "PATTERNS", "check", "hops", "slowdown"]

PATTERNS = ("ring", "all-to-all", "send")

CUBE_MESH_RINGS: Mapping[int, float] = MappingProxyType({2: 1, 3: 2, 4: 4, 5: 1.6, 6: 2, 7: 4, 8: 6})
"""Directed rings of one NVLink each that the first n of 8 V100 form, two per Hamiltonian cycle of the link graph
{01 02 13 26 37 45 46 57: 1, 03 04 12 15 23 47 56 67: 2 links} (p3.16xlarge, `nvidia-smi topo -m`). The fifth GPU has
one neighbour among the first four: no ring but a chain that passes the buffer up and down, 2 (n-1)/n = 1.6 links.
"""


def slowdown(level: Level, ways: int, step: int, pattern: str) -> float:
    """How many times longer than on its port alone a child sends in `pattern`; at least 1."""
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


def check(level: Level) -> None:
    """Raise where the keys of a topology contradict the size of the level."""
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
    """oversubscription * what leaves a leaf: of a ring one hop in each leaf, of an all-to-all the peers outside."""
    if level.leaf is None:
        return level.oversubscription
    inside = min(ways, max(1, level.leaf // step))
    if inside == ways:
        return 1.0
    leaving = (ways - inside) / (ways - 1) if pattern == "all-to-all" else 1 / inside
    return level.oversubscription * leaving


def _dragonfly(level: Level, ways: int, step: int, pattern: str) -> float:
    """As a tree of groups; of an even load that leaves its group, half goes by way of a third group."""
    within = level.leaf is not None and ways <= level.leaf // step
    return _tree(level, ways, step, pattern) * (1.5 if pattern == "all-to-all" and not within else 1.0)


def _full(level: Level, ways: int, step: int, pattern: str) -> float:
    """(size - 1) / (n - 1) of the links lead to members; one message takes one link."""
    return (level.size - 1) / (1 if pattern == "send" else ways - 1)


def _cube_mesh(level: Level, ways: int, step: int, pattern: str) -> float:
    """6 links in a port, of which rings(n) carry a group of n."""
    return 6 / CUBE_MESH_RINGS[2 if pattern == "send" else ways]


_TOPOLOGIES: Mapping[str, Callable[[Level, int, int, str], float]] = MappingProxyType({
    "switch": _tree, "fat-tree": _tree, "dragonfly": _dragonfly, "fully-connected": _full, "ring": torus,
    "torus": torus, "hybrid-cube-mesh": _cube_mesh, "hammingmesh": hamming_mesh,
})
