"""Problems too large for elimination: the bound of the messages is true, the plan is one, on seeded random problems."""

import math
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
from planmaker import cluster_of
from random_problems import least_bytes, random_problem, stack, table
from sampling import few_seeds, parametrize_or_slow
from zoo import gpt

import autoddl
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Factor, Problem, Table
from autoddl.search import Above, build_space, elimination_order, large, solve
from autoddl.search.certify.alternatives import bounding_beliefs
from autoddl.search.certify.certificate import Certificate, check_certificate
from autoddl.search.certify.min_marginals import compute_beliefs
from autoddl.search.certify.prove import NEAR, prove
from autoddl.search.certify.reparametrization import ReparametrizedPiece
from autoddl.search.limits import Clock, Limits
from autoddl.search.relaxations import least_transient
from autoddl.search.repeated_blocks import fold_blocks
from autoddl.search.tree_reweighted import pass_messages

CLOSE = 1e-9
ROUGH = 1e-5


def paired(problem: Problem) -> bool:
    return all(len(f.variables) < 3 for f in problem.factors)


def clock() -> Clock:
    return Clock.start(None, 1e7)


def limits(price: float = 0.0, ceiling: float = math.inf) -> Limits:
    return Limits(1e-3, ceiling, clock(), lambda seconds, bound: None, 0, price)


@lru_cache
def problems() -> list[Problem]:
    """Random networks, and stacks of blocks that fold; with and without a budget."""
    found = [random_problem(seed) for seed in range(40)]
    for seed in range(40):
        free = stack(seed, 6 + seed % 17)
        found.append(free)
        if paired(free):
            least, random = least_bytes(free), np.random.default_rng(seed)
            if math.isfinite(least):
                most = solve(free).nbytes
                found.append(replace(free, budget=least + float(random.random()) * max(0.0, most - least)))
    return [problem for problem in found if paired(problem)]


@parametrize_or_slow("step", [9], [3, 1])
def test_messages_bound_the_optimum_at_every_price(step: int) -> None:
    folds = close = count = 0
    for problem in problems()[::step]:
        short = fold_blocks(problem, problem.tables, np.arange(len(problem.tables)))
        space = build_space(problem)
        for lam in (0.0, 0.07):
            least = space.point(lam, space.thresholds[-1]).value
            found = pass_messages(short, lam, math.inf, 6, clock())
            again = pass_messages(short, lam, math.inf, 2, clock(), found.sent)
            if math.isinf(least):
                continue
            assert max(found.bound, again.bound) <= least + CLOSE * (1 + abs(least))
            folds, count = folds + bool(short.folds), count + 1
            close += found.bound >= least - 0.02 * abs(least)
    assert folds > 30 // step
    assert close > 0.7 * count


def test_numbers_below_zero_are_rounded_down_too() -> None:
    """Single precision loses a part of every number: what is left is a bound, and a close one."""
    for problem in problems()[:30:3]:
        lower = tuple([Table(t.core[0] - 7 / 3, *t.core[1:], t.classes) for t in problem.tables])
        shifted = replace(problem, tables=lower, budget=None)
        try:
            best = solve(shifted).seconds
        except Infeasible:
            continue
        found = large.lower_bound(shifted, 0.0)
        assert best - 0.1 * abs(best) <= found <= best


def test_what_a_variable_costs_alone_is_not_rounded() -> None:
    """Tables that cost nothing leave no room for rounding: a bound is then the sum of what is least."""
    random = np.random.default_rng(0)
    for _ in range(10):
        own = tuple([Table(1 / 3 + 1e4 * random.random(4), np.zeros(4), np.zeros(4)) for _ in range(12)])
        nothing = Table(np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((4, 4)))
        factors = *(Factor((v,), v) for v in range(12)), *(Factor((v, v + 1), 12) for v in range(11))
        problem = Problem(tuple(map(str, range(12))), (4,) * 12, (*own, nothing), factors)
        best = math.fsum(table.core[0].min() for table in own)
        assert math.isclose(large.lower_bound(problem, 0.0), best, rel_tol=1e-12)


