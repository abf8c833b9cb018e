"""Tables of a calibration: the errors before and after by source, and what every constant does."""

from collections.abc import Sequence
from math import exp, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType

from autoddl.cli.tables.table_style import columns
from autoddl.cost_models import show_seconds
from autoddl.cost_models.profile import CONSTANTS, SPREAD
from autoddl.fitting.calibrate import Calibrated, Errors
from autoddl.validation.runs import Run
from autoddl.validation.software import profile_of, unknown_programs

__all__ = ["calibration_rows", "calibration_table"]


LISTED = 20
"""Runs with a row of their own, at most."""


def calibration_rows(found: Calibrated) -> dict[str, Any]:
    """The profile, the errors by source and by run, and the constants, under stable names; fractions."""
    return {"profile": found.profile.to_json(),
            "sources": {name: _errors(rows) for name, rows in _sources(found).items()},
            "constants": {name: {"factor": found.profile[name], "spread": _spread(found, name),
                                 "spread_before": SPREAD[name], "tenth_more": found.effects(name)[0]}
                          for name in CONSTANTS},
            "runs": [{"row": one.run.row, "source": one.run.source, "measured_seconds": one.run.seconds,
                      "before": one.before, "fitted": one.fitted, "left_out": one.left_out,
                      "source_left_out": one.source_left_out} for one in found.errors],
            "unlike": found.unlike, "worse": found.worse, "unknown_frameworks": list(_unknown(found)),
            "remarks": [{"row": one.run.row, "remark": one.remark} for one in found.remarks],
            "unpriced": [{"row": one.run.row, "reason": one.reason} for one in found.unpriced]}


def calibration_table(found: Calibrated, output: Path | None = None) -> RenderableType:
    """Errors by source and by run, the constants, what was left out or is not known, and where the profile is."""
    errors = columns("source", "runs", "error before", "fitted", "run left out", "source left out")
    every = {**_sources(found), **({"all": found.errors} if len(_sources(found)) > 1 else {})}
    for name, rows in every.items():
        values = _errors(rows)
        errors.add_row(name, str(len(rows)), *(_percent(values[key]) for key in
                                               ("before", "fitted", "left_out", "source_left_out")))
    constants = columns("constant", "seconds", "within a factor of", "before", "a tenth more: steps longer by",
                        "least to most")
    for name in CONSTANTS:
        mean, least, most = found.effects(name)
        constants.add_row(name, f"x {found.profile[name]:.3f}", f"{exp(_spread(found, name)):.2f}",
                          f"{exp(SPREAD[name]):.2f}", _percent(mean), f"{_percent(least)} to {_percent(most)}")
    left = columns("left out: row", "reason")
    for one in found.unpriced:
        left.add_row(one.run.row, one.reason)
    remarks = tuple(f"row {one.run.row} {one.remark}" for one in found.remarks)
    unlike = ("on the whole, these runs are further from the package's figures than a machine's usually are: look at "
              "the cluster, and at the framework of the rows",) if found.unlike else ()
    worse = (f"runs that are left out are {_percent(found.mean_error('left_out'))} off, and by the package's own "
             f"constants {_percent(found.mean_error('before'))}: these constants are worse than none",
             ) if found.worse else ()
    written = (f"written  {output}",) if output is not None else ()
    unknown = tuple(line for text in _unknown(found) for line in ("", text))
    return Group(errors, "", _runs(found), "", _programs(found), *unknown, "", constants, *unlike, *worse,
                 *(("", left) if found.unpriced else ()), *(("", *remarks) if remarks else ()), *written)


def _programs(found: Calibrated) -> str:
    """A line that says as which programs' runs were priced."""
    names = sorted({profile_of(one.run) for one in found.errors if isinstance(one.run, Run)})
    if not names:
        return "these are plans that ran, without a program's profile"
    return f"the runs are priced as run by {', '.join(names)}" + ("" if found.profile.software else
                                                                ", so the profile names no program")


def _runs(found: Calibrated) -> RenderableType:
    """A row for every run, those that the profile foresees worst first, LISTED at most: predicted over measured."""
    table = columns("run", "source", "measured", "predicted before", "fitted", "run left out")
    for one in sorted(found.errors, key=lambda one: -abs(1 / one.left_out - 1))[:LISTED]:
        table.add_row(one.run.row, one.run.source, show_seconds(one.run.seconds),
                      *(f"{show_seconds(one.run.seconds / ratio)} ({1 / ratio - 1:+.1%})"
                        for ratio in (one.before, one.fitted, one.left_out)))
    if len(found.errors) > LISTED:
        table.add_row(f"and {len(found.errors) - LISTED} more, with smaller errors (--json has all)")
    return table


def _unknown(found: Calibrated) -> tuple[str, ...]:
    """Lines about programs of the runs that are not known."""
    every = [*(one.run for one in found.errors), *(one.run for one in found.unpriced)]
    return unknown_programs(run for run in every if isinstance(run, Run))


def _sources(found: Calibrated) -> dict[str, list[Errors]]:
    """The runs of every source, in the order of the table."""
    sources: dict[str, list[Errors]] = {}
    for one in found.errors:
        sources.setdefault(one.run.source, []).append(one)
    return sources


def _errors(rows: Sequence[Errors]) -> dict[str, float | None]:
    """Mean absolute errors of predicted over measured seconds."""
    values: dict[str, list[float | None]] = {
        "before": [one.before for one in rows], "fitted": [one.fitted for one in rows],
        "left_out": [one.left_out for one in rows], "source_left_out": [one.source_left_out for one in rows]}
    return {name: _mean([abs(1 / ratio - 1) for ratio in ratios if ratio is not None])
            for name, ratios in values.items()}


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _spread(found: Calibrated, constant: str) -> float:
    """The standard deviation of the logarithm of a constant."""
    at = CONSTANTS.index(constant)
    return sqrt(found.profile.covariance[at][at])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
