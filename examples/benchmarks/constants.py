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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from validate import taken

from autoddl.core.errors import InputError
from autoddl.cost_models import software
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.cost_models.software import SLOWDOWN
from autoddl.planner.process_pool import mapper
from autoddl.pricing import beside, price
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
Errors = dict[str, list[tuple[Run, float]]]
"""By source, runs and their predicted seconds."""


def seconds(run: Run, profile: Profile = SHIPPED) -> float | None:
    """Predicted seconds of a run, whose plan is chosen with the package's own constants; None without a price."""
    try:
        chosen, microbatch = settled(run)
        return price_as_plan(chosen, microbatch, profile, SHIPPED)
    except (Unpriced, InputError):
        return None


@contextmanager
def moved(name: str, factor: float) -> Iterator[None]:
    """Processes that start meanwhile have another slowdown, or a slower FlashAttention-1."""
    with ExitStack() as stack:
        if name == "slowdown":
            for module in (software, beside, price, run_step):
                stack.enter_context(patch.object(module, "SLOWDOWN", SLOWDOWN * factor))
        elif name == "flash-1":
            slower = {**software.SLOWER, name: software.SLOWER[name] * factor}
            stack.enter_context(patch.object(software, "SLOWER", slower))
        yield


def priced(runs: Sequence[Run], name: str, factor: float, workers: int) -> list[float | None]:
    """Predicted seconds of runs with a constant that costs `factor` times as much."""
    kinds = KINDS.get(name.removeprefix("products "), ())
    profile = SHIPPED.times("matmul", factor) if kinds else SHIPPED.times(FACTORS[name], factor) \
        if name in FACTORS else SHIPPED
    asked = [run for run in runs if not kinds or cluster_of(run).device.name.startswith(kinds)]
    with moved(name, factor), mapper(partial(seconds, profile=profile), workers) as of:
        found = dict(zip(map(id, asked), of(asked), strict=True))
    return [found.get(id(run)) for run in runs]


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
    known = [(run, one) for run, one in zip(every, priced(every, "", 1.0, asked.workers), strict=True) if one]
    runs, before = [run for run, _ in known], [one for _, one in known]

    def error(found: Sequence[float]) -> float:
        return fmean(by_source(runs, [abs(one / run.seconds - 1)
                                      for run, one in zip(runs, found, strict=True)]).values())

    print(f"{len(runs)} runs of {len(by_source(runs, before))} sources, {100 * error(before):.2f} % off")
    for name in (*(f"products {kind}" for kind in KINDS), *FACTORS, "slowdown", "flash-1"):
        less, more = ([one or same for one, same in zip(priced(runs, name, factor, asked.workers), before, strict=True)]
                      for factor in (1 / 1.1, 1.1))
        longer = [after / same - 1 for after, same in zip(more, before, strict=True)]
        hit = [(run, one) for run, one in zip(runs, longer, strict=True) if abs(one) >= 1e-3]
        means = by_source([run for run, _ in hit], [one for _, one in hit])
        most = max(means, key=lambda source: abs(means[source])) if means else ""
        print(f"{name:14} {len(hit):4} runs of {len(means):3} sources {100 * fmean(means.values() or [0.0]):+5.1f} %   "
              f"most {most} {100 * means.get(most, 0.0):+.1f} %   errors {100 * error(less):.2f} and "
              f"{100 * error(more):.2f} %", flush=True)


if __name__ == "__main__":
    main()
