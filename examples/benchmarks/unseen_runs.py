"""Published runs that no constant was chosen with: python examples/benchmarks/unseen_runs.py

data/unseen_runs.csv holds runs of sources, devices and years that the table of published runs lacks, each with its
address. They are priced as they stand and never fitted. What a source does not state is the default of a table of runs.
"""

import sys
from pathlib import Path
from statistics import fmean

from autoddl.validation.validate import validate

DATA = Path(__file__).parent / "data" / "unseen_runs.csv"


def main(workers: int = 2) -> None:
    """Prints the error of every run, of every source, and their mean."""
    found = validate(DATA, workers=workers)
    sources = dict.fromkeys(one.run.source for one in found)
    means = []
    for source in sources:
        mine = [one for one in found if one.run.source == source]
        for one in mine:
            told = one.reason if one.seconds is None else f"{100 * one.error:+7.1f} %"
            print(f"  {one.run.row:4} {one.run.model:16} {one.run.gpus:5} {one.run.device:15} {one.run.precision:5}",
                  told)
        errors = [one.error for one in mine if one.seconds is not None]
        means.append(fmean(map(abs, errors)))
        print(f"{source:18}{len(errors)} of {len(mine)}{100 * means[-1]:8.1f} %   bias {100 * fmean(errors):+.1f} %")
    print(f"mean of {len(means)} sources {100 * fmean(means):.1f} %")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
