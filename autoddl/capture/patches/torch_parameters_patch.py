"""Patches torch 2.13 so that modules made meanwhile have parameters without memory, while buffers keep their values.

    Module.register_parameter    The parameter is replaced by one on the meta device before it is registered. Ties stay:
                                 one parameter that is registered twice is replaced by one.

A model of any size is then made in the memory of its largest parameter, and initial values are never drawn. Buffers,
such as masks, have values that a graph depends on, so `torch.device("meta")` would not do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["MADE_FOR", "PATCHED", "Made", "parameters_on_meta"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.nn:Module.register_parameter": "self, name, param"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""


@dataclass
class Made:
    """The bytes of all parameters that were made so far."""

    nbytes: int = 0


@contextmanager
def parameters_on_meta() -> Iterator[Made]:
    """While open, parameters that are registered are on the meta device; yields what they would take."""
    original = nn.Module.register_parameter
    known, made = WeakTensorKeyDictionary(), Made()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and not param.is_meta and not is_lazy(param):
            if param not in known:
                known[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                known[param].__dict__.update(param.__dict__)
                made.nbytes += param.numel() * param.element_size()
            param = known[param]
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield made
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
