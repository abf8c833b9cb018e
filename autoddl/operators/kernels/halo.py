"""Runs convolutions and pools on one rank's piece of an image or a sequence: neighbours send what its windows need.

    x here  ->  x with its halo, padded by hand  ->  the op itself without padding  ->  y here
    transposed      what is made begins and ends beside y: it is cut, or zeros are added, and then the bias
    roll            what comes belongs where it is read, so nothing is left to do along dims that are split
    interpolation   y = (1 - w) x[i] + w x[i + 1] along each dim, by the numbers i of all inputs; cubic: of four

What goes where is in `operators.windows`. In backward the gradients of the halo go home and are added up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoddl.core.layout import Layout, Mesh, extents
from autoddl.operators.kernels.arguments import bound
from autoddl.operators.kernels.grouped import is_traced
from autoddl.operators.kernels.site import Kernel, Site, TorchCall
from autoddl.operators.windows import (
    INTERPOLATED,
    ROLL,
    Box,
    Shape,
    Window,
    halo_box,
    is_transposed,
    is_whole,
    read_box,
    windows_of,
)

__all__ = ["unchanged", "with_halo"]


def with_halo(kernel: Kernel) -> Kernel:
    """The kernel of an op with windows, which is `kernel` where its places are whole."""
    def windowed(site: Site, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
        if not site.option.inner:
            return kernel(site, target, args, kwargs)
        fn, args, kwargs = kernel(site, target, args, kwargs)
        values = bound(fn, args, kwargs)
        halo = _Halo(site, windows_of(site.op, tuple(t.shape for t in site.inputs)))
        first = next(iter(values))
        padding = "valid" if isinstance(values.get("padding"), str) else [0] * len(halo.windows)
        fill = float("-inf") if site.op.target.startswith("aten.max") else 0.0

        def on_piece(x: Tensor, **others: Any) -> Any:
            return fn(**{first: halo.around(x, fill)}, **others)

        def transposed_piece(x: Tensor, bias: Tensor | None, **others: Any) -> Tensor:
            return halo.piece_of(fn(**{first: halo.around(x, fill), "bias": None}, **others), bias)

        if site.op.target in INTERPOLATED:
            return halo.interpolated, (values.pop(first),), {}
        if site.op.target == ROLL:
            return halo.rolled, (values.pop(first),), {}
        if is_transposed(site.op):
            return (transposed_piece, (values.pop(first), values.pop("bias", None)),
                    values | {"padding": padding, "output_padding": padding})
        return on_piece, (values.pop(first),), values | {"padding": padding} | (
            {"ceil_mode": False} if "ceil_mode" in values else {})

    return windowed


def unchanged(site: Site, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
    """The kernel of an op whose call means the same on pieces."""
    return target, args, kwargs


@dataclass(frozen=True)
class _Halo:
    """Says what a rank computes from, what it sends of its piece, and what comes from whom."""

    site: Site
    windows: dict[int, Window]

    def around(self, x: Tensor, fill: float) -> Tensor:
        """The piece x with its halo, and the padding filled."""
        if is_traced(x):
            return x.new_empty(self.shape)
        found: Tensor = _Around.apply(x, self, fill)  # type: ignore[no-untyped-call]
        return found

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        return self.site.mesh.members(self.site.option.inner, self.site.coordinate)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(count for _, count in self.reads(self.site.coordinate))

    def piece_of(self, made: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs here of what a transposed convolution made of the piece and its halo, with the bias."""
        beside = list[int]()
        reads, out = self.reads(self.site.coordinate), self.site.output_extents()
        for d in sorted(self.windows, reverse=True):
            window = self.windows[d]
            begin = reads[d][0] * window.parts - (window.reach - 1 - window.before)
            beside += [begin - out[d][0], sum(out[d]) - begin - made.shape[d]]
        here = F.pad(made, beside)
        return here if bias is None else here + bias.view(-1, *(1,) * len(self.windows))

    def interpolated(self, x: Tensor) -> Tensor:
        """The outputs here of an interpolation."""
        found = self.around(x, 0.0)
        for d, window in self.windows.items():
            first, count = self.site.output_extents()[d]
            numbers = torch.arange(first, first + count, device=x.device)
            at = numbers * window.stride - window.before + window.parts - 1
            share = (at % window.parts).to(torch.float64) / window.parts
            lowest = at.div_(window.parts, rounding_mode="floor")
            found = self.between(found, d, lowest, share.to(x.dtype).view(-1, *(1,) * (x.dim() - d - 1)))
        return found

    def rolled(self, x: Tensor) -> Tensor:
        """The outputs here of a roll."""
        own = self.owns(self.site.coordinate)
        dims = [d for d, window in self.windows.items() if is_whole(window, own[d])]
        found = self.around(x, 0.0)
        return found.roll([self.windows[d].before for d in dims], dims) if dims else found

    def between(self, x: Tensor, d: int, lowest: Tensor, share: Tensor) -> Tensor:
        """What lies between inputs along dim d, from the `lowest` of each on, at a `share` of the way."""
        size, start = self.site.inputs[0].shape[d], self.reads(self.site.coordinate)[d][0]
        if self.windows[d].reach <= 2 * self.windows[d].parts:
            low, high = ((lowest + more).clamp(0, size - 1) - start for more in (0, 1))
            return x.index_select(d, low).lerp(x.index_select(d, high), share)
        places = [(lowest + more).clamp_(0, size - 1) - start for more in range(4)]
        weights = _cubic(share)
        found = x.index_select(d, places[0]) * weights[0]
        for place, weight in zip(places[1:], weights[1:], strict=True):
            found.addcmul_(x.index_select(d, place), weight)
        return found

    def owns(self, at: tuple[int, ...]) -> Box:
        """The piece of the rank at a place."""
        return extents(self.site.inputs[0].shape, self.site.option.inputs[0], self.site.mesh, at)

    def reads(self, at: tuple[int, ...]) -> Box:
        """Returns what the rank at a place computes from; it may lie beyond the edges."""
        return read_box(*self.known, at)

    @cached_property
    def known(self) -> tuple[Shape, Shape, dict[int, Window], Layout, Mesh]:
        """What `windows` asks of an op: shapes of input and output, windows, the input's layout and the mesh."""
        site = self.site
        return site.inputs[0].shape, site.outputs[0].shape, self.windows, site.option.inputs[0], site.mesh

    def inside(self, box: Box, place: Box) -> Box:
        """The box, counted from the first element of `place`, round the ends of dims whose ends meet."""
        around = [self.windows[d].around if d in self.windows else 0 for d in range(len(box))]
        return tuple(((first - start) % size if size else first - start, count)
                     for (first, count), (start, _), size in zip(box, place, around, strict=True))

    @cached_property
    def kept(self) -> tuple[Box, Box]:
        """Says what the rank reads of its own piece: where it is in the piece, and in what it computes from."""
        here = self.site.coordinate
        both = halo_box(*self.known, here, here)
        return self.inside(both, self.owns(here)), self.inside(both, self.reads(here))

    @cached_property
    def sent(self) -> tuple[Box, ...]:
        """For each member, what it gets of this rank's piece; nothing for the rank itself."""
        here = self.site.coordinate
        return tuple(self.inside(halo_box(*self.known, here, at), self.owns(here)) if at != here else ()
                     for at in self.members)

    @cached_property
    def received(self) -> tuple[Box, ...]:
        """For each member, where what it sends belongs in what this rank computes from."""
        here = self.site.coordinate
        return tuple(self.inside(halo_box(*self.known, at, here), self.reads(here)) if at != here else ()
                     for at in self.members)

    def exchanged(self, x: Tensor, out: tuple[Box, ...], back: tuple[Box, ...]) -> list[Tensor]:
        """Sends the boxes `out` of x to the members; returns what they send, in the shapes of the boxes `back`."""
        sent, received = ([_count(box) for box in boxes] for boxes in (out, back))
        parts = [_part(x, box).reshape(-1) for box, count in zip(out, sent, strict=True) if count]
        rows = torch.cat(parts) if parts else x.new_empty(0)
        got = self.site.swapped(rows, tuple(sent), tuple(received)).split(received)
        return [one.view([size for _, size in box]) if count else one
                for one, box, count in zip(got, back, received, strict=True)]


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo, fill: float) -> Tensor:
        ctx.halo, ctx.shape = halo, x.shape
        got = halo.exchanged(x, halo.sent, halo.received)
        found = x.new_full(halo.shape, fill)
        from_here, to = halo.kept
        _part(found, to).copy_(_part(x, from_here))
        for box, part in zip(halo.received, got, strict=True):
            if part.numel():
                _part(found, box).copy_(part)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        halo: _Halo = ctx.halo
        (given,) = upstream
        got = halo.exchanged(given, halo.received, halo.sent)
        found = given.new_zeros(ctx.shape)
        to, from_there = halo.kept
        _part(found, to).copy_(_part(given, from_there))
        for box, part in zip(halo.sent, got, strict=True):
            if part.numel():
                _part(found, box).add_(part)
        return found, None, None


def _cubic(share: Tensor) -> list[Tensor]:
    """The weights of four neighbours at a share of the way from the second to the third (Keys 1981, a = -3/4)."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(share + 1), near(share), near(1 - share), far(2 - share)]


def _count(box: Box) -> int:
    """Elements of a box; none of the empty one."""
    return prod(count for _, count in box) if box else 0


def _part(x: Tensor, box: Box) -> Tensor:
    """The part of x in a box."""
    return x[tuple(slice(first, first + count) if count else slice(0, 0) for first, count in box)]
