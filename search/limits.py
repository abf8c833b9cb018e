"""When a search stops: progress, clock, limits, and how it says that it had to."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Above", "Clock", "Exhausted", "Limits"]

Progress = Callable[[float, float], None]


class Exhausted(Exception):
    """The time or the effort that was granted is used up; what has been proven so far stands."""


class Above(Exception):
    """No plan below the ceiling: `bound` is what was proved."""

    def __init__(self, bound: float) -> None:
        super().__init__(bound)
        self.bound = bound


@dataclass(slots=True)
class Clock:
    """The time that may be used, or, where none is said, a number of label pairs: the same on every machine."""

    deadline: float | None
    pairs: float
    spent: int = 0

    @classmethod
    def start(cls, time_limit: float | None, pairs: float) -> "Clock":
        return cls(None, pairs) if time_limit is None else cls(time.monotonic() + time_limit, math.inf)

    def part(self, share: float) -> "Clock":
        """A clock with a part of what is left."""
        if self.deadline is None:
            return Clock(None, self.pairs * share)
        return Clock(time.monotonic() + max(0.0, self.left) * share, math.inf)

    @property
    def expired(self) -> bool:
        return self.pairs <= 0 or (self.deadline is not None and time.monotonic() >= self.deadline)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def spend(self, pairs: int) -> None:
        self.pairs -= pairs
        self.spent += pairs
        if self.expired:
            raise Exhausted


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop: once the gap is at most `tolerance`, the bound reaches `ceiling` within it, or the clock is out."""

    tolerance: float
    ceiling: float
    clock: Clock
    tell: Progress
    seed: int = 0
    price: float = 0.0

    def target(self, seconds: float) -> float:
        """The bound that is good enough for a plan of `seconds`: rounding apart, or within the tolerance."""
        least = min(seconds, self.ceiling)
        return least - max(self.tolerance, 1e-12) * abs(least) if math.isfinite(least) else least
