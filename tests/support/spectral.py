"""Small models that compute with complex numbers of their parameters, by name: (module, batch)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "named"]


class _Mixing(nn.Module):
    """FNet's: tokens mix by the real part of a transform over positions and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = h + torch.fft.fftn(h, dim=(1, 2)).real
        return F.cross_entropy((h + self.down(torch.relu(self.up(h)))).flatten(0, 1), tokens.flatten() % 16)


class _Operator(nn.Module):
    """A Fourier neural operator: complex weights for the lowest frequencies, the others left at 0."""

    def __init__(self, width: int = 8, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.out, self.modes = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1), modes
        self.weight = nn.Parameter(0.1 * torch.randn(width, width, modes, modes, dtype=torch.cfloat))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, m = self.lift(x), self.modes
        found = torch.fft.rfft2(h)
        kept = torch.zeros_like(found)
        kept[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.weight)
        return F.mse_loss(self.out(torch.relu(h + torch.fft.irfft2(kept, s=h.shape[-2:]))), y)


class _Filter(nn.Module):
    """GFNet's: a global filter over the places of an image, whose weights are stored as pairs."""

    def __init__(self, side: int = 8, width: int = 8) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(width, width), side
        self.pairs = nn.Parameter(0.1 * torch.randn(side, side // 2 + 1, width, 2))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft2(self.linear(x), dim=(1, 2), norm="ortho") * torch.view_as_complex(self.pairs)
        y: Tensor = torch.fft.irfft2(found, s=(self.side, self.side), dim=(1, 2), norm="ortho")
        return y.square().mean()


class _Masking(nn.Module):
    """A mask over the short-time spectrum of a signal, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(64, 64), nn.Linear(17, 17)
        self.window = nn.Buffer(torch.hann_window(32))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stft(self.linear(x), 32, hop_length=8, window=self.window, return_complex=True)
        mask = torch.sigmoid(self.mask(found.abs().transpose(1, 2))).transpose(1, 2)
        y = torch.istft(found * mask, 32, hop_length=8, window=self.window, length=64)
        return (y - x).abs().mean() + torch.polar(mask, found.angle().detach()).real.mean()


class _Complex(nn.Module):
    """A complex layer on complex inputs, whose parts two real products share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=torch.cfloat), nn.Linear(8, 8)

    def forward(self, z: Tensor) -> Tensor:
        y = self.first(z)
        return torch.complex(self.second(y.real), self.second(y.imag)).conj().abs().square().mean()


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = MappingProxyType({
    "mixing": (_Mixing, lambda rows: (torch.randint(0, 64, (rows, 8)),)),
    "operator": (_Operator, lambda rows: (torch.randn(rows, 1, 12, 10), torch.randn(rows, 1, 12, 10))),
    "filter": (_Filter, lambda rows: (torch.randn(rows, 8, 8, 8),)),
    "masking": (_Masking, lambda rows: (torch.randn(rows, 64),)),
    "complex": (_Complex, lambda rows: (torch.randn(rows, 8, dtype=torch.cfloat),))})


def named(name: str, rows: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of a name and a batch with so many rows."""
    made, batch = MODELS[name]
    return made(), batch(rows)
