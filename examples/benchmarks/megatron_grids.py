"""Grids that Megatron's recipes name, as pins, beside their published seconds and what the search finds.

    python examples/benchmarks/megatron_grids.py [part of a row's name] [theirs | ours]

Theirs are the degrees of a recipe (`--mine`) with its schedule, in equal stages, on programs with elementwise chains in
one kernel. Ours has the same devices, batch and microbatches, and as many parts of the cluster; layouts, cuts, states
and recomputation are free, and the schedule is 1F1B, interleaved or ZB-H1. Where nothing fits, theirs is priced without
a bound on memory. Each plan is made in a process of its own, in bf16-mixed with AdamW. Predicted; nothing runs.

Source: NVIDIA dgxc-benchmarking v25.02, NeMo and Megatron-Core in bf16 with the distributed optimizer, on nodes of 8
H100 of 80 GB with 400 Gb/s each.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from recipes import h100
from torch import nn

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.operators.fusion import as_compiled

from gpt3 import gpt3_175b  # isort: skip
from llama import llama3_8b, llama3_70b  # isort: skip

LIMIT = 300.0
"""Seconds that the search over stages may take."""


class Grid(NamedTuple):
    """A recipe: nodes of eight, sequences and microbatches of a step, degrees, schedule, and published seconds."""

    model: Callable[[int], nn.Module]
    nodes: int
    batch: int
    microbatches: int
    degrees: str
    schedule: str
    seconds: float


def _8b(batch: int) -> nn.Module:
    return llama3_8b(batch=batch)


def _70b(batch: int) -> nn.Module:
    return llama3_70b(batch=batch)


def _gpt3(batch: int) -> nn.Module:
    return gpt3_175b(batch=batch)


GRIDS = {
    "Llama 3.1 8B, 64 H100": Grid(_8b, 8, 1024, 32, "cp=2,zero=1", "", 13.0),
    "Llama 3.1 70B, 64 H100": Grid(_70b, 8, 128, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.61),
    "Llama 3.1 70B, 128 H100": Grid(_70b, 16, 256, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.70),
    "GPT-3 175B, 128 H100": Grid(_gpt3, 16, 256, 64, "tp=4,pp=8,zero=1,sp", "interleaved:12", 8.309),
    "GPT-3 175B, 256 H100": Grid(_gpt3, 32, 512, 64, "tp=4,pp=8,zero=1,sp", "interleaved:12", 8.408),
}
"""By name of the model and the devices."""


def _planned(name: str, whose: str) -> str:
    """The row of one plan."""
    grid, began = GRIDS[name], time.process_time()
    parts = int(dict(one.partition("=")[::2] for one in grid.degrees.split(",")).get("pp", 1))
    common = {"precision": "bf16-mixed", "microbatches": (grid.microbatches,), "workers": 1, "max_axes": 2}
    theirs = {**common, "mine": grid.degrees, "schedule": (grid.schedule or "1f1b",)}
    ours = {**common, "recompute": "search", "stages": (parts,), "stages_limit": LIMIT, "tolerance": 2e-3,
            "schedule": ("1f1b", "zb-h1", *([grid.schedule] if grid.schedule else []))}
    asked, place, note = theirs if whose == "theirs" else ours, as_compiled(h100(grid.nodes)), ""
    try:
        plan = autoddl.plan(grid.model(grid.batch), place, **asked)  # type: ignore[arg-type]
    except Infeasible:
        plan = autoddl.plan(grid.model(grid.batch), place, **asked, budget="1 TB")  # type: ignore[arg-type]
        note = ", more than the 80 GB that there are"
    schedule = f"{len(plan.pipeline.stages)} stages, {plan.pipeline.name}" if plan.pipeline else str(plan.mesh)
    gap = "" if whose == "theirs" else f", gap {plan.gap:.2%}"
    return (f"{plan.predicted.seconds:.2f} s{gap}, {schedule}; peak {plan.predicted.peak_bytes / 1e9:.1f} GB{note}; "
            f"{time.process_time() - began:.0f} CPU s")


def main(wanted: str = "", whose: str = "", name: str = "") -> None:
    """Prints a row for every plan, each from a process of its own."""
    if name:
        print(json.dumps(_planned(name, whose)))
        return
    for each, grid in GRIDS.items():
        for kind in (whose,) if whose else ("theirs", "ours"):
            if wanted in each:
                made = subprocess.run([sys.executable, __file__, wanted, kind, each], capture_output=True, text=True,
                                      check=False)
                found = json.loads(made.stdout) if made.returncode == 0 else made.stderr[-300:]
                print(f"{each}, published {grid.seconds:.2f} s, {kind}: {found}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