def test_messages_along_a_chain_are_exact() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(2, 6, 12).tolist()
    scopes = [(v,) for v in range(12)] + [(v, v + 1) if v % 2 else (v + 1, v) for v in range(11)]
    tables = tuple([table(random, tuple(sizes[v] for v in scope)) for scope in scopes])
    problem = Problem(tuple(map(str, range(12))), tuple(sizes), tables,
                      tuple([Factor(scope, t) for t, scope in enumerate(scopes)]))
    found = pass_messages(fold_blocks(problem, tables, np.arange(len(tables))), 0.0, math.inf, 1, clock())
    assert found.bound == pytest.approx(solve(problem).seconds, rel=1e-6)


def test_what_the_middle_block_cannot_do_the_first_may() -> None:
    """A chain of states, each reached from the one before alone, and a last one from all: in the middle of a long run
    there is the last state only, at its beginning all."""
    for states in (3, 4, 5, 6):
        own, step = np.append(np.zeros(states - 1), 5.0), np.full((states, states), math.inf)
        step[range(states - 2), range(1, states - 1)] = 0.0
        step[:, -1] = 1.0
        tables = tuple([Table(cost, np.zeros(cost.shape), np.zeros(cost.shape)) for cost in (own, step)])
        for blocks in (8, 12, 20):
            factors = (*(Factor((v,), 0) for v in range(blocks)), *(Factor((v - 1, v), 1) for v in range(1, blocks)))
            problem = Problem(tuple(map(str, range(blocks))), (states,) * blocks, tables, factors)
            short = fold_blocks(problem, tables, np.arange(2))
            assert short.folds
            assert pass_messages(short, 0.0, math.inf, 6, clock()).bound <= solve(problem).seconds * (1 + CLOSE)


@parametrize_or_slow("step", [9], [3, 1])
def test_a_plan_and_a_true_bound(step: int) -> None:
    proved = planned = 0
    for n, problem in enumerate(problems()[::step]):
        try:
            best = solve(problem).seconds
        except Infeasible:
            with pytest.raises(Infeasible):
                large.solve_by_messages(problem, limits())
            continue
        try:
            found = large.solve_by_messages(problem, limits(0.05 * (n % 2)))
        except Infeasible as error:
            assert "not proved" in str(error)
            continue
        assert problem.is_feasible(found.choice)
        cost = problem.cost(found.choice)
        assert found.bound <= best + CLOSE * (1 + abs(best)) and best <= cost + CLOSE * (1 + abs(cost))
        planned += 1
        proved += cost - found.bound <= 1.1e-3 * abs(cost)
    assert planned > 60 // step
    assert proved > 0.4 * planned


@parametrize_or_slow("step", [4], [1])
def test_a_ceiling_that_no_plan_is_below_is_said_with_the_bound(step: int) -> None:
    told = 0
    for problem in problems()[::step]:
        try:
            best = solve(problem).seconds
            with pytest.raises(Above) as above:
                large.solve_by_messages(problem, limits(0.05, ceiling=0.3 * best))
        except (Infeasible, pytest.fail.Exception):
            continue
        assert above.value.bound <= best + CLOSE * (1 + abs(best))
        told += 1
    assert told > 20 // step


