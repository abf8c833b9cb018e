"""Checks the bound of a problem too large for elimination: costs that factors move to their variables.

    sum of all factors at x  =  sum over v of  own_v(x_v) + costs moved to v at x_v
                              + sum over factors f of  f(x) - costs moved from f at x     whatever is moved
                            >=  the least of every term, added up

This holds for seconds + lam * retained on the cells up to `high`, as in a `Piece` (`certificate`). Options that no cell
of a factor allows are left out (arc consistency). Rounding is taken off: every term is a sum of a few numbers.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoddl.core.problem import Array, Problem, Table

__all__ = ["ReparametrizedPiece", "check_reparametrized"]

Bools = NDArray[np.bool_]

ROWS = 1 << 18
"""Cells that are computed together."""

ROUNDING = 16 * 2.0**-53
"""The fraction of the sum of all terms' largest numbers that rounding may lose."""


@dataclass(frozen=True, slots=True, eq=False)
class ReparametrizedPiece:
    """The proof for choices whose transient bytes are in `low`..`high`, at the multiplier `lam`.

    `given` are (factor, the number of a table for each of its axes): the costs that it moves to that variable.
    """

    low: float
    high: float
    lam: float
    given: tuple[tuple[int, tuple[int, ...]], ...]
    tables: tuple[Array, ...]


def check_reparametrized(problem: Problem, piece: ReparametrizedPiece) -> tuple[float, int, int]:
    """The (bound, cells, distinct cells) of one piece. Raises AssertionError for a piece that proves nothing."""
    cap = math.inf if problem.budget is None else problem.budget - problem.fixed_bytes - piece.low
    if cap < 0:
        return math.inf, 0, 0
    assert piece.lam >= 0, "a multiplier is not negative"
    assert all(np.isfinite(table).all() for table in piece.tables), "what is given is finite"
    given = dict(piece.given)
    assert len(given) == len(piece.given), "a factor gives once"
    cores = [_priced(table, piece) for table in problem.tables]
    alive = _alive(problem, cores)
    own = _owned(problem, piece, cores, alive)
    terms, known = [_Term(float(total.min()), _largest(total), 0) for total in own], dict[object, _Term]()
    for i, factor in enumerate(problem.factors):
        if len(factor.variables) > 1 or i in given:
            able, gifts = [alive[v] for v in factor.variables], given.get(i, ())
            key = (factor.table, gifts, tuple([left.tobytes() for left in able]))
            if key not in known:
                vectors = [piece.tables[k] for k in gifts] or [np.zeros(len(left)) for left in able]
                known[key] = _left(cores[factor.table], problem.tables[factor.table].classes, vectors, able)
            terms.append(known[key])
    bound = problem.fixed_seconds + math.fsum(t.least for t in terms) - (piece.lam * cap if piece.lam else 0.0)
    return (bound - ROUNDING * math.fsum(t.largest for t in terms), sum(t.cells for t in terms),
            sum(t.cells for t in known.values()))


@dataclass(frozen=True, slots=True)
class _Term:
    """The least of a factor or variable after moving, the largest number in it, and its number of cells."""

    least: float
    largest: float
    cells: int


def _owned(problem: Problem, piece: ReparametrizedPiece, cores: Sequence[Array], alive: Sequence[Bools]) -> list[Array]:
    """The costs of every variable alone, with those moved to it."""
    sums, given = [np.where(able, 0.0, math.inf) for able in alive], dict(piece.given)
    for i, factor in enumerate(problem.factors):
        gifts = given.get(i, ())
        assert len(gifts) in (0, len(factor.variables)), "a factor gives to all of its variables, or to none"
        for v, table in zip(factor.variables, gifts, strict=False):
            sums[v] += piece.tables[table]
        if len(factor.variables) == 1 and not gifts:
            sums[factor.variables[0]] += cores[factor.table][problem.tables[factor.table].classes[0]]
    return sums


def _priced(table: Table, piece: ReparametrizedPiece) -> Array:
    """The core seconds + lam * retained on the cells up to `high`; no choice of the piece is elsewhere."""
    seconds, retained, transient = table.core
    allowed = np.isfinite(seconds) & (transient <= piece.high)
    return np.where(allowed, seconds + piece.lam * retained, math.inf)


def _largest(values: Array) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _alive(problem: Problem, cores: Sequence[Array]) -> list[Bools]:
    """The options that every factor allows, with some options that are left of its other variables."""
    alive = [np.ones(size, dtype=bool) for size in problem.sizes]
    allowed = [np.isfinite(core) for core in cores]
    if all(cells.all() for cells in allowed):
        return alive
    at: defaultdict[int, list[int]] = defaultdict(list)
    for i, factor in enumerate(problem.factors):
        for v in factor.variables:
            at[v].append(i)
    known: dict[object, list[Bools]] = {}
    waiting = dict.fromkeys(range(len(problem.factors)))
    while waiting:
        i = next(iter(waiting))
        del waiting[i]
        variables, table = problem.factors[i].variables, problem.factors[i].table
        key = (table, tuple([alive[v].tobytes() for v in variables]))
        if key not in known:
            known[key] = _supported(allowed[table], problem.tables[table].classes, [alive[v] for v in variables])
        for v, left in zip(variables, known[key], strict=True):
            if (left != alive[v]).any():
                alive[v] = left
                waiting.update(dict.fromkeys(at[v]))
    return alive


def _supported(allowed: Bools, classes: Sequence[NDArray[np.intp]], alive: Sequence[Bools]) -> list[Bools]:
    """The options that one factor leaves of each of its variables."""
    used = allowed
    for axis, (of, able) in enumerate(zip(classes, alive, strict=True)):
        there = np.zeros(allowed.shape[axis], dtype=bool)
        there[of[able]] = True
        used = used & there.reshape([-1 if a == axis else 1 for a in range(allowed.ndim)])
    found = []
    for axis, (of, able) in enumerate(zip(classes, alive, strict=True)):
        there = np.flatnonzero(np.moveaxis(used, axis, 0).reshape(used.shape[axis], -1).sum(axis=1))
        found.append(able & np.isin(of, there))
    return found


def _left(core: Array, classes: Sequence[NDArray[np.intp]], gifts: Sequence[Array], alive: Sequence[Bools]) -> _Term:
    """A factor without the costs it moves, over options that are left; each class counts by the most that is moved."""
    most = []
    for axis, (of, gift, able) in enumerate(zip(classes, gifts, alive, strict=True)):
        best = np.full(core.shape[axis], -math.inf)
        np.maximum.at(best, of[able], gift[able])
        most.append(best.reshape([-1 if a == axis else 1 for a in range(core.ndim)]))
    least, rows = math.inf, max(1, ROWS // max(1, core[0].size))
    for start in range(0, len(core), rows):
        left = core[start:start + rows] - most[0][start:start + rows]
        for other in most[1:]:
            left = left - other
        least = min(least, float(left.min()))
    return _Term(least, _largest(core) + sum(_largest(gift) for gift in gifts), core.size)
