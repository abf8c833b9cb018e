"""Finds how sure predictions are, from the residuals of published runs (`cost_models.intervals` has the definitions).

    residual    log(measured / predicted)
    quantile    of residuals in which every source has the same weight, whatever its number of runs
    left out    a source's runs are set against the interval of all other sources of its regime; a regime with no other
                source takes that of all regimes
    wide        sources differ by more than runs of the sources that are known, so quantiles of these hold too few runs
                of another. The interval of a regime is made wider around its median, by the factor at which 8 of 10
                left-out runs of the regime lie inside. To count what an interval holds, that factor too is found
                without the source
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from textwrap import wrap

import yaml

from autoddl.core.errors import InputError
from autoddl.cost_models.intervals import NODE, REGIMES, Interval, interval_of, regime
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.validation.clusters import cluster_of
from autoddl.validation.runs import Run
from autoddl.validation.scores import PricedRun, groups

__all__ = ["FEWEST", "SHARED", "Winners", "covered", "find_intervals", "inside_left_out", "interval_of_run",
           "intervals_text", "regime_of", "winners"]

FEWEST = 3
"""Runs that an interval needs."""
SHARED = 0.7
"""Part of the pairs of one model and machine whose errors differ by no more than what is called a tie. Beyond it 95 %
of the called ones are right in the mean of left-out sources (examples/benchmarks/intervals.py has others)."""

Weighted = list[tuple[float, float]]
"""Values with their weights."""


def regime_of(run: Run) -> str:
    """The regime of a run."""
    return regime(run.pp, run.zero_stage > 2, _is_alone(run))


def interval_of_run(run: Run, known: Profile = SHIPPED) -> Interval:
    """The interval of a run's step: that of a plan of its regime, on a machine with these constants."""
    return interval_of(run.pp, run.zero_stage > 2, _is_alone(run)).with_runs(known.residual, known.runs)


def _is_alone(run: Run) -> bool:
    """Whether a run had one node."""
    return cluster_of(run).is_one_unit


def find_intervals(found: Iterable[PricedRun]) -> dict[str, Interval]:
    """By regime, the interval of its priced runs. Raises InputError where there are too few."""
    rows = _priced(found)
    if len(rows) < FEWEST:
        raise InputError(f"{len(rows)} priced runs say nothing of how sure a prediction is: give {FEWEST} or more")
    wide = _widenings(rows)
    return {name: _interval(_alike(rows, name), wide[name]) for name in REGIMES}


def covered(found: Sequence[PricedRun]) -> Mapping[str, tuple[int, int]]:
    """By regime, how many runs lie inside the interval of the other sources, and how many there are."""
    counts = dict.fromkeys(REGIMES, (0, 0))
    for one, lies in inside_left_out(found):
        inside, every = counts[regime_of(one.run)]
        counts[regime_of(one.run)] = inside + lies, every + 1
    return counts


def inside_left_out(found: Sequence[PricedRun]) -> list[tuple[PricedRun, bool]]:
    """Every priced run, and whether it lies inside the interval of the other sources, where there are enough."""
    rows, told = _priced(found), list[tuple[PricedRun, bool]]()
    for source, own in _by_source(rows).items():
        others = [row for row in rows if row.run.source != source]
        if len(others) >= FEWEST:
            wide = _widenings(others)
            told += [(one, _distance(one, _quantiles(_alike(others, regime_of(one.run)))) <= wide[regime_of(one.run)])
                     for one in own]
    return told


@dataclass(frozen=True, slots=True)
class Winners:
    """Pairs of configurations of one model on one machine, of which a prediction calls one faster, or a tie."""

    pairs: int
    """Number of pairs."""
    called: int
    """Pairs whose predicted seconds a token differ by more than what the other sources say is shared."""
    right: int
    """Called pairs of which the one that was called is the faster one."""


def winners(found: Sequence[PricedRun], shared: float = SHARED) -> dict[str, Winners]:
    """By source, how often the configuration that is called faster is the faster one.

    A tie is as far as the part `shared` of the other sources' pairs lie apart.
    Runs that are described alike are one configuration, by their means (`scores.groups`).
    """
    rows, told = _priced(found), dict[str, Winners]()
    for source, every in _by_source(rows).items():
        own = [one for group in groups(every) for one in group]
        others = [row for row in rows if row.run.source != source]
        called = [log(_per_token(a, predicted=True) / _per_token(b, predicted=True)) *
                  log(_per_token(a) / _per_token(b)) for a, b in _pairs(own)
                  if abs(log(_per_token(a, predicted=True) / _per_token(b, predicted=True)))
                  > max(_common(_alike(others, regime_of(one.run)), shared) for one in (a, b))]
        told[source] = Winners(len(_pairs(own)), len(called), sum(agree > 0 for agree in called))
    return told


