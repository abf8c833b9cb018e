"""Solves the problem as an integer program with OR-Tools' CP-SAT: a check by other means, for small problems.

    x[v, k]      1 if variable v takes option k                      sum over k of x[v, k] = 1
    z[f, c]      1 if factor f is charged its cell c over classes    sum of z over the cells of a class = sum of its x
    minimise     sum of seconds(c) z[f, c]
    subject to   sum of retained(c) z[f, c] + t <= budget,  t >= transient(c) z[f, c]

Seconds and bytes are rounded to integers, both down, so that the bound is true and no choice that fits is left out. A
choice that then does not fit is sought again with bytes rounded up.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Array, Problem, Table
from autoddl.search.limits import Clock

__all__ = ["LIMIT", "CpSatResult", "solve_with_cp_sat"]

LIMIT = 300_000
"""Most cells of all factors: beyond them CP-SAT is hopeless."""

GRAIN = 2.0 ** 40
"""Steps into which the largest total is divided."""


Rounded = Callable[[float], int]


@dataclass(frozen=True, slots=True)
class CpSatResult:
    """A choice, a lower bound on the seconds of all choices, and how far CP-SAT came."""

    choice: tuple[int, ...]
    bound: float
    proof: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds and bytes of one unit of the integers."""

    second: float
    byte: float


def solve_with_cp_sat(problem: Problem, clock: Clock, seed: int) -> CpSatResult:
    """The plan that CP-SAT finds, and its bound.

    Raises Infeasible if it proves that there is none, InputError for a problem too large or a time too short.
    """
    found = _solved(problem, clock, seed, math.floor)
    if problem.is_feasible(found.choice):
        return found
    try:
        return CpSatResult(_solved(problem, clock, seed, math.ceil).choice, found.bound, found.proof)
    except Infeasible:
        raise InputError("cp-sat found no plan that fits by more than its rounding; use the solver 'exact'") from None


def _solved(problem: Problem, clock: Clock, seed: int, rounded: Rounded) -> CpSatResult:
    from ortools.sat.python import cp_model

    cells = sum(problem.tables[f.table].core[0].size for f in problem.factors)
    if cells > LIMIT:
        raise InputError(f"cp-sat is for at most {LIMIT} cells, not {cells}; use the solver 'exact'")
    model: Any = cp_model.CpModel()
    options = [[model.new_bool_var(f"x{v}_{k}") for k in range(size)] for v, size in enumerate(problem.sizes)]
    for row in options:
        model.add_exactly_one(row)
    scale = _scale(problem)
    objective, retained, peaks = _factors(model, problem, options, scale, rounded)
    if problem.budget is not None:
        room = math.floor(min((problem.budget - problem.fixed_bytes) / scale.byte, 2 * GRAIN))
        _limit(model, retained, peaks, room)
    model.minimize(cp_model.LinearExpr.sum(objective))
    solver: Any = cp_model.CpSolver()
    solver.parameters.random_seed, solver.parameters.num_workers = seed, 1
    if clock.deadline is not None:
        solver.parameters.max_time_in_seconds = max(0.1, clock.left)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise Infeasible(math.inf, math.inf if problem.budget is None else problem.budget, "cp-sat proved it")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError("cp-sat found no plan in its time; give it more, or use the solver 'exact'")
    choice = tuple(next(k for k, x in enumerate(row) if solver.value(x)) for row in options)
    proof = "cp-sat, proved" if status == cp_model.OPTIMAL else "cp-sat, stopped by its time"
    return CpSatResult(choice, problem.fixed_seconds + solver.best_objective_bound * scale.second, proof)


def _scale(problem: Problem) -> _Scale:
    """Units in which every total is an integer within the range of CP-SAT."""
    seconds = sum(_largest(problem.tables[f.table].core[0]) for f in problem.factors)
    nbytes = sum(_largest(problem.tables[f.table].core[1]) + _largest(problem.tables[f.table].core[2])
                 for f in problem.factors)
    return _Scale(max(seconds, 1e-30) / GRAIN, max(nbytes, 1e-30) / GRAIN)


def _largest(values: Array) -> float:
    return float(values[np.isfinite(values)].max(initial=0.0))


def _factors(model: Any, problem: Problem, options: list[list[Any]], scale: _Scale, rounded: Rounded
             ) -> tuple[list[Any], list[Any], list[tuple[int, Any]]]:
    """Terms of the objective, terms of the retained bytes, and (transient bytes, cell) of every factor."""
    objective: list[Any] = []
    retained: list[Any] = []
    peaks: list[tuple[int, Any]] = []
    for f, factor in enumerate(problem.factors):
        table = problem.tables[factor.table]
        groups = [_classes(table, axis, options[v]) for axis, v in enumerate(factor.variables)]
        sums: list[list[list[Any]]] = [[[] for _ in group] for group in groups]
        for cell in itertools.product(*map(range, table.core[0].shape)):
            seconds, held, moment = (float(a[cell]) for a in table.core)
            if math.isinf(seconds):
                continue
            z = model.new_bool_var(f"z{f}_{cell}")
            for axis, c in enumerate(cell):
                sums[axis][c].append(z)
            objective.append(math.floor(seconds / scale.second) * z)
            retained.append(rounded(held / scale.byte) * z)
            peaks.append((rounded(moment / scale.byte), z))
        for group, cells in zip(groups, sums, strict=True):
            for members, zs in zip(group, cells, strict=True):
                if zs or members:
                    model.add(sum(zs) - sum(members) == 0)
    return objective, retained, peaks


def _classes(table: Table, axis: int, row: list[Any]) -> list[list[Any]]:
    """The options of a variable, grouped by their class in a table."""
    groups: list[list[Any]] = [[] for _ in range(table.core[0].shape[axis])]
    for x, c in zip(row, table.classes[axis].tolist(), strict=True):
        groups[c].append(x)
    return groups


def _limit(model: Any, retained: list[Any], peaks: list[tuple[int, Any]], room: int) -> None:
    """Adds the constraint retained + transient <= room."""
    if room < 0:
        model.add_bool_or([])
        return
    peak = model.new_int_var(0, room, "t")
    for size, z in peaks:
        if size:
            model.add(peak >= size * z)
    model.add(sum(retained) + peak <= room)
