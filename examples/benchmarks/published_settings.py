"""Configurations that others publish, as pins, beside their published seconds and what the search finds.

    python examples/benchmarks/published_settings.py [part of a row's name] [theirs | ours]

Theirs are the degrees of a run (`--mine`) with its schedule, in equal stages, on the kernels of the program that ran it
(`--software`); *as run* is the step as that program runs it, in brackets its 80 % interval. Ours has the same devices,
batch and microbatches, and as many parts of the cluster. Layouts, cuts, states and recomputation are free, and the
schedule is 1F1B, interleaved or ZB-H1. Where nothing fits, theirs is priced without a bound on memory. Each plan is
made in a process of its own, in the precision of the program. Models are those of `examples/` for torchtitan; for the
others they have fewer, larger products, as Megatron's modules do. Nothing runs.

    torchtitan   `benchmarks/llama3_h100_202412_torchtitan.md` and `docs/performance.md`: tokens a second and device;
                 nodes of 8 H100 of 96 GB at 500 W with 400 Gb/s each, and of 8 A100 of 80 GB. Its pipelines have as
                 many microbatches as parts unless told otherwise (`parallelisms/pipelining_utils.py` of that time)
    Megatron     NVIDIA dgxc-benchmarking v25.02, NeMo and Megatron-Core in bf16 with the distributed optimizer, on
                 nodes of 8 H100 of 80 GB with 400 Gb/s each
    Llama 3      Llama team 2024, "The Llama 3 herd of models", table 4: flops a second and device. Its program is not
                 published, and is taken to be modern. A token's flops are 6 a weight and 6 l h s of causal attention.
                 126 layers and both ends are 128 chunks, eight on each of 16 parts
    GPT          Narayanan et al. (Efficient large-scale language model training on GPU clusters using Megatron-LM,
                 2021), table 1, on nodes of 8 A100 of 80 GB with 200 Gb/s each; microbatches and chunks are those of
                 `examples/sc21/run_table_1.sh` in Megatron-LM. It ran in fp16 and computed every block again. It tells
                 flops a second and device; by its equation 3 a step of B sequences of s tokens, l layers of width h
                 and V words takes

                     96 B s l h^2 (1 + s / 6h + V / 16 l h) / (devices * flops a second and device)
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from recipes import a100, h100
from torch import nn

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.cost_models.software import run_by, software_named
from autoddl.explain.run_seconds import seconds_as_run, sureness
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
                    flops / (self.devices * self.teraflops * 1e12), a100, "megatron-2022")

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


def _405b(batch: int) -> nn.Module:
    return llama3(126, 16384, 53248, 128, batch, 8192)


def _gpt3(batch: int) -> nn.Module:
    """Its vocabulary is padded, as Megatron pads it: a rank of tp has equal shards of the head."""
    return gpt3_175b(batch=batch, vocab=WORDS)


def fused_llama(layers: int, width: int, hidden: int, heads: int) -> Callable[[int], nn.Module]:
    """Llama 3 as Megatron has it: one product for queries, keys and values, one for gate and up, fused norms."""
    return lambda batch: _Sampled(Shape(width, heads, 8, hidden, 128256, batch, 8192, gated=True, bias=False), layers)


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


MEGATRON_8B, MEGATRON_70B, MEGATRON_405B = (fused_llama(*sizes) for sizes in (
    (32, 4096, 14336, 32), (80, 8192, 28672, 64), (126, 16384, 53248, 128)))


def grand_teton(nodes: int) -> Cluster:
    """Nodes of eight H100 of 96 GB at 500 W, as in Grand Teton."""
    text = "name: one\ndevice: H100-96GB\nlevels: [{name: node, size: 8, link: NVLink4}]"
    return replace(h100(nodes), device=parse_cluster(text, "one").device)


def tokens(model: Callable[[int], nn.Module], devices: int, batch: int, degrees: str, rate: float, software: str,
           place: Callable[..., Cluster] = grand_teton, schedule: str = "", microbatches: int = 1) -> Grid:
    """A run with sequences of 8,192 tokens, by its tokens a second and device."""
    return Grid(model, devices // 8, batch, microbatches, degrees, schedule, batch * 8192 / (devices * rate), place,
                software)


def herd(devices: int, microbatches: int, teraflops: float) -> Grid:
    """A run of Llama 3 405B, of 2,048 sequences, by its flops a second and device."""
    flops = 2048 * 8192 * (6.0 * 405.9e9 + 6.0 * 126 * 16384 * 8192)
    return Grid(MEGATRON_405B, devices // 8, 2048, microbatches, "tp=8,pp=16,zero=2,sp", "interleaved:8",
                flops / (devices * teraflops * 1e12), h100, "modern")


FSDP = "zero=3,recompute=selective"
GRIDS = {
    **{f"torchtitan 8B, {n} H100{kind.replace('-', ', ')}": tokens(_8b, n, 2 * n, FSDP, rate, f"torchtitan{kind}")
       for n, rates in ((8, (5762, 6667, 8532)), (128, (5605, 6514, 8380)))
       for kind, rate in zip(("", "-compiled", "-float8"), rates, strict=True)},
    "torchtitan 70B, 256 H100, float8": tokens(_70b, 256, 512, "tp=8,zero=3,sp,recompute=full", 829,
                                               "torchtitan-float8"),
    **{f"torchtitan 405B, 512 H100, float8{said}": tokens(
        _405b, 512, 256, "tp=8,dp=8,pp=8,zero=2,sp,recompute=full", rate, "torchtitan-float8", schedule=schedule,
        microbatches=8) for said, schedule, rate in (("", "", 100), (", interleaved", "interleaved:2", 128))},
    "torchtitan 8B, 64 A100": tokens(_8b, 64, 64, FSDP, 2973, "torchtitan", a100),
    "torchtitan 70B, 64 A100": tokens(_70b, 64, 64, "zero=3,recompute=full", 331, "torchtitan", a100),
    "Megatron 8B, 64 H100": Grid(MEGATRON_8B, 8, 1024, 32, "cp=2,zero=1", "", 13.0),
    "Megatron 70B, 64 H100": Grid(MEGATRON_70B, 8, 128, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.61),
    "Megatron 70B, 128 H100": Grid(MEGATRON_70B, 16, 256, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.70),
    "Megatron 70B, 1,024 H100": Grid(MEGATRON_70B, 128, 2048, 64, "tp=4,cp=2,pp=4,zero=1,sp", "interleaved:5", 14.86),
    "Megatron 405B, 576 H100": Grid(MEGATRON_405B, 72, 252, 63, "tp=8,cp=2,pp=9,zero=1,sp", "interleaved:7", 17.50),
    "Llama 3 405B, 8,192 H100": herd(8192, 32, 430),
    "Llama 3 405B, 16,384 H100": herd(16384, 16, 400),
    "Megatron GPT-3 175B, 128 H100": Grid(_gpt3, 16, 256, 64, "tp=4,pp=8,zero=1,sp", "interleaved:12", 8.309),
    "Megatron GPT-3 175B, 256 H100": Grid(_gpt3, 32, 512, 64, "tp=4,pp=8,zero=1,sp", "interleaved:12", 8.408),
    **{f"GPT {size}, {one.devices:,} A100": one.grid() for size, one in TABLE_1.items()},
}
"""By name of the model and the devices."""


def _planned(name: str, whose: str) -> str:
    """The row of one plan."""
    grid, began = GRIDS[name], time.process_time()
    parts = int(dict(one.partition("=")[::2] for one in grid.degrees.split(",")).get("pp", 1))
    software, note = software_named(grid.software), ""
    common: dict[str, Any] = {"precision": software.precision, "optimizer": software.optimizer, "workers": 1,
                              "microbatches": (grid.microbatches,)}
    theirs = {**common, "mine": grid.degrees} | ({"schedule": (grid.schedule or "1f1b",)} if parts > 1 else {})
    schedules = ("1f1b", "zb-h1", *([grid.schedule] if grid.schedule else []))
    ours = {**common, "max_axes": 2, "recompute": "search", "tolerance": 2e-3} | (
        {"stages": (parts,), "stages_limit": LIMIT, "schedule": schedules} if parts > 1 else {})
    asked, place = theirs if whose == "theirs" else ours, run_by(grid.place(grid.nodes), software)
    try:
        plan = autoddl.plan(grid.model(grid.batch), place, **asked)
    except Infeasible:
        plan = autoddl.plan(grid.model(grid.batch), place, **asked, budget="1 TB")
        note = ", more than there is"
    schedule = f"{len(plan.pipeline.stages)} stages, {plan.pipeline.name}" if plan.pipeline else str(plan.mesh)
    seconds, sure = seconds_as_run(plan, software), sureness(plan)
    low, _, high = sure.of(seconds)
    said = f"{seconds / grid.seconds - 1:+.1%} of the published" if whose == "theirs" else f"gap {plan.gap:.2%}"
    return (f"{plan.predicted.seconds:.2f} s, as run {seconds:.2f} s ({low:.2f} to {high:.2f}), {said}, a tie within "
            f"{sure.common:.1%}, {schedule}; peak {plan.predicted.peak_bytes / 1e9:.1f} GB{note}; "
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
