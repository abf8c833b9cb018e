"""What every bounded solve shares: the reduced problem, its program, and the relaxations evaluated so far.

    V(lam, tau) = min over x of seconds(x) + lam * retained(x), using only cells with transient bytes <= tau
    lam = inf   means the least retained(x)

Every evaluation yields a Point: the value, and the choice that attains it with its true seconds and bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoddl.core.problem import Array, Problem, Table
from autoddl.search.class_tables import ClassTable
from autoddl.search.elimination import argmin, class_messages, least_value
from autoddl.search.elimination_program import EliminationProgram, Ids

__all__ = ["HullPoint", "Space", "least_transient", "price_classes", "price_options"]


@dataclass(frozen=True, slots=True)
class HullPoint:
    """One relaxation solved: its value (a lower bound), and the whole problem's choice found with what it costs."""

    lam: float
    value: float
    choice: Ids
    seconds: float
    retained: float
    transient: float


@dataclass(frozen=True, slots=True)
class Space:
    """A problem, its program, the transient thresholds that tell choices apart, and the points known.

    Where `problem` is the short or reduced form of another one, that is `whole`, and `restore` makes its choices of
    what the program finds.
    """

    problem: Problem
    program: EliminationProgram
    thresholds: tuple[float, ...]
    whole: Problem
    restore: Callable[[Ids], Ids]
    known: dict[tuple[float, float], HullPoint] = field(default_factory=dict)
    latest: dict[tuple[float, float], list[ClassTable]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, program: EliminationProgram, whole: Problem | None = None,
           restore: Callable[[Ids], Ids] = lambda choice: choice) -> "Space":
        return cls(problem, program, _thresholds(problem), problem if whole is None else whole, restore)

    def messages(self, lam: float, tau: float) -> list[ClassTable]:
        """S for every slot at one multiplier and one threshold; the latest are kept."""
        key = (lam, tau)
        if key not in self.latest:
            self.latest.clear()
            self.latest[key] = class_messages(self.program, [price_classes(t, lam, tau) for t in self.problem.tables])
        return self.latest[key]

    def point(self, lam: float, tau: float) -> HullPoint:
        """V(lam, tau), solved once."""
        key = (lam, tau)
        if key not in self.known:
            values = self.messages(lam, tau)
            self.known[key] = self.measured(lam, least_value(self.program, values), argmin(self.program, values))
        return self.known[key]

    def forget(self, lam: float) -> None:
        """Every point but those at one price: what follows depends on nothing else that was asked before."""
        for key in [key for key in self.known if key[0] != lam]:
            del self.known[key]

    def measured(self, lam: float, bound: float, found: Ids) -> HullPoint:
        """What the program found, with its true seconds and bytes; the seconds are without the fixed ones, as the value
        is."""
        choice = self.restore(found)
        seconds, retained, transient = self.whole.totals(choice)
        return HullPoint(lam, bound, choice, seconds - self.problem.fixed_seconds, retained, transient)

    def nbytes(self, point: HullPoint) -> float:
        return self.problem.fixed_bytes + point.retained + point.transient

    def fits(self, point: HullPoint) -> bool:
        budget = self.problem.budget
        return point.seconds < math.inf and (budget is None or self.nbytes(point) <= budget)


def least_transient(problem: Problem) -> float:
    """The transient bytes that no choice can do without: no less than any one factor has at least."""
    laid = [problem.tables[number].core for number, _ in problem.arrays.groups]
    return max((float(np.where(np.isfinite(core[0]), core[2], math.inf).min()) for core in laid
                if np.isfinite(core[0]).any()), default=0.0)


def _thresholds(problem: Problem) -> tuple[float, ...]:
    """The transients that a choice may come to."""
    floor = least_transient(problem)
    every = np.unique(np.concatenate([np.array([floor]), *(t.core[2][np.isfinite(t.core[0])] for t in problem.tables)]))
    return tuple(every[every >= floor].tolist())


def price_options(table: Table, lam: float, tau: float) -> Array:
    """`mapped`, over options."""
    return price_classes(table, lam, tau).dense()


def price_classes(table: Table, lam: float, tau: float) -> ClassTable:
    """seconds + lam * retained, or retained alone; infinite where forbidden or above the threshold."""
    seconds, retained, transient = table.core
    if tau == math.inf and lam < math.inf:  # nothing to leave out: infinite seconds stay so in the sum
        price = lam * retained
        price += seconds
        return ClassTable(price, table.classes)
    allowed = np.isfinite(seconds) & (transient <= tau)
    price = retained if math.isinf(lam) else seconds + lam * retained
    return ClassTable(np.where(allowed, price, math.inf), table.classes)
