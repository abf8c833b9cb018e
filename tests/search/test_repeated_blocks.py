"""Repeated blocks: the folded elimination against the plain one, on seeded random stacks of blocks."""

import math
from dataclasses import replace

import pytest
from random_problems import least_bytes, stack
from sampling import parametrize_or_slow

from autoddl.core.errors import Infeasible
from autoddl.search import solve
from autoddl.search.elimination_order import plan_elimination
from autoddl.search.exact import build_space
from autoddl.search.presolve import presolve, presolve_folded
from autoddl.search.relaxations import Space
from autoddl.search.repeated_blocks import SHARED


@parametrize_or_slow("seeds", [range(10)], [range(start, start + 25) for start in range(0, 200, 25)])
def test_a_folded_elimination_is_the_plain_one(seeds: range) -> None:
    for seed in seeds:
        problem = stack(seed, 8 + seed % 17)
        plain = presolve(problem).problem
        one, other = Space.of(plain, plan_elimination(plain)), build_space(problem)
        for lam in (0.0, 0.07, math.inf):
            for tau in (one.thresholds[0], one.thresholds[-1]):
                expected, found = one.point(lam, tau), other.point(lam, tau)
                assert found.value == pytest.approx(expected.value, rel=1e-12)
                if math.isfinite(found.value):
                    assert found.transient <= tau
                    mixed = found.retained if lam == math.inf else found.seconds + lam * found.retained
                    assert mixed == pytest.approx(found.value, rel=1e-12)


def test_as_many_blocks_as_tell_a_variable_of_all_are_folded_if_in_order() -> None:
    for seed in range(20):
        assert presolve_folded(stack(seed, SHARED[0] + 1, shuffled=0.0))[0].folds, seed


@parametrize_or_slow("seed", range(4), range(4, 12))
def test_a_budget_on_folded_blocks(seed: int) -> None:
    problem = stack(seed, 6)
    least = least_bytes(problem) + problem.fixed_bytes
    if math.isinf(least):
        with pytest.raises(Infeasible):
            solve(problem)
        return
    free = max(solve(problem).nbytes, 1.01 * least)
    for share in (0.2, 0.6):
        tight = problem.within(least + share * (free - least))
        found, expected = solve(tight), solve(tight, "cp-sat", time_limit=20)
        assert found.bound <= expected.seconds * (1 + 1e-9)
        if found.is_optimal:
            assert expected.bound <= found.seconds * (1 + 1e-6)
            if "proved" in expected.proof:
                assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)


def test_what_repeats_nothing_is_not_folded() -> None:
    problem = stack(3, 4)
    assert not presolve_folded(problem)[0].folds
    assert solve(problem).seconds == pytest.approx(solve(replace(problem, budget=1e9)).seconds)


def test_the_depth_adds_no_messages_but_its_logarithm() -> None:
    for seed in (3, 7, 13):
        few, many = (len(build_space(stack(seed, blocks)).program.computed) for blocks in (16, 1024))
        assert many - few <= 7 * 8
