"""Finds how sure predictions are, from the residuals of published runs (`cost_models.intervals` has the definitions).

    residual    log(measured / predicted)
    quantile    of residuals in which every source has the same weight, whatever its number of runs
    left out    a source's runs are set against the interval of all other sources of its regime; a regime with no other
                source takes that of all regimes
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import exp, log

import yaml

from autoddl.core.errors import InputError
from autoddl.cost_models.intervals import REGIMES, Interval, regime
from autoddl.validation.runs import Run
from autoddl.validation.scores import PricedRun

__all__ = ["covered", "find_intervals", "intervals_text", "regime_of"]

FEWEST = 3
"""Runs that an interval needs."""

Weighted = list[tuple[float, float]]
"""Values with their weights."""


def regime_of(run: Run) -> str:
    """The regime of a run."""
    return regime(run.pp, run.zero_stage > 2)


def find_intervals(found: Iterable[PricedRun]) -> dict[str, Interval]:
    """By regime, the interval of its priced runs. Raises InputError where there are too few."""
    rows = [one for one in found if one.seconds is not None]
    if len(rows) < FEWEST:
        raise InputError(f"{len(rows)} priced runs say nothing of how sure a prediction is: give {FEWEST} or more")
    each = {name: [one for one in rows if regime_of(one.run) == name] for name in REGIMES}
    return {name: _interval(own if len(own) >= FEWEST else rows) for name, own in each.items()}


def covered(found: Sequence[PricedRun]) -> Mapping[str, tuple[int, int]]:
    """By regime, how many runs lie inside the interval of the other sources, and how many there are."""
    rows, counts = [one for one in found if one.seconds is not None], dict.fromkeys(REGIMES, (0, 0))
    for one in rows:
        others = [row for row in rows if row.run.source != one.run.source]
        alike = [row for row in others if regime_of(row.run) == regime_of(one.run)]
        if len(others) >= FEWEST:
            known = _interval(alike if len(alike) >= FEWEST else others)
            inside, every = counts[regime_of(one.run)]
            ratio = exp(_residual(one))
            counts[regime_of(one.run)] = inside + (known.low <= ratio <= known.high), every + 1
    return counts


def intervals_text(intervals: Mapping[str, Interval], table: str) -> str:
    """The text of a file of intervals that rest on the runs of a table."""
    rows = {name: {"low": round(one.low, 3), "high": round(one.high, 3), "common": round(one.common, 3),
                   "runs": one.runs, "sources": one.sources} for name, one in intervals.items()}
    head = (f"# How far published runs were from their predictions as plans: `autoddl validate {table} --as-plan\n"
            "# --intervals FILE` wrote this. intervals.py has the meaning. Constants of devices were chosen with\n"
            "# these runs in view, so that a machine which no source has may be farther off.\n")
    return head + yaml.safe_dump({"regimes": rows}, sort_keys=False)


def _residual(one: PricedRun) -> float:
    assert one.seconds is not None
    return log(one.run.seconds / one.seconds)


def _interval(rows: Sequence[PricedRun]) -> Interval:
    """The interval of some priced runs."""
    sources = _by_source(rows)
    values = [(_residual(one), 1 / len(own)) for own in sources.values() for one in own]
    apart = [(abs(_residual(a) - _residual(b)), 1 / len(pairs)) for pairs in map(_pairs, sources.values())
             for a, b in pairs]
    return Interval(exp(_quantile(values, 0.1)), exp(_quantile(values, 0.9)), _quantile(apart, 0.8) if apart else 0.0,
                    len(rows), len(sources))


def _by_source(rows: Iterable[PricedRun]) -> dict[str, list[PricedRun]]:
    found: dict[str, list[PricedRun]] = {}
    for one in rows:
        found.setdefault(one.run.source, []).append(one)
    return found


def _pairs(rows: Sequence[PricedRun]) -> list[tuple[PricedRun, PricedRun]]:
    """Runs of one model on one machine, two by two."""
    return [(a, b) for a, b in combinations(rows, 2) if (a.run.model, a.run.gpus, a.run.device, a.run.precision)
            == (b.run.model, b.run.gpus, b.run.device, b.run.precision)]


def _quantile(values: Weighted, q: float) -> float:
    """The least value up to which a part q of the weight lies."""
    total, so_far = sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        so_far += weight
        if so_far >= q * total * (1 - 1e-12):
            return value
    return max(value for value, _ in values)
