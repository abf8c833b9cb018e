"""A U-Net with group norm and attention at its bottom. Run: python examples/unet.py [cluster.yaml]"""

import sys
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class Residual(nn.Module):
    """Two convolutions behind group norms, and a shortcut of 1 x 1."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, source), nn.GroupNorm(4, target)
        self.wide, self.same = nn.Conv2d(source, target, 3, padding=1), nn.Conv2d(target, target, 3, padding=1)
        self.shortcut = nn.Conv2d(source, target, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(F.silu(self.first(x)))
        return torch.add(self.shortcut(x), self.same(F.silu(self.second(y))))


class Attention(nn.Module):
    """Attention among all pixels of a feature map."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, width)
        self.qkv, self.o = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, length = x.shape
        parts = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, height * length)
        q, k, v = parts.transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(batch, width, height, length)
        return torch.add(x, self.o(y))


class UNet(nn.Module):
    """Segments images: down by strided convolutions, up by interpolation, with skips; forward returns the mean loss."""

    def __init__(self, width: int, levels: int, heads: int, side: int, classes: int, batch: int) -> None:
        super().__init__()
        self.shape, self.classes = (batch, 3, side, side), classes
        widths = [width * 2**k for k in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(one, one) for one in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.middle = Attention(widths[-1], heads)
        self.grow = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Residual(2 * one, one) for one in widths[:-1])
        self.norm, self.head = nn.GroupNorm(4, width), nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, skips = self.down[0](self.stem(images)), []
        for shrink, block in zip(self.shrink, self.down[1:], strict=True):
            skips.append(x)
            x = block(shrink(x))
        x = self.middle(x)
        for grow, block, skip in zip(reversed(self.grow), reversed(self.up), reversed(skips), strict=True):
            x = block(torch.cat([grow(F.interpolate(x, scale_factor=2.0, mode="nearest")), skip], dim=1))
        return F.cross_entropy(self.head(F.silu(self.norm(x))), labels)

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        batch, _, height, width = self.shape
        return (torch.randn(self.shape, device="cpu"),
                torch.randint(0, self.classes, (batch, height, width), device="cpu"))


def unet(width: int = 16, levels: int = 3, heads: int = 4, side: int = 32, classes: int = 5, batch: int = 8) -> UNet:
    return UNet(width, levels, heads, side, classes, batch)


def unet_large(batch: int = 64) -> UNet:
    """214 million parameters on images of 256 x 256; on the meta device."""
    with torch.device("meta"):
        return unet(width=128, levels=5, heads=8, side=256, classes=150, batch=batch)


if __name__ == "__main__":
    print(autoddl.plan(unet(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
