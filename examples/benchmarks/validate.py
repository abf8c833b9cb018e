"""The performance model on sources that its constants have not seen: python examples/benchmarks/validate.py RUNS.csv

For every source of published runs, the efficiency of each kind of device is fitted again to the other sources alone
(the factor at which the mean of their biases is nought), and the source is priced with it:

    ln T(f) is nearly linear in ln f:   slope of each run from two prices, at f = 1 and f = 1 + STEP
    f(device, left out) solves          mean over other sources of mean ln(T(f) / measured) = 0

A kind of device that has no other source keeps its figure.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import exp, log
from statistics import fmean
from unittest.mock import patch

from autoddl.cost_models import load_device
from autoddl.cost_models.machine import Device
from autoddl.validation import clusters
from autoddl.validation.clusters import build_cluster, cluster_of
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs
from autoddl.validation.validate import price_run

STEP = 0.05


@contextmanager
def efficiency_times(factor: float) -> Iterator[None]:
    """Gives every device `factor` times the efficiency of its file, at most 1."""
    def scale(name: str) -> Device:
        device = load_device(name)
        return replace(device, efficiency=min(1.0, device.efficiency * factor))

    build_cluster.cache_clear()
    try:
        with patch.object(clusters, "load_device", scale):
            yield
    finally:
        build_cluster.cache_clear()


def slopes(runs: tuple[Run, ...]) -> list[tuple[Run, float, float]]:
    """(run, ln(T / measured), d ln T / d ln f) of every run that has a price."""
    plain = [price_run(run).seconds for run in runs]
    with efficiency_times(1 + STEP):
        faster = [price_run(run).seconds for run in runs]
    return [(run, log(here / run.seconds), log(there / here) / log(1 + STEP))
            for run, here, there in zip(runs, plain, faster, strict=True) if here is not None and there is not None]


def factor(others: list[tuple[Run, float, float]]) -> float:
    """ln f at which the mean of the sources' mean logarithms is nought."""
    sources = dict.fromkeys(run.source for run, _, _ in others)
    if not sources:
        return 0.0
    groups = [[row for row in others if row[0].source == source] for source in sources]
    error = fmean(fmean(error for _, error, _ in rows) for rows in groups)
    return -error / fmean(fmean(slope for _, _, slope in rows) for rows in groups)


def main(path: str) -> None:
    rows = slopes(read_runs(path))
    kinds = {run.device: cluster_of(run).device.name.split("-")[0] for run, _, _ in rows}
    print(f"{'source left out':28}{'runs':>5}{'as shipped':>12}{'left out':>10}")
    for source in dict.fromkeys(run.source for run, _, _ in rows):
        mine = [row for row in rows if row[0].source == source]
        fitted = {kind: factor([row for row in rows if row[0].source != source and kinds[row[0].device] == kind])
                  for kind in sorted({kinds[run.device] for run, _, _ in mine})}
        plain = fmean(abs(exp(error) - 1) for _, error, _ in mine)
        left = fmean(abs(exp(error + slope * fitted[kinds[run.device]]) - 1) for run, error, slope in mine)
        factors = ", ".join(f"{kind} x {exp(value):.3f}" for kind, value in fitted.items())
        print(f"{source:28}{len(mine):5}{100 * plain:10.1f} %{100 * left:8.1f} %   {factors}")


if __name__ == "__main__":
    main(sys.argv[1])