def intervals_text(intervals: Mapping[str, Interval], tables: Iterable[str]) -> str:
    """The text of a file of intervals that rest on the runs of some tables."""
    rows = {name: {**{key: round(getattr(one, key), 3) for key in ("low", "median", "high", "common")},
                   "runs": one.runs, "sources": one.sources} for name, one in intervals.items()}
    told = ("How far published runs were from their predictions: `autoddl validate TABLES --intervals FILE`, of "
            f"{', '.join(tables)}. intervals.py has the meaning.")
    head = "".join(f"# {line}\n" for line in wrap(told, 118))
    return head + yaml.safe_dump({"regimes": rows}, sort_keys=False)


def _residual(one: PricedRun) -> float:
    assert one.seconds is not None
    return log(one.run.seconds / one.seconds)


def _interval(rows: Sequence[PricedRun], wide: float) -> Interval:
    """The interval of some priced runs, `wide` times as wide as the quantiles say."""
    low, median, high = _quantiles(rows)
    return Interval(exp(median - wide * (median - low)), exp(median + wide * (high - median)), _common(rows),
                    len(rows), len(_by_source(rows)), exp(median))


def _quantiles(rows: Sequence[PricedRun]) -> tuple[float, float, float]:
    """The quantiles .1, .5 and .9 of the residuals."""
    values = [(_residual(one), 1 / len(own)) for own in _by_source(rows).values() for one in own]
    return _quantile(values, 0.1), _quantile(values, 0.5), _quantile(values, 0.9)


def _common(rows: Sequence[PricedRun], shared: float = SHARED) -> float:
    """The quantile `shared` of how far residuals of two runs of one model on one machine lie apart; 0 without such."""
    apart = [(abs(_residual(a) - _residual(b)), 1 / len(pairs))
             for pairs in map(_pairs, _by_source(rows).values()) for a, b in pairs]
    return _quantile(apart, shared) if apart else 0.0


def _widenings(rows: Sequence[PricedRun]) -> dict[str, float]:
    """By regime, the factor on the widths of intervals at which 8 of 10 runs lie inside that of the other sources.

    It counts the runs of the regime; where these are too few, all runs inside one node, or all on several, or all.
    """
    distances, found = _distances(rows), dict[str, float]()
    for name in REGIMES:
        own = [far for one, far in distances if regime_of(one.run) == name]
        like = [far for one, far in distances if _is_alone(one.run) == name.endswith(NODE)]
        asked = next((one for one in (own, like) if len(one) >= FEWEST), [far for _, far in distances])
        found[name] = _quantile([(far, 1.0) for far in asked], 0.8) if asked else 1.0
    return found


def _distances(rows: Sequence[PricedRun]) -> list[tuple[PricedRun, float]]:
    """Every run, and how far it is from the median of the other sources, where there are enough of these."""
    distances = []
    for source, own in _by_source(rows).items():
        others = [row for row in rows if row.run.source != source]
        if len(others) >= FEWEST:
            known = {name: _quantiles(_alike(others, name)) for name in {regime_of(one.run) for one in own}}
            distances += [(one, _distance(one, known[regime_of(one.run)])) for one in own]
    return distances


def _distance(one: PricedRun, quantiles: tuple[float, float, float]) -> float:
    """How far a residual is from the median, over how far the quantile on its side is."""
    low, median, high = quantiles
    away = _residual(one) - median
    width = high - median if away > 0 else median - low
    return abs(away) / width if width else float("inf") if away else 0.0


def _alike(rows: Sequence[PricedRun], name: str) -> Sequence[PricedRun]:
    """The runs of a regime; all, where it has too few."""
    kind = name.removesuffix(NODE)
    alike = [row for row in rows if regime_of(row.run).removesuffix(NODE) == kind]
    return alike if len(alike) >= FEWEST else rows


def _priced(found: Iterable[PricedRun]) -> list[PricedRun]:
    return [one for one in found if one.seconds is not None]


def _per_token(one: PricedRun, predicted: bool = False) -> float:
    """Seconds of a token, measured or predicted."""
    assert one.seconds is not None
    return (one.seconds if predicted else one.run.seconds) / (one.run.batch * one.run.seq)


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
