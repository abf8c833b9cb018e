"""Stages by those that they are made of: every way to make them of others, and what several share counted once."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest

from autoddl.planner.pipelines.joined_stages import joined


def test_stages_are_no_less_than_the_stages_that_they_are_made_of() -> None:
    rng, units = np.random.default_rng(0), 6
    least = np.triu(rng.random((units + 1, units + 1)), 1)
    found = joined(least, 0.1)
    for a, c in combinations(range(units + 1), 2):
        sums = []
        for count in range(c - a):
            for inner in combinations(range(a + 1, c), count):
                ends = (a, *inner, c)
                sums.append(sum(least[pair] for pair in pairwise(ends)) - 0.1 * count)
        assert found[a, c] == pytest.approx(max(sums), rel=1e-12)
    assert (joined(least, float("inf")) == least).all()


@pytest.mark.parametrize("seed", range(6))
def test_what_stages_share_counts_in_one_of_them(seed: int) -> None:
    """Of pieces that share something one counts whole, the others by their floors."""
    rng, units, apart = np.random.default_rng(seed), 6, 0.1
    least = np.triu(rng.random((units + 1, units + 1)), 1)
    floors = least * rng.random(least.shape)
    few = [frozenset(rng.choice(units, 2, replace=False).tolist()) for _ in range(1 + seed % 2)]
    found = joined(least, apart, few, floors)

    def has(at: tuple[int, int], some: frozenset[int]) -> bool:
        return any(at[0] <= unit < at[1] for unit in some)

    def most(ends: tuple[int, ...]) -> float:
        pieces, best = list(pairwise(ends)), 0.0
        for whole in product((False, True), repeat=len(pieces)):
            counted = [at for at, one in zip(pieces, whole, strict=True) if one or not has(at, frozenset().union(*few))]
            if all(sum(has(at, some) for at in counted) <= 1 for some in few):
                best = max(best, sum(least[at] if at in counted else floors[at] for at in pieces))
        return best - apart * (len(pieces) - 1)

    for a, c in combinations(range(units + 1), 2):
        every = [most((a, *inner, c)) for count in range(c - a) for inner in combinations(range(a + 1, c), count)]
        assert found[a, c] <= max(every) + 1e-12
        assert found[a, c] == pytest.approx(max(every), rel=1e-12) or len(few) > 1
