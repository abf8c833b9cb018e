"""Solves problems too large for elimination: a bound by messages along edges, a plan of the options they favour.

    bound(lam)   = pass_messages(seconds + lam * retained) - lam * cap    cap: the budget without fixed bytes and the
                                                                          transient bytes that every choice needs
    few          = the FAVOURED options of every variable with the least beliefs
    plan         = the exact optimum among few, which says what a byte is worth: the next lam

in turn, until the bound is within the tolerance of the plan or the turns are over. Without a budget lam is 0.

A problem is large where its tables are, or where its graph is wide, as that of a recurrence that is written out. Tables
over three variables are not for here.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoddl.core.errors import Infeasible
from autoddl.core.problem import Array, Problem
from autoddl.search.block_factors import match_factors
from autoddl.search.coordinate_descent import descend_from_starts
from autoddl.search.elimination import count_cells
from autoddl.search.elimination_order import count_folded_cells
from autoddl.search.exact import EFFORT, Outcome, build_space, solve_exactly
from autoddl.search.limits import Above, Clock, Limits
from autoddl.search.presolve import Kept, keep_options
from autoddl.search.relaxations import Space
from autoddl.search.repeated_blocks import FoldedProblem, fold_blocks
from autoddl.search.tree_reweighted import MessageBound, Messages, pass_messages, reparametrize

__all__ = ["bound_and_plan", "elimination_space", "lower_bound", "momentary", "prove_by_messages", "rough_space",
           "solve_by_messages"]

CELLS = 6_000_000
"""Cells of all tables beyond which an elimination takes tens of seconds."""

WIDE = 1_500_000_000
"""Cells of all messages of an elimination beyond which it takes many seconds."""

ROUGH = 1_000_000
"""Cells that a message may have where elimination only bounds (mini-buckets)."""

FAVOURED = 48
"""Options per variable among which a plan is looked for."""

WORK = 5e8
"""Cells that the elimination of the favoured options may compute."""

FEWER = 20
"""How many times fewer of them are tried first."""

ROUNDS = (1, 3, 6, 10, 16)
"""Evaluations of the bound in each turn."""

SHARE = 1 / 2
"""Fraction of the remaining effort that the search for a plan may take."""

NEAR = 0.005
"""The gap to which that search is solved; the price of a byte in a rougher plan says little."""

SAME = 0.02
"""Prices that differ by less than this, relatively, count as one."""


@dataclass(frozen=True, slots=True)
class _Best:
    """The best plan so far, its seconds without the fixed ones, and the price of a byte there."""

    outcome: Outcome | None
    seconds: float
    price: float


def elimination_space(problem: Problem) -> Space | None:
    """Prepares the elimination of the problem; None where messages along edges are quicker.

    A wide problem with tables over three variables is not for messages: there elimination only bounds.
    """
    pairs = all(len(table.lengths) <= 2 for table in problem.tables)
    if pairs and sum(math.prod(table.lengths) for table in problem.tables) > CELLS:
        return None
    space = build_space(problem)
    if not _is_wide(space):
        return space
    return None if pairs else build_space(problem, ROUGH)


def rough_space(problem: Problem) -> Space:
    """Prepares an elimination that takes seconds: it is exact where that is possible, else it only bounds."""
    space = build_space(problem)
    return build_space(problem, ROUGH) if _is_wide(space) else space


def _is_wide(space: Space) -> bool:
    """Tells whether an elimination takes many seconds, or only bounds."""
    return not space.program.exact or count_cells(space.program, [t.classes for t in space.problem.tables]) > WIDE


@dataclass(frozen=True, slots=True)
class _Bound:
    """The best bound so far, of all seconds, with the price of a byte and the messages that prove it."""

    seconds: float
    price: float
    sent: Messages


def solve_by_messages(problem: Problem, limits: Limits) -> Outcome:
    """A plan and its bound. If no plan is found, raises Above where there is a ceiling, else Infeasible."""
    best, bound = bound_and_plan(problem, _short(problem), limits)
    if best.outcome is None and bound.seconds < math.inf == limits.ceiling:
        best = _descended(problem, limits)
    return _ended(problem, best, bound.seconds, limits)


def _descended(problem: Problem, limits: Limits) -> _Best:
    """A plan by coordinate descent, where the favoured options have none."""
    choice = descend_from_starts(problem, limits.seed, limits.clock)
    if choice is None:
        return _Best(None, math.inf, 0.0)
    return _Best(Outcome(choice, -math.inf, "messages along edges, and coordinate descent"),
                 problem.cost(choice) - problem.fixed_seconds, 0.0)


def lower_bound(problem: Problem, price: float) -> float:
    """Seconds that no plan is below, by one round of sweeps at one price of a byte. Infeasible if none is allowed."""
    price = 0.0 if problem.budget is None else price
    found = pass_messages(_short(problem), price, math.inf, 1, Clock.start(None, EFFORT))
    if found.bound == math.inf:
        raise _forbidden(problem)
    return found.bound - price * _room(problem) + problem.fixed_seconds


def prove_by_messages(problem: Problem, seconds: float, tolerance: float
                      ) -> tuple[float, dict[int, tuple[Array, Array]]]:
    """A proof that all plans take `seconds`, or nearly so.

    It is the price of a byte, and the costs that every factor of two variables moves to either of them.
    """
    short = _short(problem)
    limits = Limits(tolerance, seconds, Clock.start(None, EFFORT), lambda best, bound: None)
    bound = bound_and_plan(problem, short, limits)[1]
    made, stand = reparametrize(short, bound.price, bound.sent), match_factors(problem, short)
    return bound.price, {i: made[s] for i, s in enumerate(stand) if s in made}


def _short(problem: Problem) -> FoldedProblem:
    return fold_blocks(problem, problem.tables, np.arange(len(problem.tables)))


def bound_and_plan(problem: Problem, short: FoldedProblem, limits: Limits) -> tuple[_Best, _Bound]:
    """The best plan and the best bound, found in turn."""
    limits = replace(limits, ceiling=limits.ceiling - problem.fixed_seconds)
    cap = _room(problem)
    lam, planned = 0.0 if problem.budget is None else limits.price, math.nan
    best, bound, sent, before = _Best(None, math.inf, lam), _Bound(-math.inf, lam, {}), None, -math.inf
    for rounds in ROUNDS:
        found = pass_messages(short, lam, limits.target(best.seconds) + lam * cap, rounds, limits.clock, sent)
        if lam == planned and found.bound <= before:
            break  # at this price nothing is to be had any more
        sent, before = found.sent, found.bound
        bound = max(bound, _Bound(found.bound - lam * cap, lam, sent), key=lambda one: one.seconds)
        if bound.seconds >= limits.target(best.seconds) or limits.clock.expired:
            break
        if lam != planned:
            other, planned = _among(problem, short, found, limits, lam), lam
            lam = 0.0 if problem.budget is None else _between(bound.price, other.price)
            best = min(best, other, key=lambda one: one.seconds)
        limits.tell(best.seconds, bound.seconds)
        if bound.seconds >= limits.target(best.seconds):
            break
    return best, bound


def _room(problem: Problem) -> float:
    """The bytes that are left for retained ones."""
    return 0.0 if problem.budget is None else problem.budget - problem.fixed_bytes - momentary(problem)


def momentary(problem: Problem) -> float:
    """Transient bytes that no choice can do without."""
    least = [problem.tables[number].least_transient for number, _ in problem.arrays.groups]
    return max((nbytes for nbytes in least if math.isfinite(nbytes)), default=0.0)


def _between(best: float, price: float) -> float:
    """The next price of a byte to try. The price of favoured options alone would go too far."""
    if not best or abs(price - best) <= SAME * best:
        return best or price
    return math.sqrt(best * price)


def _ended(problem: Problem, best: _Best, bound: float, limits: Limits) -> Outcome:
    """The outcome of a search, or the error where it has no plan."""
    if best.outcome is not None:
        proof = best.outcome.proof if "descent" in best.outcome.proof else (
            "messages along edges, and elimination of the options they favour")
        return replace(best.outcome, bound=min(bound, best.seconds) + problem.fixed_seconds, proof=proof)
    if bound == math.inf:
        raise _forbidden(problem)
    if math.isfinite(limits.ceiling):
        raise Above(bound + problem.fixed_seconds)
    raise Infeasible(0.0, _budget(problem))


def _forbidden(problem: Problem) -> Infeasible:
    return Infeasible(math.inf, _budget(problem), "every choice meets a forbidden combination")


def _budget(problem: Problem) -> float:
    return math.inf if problem.budget is None else problem.budget


def _among(problem: Problem, short: FoldedProblem, found: MessageBound, limits: Limits, price: float) -> _Best:
    """The best plan of the options that the beliefs favour; without a budget of fewer, where that is good enough."""
    work = _Work(short, {})
    if problem.budget is None:
        best = _best_of(problem, work, found, limits, price, WORK / FEWER)
        if found.bound >= limits.target(best.seconds):
            return best
    return _best_of(problem, work, found, limits, price, WORK)


@dataclass(frozen=True, slots=True)
class _Work:
    """The cells that eliminations of parts of a short problem compute, where they are known: by kept options."""

    short: FoldedProblem
    known: dict[tuple[Kept, ...], float]

    def of(self, kept: Sequence[Kept]) -> float:
        """The cells for the kept options of every variable; infinite where a message is too large."""
        key = tuple(kept)
        if key not in self.known:
            self.known[key] = count_folded_cells(self.short, keep_options(self.short.problem, kept).problem)
        return self.known[key]


def _best_of(problem: Problem, work: _Work, found: MessageBound, limits: Limits, price: float, most: float) -> _Best:
    """The best plan of as many favoured options as can be eliminated with at most `most` cells.

    Where there is none under a budget, bytes should cost more. The first price makes the whole budget cost as much as
    the time.
    """
    short, kept = work.short, _favoured(work, found, most)
    few = keep_options(problem, [kept[v] for v in short.of[np.argsort(short.variable)].tolist()])
    granted = limits.clock.part(SHARE)
    try:
        closer = replace(limits, tolerance=min(limits.tolerance, NEAR), price=price, ceiling=math.inf, clock=granted)
        outcome = solve_exactly(few.problem, closer)
    except Infeasible:
        return _Best(None, math.inf, 2 * price or max(0.0, found.bound) / (problem.budget or 1.0))
    finally:
        limits.clock.pairs -= granted.spent
    choice = few.restore(outcome.choice)
    return _Best(replace(outcome, choice=choice), problem.cost(choice) - problem.fixed_seconds, outcome.price)


def _favoured(work: _Work, found: MessageBound, most: float) -> list[Kept]:
    """The favoured options of each short variable, as many as `most` allows; the blocks of a run have equal ones."""
    numbers = [FAVOURED >> halvings for halvings in range(FAVOURED.bit_length())]
    rows = [_first_options(work.short, found, many) for many in numbers]
    return rows[bisect_left(rows, True, hi=len(rows) - 1, key=lambda kept: work.of(kept) <= most)]


def _first_options(short: FoldedProblem, found: MessageBound, many: int) -> list[Kept]:
    """So many options of each short variable, those with the least beliefs, and what equal blocks keep."""
    kept = [set(np.argsort(belief, kind="stable")[:many].tolist()) for belief in found.beliefs]
    for fold in short.folds:
        for alike in zip(*fold.blocks, strict=True):
            whole = set().union(*(kept[v] for v in alike))
            for v in alike:
                kept[v] = whole
    return [tuple(sorted(k for k in options if math.isfinite(belief[k]))) or (int(belief.argmin()),)
            for options, belief in zip(kept, found.beliefs, strict=True)]