def test_without_a_budget_bytes_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the options that are favoured forbid each other."""
    monkeypatch.setattr(large, "FAVOURED", 1)
    alone = Table(np.ones(2), np.ones(2), np.zeros(2))
    other = Table(np.array([[math.inf, 0.0], [0.0, math.inf]]), np.zeros((2, 2)), np.zeros((2, 2)))
    problem = Problem(("a", "b"), (2, 2), (alone, other), (Factor((0,), 0), Factor((1,), 0), Factor((0, 1), 1)))
    best = solve(problem).seconds
    with pytest.raises(Above) as above:
        large.solve_by_messages(problem, limits(ceiling=5.0))
    assert above.value.bound <= best


def test_where_nothing_is_allowed_there_is_no_bound() -> None:
    never = Table(np.full((2, 2), math.inf), np.zeros((2, 2)), np.zeros((2, 2)))
    problem = Problem(("a", "b"), (2, 2), (never,), (Factor((0, 1), 0),))
    with pytest.raises(Infeasible, match="forbidden"):
        large.lower_bound(problem, 0.0)


def test_no_choice_needs_less_than_the_floor() -> None:
    for problem in problems():
        random = np.random.default_rng(1)
        for _ in range(20):
            choice = [int(random.integers(n)) for n in problem.sizes]
            seconds, _, transient = problem.totals(choice)
            assert math.isinf(seconds) or transient >= least_transient(problem)


@few_seeds(30, 150)
def test_what_finds_no_plan_has_proved_nothing(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """Two favoured options a variable and twenty cells of work: a feasible problem is solved, or not called infeasible.
    """
    monkeypatch.setattr(large, "FAVOURED", 2)
    monkeypatch.setattr(large, "WORK", 20)
    counted = 0
    for seed in seeds:
        problem = random_problem(seed)
        if any(len(factor.variables) > 2 for factor in problem.factors):
            continue
        try:
            best = solve(problem, "exhaustive").seconds
        except Infeasible:
            continue
        counted += 1
        try:
            found = large.solve_by_messages(problem, Limits(0.0, math.inf, clock(), lambda seconds, bound: None))
        except Infeasible as error:
            assert not error.is_proved, seed
            continue
        assert problem.is_feasible(found.choice) and found.bound <= best * (1 + CLOSE), seed
    assert counted > len(seeds) // 3


@parametrize_or_slow("layers,mesh", [(1, "rack=2,node=2")],
                     [(1, "hall=2,rack=2,node=2"), (2, "hall=2,rack=2,node=2"), (6, "hall=2,rack=2,node=2")])
def test_large_problems_go_this_way(monkeypatch: pytest.MonkeyPatch, layers: int, mesh: str) -> None:
    """A step of a real network on two or three axes, as if it were large."""
    place = cluster_of(mesh)
    model, sample = gpt(layers)
    exact = autoddl.plan(model, place, sample, mesh=mesh)
    budget = 0.65 * exact.predicted.peak_bytes
    tight = autoddl.plan(model, place, sample, mesh=mesh, budget=budget)
    monkeypatch.setattr(large, "CELLS", 0)
    for best, asked in ((exact, None), (tight, budget)):
        found = autoddl.plan(model, place, sample, mesh=mesh, budget=asked)
        assert found.proof.startswith("messages") and not best.proof.startswith("messages")
        assert found.predicted.seconds <= best.predicted.seconds * 1.003
        assert found.bound <= best.predicted.seconds * (1 + CLOSE)
        assert found.gap < 5e-3


@parametrize_or_slow("step", [9], [3])
def test_what_proves_a_large_problem_is_checked_without_the_solver(monkeypatch: pytest.MonkeyPatch, step: int
                                                                      ) -> None:
    """The bound of the whole problem is that of the messages over the short one; whatever else factors would give, the
    bound stays true."""
    some, proved, folds = problems()[::step], 0, 0  # made as small problems
    monkeypatch.setattr(large, "CELLS", 0)
    for n, problem in enumerate(some):
        try:
            best = solve(problem).seconds
        except Infeasible:
            continue
        (piece,) = (certificate := prove(problem, best)).pieces
        assert isinstance(piece, ReparametrizedPiece)
        bound = check_certificate(problem, certificate).bound
        short = fold_blocks(problem, problem.tables, np.arange(len(problem.tables)))
        told = large.bound_and_plan(problem, short, replace(limits(ceiling=best), tolerance=NEAR))[1]
        assert bound <= best + CLOSE * (1 + abs(best))
        least = told.seconds + problem.fixed_seconds  # of tables rounded down, with fewer bytes of the moment
        more = piece.lam * (piece.low - large.momentary(problem))
        assert least - CLOSE * (1 + abs(least)) <= bound <= least + more + ROUGH * (1 + abs(least))
        random = np.random.default_rng(n)
        wrong = replace(piece, tables=tuple([table + random.random(table.shape) for table in piece.tables]))
        assert check_certificate(problem, Certificate((wrong,))).bound <= best + CLOSE * (1 + abs(best))
        proved, folds = proved + (bound >= 0.98 * best), folds + bool(short.folds)
    assert proved > 45 // step and folds > 24 // step


def test_exact_answers_say_what_is_too_large_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = stack(0, 8)
    monkeypatch.setattr(elimination_order, "WORK", 1.0)
    for ask in (compute_beliefs, partial(prove, seconds=1.0), partial(bounding_beliefs, seconds=1.0)):
        with pytest.raises(InputError, match="fewer axes"):
            ask(problem)


def staircase(seed: int, steps: int) -> Problem:
    """Parts and concatenations of a growing list: each concatenation meets the parts before it, and makes the next.

    Some parts share their tables; now and then one recurrence reads what all steps share.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(2, 4, 2 * steps + 1).tolist()
    scopes: list[tuple[int, ...]] = [(part, steps + joined) for joined in range(steps) for part in range(joined + 1)]
    scopes += [(steps + joined, joined + 1) for joined in range(steps - 1)]
    scopes += [(2 * steps, v) for v in range(2 * steps)] if seed % 2 else [(2 * steps,)]
    tables = tuple([table(random, tuple(sizes[v] for v in scope), 0.05) for scope in scopes])
    budget = 2.0 * len(scopes) if seed % 3 == 0 else None
    return Problem(tuple(map(str, range(len(sizes)))), tuple(sizes), tables,
                   tuple([Factor(scope, t) for t, scope in enumerate(scopes)]), budget)


