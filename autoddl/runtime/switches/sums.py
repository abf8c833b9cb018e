"""Adds up blocks of bytes as numbers, always in the order of the children.

    sum = ((x_0 + x_1) + x_2) + ...         max likewise

Floats of two bytes are added in float32 and rounded once, to the nearest, ties to even. Integers wrap around, as they
do in a rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Adder", "Bytes", "adder_of"]

Numbers = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Adder:
    """How blocks of one dtype are added.

        wide     the dtype in which they are added
        itemsize bytes of a number on the wire
        widen    bytes of a block -> numbers
        narrow   numbers -> bytes of a block
        into     adds the second numbers to the first, in place
    """

    wide: np.dtype[Any]
    itemsize: int
    widen: Callable[[Bytes], Numbers]
    narrow: Callable[[Numbers], Bytes]
    into: Callable[[Numbers, Numbers], None]


def _add(total: Numbers, more: Numbers) -> None:
    np.add(total, more, out=total)


def _largest(total: Numbers, more: Numbers) -> None:
    np.maximum(total, more, out=total)


def _of_bfloat16(data: Bytes) -> Numbers:
    found: Numbers = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return found


def _to_bfloat16(numbers: Numbers) -> Bytes:
    bits = numbers.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(numbers)] = 0x7FC0
    return rounded.view(np.uint8)


def adder_of(dtype: str, how: str) -> Adder:
    """The adder of `frames.DTYPES` and `frames.REDUCTIONS`."""
    into = _add if how == "sum" else _largest
    if dtype == "bfloat16":
        return Adder(np.dtype(np.float32), 2, _of_bfloat16, _to_bfloat16, into)
    kind = np.dtype(dtype)
    if dtype == "float16":
        return Adder(np.dtype(np.float32), 2, lambda data: data.view(kind).astype(np.float32),
                     lambda numbers: numbers.astype(kind).view(np.uint8), into)
    return Adder(kind, kind.itemsize, lambda data: data.view(kind), lambda numbers: numbers.view(np.uint8), into)
