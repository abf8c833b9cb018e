"""Finds the cheapest conversions of a gradient that end with one sparse sum (`core.sparse`), for all pairs of layouts.

    sparse[i, j] = min over sets T of axes of  seconds(i -> j with P on T) + seconds of the sparse sum over T

Layout i is P on T, and j is B there. On the other axes the gradient is converted before. So it may be added up inside
of a node, or be reduced and scattered there, and be sent sparse between nodes. The residual is as large as the piece
in layout j.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from autoddl.core.conversion import Step
from autoddl.core.graph import Tensor
from autoddl.core.layout import B, Layout, P
from autoddl.core.layout_codes import BASE, BROADCAST, PARTIAL, decode_states
from autoddl.core.sparse import SparseRule
from autoddl.pricing.price import Pricing, routes_of, steps_of
from autoddl.pricing.routes import Routes

__all__ = ["sparse_seconds", "sparse_steps"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Sparse:
    """By (source, target), the least seconds, and which set of axes takes them; infinite where there is none."""

    seconds: Array
    which: npt.NDArray[np.intp]


def sparse_seconds(pricing: Pricing, gradient: Tensor) -> Array:
    """Seconds of the cheapest conversion that ends with a sparse sum, as [source, target] of the gradient's routes."""
    return _found(pricing, gradient).seconds


def sparse_steps(pricing: Pricing, gradient: Tensor, source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps of that conversion between two layouts, which has one."""
    routes, found = routes_of(pricing, gradient, "gradients"), _found(pricing, gradient)
    axes = _subsets(len(target))[int(found.which[routes.index[source], routes.index[target]])]
    before = steps_of(pricing, gradient, source, target.replace(axes, P), "gradients")
    return (*before, _step(axes, pricing.sparse))


def _subsets(count: int) -> list[tuple[int, ...]]:
    """Every set of some of so many axes."""
    return [axes for size in range(1, count + 1) for axes in combinations(range(count), size)]


def _step(axes: tuple[int, ...], rule: str) -> Step:
    return Step(axes, P, B, SparseRule.parse(rule).codec)


def _found(pricing: Pricing, gradient: Tensor) -> _Sparse:
    routes = routes_of(pricing, gradient, "gradients")
    return _tables(routes, _Key(pricing, gradient.itemsize))


@dataclass(frozen=True, eq=False)
class _Key:
    """Holds what prices depend on besides the routes."""

    pricing: Pricing
    itemsize: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        return self.pricing.mesh, self.pricing.cluster, self.pricing.sparse, self.itemsize


@lru_cache(maxsize=256)
def _tables(routes: Routes, key: _Key) -> _Sparse:
    """The tables of one tensor; equal tensors have one object of routes."""
    axes, count = len(routes.layouts[0]), len(routes.layouts)
    states = decode_states(routes.codes, axes)
    seconds = np.full((count, count), np.inf)
    which = np.zeros((count, count), dtype=np.intp)
    for number, over in enumerate(_subsets(axes)):
        step, on = _step(over, key.pricing.sparse), list(over)
        ends = np.flatnonzero((states[:, on] == BROADCAST).all(axis=1))
        starts = np.flatnonzero((states[:, on] == PARTIAL).all(axis=1))
        middle = routes.place[routes.codes[ends] + PARTIAL * sum(BASE ** a for a in over)]
        ends, middle = ends[middle >= 0], middle[middle >= 0]
        sums = np.array([key.pricing.bucket_seconds(step, int(nbytes), 0, key.itemsize)
                         for nbytes in routes.nbytes[middle]])
        found = routes.seconds[np.ix_(starts, middle)] + sums
        at = np.ix_(starts, ends)
        better = found < seconds[at]
        seconds[at], which[at] = np.where(better, found, seconds[at]), np.where(better, number, which[at])
    seconds.setflags(write=False)
    return _Sparse(seconds, which)
