"""Repeated blocks: the folded elimination against the plain one, on seeded random stacks of blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_search import least_bytes, table

from autoddl.core.errors import Infeasible
from autoddl.core.problem import Factor, Problem
from autoddl.search import solve
from autoddl.search.elimination_order import order
from autoddl.search.exact import space_of
from autoddl.search.presolve import folded, reduce
from autoddl.search.relaxations import Space


def stack(seed: int, blocks: int) -> Problem:
    """Blocks of one to four variables of various sizes, joined by one to three factors, some of three variables; often
    with something before and behind, with a variable that all blocks know, and with variables in another order."""
    random = np.random.default_rng(seed)
    width, tied = int(random.integers(1, 5)), random.random() < 0.3
    sizes = random.integers(1, 5, width).tolist()
    inside = [(i, int(random.integers(i))) for i in range(1, width)]
    across = [(int(random.integers(width)), width + int(random.integers(width))) for _ in range(random.integers(1, 4))]
    wide = [(0, width - 1, width)] if width > 1 and random.random() < 0.4 else []
    before, behind = (int(n) for n in random.integers(0, 4, 2))
    knows_all = bool(random.random() < 0.3)
    count = before + blocks * width + behind + knows_all
    size = [2] * before + sizes * blocks + [3] * behind + [3] * knows_all
    patterns = [(i,) for i in range(width)] + inside + across + wide
    tables = [table(random, tuple(sizes[i % width] for i in p), 0.05, tied) for p in patterns]
    factors = [Factor(tuple(before + b * width + i for i in p), t) for b in range(blocks)
               for t, p in enumerate(patterns) if b < blocks - 1 or max(p) < width]
    ends = [(v, v + 1) for v in range(before)] + [(v - 1, v) for v in range(before + blocks * width, count - knows_all)]
    for scope in ends:
        tables.append(table(random, tuple(size[v] for v in scope), 0.05, tied))
        factors.append(Factor(scope, len(tables) - 1))
    if knows_all:
        tables.append(table(random, (3, sizes[0]), 0.05, tied))
        factors += [Factor((count - 1, before + b * width), len(tables) - 1) for b in range(blocks)]
    moved = random.permutation(count) if random.random() < 0.2 else np.arange(count)
    laid = tuple(Factor(tuple(int(moved[v]) for v in f.variables), f.table) for f in factors)
    shape = np.empty(count, dtype=int)
    shape[moved] = size
    return Problem(tuple(map(str, range(count))), tuple(shape.tolist()), tuple(tables), laid, None, 0.5, 2.0)


@pytest.mark.parametrize("start", [0, 25, 50, *(pytest.param(n, marks=pytest.mark.slow) for n in range(75, 200, 25))])
def test_a_folded_elimination_is_the_plain_one(start: int) -> None:
    folds = 0
    for seed in range(start, start + 25):
        problem = stack(seed, 8 + seed % 17)
        plain = reduce(problem).problem
        one, other = Space.of(plain, order(plain)), space_of(problem)
        folds += bool(folded(problem)[0].folds)
        for lam in (0.0, 0.07, math.inf):
            for tau in (one.thresholds[0], one.thresholds[-1]):
                expected, found = one.point(lam, tau), other.point(lam, tau)
                assert found.value == pytest.approx(expected.value, rel=1e-12)
                if math.isfinite(found.value):
                    assert found.transient <= tau
                    mixed = found.retained if lam == math.inf else found.seconds + lam * found.retained
                    assert mixed == pytest.approx(found.value, rel=1e-12)
    assert folds >= 10


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 12))])
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
        if found.optimal:
            assert expected.bound <= found.seconds * (1 + 1e-6)
            if "proved" in expected.proof:
                assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)


def test_what_repeats_nothing_is_not_folded() -> None:
    problem = stack(3, 4)
    assert not folded(problem)[0].folds
    assert solve(problem).seconds == pytest.approx(solve(replace(problem, budget=1e9)).seconds)


def test_the_depth_adds_no_messages_but_its_logarithm() -> None:
    for seed in (3, 7, 13):
        few, many = (len(space_of(stack(seed, blocks)).program.computed) for blocks in (16, 1024))
        assert many - few <= 7 * 8
