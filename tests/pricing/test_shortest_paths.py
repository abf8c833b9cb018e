"""Shortest paths of all pairs against plain rounds over (seconds, moves), and their first moves against the rule."""

import math

import numpy as np
import pytest

from autoddl.pricing.shortest_paths import first_moves, nearest

Move = tuple[int, int, int, float]
"""(number, from, to, seconds)"""

NEVER = (math.inf, math.inf)


def _moves(rng: np.random.Generator, count: int, number: int, most: int) -> list[Move]:
    """Moves with whole seconds, which tie often; several numbers lead from one node to another, some take for ever,
    and node 0 has none."""
    found = []
    for m in range(number):
        for i in rng.choice(np.arange(1, count), size=max(1, count // 3), replace=False).tolist():
            there = int(rng.integers(count))
            if there != i:
                found.append((m, i, there, math.inf if rng.random() < 0.1 else float(rng.integers(1, most))))
    return found


def _found(count: int, *moves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    paths = nearest(count, *moves)
    return paths.far, first_moves(paths)


def _plain(count: int, moves: list[Move]) -> tuple[np.ndarray, np.ndarray]:
    """Rounds of one more move until nothing changes; then the first move of the lowest number."""
    best = [[(0.0, 0.0) if i == j else NEVER for j in range(count)] for i in range(count)]
    changed = True
    while changed:
        changed = False
        for _, i, k, seconds in moves:
            for j in range(count):
                through = (seconds + best[k][j][0], 1 + best[k][j][1])
                if through[0] < math.inf and through < best[i][j]:
                    best[i][j], changed = through, True
    onward = np.full((count, count), -1)
    for m, i, k, seconds in reversed(moves):
        for j in range(count):
            if i != j and best[i][j] != NEVER and (seconds + best[k][j][0], 1 + best[k][j][1]) == best[i][j]:
                onward[i, j] = m
    return np.array([[seconds for seconds, _ in row] for row in best]), onward


@pytest.mark.parametrize("count, number, most", [(4, 6, 3), (9, 4, 3), (30, 6, 4), (64, 5, 100), (65, 3, 5),
                                                 (90, 12, 1000)])
def test_paths_and_first_moves_are_those_of_plain_rounds(count: int, number: int, most: int) -> None:
    for seed in range(3):
        moves = _moves(np.random.default_rng(seed), count, number, most)
        numbers, here, there, seconds = (np.array(column) for column in zip(*moves, strict=True))
        far, onward = _found(count, numbers, here, there, seconds)
        expected, first = _plain(count, moves)
        assert np.array_equal(far, expected)
        assert np.array_equal(onward, first)


def test_long_chains_against_the_order_of_the_rows() -> None:
    """Every path leads to lower numbers first: the rows are swept the other way round."""
    moves = [(0, i, i - 1, 1.0) for i in range(1, 80)] + [(1, i, i + 1, 2.0) for i in range(79)]
    far, onward = _found(80, *(np.array(column) for column in zip(*moves, strict=True)))
    expected, first = _plain(80, moves)
    assert np.array_equal(far, expected) and np.array_equal(onward, first)


def test_without_moves_everything_is_out_of_reach() -> None:
    none = np.zeros(0, dtype=np.int64)
    far, onward = _found(3, none, none, none, np.zeros(0))
    assert np.array_equal(far, np.where(np.eye(3, dtype=bool), 0.0, np.inf))
    assert (onward == -1).all()


def test_what_is_less_by_rounding_alone_is_as_near() -> None:
    """0.1 + 0.2 is more than 0.3 and as near: the path of one move stays, and of two of two the first."""
    moves = [(0, 0, 1, 0.1), (1, 0, 2, 0.2), (2, 1, 3, 0.2), (3, 2, 3, 0.1), (4, 0, 3, 0.3 * (1 + 1e-14))]
    columns = [np.array(column) for column in zip(*moves, strict=True)]
    assert _found(4, *columns)[1][0, 3] == 4
    far, onward = _found(4, *(column[:4] for column in columns))
    assert onward[0, 3] == 0 and far[0, 3] == 0.1 + 0.2
