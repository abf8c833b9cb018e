"""Plans with stages and their proofs: python examples/benchmarks/pipelines.py [part of a case's name] [processes]

For every case the best plan without stages, the best pipeline of every candidate with its bound, and the gap of the
plan that is found. Seconds of planning are CPU seconds, captures included, with one process unless more are asked for.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpt import gpt
from gpt3 import gpt3_175b
from llama import llama3_8b, llama3_70b
from torch import Tensor, nn
from torch.nn import functional

import autoddl
from autoddl.explain.pipeline_proof import check_pipeline

CLUSTERS = Path(__file__).parents[1] / "clusters"


class ParallelBlock(nn.Module):
    """Attention beside an MLP, both of one norm, as in GPT-J."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        found: Tensor = x + self.out(mixed) + self.down(functional.gelu(self.up(y)))
        return found


class Encoder(nn.Module):
    """30 parallel blocks of 2,560 over 1,024 frames of 512 numbers, and one of 1,000 classes for each of 192 series."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(512, 2560), nn.ModuleList(ParallelBlock(2560, 20) for _ in range(30))
        self.norm, self.head = nn.LayerNorm(2560), nn.Linear(2560, 1000)

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        return torch.empty(192, 1024, 512, device="meta"), torch.empty(192, dtype=torch.long, device="meta")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x).mean(1)), y)


class CrossAttention(nn.Module):
    """Attention to the memory of an encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.query = heads, nn.LayerNorm(width), nn.Linear(width, width)
        self.keys, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in (self.query(self.norm(x)), *self.keys(memory).chunk(2, -1)))
        found: Tensor = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class EncoderDecoder(nn.Module):
    """12 and 12 blocks of 2,048, which share an embedding of 32,128 tokens; 96 pairs of 512 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(32128, 2048), nn.LayerNorm(2048), nn.Linear(2048, 32128)
        self.encoder, self.decoder = (nn.ModuleList(ParallelBlock(2048, 16) for _ in range(12)) for _ in range(2))
        self.cross = nn.ModuleList(CrossAttention(2048, 16) for _ in range(12))

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        one, two, three = (torch.empty(96, 512, dtype=torch.long, device="meta") for _ in range(3))
        return one, two, three

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(target)
        for block in self.encoder:
            memory = block(memory)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            x = cross(block(x), memory)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class TowerAndDecoder(nn.Module):
    """20 blocks of 1,280 over 256 patches, which every third of 18 blocks of 2,048 reads; 96 pairs, 512 tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.tower = nn.Linear(588, 1280), nn.ModuleList(ParallelBlock(1280, 16) for _ in range(20))
        self.bridge, self.tokens = nn.Linear(1280, 2048), nn.Embedding(32000, 2048)
        self.blocks = nn.ModuleList(ParallelBlock(2048, 16) for _ in range(18))
        self.cross = nn.ModuleList(CrossAttention(2048, 16) for _ in range(6))
        self.norm, self.head = nn.LayerNorm(2048), nn.Linear(2048, 32000)

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        one, two = (torch.empty(96, 512, dtype=torch.long, device="meta") for _ in range(2))
        return torch.empty(96, 256, 588, device="meta"), one, two

    def forward(self, patches: Tensor, text: Tensor, labels: Tensor) -> Tensor:
        seen, x = self.enter(patches), self.tokens(text)
        for block in self.tower:
            seen = block(seen)
        seen = self.bridge(seen)
        for i, block in enumerate(self.blocks):
            x = self.cross[i // 3](block(x), seen) if i % 3 == 2 else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def without_values(make: Callable[..., nn.Module], **sizes: int) -> Callable[[], nn.Module]:
    """Makes a model without values, which a plan needs none of."""
    def made() -> nn.Module:
        with torch.device("meta"):
            return make(**sizes)
    return made


THREE = {"stages": (1, 2, 3, 6), "microbatches": (8, 16), "schedule": ("1f1b", "interleaved:2", "zb-h1"),
         "precision": "bf16-mixed", "recompute": "search", "tolerance": 0.01, "stages_limit": 60.0}

AT_SCALE = {"stages": (4, 8), "microbatches": (16, 32), "schedule": ("1f1b", "interleaved:2", "zb-h1"),
            "precision": "bf16-mixed", "recompute": "search", "tolerance": 0.01, "stages_limit": 250.0}

UNLIKE = THREE | {"stages": (3, 6), "schedule": ("1f1b", "zb-h1"), "stages_limit": 120.0}

UNSEEN = {"stages": (2, 4, 8), "microbatches": (8, 16), "schedule": ("1f1b", "interleaved:2", "zb-v"),
          "precision": "bf16-mixed", "recompute": "search", "tolerance": 0.01, "stages_limit": 120.0}

CASES: Mapping[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "gpt thin links": (lambda: gpt(layers=8), "rehearsal-4x1-200.yaml", {
        "stages": (1, 2, 4), "microbatches": (4, 8), "schedule": ("1f1b", "gpipe", "interleaved:2")}),
    "gpt two nodes": (lambda: gpt(layers=8), "rehearsal-2x2-200.yaml", {
        "stages": (1, 2, 4), "microbatches": (4, 8)}),
    "llama 8b": (lambda: llama3_8b(batch=128), "h100-8x8.yaml", {
        "stages": (1, 2, 4, 8), "microbatches": (16,), "precision": "bf16-mixed"}),
    "all schedules, llama": (lambda: llama3_8b(batch=128), "h100-8x8.yaml", {
        "stages": (2, 4), "microbatches": (8, 16, 32), "schedule": ("1f1b", "interleaved:2", "zb-h1"),
        "precision": "bf16-mixed", "tolerance": 0.002, "stages_limit": 50.0}),
    "llama 70b": (lambda: llama3_70b(batch=256), "h100-8x16x8.yaml", {
        "stages": (1, 4, 8), "microbatches": (16, 32), "precision": "bf16-mixed", "recompute": "search"}),
    "gpt-3": (lambda: gpt3_175b(batch=512), "h100-8x16x8.yaml", {
        "stages": (1, 4, 8), "microbatches": (1, 16, 32), "precision": "bf16-mixed", "recompute": "search"}),
    "all schedules, gpt": (lambda: gpt3_175b(batch=512), "h100-8x16x8.yaml", AT_SCALE),
    "all schedules, gpt on A100": (lambda: gpt3_175b(batch=512), "a100-8x16x8.yaml", AT_SCALE),
    "all schedules, 70b": (lambda: llama3_70b(batch=256), "h100-8x16x8.yaml", AT_SCALE),
    "zero-bubble V, 70b": (lambda: llama3_70b(batch=256), "h100-8x16x8.yaml", AT_SCALE | {
        "schedule": ("1f1b", "interleaved:2", "zb-v")}),
    "256 H100, 70b": (lambda: llama3_70b(batch=128), "h100-32x8.yaml", AT_SCALE),
    "unseen, gpt of 52 layers": (
        without_values(gpt, layers=52, width=4096, heads=32, batch=96, context=2048), "h100-8x8.yaml",
        UNSEEN | {"schedule": ("1f1b", "zb-v", "dualpipe-v"), "stages_limit": 180.0}),
    "unseen, gpt of 40 layers": (
        without_values(gpt, layers=40, width=5120, heads=40, batch=64, context=2048), "h100-8x8.yaml",
        UNSEEN | {"schedule": ("1f1b", "zb-h1", "zb-v", "chimera:1")}),
    "unseen, gpt of 60 layers": (
        without_values(gpt, layers=60, width=6144, heads=48, batch=128, context=2048), "h100-8x8.yaml",
        UNSEEN | {"stages": (4, 8, 16), "microbatches": (8, 16, 32)}),
    "encoder": (without_values(Encoder), "l40s-6x4.yaml", THREE),
    "encoder of 14 GB": (without_values(Encoder), "l40s-6x4.yaml", THREE | {"budget": 14e9}),
    "pairs": (without_values(EncoderDecoder), "l40s-6x4.yaml", UNLIKE),
    "tower": (without_values(TowerAndDecoder), "l40s-6x4.yaml", UNLIKE),
    "tower in a V": (without_values(TowerAndDecoder), "l40s-6x4.yaml", UNLIKE | {
        "microbatches": (12,), "schedule": ("1f1b", "interleaved:2", "zb-v"), "stages_limit": 150.0}),
}


def main(wanted: str = "", workers: str = "1") -> None:
    for name, (model, cluster, options) in CASES.items():
        if wanted not in name:
            continue
        began, clock = time.process_time(), time.perf_counter()
        plan = autoddl.plan(model(), CLUSTERS / cluster, max_axes=2, workers=int(workers), **options)
        took, wall = time.process_time() - began, time.perf_counter() - clock
        others, own = (getrusage(which) for which in (RUSAGE_CHILDREN, RUSAGE_SELF))
        checked = check_pipeline(plan) if plan.pipeline else None
        stages = f"{len(plan.pipeline.stages)} stages, {plan.pipeline.name}" if plan.pipeline else "no stages"
        print(f"{name} on {cluster}: {plan.predicted.seconds:.6g} s with {stages}, {plan.microbatches} microbatches, "
              f"gap {plan.gap:.2%}, proof {'checked' if checked else 'not checked'}; {took:.0f} CPU s here and "
              f"{others.ru_utime + others.ru_stime:.0f} in other processes so far, {wall:.0f} s; at most "
              f"{own.ru_maxrss / 1e6:.2f} GB, another process {others.ru_maxrss / 1e6:.2f} GB")
        if (whole := plan.source["bound_without_stages"]) is not None:
            print(f"    without stages no less than {whole:.6g} s")
        for row in plan.source["alternatives"]:
            found = "-" if row["seconds"] is None else f"{row['seconds']:.6g} s"
            bound = "no plan" if row["bound"] is None else f"{row['bound']:.6g} s"
            print(f"    {row['stages']} stages, {row['schedule']}, {row['microbatches']} microbatches: {found}, no "
                  f"less than {bound}; {row['detail']}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
