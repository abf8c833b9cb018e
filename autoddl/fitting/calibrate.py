"""Fits a profile to a table of measured runs, and says how far off it is on runs that it has not seen.

    table -> runs       as `validate` reads them                                                       `runs_file`
          -> prices     of every run as a plan, and the share of each constant; a row that is further off than any
                        machine is left out                                                            `prices`
          -> constants  least squares; then priced again where these are, and fitted once more         `least_squares`
          -> errors     of every run, by the package and by the fit to all other runs; with two sources or more also by
                        the fit to all other sources
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean

import numpy as np

from autoddl.core.errors import InputError
from autoddl.cost_models import show_seconds
from autoddl.cost_models.profile import CONSTANTS, SHIPPED, Profile, least_factors
from autoddl.fitting.least_squares import Fit, Linear, Prior, fit, left_out
from autoddl.fitting.prices import At, Measured, PricedAt, machine_of, price_at
from autoddl.fitting.ran_plans import read_ran
from autoddl.planner.process_pool import Map, mapper
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs
from autoddl.validation.validate import Progress

__all__ = ["FEWEST", "FURTHEST", "SCATTER", "Calibrated", "Errors", "calibrate", "calibrate_runs", "fitted_profile"]

FEWEST = 3
"""Runs that a calibration needs."""
SCATTER = 0.03
"""Standard deviation of log(measured / predicted) of single runs by constants that are right: two published runs of one
model on one machine differ by 0.05 to 0.06 in 8 of 10 cases (`intervals.yaml`), which is 1.8 of these."""
FURTHEST = 8.0
"""Measured over predicted seconds, either way, beyond which a row of a table has a slip. Of the runs in the benchmarks
none is 4 times off. A slip in a unit or a count of devices is 8 times and more."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of one run, each as measured / predicted."""

    run: Measured
    before: float
    """By the package's constants."""
    fitted: float
    """By the profile, which has seen this run."""
    left_out: float
    """By the fit to all other runs."""
    source_left_out: float | None
    """By the fit to the runs of all other sources; None where there is one source."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A profile, and what is known of it."""

    profile: Profile
    errors: tuple[Errors, ...]
    """Of every run that has a price."""
    unpriced: tuple[PricedAt, ...]
    """The runs that were left out, each with its reason: those without a price, and those too far from it."""
    remarks: tuple[PricedAt, ...]
    """The runs with a price that cannot have run as they are described, each with why."""
    shares: tuple[tuple[float, ...], ...]
    """By run and constant, the part of the step that the constant decides."""
    unlike: bool = False
    """Whether the machine is slower or faster on the whole than what is said of it."""

    @property
    def worse(self) -> bool:
        """Whether runs that the fit has not seen are further off than by the package's constants."""
        return self.mean_error("left_out") > self.mean_error("before")

    def mean_error(self, name: str) -> float:
        """Returns the mean of |predicted / measured - 1|; `name` is a field of `Errors` that every run has."""
        return fmean(abs(1 / getattr(one, name) - 1) for one in self.errors)

    def effects(self, constant: str) -> tuple[float, float, float]:
        """Returns (mean, least, most) by which steps get longer if a constant is a tenth larger, as fractions."""
        found = [0.1 * row[CONSTANTS.index(constant)] for row in self.shares]
        return sum(found) / len(found), min(found), max(found)


def calibrate(path: str | Path | None, progress: Progress = lambda *_: None, workers: int = 1,
              ran: Sequence[Path] = ()) -> Calibrated:
    """Fits a profile to the runs of a CSV file, if there is one, and to plans that ran, with a record beside each.

    `progress` gets what is done, how often it was, and how often it will. Raises InputError for a table that cannot be
    read, and for less than three runs with a price.
    """
    runs: list[Measured] = [*(() if path is None else read_runs(path)), *map(read_ran, ran)]
    return calibrate_runs(runs, "the plans that ran" if path is None else str(path), progress, workers)


