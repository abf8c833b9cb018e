"""Local calls of operators that carry global sizes, counts or offsets in their arguments.

    reshape, squeeze, expand, repeat     the sizes of this rank's piece of the output
    full, zeros, new_ones                the same
    arange          y[i] = start + (o + i) * step        o: where the piece begins
    mean            m / n * mean(piece)                  m of n elements are here; the parts add up to the mean
    tril, triu      diagonal + (row offset) - (column offset)
    one_hot         x == o + class                       o: the first class here
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from autoddl.operators.kernels.site import Kernel, Site, TorchCall
from autoddl.operators.rules.shape import RESHAPES

__all__ = ["KERNELS", "arange_piece", "mean_part", "one_hot_piece"]

aten = torch.ops.aten
Target = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _parameters(target: Target) -> list[str]:
    return [argument.name for argument in getattr(target, "_schema").arguments]  # noqa: B009


def _bound(target: Target, args: Args, kwargs: Kwargs) -> Kwargs:
    """Arguments by name; a keyword wins over nothing, defaults are left out."""
    return {**dict(zip(_parameters(target), args, strict=False)), **kwargs}


def _with(target: Target, args: Args, kwargs: Kwargs, **new: Any) -> TorchCall:
    """Returns the call with new values for some arguments."""
    order = _parameters(target)
    positional = tuple(new.pop(name, value) for name, value in zip(order, args, strict=False))
    return target, positional, {**kwargs, **new}


def _reshape(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    return aten.reshape.default, (_bound(target, args, kwargs)["self"], list(site.output_shape())), {}


def _expand(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    return aten.expand.default, (_bound(target, args, kwargs)["self"], list(site.output_shape())), {}


def _create(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    return _with(target, args, kwargs, size=list(site.output_shape()))


def _repeat(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    """Copies here: sizes of the output piece over those of the input piece."""
    shape, out = site.input_shape(0), site.output_shape()
    padded = (1,) * (len(out) - len(shape)) + shape
    copies = [m // max(n, 1) for n, m in zip(padded, out, strict=True)]
    if 0 in padded:
        return target, args, kwargs
    return aten.repeat.default, (_bound(target, args, kwargs)["self"], copies), {}


def _repeat_interleave(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    return target, args, {name: value for name, value in kwargs.items() if name != "output_size"}


def _triangle(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    """j - i <= d for global (i, j) is j' - i' <= d + row offset - column offset for local ones."""
    (row, _), (column, _) = site.output_extents()[-2:]
    diagonal = _bound(target, args, kwargs).get("diagonal", 0)
    return _with(target, args, kwargs, diagonal=diagonal + row - column)


def _arange(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    values = _bound(target, args, kwargs)
    offset, count = site.output_extents()[0]
    if count == site.outputs[0].shape[0]:
        return target, args, kwargs
    options = {"dtype": getattr(torch, site.outputs[0].dtype), "device": values.get("device")}
    return arange_piece, (values.get("start", 0), values.get("step", 1), offset, count), options


def arange_piece(start: float, step: float, offset: int, count: int, dtype: torch.dtype, device: Any = None
                 ) -> torch.Tensor:
    """`count` elements of arange(start, .., step) from element `offset` on; floats are rounded once."""
    index = torch.arange(offset, offset + count, device=device)
    if dtype.is_floating_point:
        return (index.double() * step + start).to(dtype)
    return (index * int(step) + int(start)).to(dtype)


def _mean(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    here = prod(site.input_shape(0)) // max(1, prod(site.output_shape()))
    whole = prod(site.inputs[0].shape) // max(1, prod(site.outputs[0].shape))
    if here == whole:
        return target, args, kwargs
    values = _bound(target, args, kwargs)
    names: Kwargs = {name: values[name] for name in ("dim", "keepdim", "dtype") if name in values}
    return mean_part, (values["self"], here / whole), names


def mean_part(x: torch.Tensor, share: float, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
              ) -> torch.Tensor:
    """This rank's part of a mean, of which it has `share` of the elements."""
    return torch.mean(x, dim=dim, keepdim=keepdim, dtype=dtype) * share


def _one_hot(site: Site, target: Target, args: Args, kwargs: Kwargs) -> TorchCall:
    offset, count = site.output_extents()[-1]
    if count == site.outputs[0].shape[-1]:
        return target, args, kwargs
    return one_hot_piece, (_bound(target, args, kwargs)["self"], offset, count), {}


def one_hot_piece(x: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """`count` classes of one_hot(x) from class `offset` on."""
    classes = torch.arange(offset, offset + count, device=x.device)
    return (x.unsqueeze(-1) == classes).long()


KERNELS: dict[str, Kernel] = {
    **{f"aten.{target}": _reshape for target in RESHAPES.split()},
    **{f"aten.{base}.default": _expand for base in ("expand", "broadcast_to", "expand_as")},
    **{f"aten.{base}.default": _create for base in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones")},
    **{f"aten.arange.{overload}": _arange for overload in ("default", "start", "start_step")},
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.repeat.default": _repeat,
    "aten.tile.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.one_hot.default": _one_hot,
}
