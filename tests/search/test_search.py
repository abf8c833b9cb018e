"""The solvers against the definition: every choice of small problems, and structure that large problems repeat."""

import itertools
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from random_problems import blocks, least_bytes, random_problem, table
from sampling import few_seeds, parametrize_or_slow

from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.problem import Array, Factor, Problem, Table
from autoddl.search import SOLVERS, solve, statistics
from autoddl.search.coordinate_descent import descend
from autoddl.search.exact import solve_exactly
from autoddl.search.limits import Clock, Limits


@parametrize_or_slow("start", [0], range(50, 500, 50))
def test_exact_agrees_with_exhaustive_search(start: int) -> None:
    for seed in range(start, start + 50):
        problem = random_problem(seed)
        try:
            expected = solve(problem, "exhaustive")
        except Infeasible as error:
            with pytest.raises(Infeasible) as caught:
                solve(problem)
            assert caught.value.needed == pytest.approx(error.needed), seed
            assert caught.value.budget == error.budget
            continue
        found = solve(problem)
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-9), seed
        assert found.is_optimal and problem.is_feasible(found.choice), seed


def test_the_random_problems_are_of_every_kind() -> None:
    kinds = {"free": 0, "bound": 0, "infeasible": 0, "slack": 0}
    for seed in range(400):
        problem = random_problem(seed)
        try:
            best = solve(problem, "exhaustive")
        except Infeasible:
            kinds["infeasible"] += 1
            continue
        loose = Problem(problem.names, problem.sizes, problem.tables, problem.factors, None, 0.5, 2.0)
        free = solve(loose, "exhaustive")
        kinds["free" if problem.budget is None else "bound" if best.seconds > free.seconds else "slack"] += 1
    assert min(kinds.values()) >= 30, kinds


def test_mini_buckets_bound_and_never_claim_more_than_is_true() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        try:
            best = solve(problem, "exhaustive").seconds
            limits = Limits(0.0, math.inf, Clock.start(None, 1e6), lambda seconds, bound: None)
            outcome = solve_exactly(problem, limits, cap=4)
        except Infeasible:
            continue
        assert outcome.bound <= best + 1e-9
        assert problem.is_feasible(outcome.choice) and problem.cost(outcome.choice) >= best - 1e-9


def test_descent_that_skips_what_cannot_change_is_descent_under_a_budget_that_never_binds() -> None:
    for seed in range(80):
        problem, random = random_problem(seed).within(None), np.random.default_rng(seed)
        start = [int(random.integers(n)) for n in problem.sizes]
        free, plain = (descend(one, start, Clock.start(None, math.inf)) for one in (problem, problem.within(1e30)))
        assert free == plain, seed
    stack = blocks(5, 4, 5, seed=3)
    start = [0] * len(stack.sizes)
    assert descend(stack, start, Clock.start(None, math.inf)) == descend(stack.within(1e30), start,
                                                                         Clock.start(None, math.inf))


