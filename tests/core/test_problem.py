"""The definition of seconds and bytes, its guards, and the file form."""

import math
from pathlib import Path

import numpy as np
import pytest

from autoddl.core.cost_table import Cells, Rows
from autoddl.core.errors import InputError
from autoddl.core.problem import Factor, Problem, Solution, Table


def small() -> Problem:
    pair = Table(np.array([[1.0, 2.0, 4.0], [math.inf, 8.0, 16.0]]), np.ones((2, 3)), np.full((2, 3), 5.0))
    single = Table(np.array([0.5, 0.25]), np.array([10.0, 20.0]), np.array([7.0, 3.0]))
    return Problem(("a", "b"), (2, 3), (pair, single), (Factor((0, 1), 0), Factor((0,), 1)), 30.0, 100.0, 2.0)


def test_seconds_and_retained_add_and_transient_is_the_largest() -> None:
    problem = small()
    assert problem.cost((0, 2)) == 104.5
    assert problem.retained((1, 2)) == 21.0
    assert problem.transient((1, 2)) == 5.0
    assert problem.nbytes((1, 2)) == 28.0
    assert problem.transient((0, 0)) == 7.0


def test_a_forbidden_cell_costs_infinity_and_fits_no_budget() -> None:
    problem = small()
    assert problem.cost((1, 0)) == math.inf
    assert not problem.is_feasible((1, 0))
    assert problem.is_feasible((0, 0)) and problem.is_feasible((1, 1))


def test_tables_cannot_be_written_and_do_not_follow_their_source() -> None:
    source = np.ones(2)
    table = Table(source, np.zeros(2), np.zeros(2))
    source[0] = 9.0
    assert table.seconds[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        table.seconds[0] = 2.0


@pytest.mark.parametrize(
    ("seconds", "retained", "words"),
    [
        (np.ones(2), np.ones(3), "one shape"),
        (np.ones((2, 2, 2, 2)), np.ones((2, 2, 2, 2)), "1 to 3 axes"),
        (np.array([math.nan]), np.ones(1), "nan"),
        (np.ones(1), np.array([math.inf]), "seconds = inf"),
        (np.ones(1), np.array([-1.0]), "not negative"),
    ],
)
def test_a_table_that_means_nothing_is_refused(seconds: np.ndarray, retained: np.ndarray, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Table(seconds, retained, np.zeros(seconds.shape))


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (Factor((0, 0), 0), "twice"),
        (Factor((0, 2), 0), "outside 0..1"),
        (Factor((0, 1), 7), "table outside 0..1"),
        (Factor((1, 0), 0), r"shape \(3, 2\), not \(2, 3\)"),
    ],
)
def test_a_factor_that_does_not_fit_is_refused(factor: Factor, words: str) -> None:
    problem = small()
    with pytest.raises(InputError, match=words):
        Problem(problem.names, problem.sizes, problem.tables, (factor,), None)


def test_a_choice_names_every_variable() -> None:
    with pytest.raises(InputError, match="one option per variable: 2, not 1"):
        small().cost((0,))


@pytest.mark.parametrize("budget", [30.0, None])
def test_a_saved_problem_is_the_same_problem(tmp_path: Path, budget: float | None) -> None:
    before = small()
    before = Problem(before.names, before.sizes, before.tables, before.factors, budget, 100.0, 2.0)
    before.save(tmp_path / "problem.npz")
    after = Problem.load(tmp_path / "problem.npz")
    assert (after.names, after.sizes, after.factors) == (before.names, before.sizes, before.factors)
    assert (after.budget, after.fixed_seconds, after.fixed_bytes) == (budget, 100.0, 2.0)
    for a, b in zip(after.tables, before.tables, strict=True):
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("seconds", "retained", "transient"))


def test_an_empty_problem_is_saved_too(tmp_path: Path) -> None:
    Problem((), (), (), (), None, 1.0).save(tmp_path / "empty.npz")
    assert Problem.load(tmp_path / "empty.npz").cost(()) == 1.0


def test_a_solution_knows_whether_it_is_optimal() -> None:
    best = Solution((0,), 2.0, 3e9, 2.0, "elimination", "exact")
    rough = Solution((0,), 2.0, 3e9, 1.5, "labels", "exact")
    assert best.is_optimal and best.gap == 0.0
    assert not rough.is_optimal and rough.gap == 0.25
    assert str(best) == "2 s, 3 GB, optimal (exact: elimination)"
    assert str(rough) == "2 s, 3 GB, at most 25.000% above the optimum (exact: labels)"


def test_cells_that_are_made_when_asked_for_are_those_of_a_table() -> None:
    random, asked = np.random.default_rng(0), list[int]()
    whole = [random.random((300, 200)) for _ in range(3)]
    classes = random.integers(0, 300, 500), random.integers(0, 200, 40)
    eager = Table(whole[0], whole[1], whole[2], classes)

    def made(values: np.ndarray, least: float | None = None) -> Cells:
        def rows(which: Rows) -> np.ndarray:
            asked.append(len(values[which]))
            return values[which].copy()
        return Cells(values.shape, rows, least)

    lazy = Table.over(made(whole[0]), made(whole[1]), made(whole[2], 0.25), classes)
    assert lazy.shape == eager.shape == (500, 40) and lazy.lengths == eager.lengths == (300, 200)
    used = np.array([7, 3, 250]), np.array([0, 199])
    for mine, given in ((lazy.part(used), eager.part(used)), (lazy.pick((used[0][:2], used[1])), [
            values[[7, 3], [0, 199]] for values in whole])):
        assert all(np.array_equal(a, b) for a, b in zip(mine, given, strict=True))
    assert max(asked) <= 3
    assert lazy.least_transient == 0.25 and eager.least_transient == whole[2].min()
    assert all(np.array_equal(a, b) for a, b in zip(lazy.core, eager.core, strict=True))
    assert max(asked) < 300 and not lazy.core[0].flags.writeable
    assert lazy.at((4, 5)) == eager.at((4, 5))
