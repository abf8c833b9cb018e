"""Grids that Megatron's recipes name, as pins, beside their published seconds and what the search finds.

    python examples/benchmarks/megatron_grids.py [part of a row's name] [theirs | ours]

Theirs are the degrees of a recipe (`--mine`) with its schedule, in equal stages, on the kernels of the program that ran
it (`--software`); *as run* is the step as that program runs it. Ours has the same devices, batch and microbatches, and
as many parts of the cluster. Layouts, cuts, states and recomputation are free, and the schedule is 1F1B, interleaved or
ZB-H1. Where nothing fits, theirs is priced without a bound on memory. Each plan is made in a process of its own, in
bf16-mixed with AdamW; table 1 in bf16, with gradients of two bytes. Predicted; nothing runs.

Sources: NVIDIA dgxc-benchmarking v25.02, NeMo and Megatron-Core in bf16 with the distributed optimizer, on nodes of 8
H100 of 80 GB with 400 Gb/s each. Narayanan et al. (Efficient large-scale language model training on GPU clusters using
Megatron-LM, 2021), table 1, on nodes of 8 A100 of 80 GB with 200 Gb/s each; microbatches and chunks are those of
`examples/sc21/run_table_1.sh` in Megatron-LM. It ran in fp16 and computed every block again. It tells flops a second
and device; by its equation 3 a step of B sequences of s tokens, l layers of width h and V words takes

    96 B s l h^2 (1 + s / 6h + V / 16 l h) / (devices * flops a second and device)
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from recipes import a100, h100
from torch import nn

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.cost_models import Cluster
from autoddl.cost_models.software import run_by, software_named
from autoddl.explain.run_seconds import seconds_as_run
from autoddl.validation.layers import Decoder, Shape

from gpt3 import gpt3_175b  # isort: skip
from llama import llama3, llama3_8b, llama3_70b  # isort: skip

LIMIT = 300.0
"""Seconds that the search over stages may take."""

TOKENS, WORDS = 2048, 51200
"""Tokens of a sequence of table 1, and of its vocabulary."""


class Grid(NamedTuple):
    """A recipe: nodes of eight, sequences and microbatches of a step, degrees, schedule, and published seconds."""

    model: Callable[[int], nn.Module]
    nodes: int
    batch: int
    microbatches: int
    degrees: str
    schedule: str
    seconds: float
    place: Callable[..., Cluster] = h100
    software: str = "nemo"
    precision: str = "bf16-mixed"


class Scaled(NamedTuple):
    """A row of table 1: the model's sizes, devices, how it was divided, and teraflops a second and device."""

    layers: int
    width: int
    heads: int
    devices: int
    batch: int
    tensor: int
    parts: int
    rows: int
    chunks: int
    teraflops: float

    def grid(self) -> Grid:
        """The row as a recipe: microbatches of `rows` sequences on each replica."""
        replicas = self.devices // (self.tensor * self.parts)
        sizes = {"tp": self.tensor, "dp": replicas, "pp": self.parts}
        degrees = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        flops = 96.0 * self.batch * TOKENS * self.layers * self.width ** 2 * (
            1 + TOKENS / (6 * self.width) + WORDS / (16 * self.layers * self.width))
        return Grid(self.model, self.devices // 8, self.batch, self.batch // (self.rows * replicas),
                    ",".join((*degrees, "recompute=full")), f"interleaved:{self.chunks}" if self.chunks > 1 else "",
                    flops / (self.devices * self.teraflops * 1e12), a100, "megatron-2022", "bf16")

    def model(self, batch: int) -> nn.Module:
        """The GPT as Megatron-LM had it then, on the meta device: two products around a softmax, and dropout."""
        return _Sampled(Shape(self.width, self.heads, self.heads, 4 * self.width, WORDS, batch, TOKENS, fused=False,
                              dropout=True), self.layers)


class _Sampled(Decoder):
    """A decoder on the meta device that knows its batch."""

    def __init__(self, shape: Shape, layers: int) -> None:
        with torch.device("meta"):
            super().__init__(shape, layers)
            self.ids = torch.zeros(shape.batch, shape.length, dtype=torch.int64)

    def example_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.ids


def _8b(batch: int) -> nn.Module:
    return llama3_8b(batch=batch)


def _70b(batch: int) -> nn.Module:
    return llama3_70b(batch=batch)