@few_seeds(6, 60)
def test_growing_lists_by_elimination_and_by_messages_against_every_choice(monkeypatch: pytest.MonkeyPatch,
                                                                           seeds: range) -> None:
    """Where an elimination would look at too many cells, messages bound, and the plan is within its proven gap."""
    close = 0
    for seed in seeds:
        problem = staircase(seed, 4)
        try:
            best = solve(problem, "exhaustive").seconds
        except Infeasible:
            continue
        assert solve(problem).seconds == pytest.approx(best)
        with monkeypatch.context() as patch:
            patch.setattr(large, "WIDE", 10)
            assert large.elimination_space(problem) is None
            found = solve(problem)
            proof = prove(problem, found.seconds)
        assert "messages" in found.proof
        assert found.bound <= best + CLOSE * (1 + abs(best)) and best <= found.seconds * (1 + CLOSE)
        assert check_certificate(problem, proof).bound <= best + CLOSE * (1 + abs(best))
        close += found.gap <= 0.01
    assert close > len(seeds) // 3


def test_a_wide_problem_with_tables_over_three_is_bounded_in_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "WIDE", 10)
    monkeypatch.setattr(large, "ROUGH", 8)
    pairs = staircase(1, 4)
    three = table(np.random.default_rng(0), tuple(pairs.sizes[:3]), 0.0)
    problem = replace(pairs, tables=(*pairs.tables, three),
                      factors=(*pairs.factors, Factor((0, 1, 2), len(pairs.tables))))
    space = large.elimination_space(problem)
    assert space is not None and not space.program.exact
    found, best = solve(problem), solve(problem, "exhaustive").seconds
    assert found.bound <= best + CLOSE <= found.seconds + 2 * CLOSE
