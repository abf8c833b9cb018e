"""Layouts as numbers, for work on thousands of them at once.

    state    B is 0, P is 1, S(d) is 2 + d
    layout   sum over axes of state * BASE ** axis
"""

from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from autoddl.errors import InputError
from autoddl.layout import B, Layout, Mesh, P, Split, State, is_legal

__all__ = ["BROADCAST", "PARTIAL", "code", "layouts_of", "legal_layouts", "legal_numbers", "numbers"]

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
    """Whether a tensor of `shape` may have the layout of each number: each dim may be cut by the axes that cut it, and
    an axis of one rank is B. Raises InputError where a dim has no number."""
    axes = len(mesh.axes)
    if len(shape) > BASE - 2:
        raise InputError(f"a tensor of {len(shape)} dims, {list(shape)}, has no plan: at most {BASE - 2} can be told "
                         "apart; give the model one with fewer, larger dims")
    states = np.array(list(product(range(2 + len(shape)), repeat=axes)), dtype=np.int64)
    fine = ((states == BROADCAST) | (np.array(mesh.sizes) > 1)).all(axis=1)
    for dim in range(len(shape)):
        cut = [is_legal(shape, Layout(tuple(Split(dim) if c else B for c in cuts)), mesh)
               for cuts in product((False, True), repeat=axes)]
        fine &= np.array(cut)[(states == 2 + dim) @ 2 ** np.arange(axes)[::-1]]
    legal = np.zeros(BASE ** axes, dtype=bool)
    legal[numbers(states)] = fine
    return legal


def legal_layouts(shape: tuple[int, ...], mesh: Mesh, partial: bool = True) -> tuple[Layout, ...]:
    """Every legal layout of a tensor, in a fixed order; without partial sums if not `partial`."""
    states = [*(2 + d for d in range(len(shape)) if shape[d] > 1), BROADCAST, *([PARTIAL] if partial else [])]
    every = np.array(list(product(states, repeat=len(mesh.axes))), dtype=np.int64)
    return tuple(layouts_of(every[legal_numbers(shape, mesh)[numbers(every)]]))
