"""Found and uniform policies of recomputation, run on two ranks in turn: recompute_runs.py [rounds] [part of a case]

Small models in the proportions of larger ones, data parallel on two gloo ranks, under budgets that are shares of the
peak of the plan without one. Of every budget the search's plan and those of the uniform policies (none, every-2,
selective, full) that fit run in turn, each round a step of each; seconds of a step are those of the slower rank.
`ratio` is the median over the rounds of the search's seconds to those of the uniform plan whose median is least.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt import gpt

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.runtime.parallelize import parallelize

CLUSTER = """
name: recompute
device: cpu-core
levels:
  - {name: all, size: 2, bandwidth: 1 GB/s, latency: 100 us}
"""

Shape = tuple[int, int, int, int, int]
"""(layers, width, heads, context, batch)."""

CASES: Mapping[str, Shape] = {
    "as Llama-3-8B": (8, 256, 4, 256, 8),
    "as Llama-3-70B": (16, 192, 4, 256, 8),
    "as GPT-3": (12, 256, 8, 128, 16),
}

SHARES = (0.8, 0.65, 0.5)

UNIFORM = ("none", "every-2", "selective", "full")

WARM = 2


def model(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    layers, width, heads, context, batch = shape
    return gpt(layers=layers, width=width, heads=heads, context=context, batch=batch, vocab=512)


def place() -> Cluster:
    return parse_cluster(CLUSTER, "recompute")


def plans_of(shape: Shape, budget: float) -> dict[str, Plan]:
    """The plans that fit, by policy."""
    found: dict[str, Plan] = {}
    for policy in ("search", *UNIFORM):
        try:
            found[policy] = autoddl.plan(model(shape), place(), budget=budget, recompute=(policy,), workers=1)
        except Infeasible:
            continue
    return found


def rank_main(rank: int, shape: Shape, plans: Sequence[Plan], rounds: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=120))
    made = []
    for plan in plans:
        module = model(shape)
        made.append((module, parallelize(module, plan), module.example_inputs()))  # type: ignore[operator]
    seconds = []
    for _ in range(WARM + rounds):
        row = []
        for module, parallel, batch in made:
            for parameter in module.parameters():
                parameter.grad = None
            dist.barrier()
            start = time.perf_counter()
            parallel.step(batch)
            row.append(time.perf_counter() - start)
        seconds.append(row)
    results.put(seconds[WARM:])
    dist.barrier()
    dist.destroy_process_group()


def measured(shape: Shape, plans: Sequence[Plan], rounds: int) -> list[list[float]]:
    """By round, the seconds of a step of every plan."""
    context, store = mp.get_context("spawn"), f"/tmp/autoddl-recompute-{os.getpid()}-{time.monotonic_ns()}"
    results = context.Queue()
    processes = [context.Process(target=rank_main, args=(r, shape, plans, rounds, store, results)) for r in range(2)]
    for process in processes:
        process.start()
    rows = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return [[max(pair) for pair in zip(*both, strict=True)] for both in zip(*rows, strict=True)]


def main(rounds: int, wanted: str) -> None:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds")
    for name, shape in CASES.items():
        if wanted not in name:
            continue
        free = autoddl.plan(model(shape), place(), budget=1e12, workers=1).predicted.peak_bytes
        for share in SHARES:
            plans = plans_of(shape, share * free)
            if len(plans) < 2 or "search" not in plans:
                print(f"{name}, {share:.0%} of {free / 1e6:.1f} MB: fits only {', '.join(plans) or 'nothing'}")
                continue
            rows = measured(shape, list(plans.values()), rounds)
            medians = dict(zip(plans, (statistics.median(column) for column in zip(*rows, strict=True)), strict=True))
            best = min((policy for policy in plans if policy != "search"), key=medians.__getitem__)
            at = list(plans).index(best)
            ratios = sorted(row[0] / row[at] for row in rows)
            shown = ", ".join(f"{policy} {plans[policy].predicted.seconds * 1e3:.1f}/{seconds * 1e3:.1f}"
                              for policy, seconds in medians.items())
            print(f"{name}, {share:.0%} of {free / 1e6:.1f} MB: ms predicted/measured: {shown}; {best} is the best "
                  f"uniform one, ratio {statistics.median(ratios):.3f} [{ratios[0]:.3f} .. {ratios[-1]:.3f}]",
                  flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15, sys.argv[2] if len(sys.argv) > 2 else "")
