"""How sure predictions are of sources that were left out: python examples/benchmarks/intervals.py RUNS.csv ...

Tables are priced as `autoddl validate` prices them, and `--write FILE` writes the same file as its `--intervals`. It
says the mean error by table, and, for 80 % intervals that are found without the source of
the run:

    inside     runs inside, in each third of the scale (number of devices), and by regime
    winners    pairs of one model on one machine: how many are called, and how often the called one is the faster one,
               over all pairs and in the mean of sources, for several quantiles up to which two are a tie
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from autoddl.validation.intervals import SHARED, covered, find_intervals, inside_left_out, intervals_text, winners
from autoddl.validation.scores import PricedRun, score_sources
from autoddl.validation.validate import validate

WORKERS = 2
QUANTILES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Parts of the pairs up to which two configurations may be called a tie."""


def thirds(told: Sequence[tuple[PricedRun, bool]]) -> list[tuple[str, int, int]]:
    """(devices, inside, runs) of each third of the scale; runs of one size are in one third."""
    sizes = sorted(one.run.gpus for one, _ in told)
    first, second = sizes[len(sizes) // 3], sizes[2 * len(sizes) // 3]
    parts = ((0, first), (first, second), (second, sizes[-1]))
    return [(f"{low + 1} to {high}", sum(lies for one, lies in told if low < one.run.gpus <= high),
             sum(low < one.run.gpus <= high for one, _ in told)) for low, high in parts]


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--write", type=Path)
    asked, found = parser.parse_args(), list[PricedRun]()
    for table in asked.tables:
        found += (here := validate(table, workers=WORKERS))
        means = [score.mape for score in score_sources(here).values() if score.mape is not None]
        print(f"{table.name:22} {sum(one.seconds is not None for one in here):4} of {len(here):4} runs priced, "
              f"{len(means):3} sources {100 * fmean(means):5.1f} % off", flush=True)
    if asked.write is not None:
        names = [table.name for table in asked.tables]
        asked.write.write_text(intervals_text(find_intervals(found), names), encoding="utf-8")
    told = inside_left_out(found)
    print(f"inside the 80 % interval: {sum(lies for _, lies in told)} of {len(told)} left-out runs")
    for name, inside, every in [*thirds(told), *((name, *both) for name, both in covered(found).items())]:
        print(f"  {name:>22}   {inside:4} of {every:4}   {100 * inside / max(1, every):5.1f} %")
    for shared in QUANTILES:
        by_source = winners(found, shared)
        pairs, called, right = (sum(getattr(one, name) for one in by_source.values())
                                for name in ("pairs", "called", "right"))
        shares = [one.right / one.called for one in by_source.values() if one.called]
        print(f"winners, a tie at the quantile {shared}: {pairs} pairs, {called} called, {right} right "
              f"({right / max(1, called):.1%}; {fmean(shares or [0.0]):.1%} in the mean of {len(shares)} sources)")
    print(f"at {SHARED}, as shipped:")
    for source, one in winners(found).items():
        if one.called:
            print(f"  {source:>24}   {one.called:5} of {one.pairs:5} called, {one.right / one.called:7.1%} right")


if __name__ == "__main__":
    main()
