"""Every choice, scored at once: the definition of the optimum, for small problems and for tests."""

import math

import numpy as np

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Array, Problem

__all__ = ["LIMIT", "choice_at", "score_every_choice", "search_exhaustively"]

LIMIT = 4_000_000


def search_exhaustively(problem: Problem) -> tuple[int, ...]:
    """The least seconds within the budget; the lowest choice of equal ones."""
    seconds, nbytes = score_every_choice(problem)
    budget = math.inf if problem.budget is None else problem.budget
    seconds[nbytes > budget] = math.inf
    if not np.isfinite(seconds).any():
        raise Infeasible(float(nbytes.min()), budget, "every choice was looked at")
    return choice_at(problem, int(seconds.argmin()))


def score_every_choice(problem: Problem) -> tuple[Array, Array]:
    """(seconds, bytes) of every choice, flat, infinite where one is forbidden; `choice_at` names the choice at a place.

    Raises InputError where there are more than LIMIT.
    """
    count = math.prod(problem.sizes)
    if count > LIMIT:
        raise InputError(f"exhaustive search is for at most {LIMIT} choices, not {count}; use the solver 'exact'")
    axes = [i for i, size in enumerate(problem.sizes) if size > 1]
    shape = [problem.sizes[i] for i in axes]
    seconds, retained, transient = (np.zeros(shape) for _ in range(3))
    for factor in problem.factors:
        table = problem.tables[factor.table]
        seconds += _spread(table.seconds, factor.variables, axes)
        retained += _spread(table.retained, factor.variables, axes)
        np.maximum(transient, _spread(table.transient, factor.variables, axes), out=transient)
    nbytes = np.where(np.isfinite(seconds), problem.fixed_bytes + retained + transient, math.inf)
    return problem.fixed_seconds + seconds.ravel(), nbytes.ravel()


def choice_at(problem: Problem, place: int) -> tuple[int, ...]:
    """The choice at a place of `score_every_choice`."""
    return tuple(int(k) for k in np.unravel_index(place, problem.sizes))


def _spread(table: Array, variables: tuple[int, ...], axes: list[int]) -> Array:
    """A table's view over all variables that have a choice."""
    order = sorted(range(len(variables)), key=lambda i: variables[i])
    sizes = {variables[i]: table.shape[i] for i in order}
    return table.transpose(order).reshape([sizes.get(i, 1) for i in axes])
