"""Embedding bags of equal length and batch norms without averages are written out, and compute what they did."""

from collections.abc import Callable
from typing import Any

import decoders
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import arguments
from autoddl.capture.sample import as_sample


def check(model: nn.Module, sample: Any) -> Captured:
    """The captured model, after its loss and gradients were compared with the module's."""
    captured, parameters = capture(model, sample), list(model.parameters())
    ours = captured.program(*arguments(model, as_sample(sample), captured))[0]
    theirs = model(*sample) if isinstance(sample, tuple) else model(sample)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters))
    return captured


@pytest.mark.parametrize("factory", [decoders.decoder, decoders.bagged, decoders.recurrent])
def test_the_program_computes_what_the_module_does(factory: Callable[[], tuple[nn.Module, Any]]) -> None:
    targets = {op.target for op in check(*factory()).graph.ops}
    assert not {"aten.embedding_bag.padding_idx", "aten._native_batch_norm_legit.no_stats"} & targets


class Bag(nn.Module):
    def __init__(self, offsets: Tensor | None, **options: Any) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.randn(9, 4)), options
        self.offsets = None if offsets is None else nn.Buffer(offsets)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = F.embedding_bag(ids, self.weight, self.offsets, **self.options).square().mean()
        return loss


@pytest.mark.parametrize(("offsets", "shape", "options", "ours"), [
    (None, (6, 3), {"sparse": True, "mode": "sum"}, True),
    (None, (6, 3), {"per_sample_weights": torch.rand(6, 3), "mode": "sum"}, True),
    (torch.tensor([0, 4, 5]), (8,), {}, False), (None, (6, 3), {"padding_idx": 2}, False)])
def test_bags_of_equal_length_are_ours(offsets: Tensor | None, shape: tuple[int, ...], options: dict[str, Any],
                                       ours: bool) -> None:
    model, ids = Bag(offsets, **options), torch.randint(9, shape)
    if options.get("sparse"):
        targets = {op.target for op in capture(model, ids).graph.ops}
    else:
        targets = {op.target for op in check(model, ids).graph.ops}
    assert ("autoddl.embedding_bag" in targets) == ours != ("aten.embedding_bag.padding_idx" in targets)
