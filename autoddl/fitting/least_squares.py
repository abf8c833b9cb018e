"""Fits the logarithms u of a profile's factors to measured seconds: least squares with a ridge towards what is known.

    minimise   sum over runs of (log measured - log T(u))^2 / sigma^2  +  (u - m)' P (u - m)        lower <= u <= upper
    T(u)     = T (1 + sum over constants of share (exp(u - u0) - 1))                                    (`prices`)

m and P are the mean and the inverse covariance of u before these runs. So three runs move the constants that they
decide, and leave the others where they were.

sigma is how far single runs scatter: as assumed, or as the residuals say where these are larger. The covariance
afterwards is (J' J / sigma^2 + P)^-1, with J = d log T / d u.

Solved by Gauss and Newton's method. A constant at its bound stays there while it would go beyond.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fit", "Linear", "Prior", "fit", "left_out"]

Array = NDArray[np.float64]
STEPS = 30
ROUNDS = 4
"""How often sigma is found again from the residuals."""
FURTHEST = np.log(4.0)
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
    """The constants found: u, its covariance, and how far single runs scatter."""

    u: Array
    covariance: Array
    sigma: float


def fit(rows: Linear, prior: Prior) -> Fit:
    """Finds the constants that explain the runs best."""
    sigma, u = prior.sigma, np.clip(prior.mean, prior.lower, FURTHEST)
    for _ in range(ROUNDS):
        u = _solve(rows, prior, sigma, u)
        covariance = _covariance(rows, prior, sigma, u)
        jacobian, errors = rows.jacobian(u), rows.residuals(u)
        decided = float(np.trace(jacobian @ covariance @ jacobian.T)) / sigma**2
        sigma = max(prior.sigma, float(np.sqrt(errors @ errors / max(1.0, len(errors) - decided))))
    return Fit(u, _covariance(rows, prior, sigma, u), sigma)


def left_out(rows: Linear, prior: Prior, groups: Sequence[Sequence[int]]) -> Array:
    """log(measured / predicted) of every run, predicted by the fit to all groups but its own."""
    found = np.full(len(rows.measured), np.nan)
    for group in groups:
        u = fit(rows.without(group), prior).u
        for row in group:
            found[row] = rows.only(row).residuals(u)[0]
    return found


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


def _covariance(rows: Linear, prior: Prior, sigma: float, u: Array) -> Array:
    jacobian = rows.jacobian(u)
    return np.asarray(np.linalg.inv(jacobian.T @ jacobian / sigma**2 + np.linalg.inv(prior.covariance)))
