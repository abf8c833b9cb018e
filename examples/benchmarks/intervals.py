"""How sure predictions are, on sources that were left out: python examples/benchmarks/intervals.py RUNS.csv PRICED.json

PRICED.json is what `autoddl validate RUNS.csv --by run --json` prints, or what `validate.py --priced` keeps. It says,
for 80 % intervals that are found without the source of the run:

    inside     runs inside, in each third of the scale (number of devices), and by regime
    winners    pairs of one model on one machine: how many are called, and how often the called one is the faster one
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autoddl.validation.intervals import covered, inside_left_out, winners
from autoddl.validation.runs_file import read_runs
from autoddl.validation.scores import PricedRun


def read(runs: Path, priced: Path) -> list[PricedRun]:
    """The runs of a table, with the seconds that were predicted of them."""
    text = priced.read_text(encoding="utf-8")
    every = json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())
    seconds = {row["row"]: row["predicted_seconds"] for row in every}
    return [PricedRun(run, seconds[run.row], reason="" if seconds[run.row] else "no price")
            for run in read_runs(runs) if run.row in seconds]


def thirds(told: Sequence[tuple[PricedRun, bool]]) -> list[tuple[str, int, int]]:
    """(devices, inside, runs) of each third of the scale; runs of one size are in one third."""
    sizes = sorted(one.run.gpus for one, _ in told)
    first, second = sizes[len(sizes) // 3], sizes[2 * len(sizes) // 3]
    parts = ((0, first), (first, second), (second, sizes[-1]))
    return [(f"{low + 1} to {high}", sum(lies for one, lies in told if low < one.run.gpus <= high),
             sum(low < one.run.gpus <= high for one, _ in told)) for low, high in parts]


def main() -> None:
    """Prints both tables."""
    found = read(Path(sys.argv[1]), Path(sys.argv[2]))
    told = inside_left_out(found)
    print(f"inside the 80 % interval: {sum(lies for _, lies in told)} of {len(told)} left-out runs")
    for name, inside, every in thirds(told):
        print(f"  {name:>12} devices   {inside:4} of {every:4}   {100 * inside / max(1, every):5.1f} %")
    for name, (inside, every) in covered(found).items():
        print(f"  {name:>12}           {inside:4} of {every:4}   {100 * inside / max(1, every):5.1f} %")
    by_source = winners(found)
    pairs, called, right = (sum(getattr(one, name) for one in by_source.values())
                            for name in ("pairs", "called", "right"))
    print(f"winners: {pairs} pairs, {called} called, {right} right ({100 * right / max(1, called):.1f} %)")
    for source, one in by_source.items():
        if one.called:
            print(f"  {source:>24}   {one.called:5} of {one.pairs:5} called, {one.right / one.called:7.1%} right")


if __name__ == "__main__":
    main()
