"""Decides when a search stops: its clock, its limits, and the exceptions by which it ends."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Above", "Clock", "Exhausted", "Late", "Limits", "never"]

Progress = Callable[[float, float], None]

Late = Callable[[], bool]
"""Tells whether the time is over."""


def never() -> bool:
    """Tells that there is time."""
    return False


class Exhausted(Exception):
    """The time or the effort is used up; the bounds proved so far stand."""


class Above(Exception):
    """There is no plan below the ceiling: all plans take at least `bound` seconds."""

    def __init__(self, bound: float) -> None:
        super().__init__(bound)
        self.bound = bound


@dataclass(slots=True)
class Clock:
    """The time that may be used, or without a limit a number of label pairs, which is the same on every machine.

    `late` says whether the time is over of a search that this one is a part of.
    """

    deadline: float | None
    pairs: float
    spent: int = 0
    late: Late = never

    @classmethod
    def start(cls, time_limit: float | None, pairs: float, late: Late = never) -> "Clock":
        """A clock of `time_limit` seconds, or of `pairs` if that is None, that ends when it is `late`."""
        deadline = None if time_limit is None else time.monotonic() + time_limit
        return cls(deadline, pairs if deadline is None else math.inf, late=late)

    def part(self, share: float) -> "Clock":
        """A clock with a fraction of the time or effort that is left."""
        if self.deadline is None:
            return self.of(self.pairs * share)
        return Clock(time.monotonic() + max(0.0, self.left) * share, math.inf, late=self.late)

    def of(self, pairs: float) -> "Clock":
        """A clock of so many pairs, which ends no later than all of this one's search has to."""
        return Clock(None, pairs, late=self.late)

    @property
    def expired(self) -> bool:
        """Whether the time or the effort is used up."""
        return self.pairs <= 0 or (self.deadline is not None and time.monotonic() >= self.deadline) or self.late()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def spend(self, pairs: int) -> None:
        """Counts label pairs; raises Exhausted where the clock is expired."""
        self.pairs -= pairs
        self.spent += pairs
        if self.expired:
            raise Exhausted


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search stops, and where it starts.

        tolerance    the relative gap between plan and bound that is small enough
        ceiling      seconds: a plan above them is of no use, so a bound that reaches them ends the search
        clock        the time or effort that may be used
        tell         called with (seconds, bound) when either may have moved
        seed         seed of random starts
        price        a guess of the price of a byte, in seconds
    """

    tolerance: float
    ceiling: float
    clock: Clock
    tell: Progress
    seed: int = 0
    price: float = 0.0

    def target(self, seconds: float) -> float:
        """The bound that is good enough for a plan of `seconds`: within the tolerance, or the rounding."""
        least = min(seconds, self.ceiling)
        return least - max(self.tolerance, 1e-12) * abs(least) if math.isfinite(least) else least
