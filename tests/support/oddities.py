"""Small modules whose middle once went wrong: factories, in float64, on eight rows of sixteen."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

ODD: dict[str, Callable[[Tensor], Tensor]] = {}


def odd(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Keeps a middle by its name."""
    ODD[function.__name__] = function
    return function


class Middle(nn.Module):
    """A linear layer, the middle `name`, a mean."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.name = nn.Linear(16, 16, dtype=torch.float64), name

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.linspace(-1.0, 1.0, 8 * 16, dtype=torch.float64).reshape(8, 16),)

    def forward(self, x: Tensor) -> Tensor:
        return ODD[self.name](self.first(x)).mean()


class Several(Middle):
    """Returns its loss, its logits and a running sum in a buffer."""

    def __init__(self) -> None:
        super().__init__("where")
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = ODD[self.name](self.first(x))
        self.seen += logits.detach().sum()  # type: ignore[operator]
        return logits.mean(), logits


def several() -> nn.Module:
    """The factory of a model with several outputs."""
    return Several()


def middle(name: str = "masked_product") -> Middle:
    """The factory."""
    return Middle(name)


@odd
def masked_product(h: Tensor) -> Tensor:
    return h * (h > 0)


@odd
def where(h: Tensor) -> Tensor:
    return torch.where(h > 0, h, h * 0.5)


@odd
def masked_fill(h: Tensor) -> Tensor:
    return h.masked_fill(h < 0, 0)


@odd
def filled_new_empty(h: Tensor) -> Tensor:
    """As MiniCPM 3 builds its rotated queries."""
    found = h.new_empty(8, 16)
    found[:, :8] = h[:, 8:]
    found[:, 8:] = 2 * h[:, :8]
    return found


@odd
def filled_empty_like(h: Tensor) -> Tensor:
    """As Wan's rotary embedding does."""
    found = torch.empty_like(h)
    found[..., 0::2] = h[..., 1::2]
    found[..., 1::2] = -h[..., 0::2]
    return found


@odd
def new_zeros(h: Tensor) -> Tensor:
    return (h.new_zeros(16) + 1) * h


@odd
def full_like(h: Tensor) -> Tensor:
    return torch.full_like(h, 2.0) * h


@odd
def mask_of_zeros(h: Tensor) -> Tensor:
    """As Swin's mask of shifted windows."""
    mask = h.new_zeros(8, 16)
    mask[:4, :8] = 1.0
    return h.masked_fill(mask == 0, 0.5) + h


@odd
def cast_down_and_up(h: Tensor) -> Tensor:
    """A cast down and up again."""
    return h.float().double() * 2


@odd
def infinite_product(h: Tensor) -> Tensor:
    """Infinite values in products, in one process too."""
    return h.masked_fill(torch.arange(16) < 1, torch.inf).abs() @ torch.ones(16, 4, dtype=h.dtype)


@odd
def infinite_mask_scaled(h: Tensor) -> Tensor:
    """A mask of attention that is added before the scores are multiplied by a tensor."""
    q = h.reshape(8, 4, 4)
    mask = torch.full((4, 4), -torch.inf, dtype=h.dtype).triu(1)
    scores = (q @ q.transpose(1, 2) + mask) * torch.full((4,), 0.5, dtype=h.dtype)
    return scores.softmax(-1) @ q


@odd
def infinite_logaddexp(h: Tensor) -> Tensor:
    """As torch.masked.logaddexp."""
    kept = torch.arange(16) % 2 == 0
    found = torch.logaddexp(torch.where(kept, h, -torch.inf), torch.where(kept, h * 2, -torch.inf))
    return found * torch.linspace(1.0, 2.0, 16, dtype=h.dtype)


@odd
def short_integers(h: Tensor) -> Tensor:
    """Whole numbers of two bytes between ops: gloo has no such type."""
    return h.masked_fill((h > 0).to(torch.int16).cumsum(1).to(torch.int16) > 3, 0.0)


@odd
def dead_without_gradient(h: Tensor) -> Tensor:
    """Values that nothing reads, under no_grad, before and between live ones."""
    places = torch.arange(16)[None]
    with torch.no_grad():
        places == 3  # noqa: B015
    others = torch.arange(16)[None]
    with torch.no_grad():
        others == 4  # noqa: B015
    with torch.no_grad():
        live = h.detach().abs() * 2
    return h * live


@odd
def windows_of_memory(h: Tensor) -> Tensor:
    """As Longformer's chunks: windows that overlap, of rows that lie in memory by columns, and of a mask of ones."""
    turned, mask = h.t().contiguous().t(), h.new_ones(8, 16)
    windows = turned.as_strided((16, 3, 4), (8, 2, 1))
    return windows * mask.as_strided((16, 3, 4), (8, 2, 1)) * torch.linspace(1.0, 2.0, 4, dtype=h.dtype)
