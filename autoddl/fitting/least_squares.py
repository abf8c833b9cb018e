"""Fits the logarithms u of a profile's factors to measured seconds: least squares with a ridge towards what is known.

    minimise   sum over runs of (log measured - log T(u))^2 / sigma^2  +  (u - m)' P (u - m)        lower <= u <= upper
    T(u)     = T (1 + sum over constants of share (exp(u - u0) - 1))                                    (`prices`)

m and P are the mean and the inverse covariance of u before these runs. So three runs move the constants that they
decide, and leave the others where they were.

sigma is how far single runs scatter: as assumed, or several times that. The covariance P^-1 is as assumed, or has a
part that all constants share besides. The second is for a machine that is slower on the whole than its file says. Both
are those with the largest evidence (MacKay 1992):

    log evidence = -1/2 (e' e / sigma^2 + (u - m)' P (u - m) + n log sigma^2 + log det(I + J P^-1 J' / sigma^2))

with e the residuals and J = d log T / d u. The covariance afterwards is (J' J / sigma^2 + P)^-1.

Solved by Gauss and Newton's method. A constant at its bound stays there while it would go beyond.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fit", "Linear", "Prior", "fit", "left_out"]

Array = NDArray[np.float64]
STEPS = 30
SIGMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
"""How many times the assumed scatter of runs is tried."""
SHARED = (0.0, 1.0)
"""Standard deviations of the part of u that all constants share, which are tried."""
FURTHEST = np.log(10.0)
"""No constant is further than this from what the package says, either way."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Runs as the fit sees them.

        measured    logarithms of measured seconds, one per run
        priced      logarithms of predicted seconds at `at`
        shares      d log T / d u there, a row per run
        at          u0, one per constant
    """

    measured: Array
    priced: Array
    shares: Array
    at: Array

    def residuals(self, u: Array) -> Array:
        """log measured - log T(u)."""
        return self.measured - self.priced - np.log(self._grown(u))

    def jacobian(self, u: Array) -> Array:
        """d log T / d u."""
        return np.asarray(self.shares * np.exp(u - self.at) / self._grown(u)[:, None])

    def without(self, left: Sequence[int]) -> "Linear":
        """Returns the other runs."""
        kept = np.setdiff1d(np.arange(len(self.measured)), np.asarray(left))
        return replace(self, measured=self.measured[kept], priced=self.priced[kept], shares=self.shares[kept])

    def only(self, row: int) -> "Linear":
        """Returns one run."""
        return replace(self, measured=self.measured[[row]], priced=self.priced[[row]], shares=self.shares[[row]])

    def _grown(self, u: Array) -> Array:
        return np.asarray(np.maximum(1.0 + self.shares @ (np.exp(u - self.at) - 1.0), 1e-3))


@dataclass(frozen=True, slots=True)
class Prior:
    """The knowledge of u before the runs: its mean, covariance and least values, and how far runs scatter."""

    mean: Array
    covariance: Array
    lower: Array
    sigma: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The constants found, and with which assumptions.

        u             logarithms of the factors
        covariance    of u
        sigma         how far single runs scatter
        shared        standard deviation of the part of u that all constants share, before the runs
        evidence      logarithm of the evidence for sigma and `shared`, but for a number
    """

    u: Array
    covariance: Array
    sigma: float
    shared: float
    evidence: float


def fit(rows: Linear, prior: Prior) -> Fit:
    """Finds the constants that explain the runs best, with the scatter and the shared part of the largest evidence."""
    return max((_fit_with(rows, prior, times * prior.sigma, shared) for shared in SHARED for times in SIGMAS),
               key=lambda one: one.evidence)


def left_out(rows: Linear, prior: Prior, groups: Sequence[Sequence[int]], like: Fit | None = None) -> Array:
    """log(measured / predicted) of every run, predicted by the fit to all groups but its own.

    Scatter and shared part are those of the fit `like`; without it, those of the largest evidence without the group.
    """
    found = np.full(len(rows.measured), np.nan)
    for group in groups:
        rest = rows.without(group)
        known = fit(rest, prior) if like is None else _fit_with(rest, prior, like.sigma, like.shared)
        for row in group:
            found[row] = rows.only(row).residuals(known.u)[0]
    return found


def _fit_with(rows: Linear, prior: Prior, sigma: float, shared: float) -> Fit:
    """The constants for one scatter and one shared part."""
    wide = replace(prior, covariance=prior.covariance + shared**2)
    u = _solve(rows, wide, sigma, np.clip(prior.mean, prior.lower, FURTHEST))
    jacobian, errors, away = rows.jacobian(u), rows.residuals(u), u - prior.mean
    known = np.linalg.inv(wide.covariance)
    spread = np.eye(len(errors)) + jacobian @ wide.covariance @ jacobian.T / sigma**2
    evidence = -0.5 * float(errors @ errors / sigma**2 + away @ known @ away + len(errors) * np.log(sigma**2)
                            + np.linalg.slogdet(spread)[1])
    return Fit(u, np.asarray(np.linalg.inv(jacobian.T @ jacobian / sigma**2 + known)), sigma, shared, evidence)


def _solve(rows: Linear, prior: Prior, sigma: float, u: Array) -> Array:
    known = np.linalg.inv(prior.covariance)
    lower, upper = np.minimum(prior.lower, FURTHEST), np.full(len(u), FURTHEST)
    for _ in range(STEPS):
        jacobian = rows.jacobian(u)
        slope = jacobian.T @ rows.residuals(u) / sigma**2 - known @ (u - prior.mean)
        free = ~(((u <= lower) & (slope < 0)) | ((u >= upper) & (slope > 0)))
        curved = (jacobian.T @ jacobian / sigma**2 + known)[np.ix_(free, free)]
        step = np.zeros(len(u))
        step[free] = np.linalg.solve(curved, slope[free])
        new = np.clip(u + step, lower, upper)
        if np.abs(new - u).max() < 1e-9:
            return np.asarray(new)
        u = new
    return np.asarray(u)
