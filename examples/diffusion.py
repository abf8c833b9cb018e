"""A diffusion transformer on image latents, planned for a cluster. Run: python examples/diffusion.py [cluster.yaml]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class Modulated(nn.Module):
    """Attention and a feed-forward, each scaled, shifted and gated by the embedding of the time step (adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, 6 * width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scales = self.modulate(F.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        x = x + scales[2] * self.attention(self.norm(x) * (1 + scales[0]) + scales[1])
        y = self.norm(x) * (1 + scales[3]) + scales[4]
        return torch.add(x, scales[5] * self.down(F.gelu(self.up(y), approximate="tanh")))

    def attention(self, y: Tensor) -> Tensor:
        batch, length, width = y.shape
        q, k, v = self.qkv(y).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return mixed


class Diffusion(nn.Module):
    """Predicts the noise in a latent image from its class and its time step; forward returns the mean squared error."""

    frequencies: Tensor

    def __init__(self, layers: int, width: int, heads: int, side: int, channels: int, classes: int, batch: int) -> None:
        super().__init__()
        self.batch, self.channels, self.side, self.classes = batch, channels, side, classes
        self.patch, self.out = nn.Conv2d(channels, width, 2, 2), nn.Linear(width, 4 * channels)
        self.positions = nn.Parameter(torch.zeros(1, (side // 2) ** 2, width))
        self.labels, self.time = nn.Embedding(classes, width), nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.register_buffer("frequencies", torch.exp(-torch.arange(width // 2) * (9.2 / (width // 2))))
        self.blocks = nn.ModuleList(Modulated(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, latents: Tensor, noise: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        share = time.view(-1, 1, 1, 1)
        x = self.patch(latents * (1 - share) + noise * share).flatten(2).transpose(1, 2) + self.positions
        angles = 1000 * time.unsqueeze(1) * self.frequencies
        when = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.labels(labels)
        for block in self.blocks:
            x = block(x, when)
        found = self.out(self.norm(x)).view(-1, self.side // 2, self.side // 2, 2, 2, self.channels)
        return F.mse_loss(found.permute(0, 5, 1, 3, 2, 4).reshape(noise.shape), noise - latents)

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = (self.batch, self.channels, self.side, self.side)
        return (torch.randn(shape, device="cpu"), torch.randn(shape, device="cpu"),
                torch.rand(self.batch, device="cpu"), torch.randint(0, self.classes, (self.batch,), device="cpu"))


def diffusion(layers: int = 4, width: int = 128, heads: int = 4, side: int = 16, channels: int = 4, classes: int = 10,
              batch: int = 8) -> Diffusion:
    return Diffusion(layers, width, heads, side, channels, classes, batch)


def dit_xl(batch: int = 256) -> Diffusion:
    """673 million parameters on latents of 32 x 32, as the largest of the DiT paper; on the meta device."""
    with torch.device("meta"):
        return diffusion(layers=28, width=1152, heads=16, side=32, classes=1000, batch=batch)


if __name__ == "__main__":
    print(autoddl.plan(diffusion(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
