"""Curves of measured kernels: seconds of a kernel between and beyond the sizes that were timed.

    seconds = max(work / rate(x), floor)

The work of a product, convolution or attention is its flops, that of any other kernel the bytes that it moves. The
sizes of the kernel are x, and floor is the least of the curve's seconds. A curve has seconds at every point of a
rectangular grid of x:

    products, convolutions   x = (m, n, k)                   attention   x = (queries, head size)
    others                   x = (bytes,)

Between the points of the grid, log rate is linear in the log of each x. This is multilinear interpolation, as in the
roofline tables of Williams et al. 2009. Outside the grid, the rate is that of its border. A device holds its curves
as canonical JSON, so that it stays a value that hashes fast; `curves_by_name` reads them once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import exp, log, prod
from types import MappingProxyType
from typing import Any

from autoddl.core.errors import InputError

__all__ = ["Curve", "Kernel", "curve_lower_bound", "curve_seconds", "curves_by_name", "curves_to_text", "find_curve"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, as far as its price depends on it.

        kind      one of `kernel.KINDS`
        shape     (batch, m, n, k) of a matmul, or of the matmul to which a convolution amounts;
                  (batch * heads, queries, keys, head size, causal) of attention, whose head size is the mean of the
                  widths of keys and values; () of memory
        flops     multiplications and additions
        nbytes    bytes read and written
        dtype     dtype of the operands
        name      the curve that prices it on a device that was measured
    """

    kind: str
    shape: tuple[int, ...]
    flops: float
    nbytes: float
    dtype: str
    name: str = ""

    @property
    def sizes(self) -> tuple[float, ...]:
        """x on the grid of its curve."""
        if self.kind.startswith("attention"):
            return float(self.shape[1]), float(self.shape[3])
        return tuple(float(size) for size in self.shape[1:]) if self.shape else (self.nbytes,)

    @property
    def work(self) -> float:
        """The quantity whose rate per second its curve has: flops, or bytes where the kernel has no shape."""
        return self.flops if self.shape else self.nbytes


@dataclass(frozen=True, slots=True)
class Curve:
    """The measured rates of kernels of one `name` and dtype.

    `grid` has the sizes along each x, `rates` the work per second at every point, row major, `floor` the least seconds.
    """

    name: str
    dtype: str
    grid: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]
    floor: float

    @property
    def best(self) -> float:
        """The greatest rate that any size reaches."""
        return max(self.rates)

    def rate(self, sizes: Sequence[float]) -> float:
        """Work per second at `sizes`, one per x of the grid."""
        corners = [_between(line, size) for line, size in zip(self.grid, sizes, strict=True)]
        total = 0.0
        for corner in product(*corners):
            share = prod(part for _, part in corner)
            if share:
                total += share * log(self.rates[self._index([at for at, _ in corner])])
        return exp(total)

    def seconds(self, work: float, sizes: Sequence[float]) -> float:
        """Seconds of a kernel of this work and these sizes."""
        return max(work / self.rate(sizes), self.floor)

    def _index(self, at: Sequence[int]) -> int:
        index = 0
        for line, i in zip(self.grid, at, strict=True):
            index = index * len(line) + i
        return index


def _between(line: tuple[float, ...], size: float) -> tuple[tuple[int, float], ...]:
    """The points of an axis around `size` with their shares; outside, the border alone."""
    if size <= line[0]:
        return ((0, 1.0),)
    if size >= line[-1]:
        return ((len(line) - 1, 1.0),)
    after = next(i for i, point in enumerate(line) if point >= size)
    share = log(size / line[after - 1]) / log(line[after] / line[after - 1])
    return ((after - 1, 1.0 - share), (after, share))


def curve_seconds(text: str, kernel: Kernel) -> float | None:
    """Seconds of a kernel by the curves of `Device.curves`; None where no curve is of this kernel.

    A product is no faster than a copy of its bytes.
    """
    curve = find_curve(text, kernel.name, kernel.dtype)
    if curve is None:
        return None
    seconds = curve.seconds(kernel.work, kernel.sizes)
    copy = find_curve(text, "copy", kernel.dtype) if kernel.shape else None
    return max(seconds, copy.seconds(kernel.nbytes, (kernel.nbytes,))) if copy else seconds


def curve_lower_bound(text: str, kernel: Kernel, ranks: int) -> float | None:
    """A lower bound on the seconds of each part of an even cut among `ranks`, by the best rate of its kind.

    None where no curve is of this kernel.
    """
    curve = find_curve(text, kernel.name, kernel.dtype)
    if curve is None:
        return None
    alike = [other for (name, _), other in curves_by_name(text).items() if name.startswith(kernel.kind)] or [curve]
    return max(kernel.work / ranks / max(other.best for other in alike), min(other.floor for other in alike))


@lru_cache(maxsize=64)
def curves_by_name(text: str) -> Mapping[tuple[str, str], Curve]:
    """The curves of `Device.curves` by name and dtype."""
    return MappingProxyType({(c["name"], c["dtype"]): _curve(c) for c in (json.loads(text) if text else ())})


def _curve(tree: Mapping[str, Any]) -> Curve:
    grid = tuple(tuple(float(size) for size in line) for line in tree["grid"])
    seconds = [float(value) for value in tree["seconds"]]
    rates = tuple(work / second for work, second in zip(tree["work"], seconds, strict=True))
    return Curve(tree["name"], tree["dtype"], grid, rates, min(seconds))


def find_curve(text: str, name: str, dtype: str) -> Curve | None:
    """The curve of kernels `name`: of this dtype, else of a dtype as wide, else of the nearest wider, else of any.

    None if no dtype has one.
    """
    known = curves_by_name(text)
    name, width = _known(known, name), _WIDTH.get(dtype, 4)
    for other in (dtype, *(d for d in _DTYPES if _WIDTH[d] == width), *(d for d in _DTYPES if _WIDTH[d] > width),
                  *_DTYPES):
        if (name, other) in known:
            return known[name, other]
    return None


def _known(known: Mapping[tuple[str, str], Curve], name: str) -> str:
    """The curve's name: that of other products for recurrent ones; by rows where no `blocks` were timed yet."""
    name = name.replace(" recurrent", "")
    rows = name.replace(" blocks", "")
    return name if any(timed == name for timed, _ in known) else rows


def curves_to_text(curves: Sequence[Mapping[str, Any]], source: str) -> str:
    """Canonical JSON of curves: name, dtype, grid, and work and seconds at every point of it.

    Raises InputError where a grid does not rise, has another number of points than values, or a value is not positive.
    """
    for curve in curves:
        place = f"{source}: measured: curve {curve.get('name')!r}"
        points = prod(len(line) for line in curve["grid"])
        if not points or points != len(curve["seconds"]) or points != len(curve["work"]):
            raise InputError(f"{place}: its grid has {points} points, but there are {len(curve['seconds'])} seconds "
                             f"and {len(curve['work'])} amounts of work; measure again")
        if any(list(line) != sorted(set(line)) or line[0] <= 0 for line in curve["grid"]):
            raise InputError(f"{place}: sizes rise and are above 0; measure again")
        if min(*curve["seconds"], *curve["work"]) <= 0:
            raise InputError(f"{place}: seconds and work are above 0; measure again")
    return json.dumps([{key: c[key] for key in ("name", "dtype", "grid", "work", "seconds")} for c in curves],
                      sort_keys=True)
