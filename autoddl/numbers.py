"""Layouts as numbers, for work on thousands of them at once.

    state    B is 0, P is 1, S(d) is 2 + d
    layout   sum over axes of state * BASE ** axis
"""

from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from autoddl.layout import B, Layout, Mesh, P, Split, State, is_legal

__all__ = ["BROADCAST", "PARTIAL", "code", "layouts_of", "legal_numbers", "numbers"]

Codes = npt.NDArray[np.int64]

BROADCAST, PARTIAL = 0, 1
BASE = 16


def code(state: State) -> int:
    return 2 + state.dim if isinstance(state, Split) else (BROADCAST if state == B else PARTIAL)


def _state(number: int) -> State:
    return Split(number - 2) if number > PARTIAL else (P if number else B)


def numbers(states: Codes) -> Codes:
    """The number of every layout; states by axis along the last dim."""
    found: Codes = states @ BASE ** np.arange(states.shape[-1])
    return found


@lru_cache(maxsize=100_000)
def _layout(states: tuple[int, ...]) -> Layout:
    return Layout(tuple(map(_state, states)))


def layouts_of(states: Codes) -> list[Layout]:
    """One layout per row; equal ones are one object."""
    return [_layout(row) for row in map(tuple, states.tolist())]


@lru_cache(maxsize=10_000)
def legal_numbers(shape: tuple[int, ...], mesh: Mesh) -> npt.NDArray[np.bool_]:
    """Whether a tensor of `shape` may have the layout of each number."""
    axes = len(mesh.axes)
    states = np.array(list(product(range(2 + len(shape)), repeat=axes)), dtype=np.int64)
    legal = np.zeros(BASE ** axes, dtype=bool)
    legal[numbers(states)] = [is_legal(shape, layout, mesh) for layout in layouts_of(states)]
    return legal
