"""Says how sure a predicted step is: what published runs of the same regime took over what was predicted for them.

    interval    [p low, p high] of predicted seconds p holds 8 of 10 runs: low and high are the quantiles .1 and .9 of
                measured / predicted, every source with the same weight
    median      half of the runs take longer than p median. Predictions of a regime may be too short or too long on the
                whole, so p itself may lie at one end of its interval, or outside
    profile     runs of one's own say more: their residuals r, left out one by one, have the median 1. The interval is
                then exp(+-1.28 s), with s^2 the mean of r^2 and of the variance above, which counts as `KNOWN` runs
    common      two configurations of one model on one machine share most errors: the quantile .7 of |log of the ratio
                of their measured / predicted|. Configurations that differ by less are a tie. Beyond it one is called,
                rightly in 95 % of the cases in the mean of the sources

`intervals.yaml` has them by regime: `pipeline` has stages, `sharded` gathers weights again (ZeRO-3), `whole` is all
other. Each is there once more for plans inside one node, which no network can surprise. Medians are those of both,
widths what runs inside a node have asked for. `autoddl validate RUNS.csv --intervals FILE` writes such a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from types import MappingProxyType

import yaml

__all__ = ["INTERVALS_FILE", "NODE", "REGIMES", "Interval", "interval_of", "known_intervals", "regime"]

INTERVALS_FILE = Path(__file__).parent / "intervals.yaml"
EIGHTY = 1.2816
"""Standard deviations either way of a normal number that hold 8 of 10."""
KNOWN = 4
"""Runs of one's own that say as much of an interval as all that are published."""
NODE = " in one node"
"""End of the name of a regime inside one unit of the innermost level."""
REGIMES = tuple(kind + place for kind in ("pipeline", "sharded", "whole") for place in ("", NODE))
"""The kinds of plans that have an interval of their own."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How far measured steps were from predicted ones.

        low         factor on predicted seconds below which one of 10 steps lies
        high        factor on predicted seconds above which one of 10 steps lies
        median      factor on predicted seconds above which half of the steps lie
        common      the part by which two configurations of one model on one machine must differ to be told apart
        runs        number of runs that this rests on
        sources     number of their sources
    """

    low: float
    high: float
    common: float
    runs: int
    sources: int
    median: float = 1.0

    def of(self, seconds: float) -> tuple[float, float, float]:
        """Returns the least, the median and the most seconds of 8 of 10 steps that are predicted to take `seconds`."""
        return seconds * self.low, seconds * self.median, seconds * self.high

    def with_runs(self, residual: float, runs: int) -> "Interval":
        """Returns the interval of a machine with a profile: `runs` of its own scatter by `residual`, left out."""
        if not runs:
            return self
        before = log(self.high / self.low) / (2 * EIGHTY)
        spread = sqrt((KNOWN * before**2 + runs * residual**2) / (KNOWN + runs))
        return Interval(exp(-EIGHTY * spread), exp(EIGHTY * spread), self.common, runs, 1)

    def ties(self, one: float, other: float) -> bool:
        """Whether two predicted steps of one model on one machine differ by less than what they share is sure to."""
        return max(one, other) <= min(one, other) * exp(self.common)


def regime(stages: int, sharded: bool, alone: bool = False) -> str:
    """The regime of a plan with so many stages, whose weights are perhaps gathered again, perhaps inside one node."""
    return ("pipeline" if stages > 1 else "sharded" if sharded else "whole") + NODE * alone


@lru_cache(maxsize=1)
def known_intervals() -> Mapping[str, Interval]:
    """By regime, the interval that the package's file has."""
    tree = yaml.safe_load(INTERVALS_FILE.read_text(encoding="utf-8"))
    return MappingProxyType({name: Interval(**row) for name, row in tree["regimes"].items()})


def interval_of(stages: int, sharded: bool, alone: bool = False) -> Interval:
    """The interval of a plan with so many stages, whose weights are perhaps gathered again, perhaps inside one node."""
    return known_intervals()[regime(stages, sharded, alone)]
