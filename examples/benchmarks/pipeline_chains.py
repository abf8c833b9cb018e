"""Compares pipelines that are found with the best of all cuts and layouts, on random chains of two stages.

    python examples/benchmarks/pipeline_chains.py [FIRST] [LAST]

Every second chain has a budget of 93 % of the peak that is free. Prints, for those where something fits, how far the
found pipeline is above the best one, how wide the gap that it was proved with, and how many bounds were false.
"""

import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))
from every_pipeline import Chain, best_pipeline, random_case

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.planner.options import PlanOptions
from autoddl.planner.task import task_of


def main(first: int, last: int) -> None:
    """Prints a row for each chain whose plan is not the best, and then all chains' figures."""
    above, gaps, false, start, none = [], [], 0, perf_counter(), 0
    for seed in range(first, last):
        case = random_case(seed)
        torch.manual_seed(seed)
        model, sample = Chain(case.widths), torch.randn(case.batch, case.widths[0])
        ask: dict[str, Any] = {"microbatches": (case.microbatches,), "max_axes": 2, "workers": 1}
        options: dict[str, Any] = ask | {"stages": (2,), "schedule": (case.schedule,)}
        plan = autoddl.plan(model, case.cluster, sample, **options)
        budget = 0.93 * plan.predicted.peak_bytes if seed % 2 else None
        task = task_of(model, case.cluster, sample, PlanOptions(**ask, budget=budget), "chain", None)
        best = best_pipeline(task, case)
        try:
            plan = autoddl.plan(model, case.cluster, sample, **options, budget=budget) if budget else plan
        except Infeasible:
            none += 1
            false += best < float("inf")
            continue
        false += plan.bound > best * (1 + 1e-9)
        above.append(plan.predicted.seconds / best - 1)
        gaps.append(1 - plan.bound / plan.predicted.seconds)
        if above[-1] > 1e-3:
            print(f"chain {seed}: {above[-1]:.2%} above the best, gap {gaps[-1]:.2%}, {case.schedule}, "
                  f"{case.microbatches} microbatches, {'a budget' if budget else 'no budget'}", flush=True)
    best_found = sum(x <= 1e-3 for x in above)
    print(f"{len(above)} chains, {none} more without a plan; best pipeline found in {best_found}, else at most "
          f"{max(above):.2%} above; gap {median(gaps):.2%} in the median, {max(gaps):.2%} at most; "
          f"{false} false bounds; {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (0, 200))
