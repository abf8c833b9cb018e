"""Layouts as integers, for work on arrays of thousands of them.

    code of a state      B is 0, P is 1, S(d) is 2 + d
    code of a layout     sum over axes of state * BASE ** axis
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout, Mesh, P, Split, State, is_legal

__all__ = [
    "BASE",
    "BROADCAST",
    "PARTIAL",
    "Codes",
    "decode_layout",
    "decode_layouts",
    "decode_states",
    "distinct_rows",
    "dual_codes",
    "encode_layout",
    "encode_states",
    "legal_layouts",
    "legal_mask",
    "legal_states",
    "local_shapes",
    "state_code",
]

Codes = npt.NDArray[np.int64]

BROADCAST, PARTIAL = 0, 1
"""Codes of B and P."""
BASE = 16
"""Codes of states are below this: a tensor has at most 14 dims."""


def state_code(state: State) -> int:
    """The code of a state."""
    return 2 + state.dim if isinstance(state, Split) else (BROADCAST if state == B else PARTIAL)


def _state(number: int) -> State:
    return Split(number - 2) if number > PARTIAL else (P if number else B)


def encode_states(states: Codes) -> Codes:
    """The codes of layouts, whose states' codes are along the last dim of `states`, by axis."""
    found: Codes = states @ BASE ** np.arange(states.shape[-1])
    return found


@lru_cache(maxsize=100_000)
def encode_layout(layout: Layout) -> int:
    """The code of a layout."""
    return sum(state_code(state) * BASE ** axis for axis, state in enumerate(layout))


@lru_cache(maxsize=100_000)
def decode_layout(number: int, axes: int) -> Layout:
    """The layout on `axes` mesh axes with this code; equal layouts are one object."""
    return Layout(tuple(_state(number // BASE ** axis % BASE) for axis in range(axes)))


def decode_layouts(given: Codes, axes: int) -> list[Layout]:
    """The layout on `axes` mesh axes with each code."""
    return [decode_layout(number, axes) for number in given.tolist()]


def decode_states(given: Codes, axes: int) -> Codes:
    """The codes of the states of each layout, a row per layout and a column per axis."""
    found: Codes = given[:, None] // BASE ** np.arange(axes) % BASE
    return found


def dual_codes(given: Codes, axes: int) -> Codes:
    """The codes with B in place of P: a producer's backward needs its gradient in this layout."""
    states = decode_states(given, axes)
    return encode_states(np.where(states == PARTIAL, BROADCAST, states))


@lru_cache(maxsize=10_000)
def legal_mask(shape: tuple[int, ...], mesh: Mesh) -> npt.NDArray[np.bool_]:
    """For every code whether a tensor of `shape` may have that layout, as `is_legal` says.

    Raises InputError where the tensor has more dims than codes can name.
    """
    axes = len(mesh.axes)
    if len(shape) > BASE - 2:
        raise InputError(f"a tensor of {len(shape)} dims, {list(shape)}, has no plan: layouts are coded for at "
                         f"most {BASE - 2} dims; give the model a tensor with fewer, larger dims")
    states = np.array(list(product(range(2 + len(shape)), repeat=axes)), dtype=np.int64)
    fine = ((states == BROADCAST) | (np.array(mesh.sizes) > 1)).all(axis=1)
    for dim in range(len(shape)):
        cut = [is_legal(shape, Layout(tuple(Split(dim) if c else B for c in cuts)), mesh)
               for cuts in product((False, True), repeat=axes)]
        fine &= np.array(cut)[(states == 2 + dim) @ 2 ** np.arange(axes)[::-1]]
    legal = np.zeros(BASE ** axes, dtype=bool)
    legal[encode_states(states)] = fine
    return legal


def legal_states(shape: tuple[int, ...], mesh: Mesh, partial: bool = True) -> Codes:
    """Codes of the states of every legal layout of a tensor, a row per layout, in a fixed order.

    Layouts with partial sums are left out unless `partial`.
    """
    states = [*(2 + d for d in range(len(shape)) if shape[d] > 1), BROADCAST, *([PARTIAL] if partial else [])]
    every = np.array(list(product(states, repeat=len(mesh.axes))), dtype=np.int64)
    found: Codes = every[legal_mask(shape, mesh)[encode_states(every)]]
    return found


def legal_layouts(shape: tuple[int, ...], mesh: Mesh, partial: bool = True) -> tuple[Layout, ...]:
    """Every legal layout of a tensor, in the order of `legal_states`."""
    return tuple(decode_layouts(encode_states(legal_states(shape, mesh, partial)), len(mesh.axes)))


def local_shapes(shape: tuple[int, ...], states: Codes, mesh: Mesh) -> Codes:
    """`local_shape` of rank 0 in every layout, a row per layout; `states` as of `legal_states`."""
    found = np.tile(np.array(shape, dtype=np.int64), (len(states), 1))
    for a, axis in enumerate(mesh.axes):
        for d in range(len(shape)):
            np.copyto(found[:, d], -(-found[:, d] // axis.size), where=states[:, a] == 2 + d)
    return found


def distinct_rows(columns: Sequence[npt.NDArray[Any]]) -> tuple[Codes, Codes]:
    """Like np.unique over rows of integers that are given as columns, in order of first occurrence.

    Returns the index of each distinct row's first occurrence, and for every row the position of its like among them.
    """
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
