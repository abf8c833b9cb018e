"""Names the runs that would most narrow the choice between the best plans of a model, before it is trained.

    constants    u, logarithms of a profile's factors, are normal with its covariance C
    plans        log T = log T(u0) + s' (u - u0), with s the shares of the constants             (`ran_plans.shares_at`)
    choice       D = log T of the second - log T of the best; its standard deviation is sqrt(g' C g), g = s2 - s1
    experiment   a run of a plan with the shares e, on part of the cluster, measured within sigma, leaves
                     C' = C - C e e' C / (e' C e + sigma^2)
                 so that D is known within sqrt(g' C' g). Its worth is the fall of the variance of D

Plans differ by more than constants explain: as far as two published runs of one model on one machine do, in the mean
(`intervals.yaml`). That part of the doubt stays.

What both plans share cancels in g: an experiment that narrows only that is worth nothing. An experiment is good whose
worth is at least half of the largest. The good one of the fewest device seconds is next, and so on with what it leaves.
One that narrows D by less than a thousandth is worth nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, hypot, log, sqrt

import numpy as np
from numpy.typing import NDArray

from autoddl.core.plan import Plan
from autoddl.cost_models.profile import Profile

__all__ = ["LEAST", "RUN_STEPS", "SIGMA", "START", "BestOfTwo", "Contender", "Experiment", "Worthwhile", "choice_of",
           "name_experiments"]

Array = NDArray[np.float64]
RUN_STEPS = 12
"""Steps of an experiment: the first is not counted."""
START = 30.0
"""Seconds of a run before its first step: processes, capture, connections. Assumed."""
SIGMA = 0.03
"""Standard deviation of the logarithm of a measured step from one by the right constants, as in `calibrate.SCATTER`."""
HALF = 0.5
"""Part of the largest worth from which an experiment is good enough to be taken for its price."""
LEAST = 1e-3
"""By how much an experiment narrows D at least: less is no difference that anyone would measure."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A plan that may be the best, its step and the shares of the constants in it."""

    name: str
    seconds: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BestOfTwo:
    """The best of some plans and the next, and how sure it is that they are in this order."""

    best: Contender
    second: Contender
    spread: float
    """Standard deviation of D, the logarithm of the second's seconds over those of the best, by the constants."""
    model: float = 0.0
    """Standard deviation of D that no constant explains."""

    @property
    def difference(self) -> float:
        """D."""
        return log(self.second.seconds / self.best.seconds)

    @property
    def sure(self) -> float:
        """The probability that the best is the faster one."""
        return _below(self.difference, hypot(self.spread, self.model))


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run that could be made: a plan on a part of the cluster, its step and the shares of the constants in it."""

    name: str
    plan: Plan
    seconds: float
    shares: tuple[float, ...]

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.plan.mesh.size

    @property
    def takes(self) -> float:
        """Seconds of the whole run."""
        return START + RUN_STEPS * self.seconds


@dataclass(frozen=True, slots=True)
class Worthwhile:
    """An experiment that is worth its price, and what it leaves of the doubt, with those before it."""

    experiment: Experiment
    before: float
    """Standard deviation of D without it."""
    after: float
    """Standard deviation of D with it."""


def choice_of(candidates: Sequence[Contender], profile: Profile, model: float = 0.0) -> BestOfTwo | None:
    """The best candidate and the one that is most likely to be faster; None where there is no second.

    `model` is the standard deviation of D that no constant explains.
    """
    ordered = sorted(candidates, key=lambda one: one.seconds)
    known = np.array(profile.covariance)
    rest = [BestOfTwo(ordered[0], one, _spread(known, _gap(ordered[0], one)), model) for one in ordered[1:]]
    return min(rest, key=lambda one: (one.sure, one.difference), default=None)


def name_experiments(choice: BestOfTwo, experiments: Sequence[Experiment], profile: Profile, count: int
                     ) -> tuple[Worthwhile, ...]:
    """Names up to `count` experiments, the one to make first in front; none that is worth nothing."""
    known, gap = np.array(profile.covariance), _gap(choice.best, choice.second)
    left, found = [*experiments], list[Worthwhile]()
    while left and len(found) < count:
        before = _spread(known, gap)
        after = {id(one): _spread(_after(known, one), gap) for one in left}
        worth = {key: before**2 - one**2 for key, one in after.items()}
        most = max(worth.values())
        good = [one for one in left if before - after[id(one)] >= LEAST and worth[id(one)] >= HALF * most]
        if not good:
            break
        best = min(good, key=lambda one: (one.ranks * one.takes, -worth[id(one)]))
        known = _after(known, best)
        found.append(Worthwhile(best, before, _spread(known, gap)))
        left.remove(best)
    return tuple(found)


def _gap(best: Contender, second: Contender) -> Array:
    return np.asarray(np.array(second.shares) - np.array(best.shares))


def _after(known: Array, one: Experiment) -> Array:
    """The covariance of the constants when the run's seconds are known."""
    told = known @ np.array(one.shares)
    return np.asarray(known - np.outer(told, told) / (float(np.array(one.shares) @ told) + SIGMA**2))


def _spread(known: Array, gap: Array) -> float:
    return sqrt(max(0.0, float(gap @ known @ gap)))


def _below(value: float, spread: float) -> float:
    """The probability that a normal number of this spread is below a value."""
    return 0.5 * (1 + erf(value / (spread * sqrt(2)))) if spread else 1.0
