"""Attention by a mask that numbers alone decide is causal attention, or has no mask, where that is the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import capture
from autoddl.capture.materialize import arguments
from autoddl.capture.rewrites import known_masks
from autoddl.capture.sample import as_sample

LENGTH = 12
Mask = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention of two heads by a mask that `mask` makes of positions and the input."""

    lower: Tensor

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.linear = mask, nn.Linear(8, 24)
        self.register_buffer("lower", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = self.lower if self.mask is buffer else self.mask(torch.arange(x.shape[1]), x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()


def lower(at: Tensor, x: Tensor) -> Tensor:
    return at[:, None] >= at


def added(at: Tensor, x: Tensor) -> Tensor:
    """Numbers that are added, written in place, one for each row of the batch."""
    return torch.zeros(LENGTH, LENGTH).masked_fill_(at[:, None] < at, float("-inf")).expand(x.shape[0], 1, -1, -1)


def least(at: Tensor, x: Tensor) -> Tensor:
    return torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)


def everything(at: Tensor, x: Tensor) -> Tensor:
    return at[:, None] + at >= 0


def window(at: Tensor, x: Tensor) -> Tensor:
    return (at[:, None] >= at) & (at[:, None] < at + 3)


def slope(at: Tensor, x: Tensor) -> Tensor:
    return torch.where(at[:, None] >= at, (at - at[:, None]).float(), float("-inf"))


def given(at: Tensor, x: Tensor) -> Tensor:
    return (at[:, None] >= at) & (x[:, None, None, :, 0] < 1e9)


def written_later(at: Tensor, x: Tensor) -> Tensor:
    """A mask that blocked nothing when it was read before, and of which a view is written since."""
    mask = torch.zeros(LENGTH, LENGTH)
    F.scaled_dot_product_attention(x[..., :4], x[..., :4], x[..., :4], mask)
    mask[0].fill_(float("-inf"))
    mask[0, 0] = 0.0
    return mask


def wider(at: Tensor, x: Tensor) -> Tensor:
    """One for each of two batches in front of the rows, so that the result has both."""
    return lower(at, x).expand(2, 1, 1, -1, -1)


def buffer(at: Tensor, x: Tensor) -> Tensor:
    raise AssertionError("this stands for the module's buffer")


def attention(mask: Mask) -> tuple[bool, bool]:
    """Whether the captured attention has a mask, and whether it is causal."""
    graph = capture(Attention(mask), as_sample(torch.randn(4, LENGTH, 8))).graph
    op = [op for op in graph.ops if op.name.startswith("scaled_dot_product_attention")][-1]
    return "attn_mask" in op.slots, dict(op.args)["is_causal"] is True


@pytest.mark.parametrize(("mask", "found"), [
    (lower, (False, True)), (added, (False, True)), (least, (False, True)), (everything, (False, False)),
    (window, (True, False)), (slope, (True, False)), (given, (True, False)), (buffer, (True, False)),
    (written_later, (True, False)), (wider, (True, False))])
def test_a_mask_that_numbers_decide_is_seen(mask: Mask, found: tuple[bool, bool]) -> None:
    assert attention(mask) == found


def test_a_mask_too_large_to_look_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_masks, "LARGEST", LENGTH * LENGTH - 1)
    assert attention(lower) == (True, False)


@pytest.mark.parametrize("mask", [lower, added, everything])
def test_a_program_without_the_mask_computes_what_the_module_does(mask: Mask) -> None:
    torch.manual_seed(0)
    module, batch = Attention(mask), torch.randn(4, LENGTH, 8)
    captured = capture(module, batch)
    found = captured.program(*arguments(module, as_sample(batch), captured))[0]
    torch.testing.assert_close(found, module(batch))
