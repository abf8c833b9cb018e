"""Cuts tensors of one process into the pieces of all ranks, and compares pieces with the whole."""

from itertools import product

import torch
from torch import Tensor

from autoddl.core.layout import Layout, Mesh, PartialSum, extents

__all__ = ["Coordinate", "Pieces", "coordinates", "cut", "error_of", "partial_axes"]

Coordinate = tuple[int, ...]
Pieces = dict[Coordinate, Tensor]


def coordinates(mesh: Mesh) -> list[Coordinate]:
    """The places of all ranks of the mesh, in order."""
    return list(product(*(range(size) for size in mesh.sizes)))


def _slice(value: Tensor, layout: Layout, mesh: Mesh, at: Coordinate) -> Tensor:
    for dim, (offset, size) in enumerate(extents(tuple(value.shape), layout, mesh, at)):
        value = value.narrow(dim, offset, size)
    return value


def partial_axes(layout: Layout) -> list[int]:
    """The mesh axes over which the layout is a partial sum."""
    return [a for a, part in enumerate(layout) if isinstance(part, PartialSum)]


def cut(value: Tensor, layout: Layout, mesh: Mesh) -> Pieces:
    """Every rank's piece; a partial sum is cut into random terms."""
    axes = partial_axes(layout)
    keys = list(product(*(range(mesh.sizes[a]) for a in axes)))
    generator = torch.Generator().manual_seed(3)
    drawn = torch.complex64 if value.is_complex() else torch.float32
    terms = {key: torch.randn(value.shape, generator=generator, dtype=drawn).to(value.dtype) for key in keys[1:]}
    terms[keys[0]] = value - sum(terms.values(), torch.zeros_like(value)) if terms else value
    return {at: _slice(terms[tuple(at[a] for a in axes)], layout, mesh, at).clone() for at in coordinates(mesh)}


def error_of(pieces: Pieces, whole: Tensor, layout: Layout, mesh: Mesh) -> float:
    """Largest difference of the pieces (of the sums of terms) from the slices of the whole, relative to its largest."""
    axes = partial_axes(layout)
    worst = 0.0
    for at in coordinates(mesh):
        if any(at[a] for a in axes):
            continue
        terms = [pieces[other] for other in coordinates(mesh) if all(
            other[a] == at[a] for a in range(len(at)) if a not in axes)]
        got, want = sum(terms[1:], terms[0]), _slice(whole, layout, mesh, at)
        if got.shape != want.shape or got.dtype != want.dtype:
            return float("inf")
        if not torch.equal(got, want):
            same = (got == want) | (got.isnan() & want.isnan())
            difference = torch.where(same, 0.0, (_wide(got) - _wide(want)).abs())
            worst = max(worst, float(difference.nan_to_num(float("inf")).max()))
    finite = _wide(whole).abs().nan_to_num(0.0, 0.0, 0.0)
    return worst / max(1.0, float(finite.max()) if finite.numel() else 1.0)


def _wide(value: Tensor) -> Tensor:
    """The values in float64, complex ones in pairs of it."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
