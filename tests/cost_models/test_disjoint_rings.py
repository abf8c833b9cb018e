"""Two rings of an all-reduce use every link of a torus or a HammingMesh, and none of them twice."""

from collections import Counter
from itertools import combinations, pairwise

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models.disjoint_rings import _cycles, disjoint_rings, torus_links
from autoddl.cost_models.machine import Level
from autoddl.cost_models.topologies import slowdown

SIDES = [(2, 2), (2, 6), (3, 3), (3, 4), (3, 7), (4, 4), (4, 6), (5, 5), (5, 8), (6, 6), (8, 8), (4, 16), (16, 2)]
MESHES = [(1, 2, 2), (1, 4, 3), (2, 1, 1), (2, 2, 2), (2, 3, 2), (2, 4, 4), (3, 2, 1), (4, 2, 2), (4, 1, 3)]
"""Devices of a side of a board, and boards of a row and of a column."""


def between(ring: tuple[int, ...]) -> Counter[frozenset[int]]:
    """How often a ring passes between two nodes."""
    return Counter(frozenset(pair) for pair in pairwise((*ring, ring[0])))


def check(rows: int, columns: int) -> None:
    """Every node once in each ring, and together every link of the torus just once."""
    first, second = disjoint_rings(rows, columns)
    assert sorted(first) == sorted(second) == list(range(rows * columns))
    assert between(first) + between(second) == Counter(map(frozenset, torus_links(rows, columns)))


@pytest.mark.parametrize(("rows", "columns"), SIDES)
def test_two_rings_of_a_torus_use_every_link_once(rows: int, columns: int) -> None:
    check(rows, columns)
    level = Level("net", rows * columns, 1.0, 0.0, topology="torus", dims=(columns, rows))
    assert slowdown(level, rows * columns, 1, "ring") == 1  # what the price takes for granted


@pytest.mark.parametrize(("side", "x", "y"), MESHES)
def test_two_rings_of_a_hamming_mesh_use_every_port_of_its_boards(side: int, x: int, y: int) -> None:
    check(side * y, side * x)
    level = Level("net", side * side * x * y, 1.0, 0.0, topology="hammingmesh", dims=(x, y), board=side)
    assert slowdown(level, level.size, 1, "ring") == 1


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (2, 3), (5, 2)])
def test_a_line_and_a_side_of_two_beside_an_odd_one_have_no_two_rings(rows: int, columns: int) -> None:
    with pytest.raises(InputError, match=f"a torus of {rows} x {columns} has no two rings"):
        disjoint_rings(rows, columns)


def test_beside_a_side_of_two_no_choice_of_links_makes_two_rings_of_three_places() -> None:
    links = torus_links(2, 3)
    for chosen in combinations(range(len(links)), 6):
        colour = [int(number not in chosen) for number in range(len(links))]
        degrees = Counter(end for number in chosen for end in links[number])
        if set(degrees.values()) == {2} and len(degrees) == 6:
            assert max(len(_cycles(links, colour, which)) for which in (0, 1)) > 1