@few_seeds(20, 60)
@pytest.mark.parametrize("solver", ["coordinate-descent", "greedy"])
def test_exact_is_never_worse(solver: str, seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        try:
            other = solve(problem, solver)
        except Infeasible:
            with pytest.raises(Infeasible):
                solve(problem)
            continue
        assert solve(problem).seconds <= other.seconds + 1e-9
        assert problem.is_feasible(other.choice) and other.bound <= other.seconds


def test_larger_random_problems_agree_too() -> None:
    for seed in range(12):
        random = np.random.default_rng(seed)
        free = blocks(depth=int(random.integers(3, 6)), width=2, size=3, seed=seed)
        least, most = least_bytes(free), solve(free).nbytes
        problem = blocks(len(free.sizes) // 2, 2, 3, budget=least + float(random.random()) * (most - least), seed=seed)
        assert solve(problem).seconds == pytest.approx(solve(problem, "exhaustive").seconds, rel=1e-9)


def sliced(whole: Table, index: tuple[NDArray[np.intp], ...]) -> Table:
    return Table(whole.seconds[index], whole.retained[index], whole.transient[index])


def skipping(seed: int) -> Problem:
    """Repeated blocks with skips across one or two of them, some options alike, often a budget that binds."""
    random = np.random.default_rng(seed)
    depth, size = int(random.integers(3, 8)), int(random.integers(2, 4))
    one, two, skip, far = table(random, (size,), 0.0), *(table(random, (size, size), 0.2) for _ in range(3))
    if random.random() < 0.5:
        two = sliced(two, np.ix_([0] * size, range(size)))
    factors = [Factor((i,), 0) for i in range(depth)] + [Factor((i, i + 1), 1) for i in range(depth - 1)]
    factors += [Factor((i, i + 2), 2) for i in range(0, depth - 2, 1 + seed % 2)]
    factors += [Factor((i, i + 3), 3) for i in range(0, depth - 3, 3)]
    budget = None if random.random() < 0.3 else float(random.random() * 5 * len(factors) + 9)
    return Problem(tuple(map(str, range(depth))), (size,) * depth, (one, two, skip, far), tuple(factors), budget)


@few_seeds(25, 100)
def test_repeated_blocks_with_skips_agree_with_exhaustive_search(seeds: range) -> None:
    for seed in seeds:
        problem = skipping(seed)
        try:
            expected = solve(problem, "exhaustive")
        except Infeasible as error:
            with pytest.raises(Infeasible) as caught:
                solve(problem)
            assert caught.value.needed == pytest.approx(error.needed), seed
            continue
        found = solve(problem)
        assert found.is_optimal and found.seconds == pytest.approx(expected.seconds, rel=1e-9), seed


def test_cp_sat_agrees_with_exhaustive_search() -> None:
    for seed in range(30):
        problem = random_problem(seed)
        try:
            expected = solve(problem, "exhaustive")
        except Infeasible as error:
            with pytest.raises(Infeasible) as caught:
                solve(problem, "cp-sat")
            assert caught.value.needed == pytest.approx(error.needed), seed
            continue
        found = solve(problem, "cp-sat")
        assert found.bound <= expected.seconds * (1 + 1e-9)
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-6)


def test_classes_of_options_change_no_number() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        count, size = 5, 6
        rows = [random.integers(0, 3, size) for _ in range(2)]
        core = table(random, (3, 3), 0.1)
        short, long = Table(*core.core, rows), sliced(core, np.ix_(*rows))
        assert short.shape == long.shape and all(short.at(c) == long.at(c) for c in np.ndindex(size, size))
        own = table(random, (size,), 0.0)
        factors = tuple([Factor((i, i + 1), 0) for i in range(count - 1)] + [Factor((i,), 1) for i in range(count)])
        made = [Problem(("v",) * count, (size,) * count, (t, own), factors, budget)
                for budget in (None, 40.0) for t in (short, long)]
        for a, b in (made[:2], made[2:]):
            assert a.cost((0, 1, 2, 3, 4)) == b.cost((0, 1, 2, 3, 4))
            try:
                assert solve(a).seconds == pytest.approx(solve(b, "exhaustive").seconds, rel=1e-9)
            except Infeasible:
                continue


def test_a_chain_of_two_thousand_variables_takes_well_under_two_seconds() -> None:
    problem = blocks(depth=100, width=20, size=36)
    start = time.process_time()
    assert solve(problem).is_optimal
    assert time.process_time() - start < 2.0


def test_depth_costs_a_logarithm() -> None:
    few, many = statistics(blocks(8, 20, 3)), statistics(blocks(128, 20, 3))
    assert many.messages <= 1.3 * few.messages
    assert many.eliminations == 128 * 20 + 1
    uniform = [statistics(blocks(depth, 1, 3)).messages for depth in (64, 1024)]
    assert uniform[1] <= uniform[0] + 4 * 4


@parametrize_or_slow("share,depth", [(0.5, 8)], [(0.5, 16), (0.2, 24), (0.5, 24), (0.8, 24)])
def test_deep_problems_with_a_budget_are_nearly_proved(share: float, depth: int) -> None:
    free = blocks(depth, 12, depth // 2)
    most, least = solve(free).nbytes, least_bytes(free)
    problem = blocks(depth, 12, depth // 2, budget=least + share * (most - least))
    found = solve(problem)
    assert found.gap <= 1e-3
    assert found.seconds <= solve(problem, "coordinate-descent").seconds


def test_forbidden_everywhere_is_infeasible() -> None:
    never = Table(np.full(2, math.inf), np.zeros(2), np.zeros(2))
    for budget in (None, 5.0):
        problem = Problem(("a", "b"), (2, 2), (never,), (Factor((1,), 0),), budget)
        for solver in SOLVERS:
            with pytest.raises(Infeasible):
                solve(problem, solver)


def test_a_problem_without_factors_or_variables_costs_what_is_fixed() -> None:
    assert solve(Problem((), (), (), (), None, 2.5, 3.0)).seconds == 2.5
    assert solve(Problem(("a",), (3,), (), (), 4.0, 2.5, 3.0)).choice == (0,)
    with pytest.raises(Infeasible) as caught:
        solve(Problem(("a",), (3,), (), (), 2.0, 2.5, 3.0))
    assert caught.value.needed == 3.0


def test_unknown_solvers_and_too_large_problems_say_the_way_out() -> None:
    with pytest.raises(InputError, match=r"'magic'.*exact, exhaustive, coordinate-descent, greedy, cp-sat"):
        solve(random_problem(0), "magic")
    with pytest.raises(InputError, match="use the solver 'exact'"):
        solve(blocks(4, 4, 9), "exhaustive")
    assert issubclass(Infeasible, AutoDDLError)


def test_time_and_tolerance_give_a_plan_with_a_true_bound() -> None:
    free = blocks(12, 8, 8, seed=3)
    budget = 0.5 * (solve(free).nbytes + least_bytes(free))
    problem = blocks(12, 8, 8, budget=budget, seed=3)
    best = solve(problem)
    told: list[tuple[float, float]] = []
    hurried = solve(problem, time_limit=0.0, progress=lambda seconds, bound: told.append((seconds, bound)))
    assert hurried.bound <= best.seconds <= hurried.seconds + 1e-9
    assert told and told[-1][1] == pytest.approx(hurried.bound)
    rough = solve(problem, tolerance=0.05)
    assert rough.bound <= best.seconds <= rough.seconds <= 1.06 * rough.bound
    asked: list[int] = []

    def late() -> bool:
        """Says after 50 questions that the time is over of what the search is a part of."""
        asked.append(len(asked))
        return len(asked) > 50

    ended = solve(problem, late=late)
    assert 50 < len(asked) < 200 and ended.bound <= best.seconds <= ended.seconds + 1e-9


def test_effort_past_the_tolerance_only_betters_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    better = 0
    for seed in range(12):
        problem = blocks(6, 1, 4, seed=seed)
        problem = replace(problem, budget=0.7 * solve(problem).nbytes)
        try:
            polished = solve(problem, tolerance=0.05)
        except Infeasible:
            continue
        optimum = solve(problem, tolerance=0.0).seconds
        with monkeypatch.context() as without:
            without.setattr(sys.modules["autoddl.search.budget"], "POLISH", 0.0)
            plain = solve(problem, tolerance=0.05)
        assert polished.bound <= optimum * (1 + 1e-12) and optimum <= polished.seconds * (1 + 1e-12)
        assert polished.seconds <= plain.seconds and polished.bound >= plain.bound and polished.gap <= 0.05
        better += polished.seconds < plain.seconds
    assert better


@pytest.mark.ranks
def test_the_same_plan_whatever_the_hash_seed() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests/support']; from random_problems import blocks;"
        "from autoddl.search import solve;"
        "print(solve(blocks(6, 5, 4)).choice, solve(blocks(6, 5, 4, budget=250.0)).choice)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1


def triangle(seconds: Array, retained: Array, transient: Array, budget: float) -> Problem:
    """a, b, c of two options each, one table for every pair."""
    tables = tuple(Table(seconds[i], retained[i], transient[i]) for i in range(3))
    factors = tuple(Factor(scope, i) for i, scope in enumerate(((0, 1), (1, 2), (0, 2))))
    return Problem(("a", "b", "c"), (2, 2, 2), tables, factors, budget, 0.0, 0.0)


def test_mini_buckets_at_a_price_bound_seconds_alone() -> None:
    seconds = np.array([[[1.0, 2.0], [2.0, 1.0]]] * 3)
    problem = triangle(seconds, np.full_like(seconds, 10.0), np.zeros_like(seconds), 100.0)
    limits = Limits(0.0, math.inf, Clock.start(None, 1e6), lambda seconds, bound: None, price=1.0)
    found = solve_exactly(problem, limits, cap=1)
    assert found.bound <= problem.cost(found.choice) == 3.0


def test_least_bytes_where_every_choice_read_back_is_forbidden() -> None:
    retained = np.array([[[0.0, 0.0], [9.0, 9.0]], [[5.0, 0.0], [5.0, 0.0]], [[5.0, 0.0], [5.0, 5.0]]])
    seconds, transient = np.ones_like(retained), np.zeros_like(retained)
    seconds[0, 0, 1] = seconds[1, 0, 1] = math.inf
    transient[0, 0, 1] = transient[1, 0, 1] = 7.0
    problem = triangle(seconds, retained, transient, 1.0)
    with pytest.raises(Infeasible) as error:
        solve_exactly(problem, Limits(0.0, math.inf, Clock.start(None, 1e6), lambda seconds, bound: None), cap=1)
    assert error.value.needed <= min(problem.nbytes(c) for c in itertools.product(range(2), repeat=3)
                                     if problem.cost(c) < math.inf)


def unary(*seconds: list[float], budget: float | None = None, nbytes: list[list[float]] | None = None) -> Problem:
    """Tables over one variable each, or over the same one where there are no bytes."""
    held = nbytes or [[0.0] * len(row) for row in seconds]
    tables = tuple(Table(np.array(row), np.array(kept), np.zeros(len(row)))
                   for row, kept in zip(seconds, held, strict=True))
    count = len(seconds) if nbytes else 1
    factors = tuple(Factor((i if nbytes else 0,), i) for i in range(len(seconds)))
    return Problem(tuple(f"v{i}" for i in range(count)), (2,) * count, tables, factors, budget, 0.0, 0.0)


def test_a_table_that_stands_twice_over_a_variable_counts_twice() -> None:
    problem = unary([1.5, 0.0], [1.5, 0.0], [0.0, 2.0])
    assert solve(problem).seconds == solve(problem, "exhaustive").seconds == 2.0


def test_cp_sat_finds_what_fits_to_the_byte() -> None:
    problem = unary([1.0, 2.0], [1.0, 2.0], budget=7.0, nbytes=[[3.0, 0.0], [4.0, 0.0]])
    assert solve(problem, "cp-sat").seconds == solve(problem).seconds == 2.0


def test_variables_of_no_table_are_no_run() -> None:
    assert solve(Problem(tuple("abcdef"), (2,) * 6, (), (), None, 1.0, 0.0)).seconds == 1.0
