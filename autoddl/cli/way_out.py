"""Finds the cheap ways out where no plan fits: what costs the user nothing, recomputation and microbatches."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from autoddl.core.errors import CaptureError, Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.planner.mesh_search import Progress
from autoddl.planner.options import Options, PlanOptions

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ways_out"]

SHORT = 3.0
"""Seconds that the search of one mesh may take where any plan that fits is an answer."""


def ways_out(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *,
             seconds: Callable[[Plan], float], progress: Progress | None = None, **options: Unpack[Options]
             ) -> tuple[tuple[str, float], ...]:
    """The options that fit where none does, as a user writes them, each with the seconds of a step, the fastest first.

    These are recomputation of all blocks and the fewest microbatches that fit, or where neither does both together.
    Every search is short (`SHORT`), so the `seconds` are those of a plan that fits, perhaps not of the best.
    """
    from autoddl.api import plan  # torch is not waited for where plans are read

    given = PlanOptions.of(options)
    counts = [n * given.microbatches[-1] for n in (2, 4, 8)]
    short = replace(given, time_limit=SHORT, tolerance=0.1, overlap=False)

    def first(tried: Sequence[tuple[str, PlanOptions]]) -> tuple[tuple[str, float], ...]:
        for words, one in tried:
            with suppress(Infeasible, InputError, CaptureError):
                return (words, seconds(plan(model, cluster, sample, progress=_within(progress, words),
                                            **one.words()))),
        return ()

    alone = (*first([("--recompute full", replace(short, recompute=("full",)))]),
             *first([(f"--microbatches {n}", replace(short, microbatches=(n,))) for n in counts]))
    both = [(f"--microbatches {n} --recompute full", replace(short, microbatches=(n,), recompute=("full",)))
            for n in counts]
    return tuple(sorted(alone, key=lambda way: way[1])) or first(both)


def _within(progress: Progress | None, words: str) -> Progress | None:
    """Progress that says first which way out is tried."""
    return progress and (lambda what, done, total: progress(f"nothing fits; trying {words}: {what}", done, total))
