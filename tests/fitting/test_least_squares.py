"""The fit of constants against brute force, and what few or odd runs do to it."""

from itertools import product

import numpy as np
import pytest

from autoddl.fitting.least_squares import Linear, Prior, fit, left_out

SHARES = np.array([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
PRIOR = Prior(np.zeros(2), np.diag([0.04, 0.09]), np.array([-np.inf, -np.inf]), 0.03)


def runs(true: list[float], shares: np.ndarray = SHARES, noise: float = 0.0) -> Linear:
    seconds = 1 + shares @ (np.array(true) - 1)
    drawn = np.random.default_rng(1).normal(0, noise, len(shares)) if noise else 0.0
    return Linear(np.log(seconds) + drawn, np.zeros(len(shares)), shares, np.zeros(2))


def test_no_constants_on_a_grid_are_better() -> None:
    rows = runs([1.3, 0.9], noise=0.02)
    found = fit(rows, PRIOR)
    known = np.linalg.inv(PRIOR.covariance + found.shared**2)

    def cost(u: np.ndarray) -> float:
        errors = rows.residuals(u)
        return float(errors @ errors / found.sigma**2 + u @ known @ u)

    best = min((np.array(u) for u in product(np.linspace(-0.6, 0.6, 121), repeat=2)), key=cost)
    assert cost(found.u) <= cost(best) and found.u == pytest.approx(best, abs=0.011)


def test_exact_runs_give_their_constants_back() -> None:
    many = runs([1.3, 0.9], np.tile(SHARES, (20, 1)))
    assert np.exp(fit(many, PRIOR).u) == pytest.approx([1.3, 0.9], rel=0.01)


def test_the_covariance_is_how_far_fits_to_other_draws_lie() -> None:
    draws = np.random.default_rng(2)
    found = []
    for _ in range(40):
        u = draws.multivariate_normal(PRIOR.mean, PRIOR.covariance)
        rows = runs(list(np.exp(u)))
        noisy = Linear(rows.measured + draws.normal(0, 0.03, 4), rows.priced, rows.shares, rows.at)
        one = fit(noisy, PRIOR)
        found.append((one.u - u) / np.sqrt(np.diag(one.covariance)))
    assert np.std(found) == pytest.approx(1.0, abs=0.3)


def test_a_bound_holds_and_the_others_make_up_for_it() -> None:
    bound = Prior(PRIOR.mean, PRIOR.covariance, np.log([0.8, 0.1]), 0.03)
    found = fit(runs([0.6, 1.0], np.tile(SHARES, (5, 1))), bound)
    assert np.exp(found.u[0]) == pytest.approx(0.8) and np.exp(found.u[1]) < 1.0


def test_a_machine_that_is_three_times_slower_is_no_chance() -> None:
    found = fit(runs([3.0, 3.0]), PRIOR)
    assert found.shared > 0 and np.abs(runs([3.0, 3.0]).residuals(found.u)).max() < 0.1


def test_runs_that_contradict_each_other_move_little() -> None:
    same = np.tile(SHARES[:1], (4, 1))
    odd = Linear(np.log([1.5, 1 / 1.5, 1.5, 1 / 1.5]), np.zeros(4), same, np.zeros(2))
    found = fit(odd, PRIOR)
    assert found.sigma > 0.1 and np.abs(found.u).max() < 0.05


def test_a_run_left_out_is_foreseen_by_the_others_alone() -> None:
    rows = runs([1.3, 0.9], noise=0.02)
    apart = left_out(rows, PRIOR, [[0], [1, 2], [3]])
    assert apart[0] == pytest.approx(rows.only(0).residuals(fit(rows.without([0]), PRIOR).u)[0])
    assert apart[2] == pytest.approx(rows.only(2).residuals(fit(rows.without([1, 2]), PRIOR).u)[0])
