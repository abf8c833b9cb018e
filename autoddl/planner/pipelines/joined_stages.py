"""Finds the least seconds of stages by those of the stages that they are made of.

    x[a, c] = max(least[a, c], max over b of x[a, b] + x[b, c] - apart)

`apart` is what a stage may take less than two that it is made of. Shorter stages come first.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array

__all__ = ["joined"]


def joined(least: Array, apart: float, shared: Collection[frozenset[int]] = (), floors: Array | None = None) -> Array:
    """[a, c]: least seconds of the stage from a to c, at least those of two stages that it is made of, less `apart`.

        least    [a, b], for a < b, what is known of the stage from a to b
        apart    seconds by which a stage may take less than two that it is made of; where it is infinite nothing joins
        shared   sets of units which share something that a stage with several of them has once
        floors   [a, b], seconds that hold without what is shared; 0 where this is None

    The greatest solution of  x[a, c] = max(least[a, c], max over b of x[a, b] + x[b, c] - apart),  shortest first.
    Where both stages have units that share something, one of them counts by y. That is the same of floors, and of
    stages without such units.
    """
    if not shared or apart == math.inf:
        return _longer(least, apart)
    units, some = len(least) - 1, sorted(set().union(*shared))
    without, bare = np.zeros_like(least) if floors is None else np.array(floors), np.array(least)
    first, last = np.indices(least.shape)
    has = np.zeros(least.shape, dtype=np.bool_)
    for unit in some:
        has |= (first <= unit) & (unit < last)
    bare[has] = without[has]
    before = [np.array([sum(unit < at for unit in one) for at in range(units + 1)]) for one in shared]
    return _longer(least, apart, _longer(bare, apart), before)


def _longer(least: Array, apart: float, bare: Array | None = None, before: Sequence[NDArray[np.intp]] = ()) -> Array:
    """The solution x of `joined`; `bare` is y, `before` the units that share something before each place."""
    units = len(least) - 1
    rows = [np.diagonal(least, n).copy() for n in range(units + 1)]
    others = rows if bare is None else [np.diagonal(bare, n) for n in range(units + 1)]
    for n in range(2, units + 1) if apart < math.inf else ():
        for k in range(1, n):
            left, right = slice(0, units - n + 1), slice(k, None)
            sums = rows[k][left] + rows[n - k][right]
            for one in before:
                twice = (one[k:units - n + 1 + k] > one[:units - n + 1]) & (one[n:] > one[k:units - n + 1 + k])
                sums = np.where(twice, np.maximum(rows[k][left] + others[n - k][right],
                                                  others[k][left] + rows[n - k][right]), sums)
            np.maximum(rows[n], sums - apart, out=rows[n])
    found = np.array(least)
    for n, row in enumerate(rows):
        found[np.arange(units - n + 1), np.arange(n, units + 1)] = row
    return found