def _gpt3(batch: int) -> nn.Module:
    return gpt3_175b(batch=batch)


def _405b(batch: int) -> nn.Module:
    return llama3(126, 16384, 53248, 128, batch, 8192)


TABLE_1 = {
    "1.7B": Scaled(24, 2304, 24, 32, 512, 1, 1, 16, 1, 137),
    "3.6B": Scaled(30, 3072, 32, 64, 512, 2, 1, 16, 1, 138),
    "7.5B": Scaled(36, 4096, 32, 128, 512, 4, 1, 16, 1, 142),
    "18.4B": Scaled(40, 6144, 48, 256, 1024, 8, 1, 8, 1, 135),
    "39.1B": Scaled(48, 8192, 64, 512, 1536, 8, 2, 4, 1, 138),
    "76.1B": Scaled(60, 10240, 80, 1024, 1792, 8, 4, 2, 3, 140),
    "145.6B": Scaled(80, 12288, 96, 1536, 2304, 8, 8, 2, 2, 148),
    "310.1B": Scaled(96, 16384, 128, 1920, 2160, 8, 16, 1, 2, 155),
    "529.6B": Scaled(105, 20480, 128, 2520, 2520, 8, 35, 1, 3, 163),
    "1008B": Scaled(128, 25600, 160, 3072, 3072, 8, 64, 1, 1, 163),
}
"""By size, GPT of 2,048 tokens; teraflops are the published ones, those of recomputation included."""


GRIDS = {
    "Llama 3.1 8B, 64 H100": Grid(_8b, 8, 1024, 32, "cp=2,zero=1", "", 13.0),
    "Llama 3.1 70B, 64 H100": Grid(_70b, 8, 128, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.61),
    "Llama 3.1 70B, 128 H100": Grid(_70b, 16, 256, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.70),
    "Llama 3.1 70B, 1,024 H100": Grid(_70b, 128, 2048, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.86),
    "Llama 3.1 405B, 576 H100": Grid(_405b, 72, 252, 63, "tp=8,cp=2,pp=9,zero=1,sp", "interleaved:7", 17.50),
    "GPT-3 175B, 128 H100": Grid(_gpt3, 16, 256, 64, "tp=4,pp=8,zero=1,sp", "interleaved:12", 8.309),
    "GPT-3 175B, 256 H100": Grid(_gpt3, 32, 512, 64, "tp=4,pp=8,zero=1,sp", "interleaved:12", 8.408),
    **{f"GPT {size}, {one.devices:,} A100": one.grid() for size, one in TABLE_1.items()},
}
"""By name of the model and the devices."""


def _planned(name: str, whose: str) -> str:
    """The row of one plan."""
    grid, began = GRIDS[name], time.process_time()
    parts = int(dict(one.partition("=")[::2] for one in grid.degrees.split(",")).get("pp", 1))
    common: dict[str, Any] = {"precision": grid.precision, "microbatches": (grid.microbatches,), "workers": 1}
    theirs = {**common, "mine": grid.degrees} | ({"schedule": (grid.schedule or "1f1b",)} if parts > 1 else {})
    schedules = ("1f1b", "zb-h1", *([grid.schedule] if grid.schedule else []))
    ours = {**common, "max_axes": 2, "recompute": "search", "tolerance": 2e-3} | (
        {"stages": (parts,), "stages_limit": LIMIT, "schedule": schedules} if parts > 1 else {})
    software, note = software_named(grid.software), ""
    asked, place = theirs if whose == "theirs" else ours, run_by(grid.place(grid.nodes), software)
    try:
        plan = autoddl.plan(grid.model(grid.batch), place, **asked)
    except Infeasible:
        plan = autoddl.plan(grid.model(grid.batch), place, **asked, budget="1 TB")
        note = ", more than the 80 GB that there are"
    schedule = f"{len(plan.pipeline.stages)} stages, {plan.pipeline.name}" if plan.pipeline else str(plan.mesh)
    gap = "" if whose == "theirs" else f", gap {plan.gap:.2%}"
    return (f"{plan.predicted.seconds:.2f} s{gap}, as run {seconds_as_run(plan, software):.2f} s, {schedule}; peak "
            f"{plan.predicted.peak_bytes / 1e9:.1f} GB{note}; {time.process_time() - began:.0f} CPU s")


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
