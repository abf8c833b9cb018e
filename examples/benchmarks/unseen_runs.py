"""Published runs that no constant was chosen with: python examples/benchmarks/unseen_runs.py [SET] [WORKERS]

data/unseen_runs.csv and unseen_runs_2.csv to _7.csv hold runs of sources, devices and years that the table of published
runs lacks, each with its address. Each set was priced as it stands before anyone looked at its errors, and is never
fitted. What a source does not state is the default of a table of runs. SET is 1 to 7, several like 1,2,3, or the
path of a table. The last line counts the runs inside the package's 80 % intervals, which rest on these sets too.
"""

import sys
from pathlib import Path
from statistics import fmean

from autoddl.validation.intervals import interval_of_run
from autoddl.validation.validate import validate

DATA = Path(__file__).parent / "data"
SETS = {"1": DATA / "unseen_runs.csv", "2": DATA / "unseen_runs_2.csv", "3": DATA / "unseen_runs_3.csv",
        "4": DATA / "unseen_runs_4.csv", "5": DATA / "unseen_runs_5.csv", "6": DATA / "unseen_runs_6.csv",
        "7": DATA / "unseen_runs_7.csv"}
"""Name of a set -> its table, in the order in which they were written down."""


def main(table: str = "1", workers: str = "2") -> None:
    """Prints the error of every run of some sets, of every source, their mean, and what intervals hold of them."""
    found = [one for name in table.split(",") for one in validate(SETS.get(name, Path(name)), workers=int(workers))]
    sources = dict.fromkeys(one.run.source for one in found)
    means = []
    for source in sources:
        mine = [one for one in found if one.run.source == source]
        for one in mine:
            told = one.reason if one.seconds is None else f"{100 * one.error:+7.1f} %"
            print(f"  {one.run.row:4} {one.run.model:16} {one.run.gpus:5} {one.run.device:15} {one.run.precision:5}",
                  told)
        errors = [one.error for one in mine if one.seconds is not None]
        if errors:
            means.append(fmean(map(abs, errors)))
            told = f"{100 * means[-1]:8.1f} %   bias {100 * fmean(errors):+.1f} %"
        print(f"{source:18}{len(errors)} of {len(mine)}", told if errors else "no run has a price")
    print(f"mean of {len(means)} sources {100 * fmean(means):.1f} %")
    priced = [(one.run, one.seconds) for one in found if one.seconds is not None]
    inside = [interval.low <= run.seconds / seconds <= interval.high
              for run, seconds in priced for interval in [interval_of_run(run)]]
    print(f"{sum(inside)} of {len(inside)} runs lie inside the 80 % intervals")


if __name__ == "__main__":
    main(*sys.argv[1:])
