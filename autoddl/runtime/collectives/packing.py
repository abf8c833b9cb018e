"""Packs the pieces of one tensor into the buffers of one conversion step: cutting, padding, joining.

A collective moves one *block* per member of the group. All blocks have the size of the largest piece, and smaller
pieces are padded with zeros. A `Packing` knows the blocks of one tensor for one step on one rank:

    target S(j)    the block for member m is the part of dim j that m has afterwards
    source S(i)    the block from member m is the part of dim i that m had before; these parts are joined along i
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from autoddl.core.conversion import Step
from autoddl.core.layout import Layout, Mesh, Split, extents

__all__ = ["Packing", "packing_of"]


@dataclass(frozen=True, slots=True)
class Packing:
    """The blocks of one tensor for one step on one rank.

        cut       the dim that is cut, None if every member gets the same
        cuts      (offset, size) along it of the part that goes to each member
        join      the dim along which parts are joined, None if there is nothing to join
        joins     size along it of the part that comes from each member
        block     shape of a block
        result    local shape afterwards
        even      whether nothing is padded
        mine      position of this rank in the group
    """

    cut: int | None
    cuts: tuple[tuple[int, int], ...]
    join: int | None
    joins: tuple[int, ...]
    block: tuple[int, ...]
    result: tuple[int, ...]
    even: bool
    mine: int

    @property
    def numel(self) -> int:
        """Elements of a block."""
        return prod(self.block)

    def pack(self, x: Tensor) -> Tensor:
        """The blocks to send, (n, *block), or (1, *block) if all members get the same."""
        n = len(self.cuts)
        if self.cut is None:
            return (x if self.even else self._padded(x)).unsqueeze(0)
        if self.even:
            rows: Tensor = x.unflatten(self.cut, (n, -1))
            return rows.movedim(self.cut, 0)
        return torch.stack([self._padded(x.narrow(self.cut, *cut)) for cut in self.cuts])

    def unpack(self, rows: Tensor) -> Tensor:
        """The local tensor afterwards, from received blocks (n, *block), or (1, *block) if there is nothing to join.

        What is joined is contiguous: a view between the blocks of others would keep all of them.
        """
        if self.join is None:
            return rows.squeeze(0) if self.even else self._cropped(rows[0], self.result)
        if self.even:
            return rows.movedim(0, self.join).flatten(self.join, self.join + 1).contiguous()
        sizes = [(*self.result[:self.join], size, *self.result[self.join + 1:]) for size in self.joins]
        return torch.cat([self._cropped(row, size) for row, size in zip(rows, sizes, strict=True)], self.join)

    def slice(self, x: Tensor) -> Tensor:
        """A view of this rank's own part of a tensor."""
        assert self.cut is not None
        offset, size = self.cuts[self.mine]
        return x.narrow(self.cut, offset, size)

    def fill(self, x: Tensor) -> Tensor:
        """Zeros of the whole shape, with this rank's piece in its place."""
        assert self.join is not None
        whole = x.new_zeros(self.result)
        whole.narrow(self.join, sum(self.joins[:self.mine]), self.joins[self.mine]).copy_(x)
        return whole

    def _padded(self, x: Tensor) -> Tensor:
        if tuple(x.shape) == self.block:
            return x
        block = x.new_zeros(self.block)
        self._cropped(block, tuple(x.shape)).copy_(x)
        return block

    @staticmethod
    def _cropped(block: Tensor, sizes: tuple[int, ...]) -> Tensor:
        for dim, size in enumerate(sizes):
            block = block.narrow(dim, 0, size)
        return block


@lru_cache(maxsize=100_000)
def packing_of(step: Step, shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Packing:
    """The packing of `step` on a tensor of global `shape` in `layout`, for the rank at `coordinate`."""
    group = mesh.members(step.axes, coordinate)
    mine = group.index(coordinate)
    before = [extents(shape, layout, mesh, at) for at in group]
    after = [extents(shape, step.after(layout), mesh, at) for at in group]
    cut = step.target.dim if isinstance(step.target, Split) else None
    join = step.source.dim if isinstance(step.source, Split) else None
    return Packing(
        cut, tuple((0, 0) if cut is None else (a[cut][0] - before[mine][cut][0], a[cut][1]) for a in after),
        join, tuple(0 if join is None else b[join][1] for b in before),
        tuple(min(b[1], a[1]) for b, a in zip(before[0], after[0], strict=True)), tuple(s for _, s in after[mine]),
        all(_sizes(e) == _sizes(every[0]) for every in (before, after) for e in every), mine)


def _sizes(extent: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(size for _, size in extent)
