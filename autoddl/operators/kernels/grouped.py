"""Multiplies groups of rows, each by a matrix of its own.

Rows are sorted by group; `ends[g]` is the end of group g, and rows behind the last end belong to none:

    y[ends[g-1]:ends[g]] = x[ends[g-1]:ends[g]] W_g        zero of rows of no group

Of W split by groups, a rank makes the rows of its own groups, and the others zero: the ranks' results add up.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

__all__ = ["is_traced", "outer_of_groups", "product_of_groups", "rows_of_groups", "sums_of_groups"]


def is_traced(x: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return isinstance(x, FakeTensor) or x.is_meta


def product_of_groups(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The rows of each group times its matrix: [rows, in], [groups, in, out], [groups] -> [rows, out]."""
    if rows.is_cuda and rows.dtype is torch.bfloat16:
        return F.grouped_mm(rows, weight, offs=ends.int())
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    for g, (start, end) in enumerate(pairwise((0, *ends.tolist()))):
        if start < end:
            torch.mm(rows[start:end], weight[g], out=out[start:end])
    return out


def outer_of_groups(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """The sum of first^T second over the rows of each group; zero of one without rows."""
    out = first.new_zeros(ends.shape[0], first.shape[1], second.shape[1])
    for g, (start, end) in enumerate(pairwise((0, *ends.tolist()))):
        if start < end:
            torch.mm(first[start:end].t(), second[start:end], out=out[g])
    return out


def sums_of_groups(rows: Tensor, ends: Tensor) -> Tensor:
    """The sum of the rows of each group."""
    return torch.stack([rows[start:end].sum(0) for start, end in pairwise((0, *ends.tolist()))])


def rows_of_groups(rows: Tensor, weight: Tensor, ends: Tensor, first: int = 0) -> Tensor:
    """Returns y where `weight` has the matrices of the groups from `first` on, of all of which `ends` has the ends."""
    if is_traced(rows):
        return rows.new_empty(rows.shape[0], weight.shape[2])
    found: Tensor = _Groups.apply(rows, weight, ends, first)  # type: ignore[no-untyped-call]
    return found


class _Groups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.first = first
        start, stop, local = _here(ends, weight, first)
        out = rows.new_zeros(rows.shape[0], weight.shape[2])
        out[start:stop] = product_of_groups(rows[start:stop], weight, local)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        rows, weight, ends = ctx.saved_tensors
        start, stop, local = _here(ends, weight, ctx.first)
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = torch.zeros_like(rows)
            of_rows[start:stop] = product_of_groups(upstream[start:stop], weight.transpose(1, 2), local)
        if ctx.needs_input_grad[1]:
            of_weight = outer_of_groups(rows[start:stop], upstream[start:stop], local)
        return of_rows, of_weight, None, None


def _here(ends: Tensor, weight: Tensor, first: int) -> tuple[int, int, Tensor]:
    """(first row of the groups here, end of the last, ends of the groups counted from that row)."""
    mine = ends[first:first + weight.shape[0]]
    start = int(ends[first - 1]) if first else 0
    return start, int(mine[-1]), mine - start
