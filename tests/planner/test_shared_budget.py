"""The budget of a rank with several stages: merged fronts against every choice, and shares that add up."""

import random
from itertools import product
from math import inf

import pytest

from autoddl.planner.pipelines.shared_budget import EVEN, least_together, moved, shares_of


@pytest.mark.parametrize("seed", range(40))
def test_merged_fronts_have_the_least_of_every_choice(seed: int) -> None:
    rng = random.Random(seed)
    fronts = [[(rng.uniform(1, 9), rng.uniform(1, 9)) for _ in range(rng.randint(1, 5))]
              for _ in range(rng.randint(1, 4))]
    budget = rng.uniform(2, 5) * len(fronts)
    every = [choice for choice in product(*fronts) if sum(b for _, b in choice) <= budget]
    wanted = min((sum(t for t, _ in choice) for choice in every), default=inf)
    found = least_together(fronts, budget)
    if found is None:
        assert wanted == inf
    else:
        chosen = [front[k] for front, k in zip(fronts, found, strict=True)]
        assert sum(t for t, _ in chosen) == pytest.approx(wanted) and sum(b for _, b in chosen) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_whole_add_up_and_follow_the_sizes(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.uniform(0.1, 9) for _ in range(rng.randint(2, 5))]
    shares = shares_of(sizes)
    assert sum(shares) == EVEN and min(shares) >= 1
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    assert [shares[s] for s in order] == sorted(shares)


def test_a_share_goes_from_where_a_byte_is_worth_least_to_where_it_is_worth_most() -> None:
    assert moved((10, 10), (1.0, 3.0)) == (9, 11)
    assert moved((1, 19), (1.0, 3.0)) is None, "no stage is left without"
    assert moved((10, 10), (2.0, 2.0)) is None, "nothing is gained"
    assert moved((1, 9, 10), (0.0, 1.0, 2.0)) == (1, 8, 11)
