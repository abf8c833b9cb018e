"""Small models of operators on images and sequences, with a batch each, as factories of `verify`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["bagged", "decoder", "recurrent"]


class Decoder(nn.Module):
    """Two steps of a U-Net, up by interpolation, transposed convolution and pixel shuffle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width // 4, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, width, 2, 2), nn.ConvTranspose2d(width, width, 2, 2)
        self.norm, self.plain = nn.InstanceNorm2d(width, affine=True), nn.BatchNorm2d(width, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.norm(self.first(x))
        h = self.plain(self.down(F.relu(skip)))
        h = F.interpolate(h, scale_factor=2, mode="bilinear") + self.up(h)
        h = F.interpolate(F.pixel_shuffle(h + skip, 2), scale_factor=0.5, mode="nearest")
        loss: Tensor = F.mse_loss(self.last(h), x)
        return loss


def decoder(width: int = 8, size: int = 8, batch: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Decoder(width), torch.randn(batch, 3, size, size)


class Recurrent(nn.Module):
    """A recurrent layer, a form of two inputs, and distances."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.LSTM(6, 8, batch_first=True), nn.GRUCell(8, 8)
        self.form = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
        self.pair = nn.Bilinear(4, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, (last, _) = self.layer(x)
        last = self.cell(last[0], h[:, 0])
        y = self.pair(self.form(h), h)
        loss: Tensor = torch.cdist(y, y.flip(1) + 1).mean() + last.square().mean()
        return loss


def recurrent() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Recurrent(), torch.randn(8, 5, 6)


class Bagged(nn.Module):
    """Tables of a recommender, read in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(12, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.top = nn.Linear(24, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        found = torch.cat([table(ids) for table in self.tables], -1)
        return F.binary_cross_entropy_with_logits(self.top(found).squeeze(-1), labels)


def bagged() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Bagged(), (torch.randint(12, (8, 3)), torch.rand(8))
