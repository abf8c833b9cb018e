"""Rings, tori and HammingMesh: how many times slower than its port a child sends, by where the group lies.

B is the bandwidth of a port, all its links; k dims give a child links of B/2k each way. Of a dim of `side` children the
group has `extent`, each `gap` from the next; the groups between share the links. Part of a dim is a line, not a ring.

    ring         torus  k / sum over the dims covered of (1, of a line 1/2) / gap       hammingmesh  1
    all-to-all   torus  k n/(n-1) max over the dims of gap extent/4 (of a line twice)   hammingmesh  a (2 p2 + p1)
    send         torus  2 k gap, one of 2k links                                        hammingmesh  4

with p1 = (x+y-2)/xy, p2 = (x-1)(y-1)/xy of x x y boards of a x a devices (Hoefler et al., HammingMesh, SC 2022).
"""

from math import isqrt

from autoddl.cost_models.machine import Level

__all__ = ["distance", "hamming_mesh", "torus"]


def distance(level: Level, ways: int, step: int) -> float:
    """Mean links between two members; at least 1."""
    return max(1.0, sum(_mean(extent) * gap for _, extent, gap in _box(level, ways, step) if extent > 1))


def torus(level: Level, ways: int, step: int, pattern: str) -> float:
    """k dims of 2 B/2k per child: a ring uses the dims it covers, an even load is bound by its longest dim.

    An even load passes e/4 links of a closed dim on average, and twice that in the middle of a line; `gap` groups that
    lie between one another share the links.
    """
    k, box = max(1, len(level.dims)), [part for part in _box(level, ways, step) if part[1] > 1]
    if pattern == "ring":
        return k / sum((1.0 if extent * gap == side else 0.5) / gap for side, extent, gap in box)
    if pattern == "send":
        return max((1 if side == 2 else 2) * k * gap for side, _, gap in box)
    return k * ways / (ways - 1) * max(gap * _mean(extent) * (1 if extent * gap == side else 2)
                                       for side, extent, gap in box)


def hamming_mesh(level: Level, ways: int, step: int, pattern: str) -> float:
    """All-to-all a (2 p2 + p1) (Hoefler et al., HammingMesh, SC 2022); two disjoint rings use all four ports."""
    if pattern != "all-to-all":
        return 1.0 if pattern == "ring" else 4.0
    x, y = level.dims if ways == level.size else _near_square(max(1, ways // level.board**2))
    p1, p2 = (x + y - 2) / (x * y), (x - 1) * (y - 1) / (x * y)
    return level.board * max(1.0, 2 * p2 + p1)  # the board itself is a mesh of a x a, whose bisection is 1/a


def _near_square(n: int) -> tuple[int, int]:
    side = next(side for side in range(isqrt(n), 0, -1) if n % side == 0)
    return side, n // side


def _mean(extent: int) -> float:
    """Mean links between two of a ring of e: e/4, or (e - 1/e)/4 where e is odd."""
    return extent / 4 if extent % 2 == 0 else (extent - 1 / extent) / 4


def _box(level: Level, ways: int, step: int) -> list[tuple[int, int, int]]:
    """(side, members, gap) per dim, the first dim fastest: where n children, each `step` from the next, lie."""
    found = []
    for side in level.dims or (level.size,):
        gap, step = min(step, side), max(1, step // side)
        extent = max(1, min(ways, side // gap))
        ways = -(-ways // extent)
        found.append((side, extent, gap if extent > 1 else 1))
    return found
