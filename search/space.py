"""What every bounded solve shares: the reduced problem, its program, and the relaxations evaluated so far.

    V(lam, tau) = min over x of seconds(x) + lam * retained(x), using only cells with transient bytes <= tau
    lam = inf   means the least retained(x)

Every evaluation yields a Point: the value, and the choice that attains it with its true seconds and bytes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoddl.problem import Array, Problem, Table
from autoddl.search.eliminate import argmin, messages, value
from autoddl.search.program import Program

__all__ = ["Clock", "Exhausted", "Point", "Space", "priced"]

Progress = Callable[[float, float], None]


class Exhausted(Exception):
    """The time or the effort that was granted is used up; what has been proven so far stands."""


@dataclass(slots=True)
class Clock:
    """The time that may be used, or, where none is said, a number of label pairs: the same on every machine."""

    deadline: float | None
    pairs: float

    @classmethod
    def start(cls, time_limit: float | None, pairs: float) -> "Clock":
        return cls(None, pairs) if time_limit is None else cls(time.monotonic() + time_limit, math.inf)

    @property
    def expired(self) -> bool:
        return self.pairs <= 0 or (self.deadline is not None and time.monotonic() >= self.deadline)

    def spend(self, pairs: int) -> None:
        self.pairs -= pairs
        if self.expired:
            raise Exhausted


@dataclass(frozen=True, slots=True)
class Point:
    """One relaxation solved: its value (a lower bound), and the choice found with what it costs."""

    lam: float
    value: float
    choice: tuple[int, ...]
    seconds: float
    retained: float
    transient: float


@dataclass(frozen=True, slots=True)
class Space:
    """A problem, its program, the transient thresholds that tell choices apart, and the points known."""

    problem: Problem
    program: Program
    thresholds: tuple[float, ...]
    known: dict[tuple[float, float], Point] = field(default_factory=dict)
    latest: dict[tuple[float, float], list[Array]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, program: Program) -> "Space":
        finite = [t.transient[np.isfinite(t.seconds)] for t in problem.tables]
        return cls(problem, program, tuple(np.unique(np.concatenate([np.zeros(1), *finite])).tolist()))

    def messages(self, lam: float, tau: float) -> list[Array]:
        """S for every slot at one multiplier and one threshold; the latest are kept."""
        key = (lam, tau)
        if key not in self.latest:
            self.latest.clear()
            self.latest[key] = messages(self.program, [priced(table, lam, tau) for table in self.problem.tables])
        return self.latest[key]

    def point(self, lam: float, tau: float) -> Point:
        """V(lam, tau), solved once."""
        key = (lam, tau)
        if key not in self.known:
            values = self.messages(lam, tau)
            self.known[key] = self.measured(lam, value(self.program, values), argmin(self.program, values))
        return self.known[key]

    def measured(self, lam: float, bound: float, choice: tuple[int, ...]) -> Point:
        """A choice with its true seconds and bytes; the seconds are without the fixed ones, as the value is."""
        picked = [(t.seconds.item(c), t.retained.item(c), t.transient.item(c)) for t, c in self.problem.cells(choice)]
        seconds, retained, transient = zip(*picked, strict=True) if picked else ((), (), ())
        return Point(lam, bound, choice, math.fsum(seconds), math.fsum(retained), max(transient, default=0.0))

    def nbytes(self, point: Point) -> float:
        return self.problem.fixed_bytes + point.retained + point.transient

    def fits(self, point: Point) -> bool:
        budget = self.problem.budget
        return point.seconds < math.inf and (budget is None or self.nbytes(point) <= budget)


def priced(table: Table, lam: float, tau: float) -> Array:
    """seconds + lam * retained, or retained alone; infinite where forbidden or above the threshold."""
    allowed = np.isfinite(table.seconds) & (table.transient <= tau)
    price = table.retained if math.isinf(lam) else table.seconds + lam * table.retained
    return np.where(allowed, price, math.inf)
