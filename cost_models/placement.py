"""Counts how many rings share the busiest link of a HammingMesh, where ranks are placed on its devices.

A device at (row, column) has a link to each neighbour on its board, of `board` x `board` devices. Edge devices of a row
of boards have a port to the switch of that row, and likewise in columns. A message goes along its row first, then along
its column. On its own board it takes the links between. To another board it leaves by the nearer edge, and enters by
the edge that is nearer to its receiver.

    load = max over links and directions of the messages on it, when every rank of every ring sends to the next

Rings whose load is L take L times as long as rings that share no link. With boards of one device it is a HyperX.
Source: Hoefler et al., HammingMesh, SC 2022.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from autoddl.core.errors import InputError

__all__ = ["ring_load", "row_by_row"]

Place = tuple[int, int]
Link = tuple[str, int, int, int]
"""Kind and line of a link, and the places along the line from which and to which it leads; -1 is the switch."""


def row_by_row(columns: int, ranks: int) -> tuple[Place, ...]:
    """The place of every rank where ranks fill one row after the other, as mesh axes are laid out."""
    return tuple(divmod(rank, columns) for rank in range(ranks))


def ring_load(groups: Sequence[Sequence[int]], places: Sequence[Place], board: int) -> int:
    """The messages on the busiest link while every group of ranks passes messages round its ring.

    `places` has the device of every rank. Raises InputError where two ranks are on one device, or a board has no side.
    """
    if board < 1 or len(set(places)) < len(places):
        raise InputError(f"boards of {board} x {board} and {len(set(places))} devices for {len(places)} ranks: every "
                         "rank has a device of its own, on boards of at least 1 x 1")
    found = Counter(link for group in groups for one, other in pairwise((*group, group[0]))
                    for link in _links(places[one], places[other], board))
    return max(found.values(), default=0)


def _links(source: Place, target: Place, board: int) -> Iterator[Link]:
    """The links from one device to another: along the row, then along the column."""
    (row, column), (below, beside) = source, target
    yield from _along("row", row, column, beside, board)
    yield from _along("column", beside, row, below, board)


def _along(kind: str, line: int, start: int, stop: int, board: int) -> Iterator[Link]:
    """The links along one line of devices."""
    first, last = start // board * board, stop // board * board
    if first == last:
        yield from _walk(kind, line, start, stop)
        return
    leaves = first if start - first < first + board - 1 - start else first + board - 1
    enters = last if stop - last <= last + board - 1 - stop else last + board - 1
    yield from _walk(kind, line, start, leaves)
    side = 0 if leaves == first else 1
    yield kind, line, 2 * leaves + side, -1
    side = 0 if enters == last else 1
    yield kind, line, -1, 2 * enters + side
    yield from _walk(kind, line, enters, stop)


def _walk(kind: str, line: int, start: int, stop: int) -> Iterator[Link]:
    """The links between neighbours of a board."""
    step = 1 if stop > start else -1
    for here in range(start, stop, step):
        yield f"{kind} of a board", line, here, here + step
