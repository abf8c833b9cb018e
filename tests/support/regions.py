"""A module that uses torch.autocast inside, in several ways."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "nested", "regions"]

KINDS = ("plain", "nested", "decorated", "in place", "entered twice", "no gradient")


class Regions(nn.Module):
    """Three layers; `kind` says where autocast is, `device` what it is called for."""

    def __init__(self, kind: str = "plain", device: str = "cpu", width: int = 16) -> None:
        super().__init__()
        self.kind, self.device = kind, device
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def cast(self, **options: Any) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, **options)

    @torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]
    def decorated(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(x)
        return y

    def middle(self, x: Tensor) -> Tensor:
        match self.kind:
            case "nested":
                with self.cast():
                    x = self.second(x).relu()
                    with self.cast(enabled=False):
                        x = self.third(x.float())
                        with self.cast():
                            x = x + self.second(x)
            case "decorated":
                x = self.decorated(x)
            case "in place":
                with self.cast():
                    y = x.clone()
                    z = self.second(y)
                    y.mul_(2)
                    x = z + self.second(y)
            case "entered twice":
                with self.cast():
                    x = self.second(x)
                with self.cast():
                    x = self.second(x).to(x.dtype).relu()
            case "no gradient":
                with self.cast(), torch.no_grad():
                    y = self.second(x)
                x = x + y
            case _:
                with self.cast():
                    x = self.second(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        loss: Tensor = self.third(self.middle(x).float()).square().mean()
        return loss


def regions(kind: str = "plain", device: str = "cpu") -> tuple[nn.Module, Tensor]:
    return Regions(kind, device), torch.randn(8, 16)


def nested() -> tuple[nn.Module, Tensor]:
    """A factory for `verify`."""
    return regions("nested", "cuda")
