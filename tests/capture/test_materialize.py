"""Models without memory get some: their own initial values, with ties kept and what has values left alone."""

import pytest
import torch
from torch import nn

from autoddl.capture.materialize import materialise
from autoddl.core.errors import InputError


class Tied(nn.Module):
    """Rows that are looked up are those that the head multiplies with; a normalisation has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight


def test_ties_are_kept_and_all_has_values() -> None:
    with torch.device("meta"):
        model = Tied()
    materialise(model, 0)
    assert model.head.weight is model.tokens.weight and len(list(model.parameters())) == 3
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.norm.running_var is not None and torch.equal(model.norm.running_var, torch.ones(4))
    assert torch.isfinite(model.head.weight).all()
    with torch.device("meta"):
        again = Tied()
    materialise(again, 0)
    assert torch.equal(again.head.weight, model.head.weight)


def test_what_has_values_keeps_them() -> None:
    loaded, new = nn.Linear(3, 3), nn.Linear(3, 2, device="meta")
    weight = loaded.weight.detach().clone()
    materialise(nn.Sequential(loaded, new), 0)
    assert torch.equal(loaded.weight, weight) and torch.isfinite(new.weight).all()


def test_half_a_layer_is_an_error() -> None:
    half = nn.Linear(3, 3)
    half.bias = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(InputError, match=r"0 \(Linear\) has values for a part"):
        materialise(nn.Sequential(half), 0)
