"""Times plans of graphs that are wide: python examples/benchmarks/wide_graphs.py [NAME ..]

    densenet121, densenet201    torchvision: each layer reads a list that grows
    coat                        timm's CoaT tiny: paths at four scales, which read each other
    rwkv                        two layers of RWKV, 64 steps of the recurrence written out
    xlstm                       two blocks of an mLSTM, 24 steps written out, each with a matrix as its state
    unet3d                      a U-Net in three dimensions
    whisper-large               transformers, 32 and 32 layers

Each is planned on 2 x 2 and 8 x 8 devices of `h100-8x8.yaml`, mesh given, and printed with processor seconds of
`autoddl.plan`, capture included, and the gap. Libraries that are not installed are named.
"""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from family_models import Squares, declared_torchvision
from torch import Tensor, nn

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.cost_models import Cluster, parse_cluster

CLUSTER = Path(__file__).parents[1] / "clusters" / "h100-8x8.yaml"
SIZES = (2, 8)


class Rwkv(nn.Module):
    """Time mixing of RWKV-4 (Peng et al. 2023) and channel mixing, over (batch, steps, width)."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.norm, self.second = steps, nn.LayerNorm(width), nn.LayerNorm(width)
        self.key, self.value, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.decay, self.first = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        keys, values = self.key(h), self.value(h)
        above = below = torch.zeros_like(keys[:, 0])
        mixed, fade = [], torch.exp(-torch.exp(self.decay))
        for t in range(self.steps):
            weight, own = keys[:, t].exp(), (self.first + keys[:, t]).exp()
            mixed.append((above + own * values[:, t]) / (below + own))
            above, below = fade * above + weight * values[:, t], fade * below + weight
        x = x + self.out(self.gate(h).sigmoid() * torch.stack(mixed, 1))
        found: Tensor = x + self.down(self.up(self.second(x)).relu().square())
        return found


class Mlstm(nn.Module):
    """The matrix memory of xLSTM (Beck et al. 2024), of one head, step by step."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps, self.norm = steps, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gates = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        queries, keys, values, gates = self.query(h), self.key(h), self.value(h), self.gates(h)
        memory = torch.zeros_like(keys[:, 0, :, None] * values[:, 0, None, :])
        total, read = torch.zeros_like(keys[:, 0]), []
        for t in range(self.steps):
            enter, keep = gates[:, t, :1].exp(), gates[:, t, 1:].sigmoid()
            memory = keep[..., None] * memory + enter[..., None] * keys[:, t, :, None] * values[:, t, None, :]
            total = keep * total + enter * keys[:, t]
            size = (total * queries[:, t]).sum(-1, keepdim=True).abs().clamp_min(1.0)
            read.append((queries[:, t, None, :] @ memory)[:, 0] / size)
        found: Tensor = x + self.out(torch.stack(read, 1))
        return found


class Unet3d(nn.Module):
    """Three scales of convolutions, concatenated on the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.pair(a, b) for a, b in ((1, width), (width, 2 * width), (2 * width, 4 * width)))
        self.up = nn.ModuleList(self.pair(3 * a, a) for a in (2 * width, width))
        self.head = nn.Conv3d(width, 2, 1)

    @staticmethod
    def pair(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.BatchNorm3d(after), nn.ReLU(),
                             nn.Conv3d(after, after, 3, padding=1), nn.BatchNorm3d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.down:
            kept.append(block(x if not kept else nn.functional.max_pool3d(kept[-1], 2)))
        x = kept.pop()
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        found: Tensor = self.head(x)
        return found


def _vision(name: str) -> nn.Module:
    library = declared_torchvision()
    if library is None:
        raise ImportError("torchvision is not installed")
    return Squares(library.models.get_model(name, weights=None), torch.randn(64, 3, 224, 224))


def _coat() -> nn.Module:
    declared_torchvision()
    return Squares(importlib.import_module("timm").create_model("coat_tiny"), torch.randn(64, 3, 224, 224))


def _whisper() -> nn.Module:
    import transformers
    config: Any = transformers.WhisperConfig(d_model=1280, encoder_layers=32, decoder_layers=32,
                                             encoder_attention_heads=20, decoder_attention_heads=20,
                                             encoder_ffn_dim=5120, decoder_ffn_dim=5120, use_cache=False)
    with torch.device("meta"):
        model = transformers.WhisperModel(config)
    return Squares(model, input_features=torch.randn(64, 80, 3000), decoder_input_ids=torch.zeros(64, 448).long())


def _layers(layer: Callable[[int, int], nn.Module], width: int, steps: int) -> Callable[[], nn.Module]:
    return lambda: Squares(nn.Sequential(*(layer(width, steps) for _ in range(2))), torch.randn(64, steps, width))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "densenet121": lambda: _vision("densenet121"), "densenet201": lambda: _vision("densenet201"), "coat": _coat,
    "rwkv": _layers(Rwkv, 256, 64), "xlstm": _layers(Mlstm, 128, 24),
    "unet3d": lambda: Squares(Unet3d(16), torch.randn(64, 1, 32, 32, 32)), "whisper-large": _whisper}


def cluster_of(size: int) -> Cluster:
    """So many nodes of so many devices."""
    return parse_cluster(CLUSTER.read_text().replace("size: 8", f"size: {size}"), f"h100-{size}x{size}")


def row(name: str, size: int) -> str:
    """The line of one model on one mesh."""
    model, mesh = MODELS[name](), f"net={size},node={size}"
    start = time.process_time()
    plan = autoddl.plan(model, cluster_of(size), mesh=mesh, workers=1)
    seconds = time.process_time() - start
    return f"| {name} | {mesh} | {seconds:.1f} | {plan.predicted.seconds * 1e3:.2f} ms | {plan.gap:.3%} |"


def main() -> None:
    print("| model | mesh | CPU s | step | gap |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        for size in SIZES:
            try:
                print(row(name, size), flush=True)
            except (ImportError, Infeasible) as error:
                print(f"| {name} | {size} x {size} | left out: {error} | | |", flush=True)


if __name__ == "__main__":
    main()
