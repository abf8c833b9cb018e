"""Finds two rings over all nodes of a torus that share no link: an all-reduce on both at once uses every port.

Node i * columns + j has a link to its right, (i, j+1), and one down, (i+1, j); both close. All links to the right are
`rows` cycles, all links down are `columns` cycles. A square whose four links alternate between the two colours is
turned: its links swap colours, so every node keeps two links of each.

    turning a square    joins two cycles of a colour, or splits one, or leaves their number
    wanted              one cycle of each colour

Turns are tried until there is one cycle of each; by Kotzig (1973) every torus with sides of 3 and more has such a pair.
Beside a side of 2, each ring zigzags over one of the two links between neighbours; the other side must be even. With 3
or 5 there is no such pair, as trying every choice of links shows.

For rings a HammingMesh is the torus of its devices. The edge ports of a row of boards meet in one switch, which closes
the row.
"""

import random
from collections.abc import Iterator

from autoddl.core.errors import InputError

__all__ = ["disjoint_rings", "torus_links"]

TRIES = 200_000
"""Squares that are looked at before the search gives up."""


def torus_links(rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """The ends of every link: of node n that to its right is number 2 n, and that down number 2 n + 1."""
    return tuple(end for i in range(rows) for j in range(columns) for end in (
        (i * columns + j, i * columns + (j + 1) % columns), (i * columns + j, (i + 1) % rows * columns + j)))


def disjoint_rings(rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two rings, each all nodes in order, without a common link of a torus of at least 2 x 2 nodes.

    Sides of 2 have two links between neighbours. Raises InputError for a side below 2, or of 2 beside an odd one.
    """
    if min(rows, columns) < 2 or (min(rows, columns) == 2 and rows * columns % 4):
        raise InputError(f"a torus of {rows} x {columns} has no two rings over all nodes: both sides are 2 or more, "
                         "and beside a side of 2 the other is even")
    if rows == 2:
        return _zigzag(columns, columns, 1, 0), _zigzag(columns, columns, 1, 1)
    if columns == 2:
        return _zigzag(rows, 1, 2, 0), _zigzag(rows, 1, 2, 1)
    links = torus_links(rows, columns)
    colour = [number % 2 for number in range(len(links))]
    cycles = [_cycles(links, colour, which) for which in (0, 1)]
    drawing = random.Random(0)
    for _ in range(TRIES):
        if max(map(len, cycles)) == 1:
            return cycles[0][0], cycles[1][0]
        square = _square(drawing.randrange(rows), drawing.randrange(columns), rows, columns)
        if not colour[square[0]] == colour[square[1]] != colour[square[2]] == colour[square[3]]:
            continue
        for number in square:
            colour[number] ^= 1
        found = [_cycles(links, colour, which) for which in (0, 1)]
        if sum(map(len, found)) <= sum(map(len, cycles)) or drawing.random() < 0.05:
            cycles = found
        else:
            for number in square:
                colour[number] ^= 1
    raise InputError(f"no two rings over a torus of {rows} x {columns} were found in {TRIES} turns")


def _zigzag(length: int, across: int, along: int, first: int) -> tuple[int, ...]:
    """Both nodes of every place along; the `first` comes in front at even places, the other at odd ones."""
    return tuple(k * along + across * side for k in range(length) for side in ((first, 1 - first) if k % 2 == 0 else
                                                                              (1 - first, first)))


def _square(i: int, j: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """The links of the square right and down of (i, j): the two to the right, then the two down."""
    here, below, right = i * columns + j, (i + 1) % rows * columns + j, i * columns + (j + 1) % columns
    return 2 * here, 2 * below, 2 * here + 1, 2 * right + 1


def _cycles(links: tuple[tuple[int, int], ...], colour: list[int], which: int) -> list[tuple[int, ...]]:
    """The nodes of every cycle that the links of a colour make, in order."""
    at: dict[int, list[int]] = {}
    for number, ends in enumerate(links):
        if colour[number] == which:
            for end in ends:
                at.setdefault(end, []).append(number)
    left = set(at)
    found = []
    while left:
        cycle = tuple(_walk(min(left), links, at))
        left -= set(cycle)
        found.append(cycle)
    return found


def _walk(first: int, links: tuple[tuple[int, int], ...], at: dict[int, list[int]]) -> Iterator[int]:
    """The nodes of the cycle of `first`."""
    node, by = first, at[first][0]
    while True:
        yield node
        node = sum(links[by]) - node
        if node == first:
            return
        by = at[node][1] if at[node][0] == by else at[node][0]
