"""Evaluates relaxations for all bounded solves: the reduced problem, its program, and the points known so far.

    V(lam, tau) = min over x of seconds(x) + lam * retained(x), using only cells with transient bytes <= tau
    lam = inf   means the least retained(x)

Every evaluation yields a HullPoint: the value, and the choice that attains it with its true seconds and bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from autoddl.core.problem import Array, Problem, Table
from autoddl.search.class_tables import ClassTable
from autoddl.search.elimination import argmin, class_messages, least_value
from autoddl.search.elimination_program import EliminationProgram, Ids

__all__ = ["HullPoint", "Space", "least_transient", "price_classes", "price_options"]


LATEST = 5
"""Multipliers whose messages are kept."""


@dataclass(frozen=True, slots=True)
class HullPoint:
    """One relaxation solved.

        lam          price of a retained byte in seconds, inf for the least bytes
        value        V(lam, tau), or another lower bound, without the fixed seconds
        choice       the choice of the whole problem that attains it
        seconds      its seconds without the fixed ones
        retained     its retained bytes
        transient    its transient bytes
    """

    lam: float
    value: float
    choice: Ids
    seconds: float
    retained: float
    transient: float


@dataclass(frozen=True, slots=True)
class Space:
    """A problem with its elimination and the relaxations that were solved.

        problem       the problem, short or reduced
        program       its elimination
        thresholds    the transient bytes that choices may have, ascending
        whole         the problem of which `problem` is a short or reduced form, or itself
        restore       choice of the program -> choice of `whole`
        known         the points by (lam, tau)
        latest        the messages of the latest (lam, tau)
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
        """The space of a problem, with its thresholds."""
        return cls(problem, program, _thresholds(problem), problem if whole is None else whole, restore)

    def within(self, budget: float | None) -> "Space":
        """The space of the same problem under another budget; both know the points of either."""
        return replace(self, problem=self.problem.within(budget), whole=self.whole.within(budget))

    def messages(self, lam: float, tau: float) -> list[ClassTable]:
        """The table S of every slot at one multiplier and one threshold; the latest are kept."""
        key = (lam, tau)
        if key not in self.latest:
            while len(self.latest) >= LATEST:
                del self.latest[next(iter(self.latest))]
            self.latest[key] = class_messages(self.program, [price_classes(t, lam, tau) for t in self.problem.tables])
        return self.latest[key]

    def point(self, lam: float, tau: float) -> HullPoint:
        """The point of V(lam, tau), solved once."""
        key = (lam, tau)
        if key not in self.known:
            values = self.messages(lam, tau)
            self.known[key] = self.measured(lam, least_value(self.program, values), argmin(self.program, values))
        return self.known[key]

    def forget(self, lam: float) -> None:
        """Forgets all points but those at one price, so that later results do not depend on earlier questions."""
        for key in [key for key in self.known if key[0] != lam]:
            del self.known[key]

    def measured(self, lam: float, bound: float, found: Ids) -> HullPoint:
        """The point of a choice that the program found, with its true seconds and bytes."""
        choice = self.restore(found)
        seconds, retained, transient = self.whole.totals(choice)
        return HullPoint(lam, bound, choice, seconds - self.problem.fixed_seconds, retained, transient)

    def nbytes(self, point: HullPoint) -> float:
        """All bytes of a point: fixed, retained and transient."""
        return self.problem.fixed_bytes + point.retained + point.transient

    def fits(self, point: HullPoint) -> bool:
        """Whether the choice of a point is allowed and within the budget."""
        budget = self.problem.budget
        return point.seconds < math.inf and (budget is None or self.nbytes(point) <= budget)


def least_transient(problem: Problem) -> float:
    """The transient bytes that every choice has at least: the greatest of the factors' least ones."""
    laid = [problem.tables[number].core for number, _ in problem.arrays.groups]
    return max((float(np.where(np.isfinite(core[0]), core[2], math.inf).min()) for core in laid
                if np.isfinite(core[0]).any()), default=0.0)


def _thresholds(problem: Problem) -> tuple[float, ...]:
    """The transient bytes that a choice may have, ascending."""
    floor = least_transient(problem)
    every = np.unique(np.concatenate([np.array([floor]), *(t.core[2][np.isfinite(t.core[0])] for t in problem.tables)]))
    return tuple(every[every >= floor].tolist())


def price_options(table: Table, lam: float, tau: float) -> Array:
    """The table of `price_classes`, over options."""
    return price_classes(table, lam, tau).dense()


def price_classes(table: Table, lam: float, tau: float) -> ClassTable:
    """The table seconds + lam * retained, or retained for lam = inf; inf where forbidden or above threshold `tau`."""
    seconds, retained, transient = table.core
    if tau == math.inf and lam < math.inf:  # nothing to leave out: infinite seconds stay so in the sum
        price = lam * retained
        price += seconds
        return ClassTable(price, table.classes)
    allowed = np.isfinite(seconds) & (transient <= tau)
    price = retained if math.isinf(lam) else seconds + lam * retained
    return ClassTable(np.where(allowed, price, math.inf), table.classes)
