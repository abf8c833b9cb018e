"""The tiny model with one weight for its tokens and its head: where stages share a parameter."""

from tiny import Tiny, tiny
from torch import nn

__all__ = ["tied"]


def tied() -> nn.Module:
    model = tiny(dropout=0.0)
    assert isinstance(model, Tiny)
    model.head.weight = model.tokens.weight
    return model
