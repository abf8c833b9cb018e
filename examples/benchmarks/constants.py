"""What a tenth more of each fitted constant does to published runs: python examples/benchmarks/constants.py TABLES

Each constant that was chosen with end-to-end runs in view costs a tenth more, with all others as they are, and
the plans of all runs are priced again:

    products V100, A100, H100     seconds of products on devices with this kind's efficiency (cost_models/hardware)
    attention                     seconds of fused attention
    elementwise                   seconds of kernels that move bytes
    host                          seconds of the host for an operator (`software.HOST`)
    slowdown                      what computes and communicates at once (`software.SLOWDOWN`)
    flash-1                       how many times longer FlashAttention-1 takes than 2 (`software.SLOWER`)

Columns: runs that it moves by a thousandth and more, by how many per cent they get longer (mean of their sources), the
source that is moved most, and the mean of the sources' errors, over all sources, with a tenth less and a tenth more.

    --every N      every N-th run of a source with more than 12
    --workers N    processes
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from validate import taken

from autoddl.core.errors import InputError
from autoddl.cost_models import software
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.cost_models.software import SLOWDOWN
from autoddl.planner.process_pool import mapper
from autoddl.pricing import price
from autoddl.schedule import run_step
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.clusters import cluster_of
from autoddl.validation.run_parts import Unpriced
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs
from autoddl.validation.validate import settled

KINDS = {"V100": ("V100",), "A100": ("A100", "A800"), "H100": ("H100", "H800", "H200", "GH200", "H20")}
"""Device whose products were fitted -> beginnings of the devices with its figure."""
FACTORS = {"attention": "attention", "elementwise": "memory", "host": "host"}
"""Constant -> the constant of a profile."""
NAMES = (*(f"products {kind}" for kind in KINDS), *FACTORS, "slowdown", "flash-1")
MOVES = (1 / 1.1, 1.1)


def profile_of(run: Run, name: str, factor: float) -> Profile:
    """The package's constants, with one that costs `factor` times as much where a run has it."""
    if name in FACTORS:
        return SHIPPED.times(FACTORS[name], factor)
    kinds = KINDS.get(name.removeprefix("products "), ())
    return SHIPPED.times("matmul", factor) if cluster_of(run).device.name.startswith(kinds or "-") else SHIPPED


def moved_seconds(run: Run, slowdown: float = 1.0) -> dict[tuple[str, float], float]:
    """Seconds of a run by what is moved and how far, whose plan is chosen as the package has it; none without a price.

    Prices are remembered in a process, which has one `slowdown`: by this factor what runs at once takes longer.
    """
    with ExitStack() as stack:
        for module in (price, run_step):
            stack.enter_context(patch.object(module, "SLOWDOWN", SLOWDOWN * slowdown))
        try:
            chosen, microbatch = settled(run)
            if slowdown != 1.0:
                return {("slowdown", slowdown): price_as_plan(chosen, microbatch)}
            found = {("", 1.0): price_as_plan(chosen, microbatch)}
            for name, factor in product((one for one in NAMES if one != "slowdown"), MOVES):
                slower = dict(software.SLOWER)
                if name in slower:
                    slower[name] *= factor
                with patch.object(software, "SLOWER", slower):
                    found[name, factor] = price_as_plan(chosen, microbatch, profile_of(run, name, factor), SHIPPED)
            return found
        except (Unpriced, InputError):
            return {}


def priced(runs: Sequence[Run], workers: int) -> dict[tuple[str, float], list[float]]:
    """By what is moved and how far, seconds of the runs; those of runs without a price are left out everywhere."""
    found: list[dict[tuple[str, float], float]] = [{} for _ in runs]
    for slowdown in (1.0, *MOVES):
        with mapper(partial(moved_seconds, slowdown=slowdown), workers) as of:
            for known, more in zip(found, of(runs), strict=True):
                known |= more
    keys = dict.fromkeys(key for known in found for key in known)
    return {key: [known.get(key, 0.0) for known in found] for key in keys}


def by_source(runs: Sequence[Run], figures: Sequence[float]) -> dict[str, float]:
    """Source -> the mean of its runs' figures."""
    sources = dict.fromkeys(run.source for run in runs)
    return {source: fmean(one for run, one in zip(runs, figures, strict=True) if run.source == source)
            for source in sources}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    every = taken([run for table in asked.tables for run in read_runs(table)], asked.every)
    found = priced(every, asked.workers)
    runs = [run for run, one in zip(every, found["", 1.0], strict=True) if one]

    def of(name: str, factor: float) -> list[float]:
        return [one for one, same in zip(found[name, factor], found["", 1.0], strict=True) if same]

    def error(seconds: Sequence[float]) -> float:
        return fmean(by_source(runs, [abs(one / run.seconds - 1)
                                      for run, one in zip(runs, seconds, strict=True)]).values())

    before = of("", 1.0)
    print(f"{len(runs)} runs of {len(by_source(runs, before))} sources, {100 * error(before):.2f} % off")
    for name in NAMES:
        less, more = (of(name, factor) for factor in MOVES)
        longer = [after / same - 1 for after, same in zip(more, before, strict=True)]
        hit = [(run, one) for run, one in zip(runs, longer, strict=True) if abs(one) >= 1e-3]
        means = by_source([run for run, _ in hit], [one for _, one in hit])
        most = max(means, key=lambda source: abs(means[source])) if means else ""
        print(f"{name:14} {len(hit):4} runs of {len(means):3} sources {100 * fmean(means.values() or [0.0]):+5.1f} %   "
              f"most {most} {100 * means.get(most, 0.0):+.1f} %   errors {100 * error(less):.2f} and "
              f"{100 * error(more):.2f} %", flush=True)


if __name__ == "__main__":
    main()
