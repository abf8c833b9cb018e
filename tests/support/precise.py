"""Models that cast to float32 by themselves, in float64 throughout: so that exactness can be told from rounding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Precise"]


class _Wide(TorchFunctionMode):
    """Every float32 that is asked for is float64."""

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {torch.float32: torch.float64}
        narrow = (torch.bfloat16, torch.float16)
        assert not any(a in narrow for a in args if isinstance(a, torch.dtype)), "these models are float32 or wider"
        new = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        named = {k: wide.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*new, **named)


class Precise(nn.Module):
    """`inner`, a float64 module, without its casts to float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Wide():
            return self.inner(*args, **kwargs)
