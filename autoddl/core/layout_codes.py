"""Layouts as numbers, for work on thousands of them at once.

    state    B is 0, P is 1, S(d) is 2 + d
    layout   sum over axes of state * BASE ** axis
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout, Mesh, P, Split, State, is_legal

__all__ = ["BASE", "BROADCAST", "PARTIAL", "Codes", "code", "distinct", "duals", "layout_of", "layouts_of",
           "legal_layouts", "legal_numbers", "legal_states", "number_of", "numbers", "pieces", "states_of"]

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
def number_of(layout: Layout) -> int:
    return sum(code(state) * BASE ** axis for axis, state in enumerate(layout))


@lru_cache(maxsize=100_000)
def layout_of(number: int, axes: int) -> Layout:
    """The layout on so many axes; equal ones are one object."""
    return Layout(tuple(_state(number // BASE ** axis % BASE) for axis in range(axes)))


def layouts_of(given: Codes, axes: int) -> list[Layout]:
    """The layout of each number."""
    return [layout_of(number, axes) for number in given.tolist()]


def states_of(given: Codes, axes: int) -> Codes:
    """States by axis of the layout of each number."""
    found: Codes = given[:, None] // BASE ** np.arange(axes) % BASE
    return found


def duals(given: Codes, axes: int) -> Codes:
    """The layout, as a number, of the gradient that the producer's backward needs: B in place of P."""
    states = states_of(given, axes)
    return numbers(np.where(states == PARTIAL, BROADCAST, states))


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


def legal_states(shape: tuple[int, ...], mesh: Mesh, partial: bool = True) -> Codes:
    """The states by axis of every legal layout of a tensor, in a fixed order; without partial sums if not `partial`."""
    states = [*(2 + d for d in range(len(shape)) if shape[d] > 1), BROADCAST, *([PARTIAL] if partial else [])]
    every = np.array(list(product(states, repeat=len(mesh.axes))), dtype=np.int64)
    found: Codes = every[legal_numbers(shape, mesh)[numbers(every)]]
    return found


def legal_layouts(shape: tuple[int, ...], mesh: Mesh, partial: bool = True) -> tuple[Layout, ...]:
    """Every legal layout of a tensor, in that order."""
    return tuple(layouts_of(numbers(legal_states(shape, mesh, partial)), len(mesh.axes)))


def pieces(shape: tuple[int, ...], states: Codes, mesh: Mesh) -> Codes:
    """`local_shape` of rank 0 in every layout, one row each."""
    found = np.tile(np.array(shape, dtype=np.int64), (len(states), 1))
    for a, axis in enumerate(mesh.axes):
        for d in range(len(shape)):
            np.copyto(found[:, d], -(-found[:, d] // axis.size), where=states[:, a] == 2 + d)
    return found


def distinct(columns: Sequence[npt.NDArray[Any]]) -> tuple[Codes, Codes]:
    """Of rows of whole numbers, given by columns: the first row of each kind, in order, and every row's kind."""
    key, span = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if span * (high - low + 1) >= 1 << 63:
            key = np.unique(key, return_inverse=True)[1]
            span = int(key.max()) + 1
        key, span = key * (high - low + 1) + (column - low), span * (high - low + 1)
    _, first, kinds = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[kinds]
