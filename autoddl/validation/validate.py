"""Prices published runs as they are described, to compare with what was measured: the performance model's report card.

    row -> cluster, software, shapes    what it ran on, with, and of         `clusters`, `software`, `run_parts`
        -> seconds and peak bytes       of the plan of its degrees           `as_plan`, `as_plan_bytes`
        -> errors per source            beside the trivial predictor's       `scores`

Constants belong to devices, links and programs, never to a source. A row that cannot be priced is counted with its
reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

from autoddl.core.errors import InputError
from autoddl.core.recompute import FULL
from autoddl.cost_models import show_bytes
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.planner.process_pool import mapper
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.as_plan_bytes import bytes_as_plan
from autoddl.validation.clusters import cluster_of
from autoddl.validation.run_parts import Unpriced
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs
from autoddl.validation.scores import PricedRun
from autoddl.validation.software import recomputation_of, splits_stream

__all__ = ["assume_recomputation", "beyond_memory", "check_priced", "price_run", "settled", "validate"]

Progress = Callable[[str, int, int], None]
SURE = 1.25
"""Predicted over available bytes from which a run that does not tell is taken to recompute: beyond the memory model's
own error."""
MICROBATCHES = (1, 2, 4, 8, 16)
"""Microbatches that a tuned run may have."""


def validate(path: str | Path, progress: Progress = lambda *_: None, workers: int = 1, profile: Profile = SHIPPED
             ) -> tuple[PricedRun, ...]:
    """Prices every run of a CSV file; `progress` gets what is done, how often it was, and how often it will be.

    Machines have the constants of `profile`. Raises InputError for a table that cannot be read.
    """
    runs, found = read_runs(path), list[PricedRun]()
    with mapper(partial(price_run, profile=profile), workers) as priced:
        for i, one in enumerate(priced(runs)):
            progress("pricing", i, len(runs))
            found.append(one)
    return tuple(found)


def check_priced(found: Sequence[PricedRun]) -> None:
    """Raises InputError, with the first reason, where no run has a price."""
    if all(one.seconds is None for one in found):
        raise InputError(f"no run has a price: {found[0].reason}")


def price_run(run: Run, profile: Profile = SHIPPED) -> PricedRun:
    """Returns the seconds of a run as the plan of its degrees has them, or the reason why there are none.

    Peak bytes are those of the plan.
    """
    try:
        run, microbatch = settled(run)
        memory = bytes_as_plan(run, microbatch, profile)
        return PricedRun(run, price_as_plan(run, microbatch, profile), memory, remark=beyond_memory(run, memory))
    except (Unpriced, InputError) as error:
        return PricedRun(run, reason=str(error))


def beyond_memory(run: Run, nbytes: float) -> str:
    """Says that a run with predicted peak bytes cannot fit its device, and which columns to look at; "" where it may.
    """
    memory = cluster_of(run).device.memory
    if nbytes <= SURE * memory:
        return ""
    looked_at = [f"zero_stage {run.zero_stage}"] * (run.dp * run.cp > 1 and run.zero_stage < 3)
    looked_at += [f"recompute {run.recompute}"] * (recomputation_of(run) != FULL)
    looked_at += ["seq_parallel 0"] * (run.tp > 1 and not splits_stream(run))
    return (f"does not fit as it is described: {show_bytes(nbytes)} on a device of {show_bytes(memory)}; look at "
            + ", ".join([*looked_at, f"microbatch {run.microbatch}", f"precision {run.precision}"]))


def settled(run: Run) -> tuple[Run, int]:
    """Returns a run that says what it recomputes, and the sequences of its microbatch.

    Raises Unpriced or InputError with the reason where there are none.
    """
    size = run.microbatch or _fastest_microbatch(run if recomputation_of(run) else replace(run, recompute="none"))
    return assume_recomputation(replace(run, microbatch=size)), size


def assume_recomputation(run: Run) -> Run:
    """Returns a run, whose microbatch is known, that says what it recomputes.

    One that does not say so recomputes only where it would not fit otherwise, and in as few layers of a stage as then
    fit.
    """
    if recomputation_of(run):
        return run
    plain, full = replace(run, recompute="none"), replace(run, recompute="full")
    most = bytes_as_plan(plain, run.microbatch)
    beyond, layers = most - SURE * cluster_of(run).device.memory, -(-run.layers // run.pp)
    if beyond <= 0:
        return plain
    least = bytes_as_plan(full, run.microbatch)
    share = min(1.0, ceil(layers * beyond / (most - least)) / layers) if most > least else 1.0
    return replace(full, recomputed_share=share)


def _fastest_microbatch(run: Run) -> int:
    """The microbatch that a tuned run would have: the fastest power of two that divides the batch and fits.

    Where none fits by the memory model it is the least. A larger one may fit where a smaller one does not: the whole
    batch at once adds no gradients up.
    """
    memory = cluster_of(run).device.memory
    seconds, known, reasons = dict[int, float](), list[int](), []
    for size in (size for size in MICROBATCHES if run.batch // run.dp % size == 0):
        try:
            if bytes_as_plan(run, size) <= memory:
                seconds[size] = price_as_plan(run, size)
            known.append(size)
        except (Unpriced, InputError) as error:
            reasons.append(error)
    if not known:
        raise reasons[0]
    return min(seconds, key=lambda size: seconds[size]) if seconds else known[0]