def calibrate_runs(runs: Sequence[Measured], where: str = "the runs", progress: Progress = lambda *_: None,
                   workers: int = 1) -> Calibrated:
    """Fits a profile to runs; `where` names them in errors."""
    _check_count(runs, where, ())
    with mapper(price_at, workers, _key) as priced:
        first = [_believed(one) for one in
                 _priced(priced, runs, SHIPPED, progress, "pricing with each constant moved")]
        known = [one for one in first if not one.reason]
        _check_count(known, where, first)
        prior = prior_of(known)
        profile = fitted_profile(known, fit(_linear(known, SHIPPED), prior))
        again = _priced(priced, [one.run for one in known], profile, progress, "pricing where the constants are now")
    here = [one for one in again if not one.reason]
    rows = _linear(here, profile)
    found = fit(rows, prior)
    alone = left_out(rows, prior, [[i] for i in range(len(here))], found)
    sources = [[i for i, one in enumerate(here) if one.run.source == name]
               for name in dict.fromkeys(one.run.source for one in here)]
    apart = left_out(rows, prior, sources) if len(sources) > 1 else None
    before = {id(one.run): one.seconds for one in known}
    after = rows.residuals(found.u)
    errors = tuple(Errors(one.run, one.run.seconds / before[id(one.run)], exp(after[i]), exp(alone[i]),
                          None if apart is None else exp(apart[i])) for i, one in enumerate(here))
    scatter = float(np.sqrt(np.mean(np.square(alone if apart is None else apart))))
    return Calibrated(fitted_profile(here, found, scatter), errors, tuple(one for one in first if one.reason),
                      tuple(one for one in known if one.remark),
                      tuple(one.shares for one in here), found.shared > 0)


def prior_of(rows: Iterable[PricedAt]) -> Prior:
    """The knowledge before the runs: the package's constants, their spread, and that no kernel is above its peak."""
    clusters = {machine_of(one.run)[0] for one in rows}
    lower = [max(column) for column in zip(*map(least_factors, clusters), strict=True)]
    return Prior(np.log(SHIPPED.factors), np.array(SHIPPED.covariance), np.log(lower), SCATTER)


def fitted_profile(rows: Sequence[PricedAt], found: Fit, residual: float = 0.0) -> Profile:
    """The constants found, with the devices and the software of the runs that they were fitted to."""
    machines = [machine_of(one.run) for one in rows]
    devices, software = {cluster.device.name for cluster, _ in machines}, {name for _, name in machines}
    return Profile(tuple(map(float, np.exp(found.u))), tuple(tuple(map(float, row)) for row in found.covariance),
                   residual, len(rows), tuple(sorted(devices)), software.pop() if len(software) == 1 else None)


def _priced(priced: Map, runs: Sequence[Measured], profile: Profile, progress: Progress, what: str) -> list[PricedAt]:
    found = []
    for i, one in enumerate(priced([At(run, profile) for run in runs])):
        progress(what, i, len(runs))
        found.append(one)
    return found


def _believed(one: PricedAt) -> PricedAt:
    """The run, with a reason to leave it out where it is a row that is further off than a machine can be."""
    if one.reason or not isinstance(one.run, Run):
        return one
    ratio = one.run.seconds / one.seconds
    if 1 / FURTHEST <= ratio <= FURTHEST:
        return one
    times = f"{ratio:.4g} times as long" if ratio > 1 else f"{1 / ratio:.4g} times as short"
    return replace(one, reason=f"measured {show_seconds(one.run.seconds)}, {times} as the predicted "
                               f"{show_seconds(one.seconds)}, and no machine is more than {FURTHEST:g} times off; look "
                               "at the unit of the time or rate, at global_batch and at n_gpus")


def _key(asked: At) -> str:
    """Arguments of one run go to the process that knows its plans."""
    return f"{asked.run.source} {asked.run.row}"


def _linear(rows: Sequence[PricedAt], at: Profile) -> Linear:
    return Linear(np.log([one.run.seconds for one in rows]), np.log([one.seconds for one in rows]),
                  np.array([one.shares for one in rows]), np.log(at.factors))


def _check_count(rows: Sequence[object], where: str, first: Sequence[PricedAt]) -> None:
    if len(rows) < FEWEST:
        reasons = [one.reason for one in first if one.reason]
        why = f"; the first of {len(reasons)} that were left out: {reasons[0]}" if reasons else ""
        raise InputError(f"{where}: {len(rows)} runs with a price do not tell constants from chance: give {FEWEST} or "
                         f"more{why}")
