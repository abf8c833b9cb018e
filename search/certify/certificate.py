"""Checks certificates: proofs of a lower bound on the seconds of every plan of a problem.

A *message* replaces some factors by one that is nowhere above their sum, so the sum of all factors nowhere rises:

    for every choice x    message(x) <= sum of its sources at x            (one inequality per cell)
    bound               = fixed_seconds + sum over the factors that are left of their least cell

With a budget, let r(x) be the retained bytes, t(x) the transient ones, lam >= 0. A choice with low <= t(x) <= high uses
no cell above `high`, and must have r(x) <= cap = budget - fixed_bytes - low, so

    seconds(x) >= seconds(x) + lam * (r(x) - cap) >= bound of (seconds + lam * r on the cells up to high) - lam * cap

A *piece* says this for one range of t(x), perhaps only for some options of some variables. Pieces that cover all
choices prove the least of their bounds. Where an elimination is too large, a piece is reparametrized instead: factors
move costs to their variables (`reparametrization`).

The check shares no code with the making of the messages, and trusts its own arithmetic alone. Where an inequality fails
by rounding, the difference is taken off the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoddl.core.problem import Array, Problem, Table
from autoddl.core.problem import Factor as ProblemFactor
from autoddl.search.certify.reparametrization import ReparametrizedPiece, check_reparametrized

__all__ = ["Allowed", "Certificate", "CheckedBound", "Message", "Piece", "align_axes", "check_certificate",
           "restrict_options"]

CELLS = 1 << 22
"""Cells that are compared at a time."""

Scope = tuple[int, ...]
Factor = tuple[Scope, int]
"""(variables, number of a table over them)."""


Allowed = tuple[tuple[int, tuple[int, ...]], ...]
"""(variable, options), each variable once."""


@dataclass(frozen=True, slots=True)
class Message:
    """Replaces the factors `sources` (ids: the problem's factors, then the messages) by table `table` over `scope`."""

    sources: tuple[int, ...]
    scope: Scope
    table: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The proof for choices whose transient bytes are in `low`..`high`.

        low         least transient bytes
        high        greatest transient bytes
        lam         the multiplier: price of a retained byte, in seconds
        messages    the messages, in order
        tables      their tables
        allowed     options of some variables, to which the piece is restricted
    """

    low: float
    high: float
    lam: float
    messages: tuple[Message, ...]
    tables: tuple[Array, ...]
    allowed: Allowed = ()


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """A proof in pieces, by rising transient bytes."""

    pieces: tuple[Piece | ReparametrizedPiece, ...]


@dataclass(frozen=True, slots=True)
class CheckedBound:
    """The bound that holds, the numbers of inequalities and of distinct ones that were checked, and the multipliers."""

    bound: float
    inequalities: int
    distinct: int
    multipliers: tuple[float, ...]


def align_axes(table: Array, scope: Scope, over: Scope) -> Array:
    """The table with its axes in the order of `over`; variables that `scope` has not get an axis of length one."""
    order = sorted(range(len(scope)), key=lambda i: over.index(scope[i]))
    sizes = {scope[i]: table.shape[i] for i in order}
    return table.transpose(order).reshape([sizes.get(v, 1) for v in over])


def restrict_options(problem: Problem, allowed: Allowed) -> Problem:
    """The problem with one more factor for each variable of `allowed`, which forbids its other options."""
    tables, factors = list(problem.tables), list(problem.factors)
    for v, options in allowed:
        nothing, seconds = np.zeros(problem.sizes[v]), np.full(problem.sizes[v], math.inf)
        seconds[list(options)] = 0.0
        factors.append(ProblemFactor((v,), len(tables)))
        tables.append(Table(seconds, nothing, nothing))
    return replace(problem, tables=tuple(tables), factors=tuple(factors))


def check_certificate(problem: Problem, certificate: Certificate) -> CheckedBound:
    """The bound that a certificate proves. Raises AssertionError for one that proves nothing: that is a bug of ours."""
    _check_cover(problem, certificate.pieces)
    found = [_check_piece(problem, piece) if isinstance(piece, Piece) else check_reparametrized(problem, piece)
             for piece in certificate.pieces]
    return CheckedBound(min(bound for bound, _, _ in found), sum(n for _, n, _ in found), sum(n for _, _, n in found),
                        tuple(piece.lam for piece in certificate.pieces))


def _check_cover(problem: Problem, pieces: Sequence[Piece | ReparametrizedPiece]) -> None:
    """Asserts that no choice has transient bytes below, between or above the pieces.

    Transient bytes of a choice are those of some cell, and at least the least ones of every factor.
    """
    cells = [t.transient[np.isfinite(t.seconds)] for t in problem.tables]
    least = max((float(cells[f.table].min()) for f in problem.factors if cells[f.table].size), default=0.0)
    levels = np.unique(np.concatenate([np.array([least]), *cells]))
    _check_branches(levels[levels >= least], pieces, problem.sizes)
    assert problem.budget is not None or all(piece.lam == 0 for piece in pieces), "a multiplier without a budget"


def _check_branches(levels: Array, pieces: Sequence[Piece | ReparametrizedPiece], sizes: Sequence[int]) -> None:
    """Asserts the cover for each option of each restricted variable; options with equal pieces count as one."""
    narrow = [dict(piece.allowed) if isinstance(piece, Piece) else {} for piece in pieces]
    named = next((v for allowed in narrow for v in allowed), None)
    if named is None:
        covered = np.zeros(len(levels), dtype=bool)
        for piece in pieces:
            covered |= (piece.low <= levels) & (levels <= piece.high)
        assert covered.all(), "the certificate leaves out choices by their transient bytes"
        return
    groups = {tuple(named not in allowed or k in allowed[named] for allowed in narrow) for k in range(sizes[named])}
    for group in groups:
        those = [_without(piece, named) for piece, has in zip(pieces, group, strict=True) if has]
        _check_branches(levels, those, sizes)


def _without(piece: Piece | ReparametrizedPiece, v: int) -> Piece | ReparametrizedPiece:
    if isinstance(piece, ReparametrizedPiece):
        return piece
    return replace(piece, allowed=tuple([(u, options) for u, options in piece.allowed if u != v]))


def _check_piece(problem: Problem, piece: Piece) -> tuple[float, int, int]:
    """The (bound, inequalities, distinct inequalities) of one piece."""
    problem = restrict_options(problem, piece.allowed)
    cap = math.inf if problem.budget is None else problem.budget - problem.fixed_bytes - piece.low
    if cap < 0:
        return math.inf, 0, 0
    assert piece.lam >= 0, "a multiplier is not negative"
    priced = [_priced(table, piece) for table in problem.tables]
    tables = [*priced, *piece.tables]
    factors: list[Factor | None] = [(f.variables, f.table) for f in problem.factors]
    known: dict[object, tuple[float, int]] = {}
    missed, count = [], 0
    for message in piece.messages:
        sources = [_taken(factors, i) for i in message.sources]
        result = (message.scope, len(priced) + message.table)
        key = _pattern([*sources, result])
        if key not in known:
            known[key] = _missed(sources, result, tables)
        missed.append(known[key][0])
        count += known[key][1]
        factors.append(result)
    left = [float(tables[factor[1]].min()) for factor in factors if factor is not None]
    bound = problem.fixed_seconds + math.fsum(left) - math.fsum(missed) - (piece.lam * cap if piece.lam else 0.0)
    return bound, count, sum(n for _, n in known.values())


def _priced(table: Table, piece: Piece) -> Array:
    """The table seconds + lam * retained on the cells up to `high`; no choice of the piece is elsewhere."""
    allowed = np.isfinite(table.seconds) & (table.transient <= piece.high)
    return np.where(allowed, table.seconds + piece.lam * table.retained, math.inf)


def _taken(factors: list[Factor | None], i: int) -> Factor:
    """Takes factor i away from other messages, and returns it."""
    factor = factors[i]
    assert factor is not None, "a factor is used twice"
    factors[i] = None
    return factor


def _pattern(factors: Sequence[Factor]) -> object:
    """A key that is equal for messages with equal inequalities: the tables, and how their axes meet."""
    local: dict[int, int] = {}
    return tuple((table, tuple([local.setdefault(v, len(local)) for v in scope])) for scope, table in factors)


def _missed(sources: Sequence[Factor], result: Factor, tables: Sequence[Array]) -> tuple[float, int]:
    """The most by which the message is above the sum of its sources, and the number of cells compared."""
    scope, table = result
    sizes = {v: n for s, t in (*sources, result) for v, n in zip(s, tables[t].shape, strict=True)}
    over = (*(v for v in sizes if v not in scope), *scope)
    parts = [align_axes(tables[t], s, over) for s, t in sources]
    claim = align_axes(tables[table], scope, over)
    cells = math.prod(sizes[v] for v in over)
    rows = max(1, CELLS // max(1, cells // (sizes[over[0]] if over else 1)))
    worst = 0.0
    for start in range(0, sizes[over[0]] if over else 1, rows):
        total = sum((_rows(part, start, rows) for part in parts), np.zeros(()))
        here, there = np.broadcast_arrays(_rows(claim, start, rows), total)
        finite = np.isfinite(there)
        worst = max(worst, float((here[finite] - there[finite]).max(initial=0.0)))
    assert worst < math.inf, "a message forbids what its sources allow"
    return worst, cells


def _rows(part: Array, start: int, rows: int) -> Array:
    """Some rows of the first axis; all of an axis of length one."""
    return part[start:start + rows] if part.ndim and part.shape[0] > 1 else part
