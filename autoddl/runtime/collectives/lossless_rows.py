"""Codes rows of float32 or bfloat16 values as bytes without loss, and back, as `core.codecs` says.

A row has, one part behind the other:

    first      sign and 7 bits of every value          largest    the largest exponent of each block
    others     of float32, its other two bytes         places     of listed exponents, 4 bytes each
    codes      4 bits of every exponent                listed     these exponents
                                                       count      their number, or ALL

A code is how far the exponent is below the largest of its block, at most ZERO. Values are coded a CHUNK at a time. Its
exponents are bytes, and all is done with additions and shifts of integers: torch is slow with booleans on a CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from autoddl.core.codecs import BLOCK, ROOM

__all__ = ["exponents_of", "lacks_exponents", "pack", "unpack"]

CHUNK = 64 * BLOCK
"""Values of a lossless row that are coded at once: they and their parts fit a cache."""

ZERO = 15
"""The 4 bits of an exponent that is 15 or more below the largest: it is 0, as of zeros and denormals, or is listed."""

ALL = -1
"""Number of listed exponents of a row whose exponents are sent besides."""


class _Parts(NamedTuple):
    """Views of the parts of a row, by the module docstring; `total` is the count."""

    first: Tensor
    others: Tensor
    codes: Tensor
    largest: Tensor
    places: Tensor
    listed: Tensor
    total: Tensor

    def chunk(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first four parts, of the values from `start` to before `end` alone; `start` begins a block."""
        wide = len(self.others) // len(self.first)
        return (self.first[start:end], self.others[wide * start:wide * end], self.codes[start // 2:-(-end // 2)],
                self.largest[start // BLOCK:-(-end // BLOCK)])


def _parts(data: Tensor, elements: int, itemsize: int) -> _Parts:
    room = -(-elements // ROOM)
    sizes = (elements, elements * (itemsize - 2), -(-elements // 2), -(-elements // BLOCK), 4 * room, room, 4)
    return _Parts(*data.split(sizes))


def _bits(row: Tensor) -> Tensor:
    """The values as integers of their width."""
    return row.contiguous().view(torch.int32 if row.element_size() == 4 else torch.int16)


def _exponents(bits: Tensor) -> Tensor:
    """The exponents of values that are given as integers, of float32 or bfloat16."""
    return bits.bitwise_right_shift(23 if bits.element_size() == 4 else 7).to(torch.uint8)


def exponents_of(rows: Tensor) -> Tensor:
    """The exponents of values, (rows, elements) of uint8."""
    return torch.stack([_exponents(_bits(row)) for row in rows])


def pack(row: Tensor, into: Tensor) -> None:
    """Writes a row; where its list has no room for all exponents, it says ALL."""
    parts, bits, count = _parts(into, len(row), row.element_size()), _bits(row), 0
    for start in range(0, len(bits), CHUNK):
        places, exponents = _pack_chunk(bits[start:start + CHUNK], *parts.chunk(start, min(len(bits), start + CHUNK)))
        end = count + len(places)
        if count == ALL or end > len(parts.listed):
            count = ALL
        elif end > count:
            parts.places[4 * count:4 * end].copy_(places.add_(start).to(torch.int32).view(torch.uint8))
            parts.listed[count:end].copy_(exponents)
            count = end
    parts.total.copy_(torch.tensor([count], dtype=torch.int32).view(torch.uint8))


def _pack_chunk(bits: Tensor, first: Tensor, others: Tensor, into: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Writes some values of a row; returns the places of the exponents to list, and these."""
    exponents = torch.zeros(len(largest), BLOCK, dtype=torch.uint8, device=bits.device)
    exponents.view(-1)[:len(bits)] = _exponents(bits)
    if bits.element_size() == 4:
        others.copy_(bits.to(torch.int16).view(torch.uint8))
        bits = bits.bitwise_right_shift(16).to(torch.int16)
    first.copy_(bits.bitwise_and(127).bitwise_or_(bits.bitwise_right_shift(8).bitwise_and_(128)))
    torch.amax(exponents, 1, out=largest)
    codes = (largest.unsqueeze(1) - exponents).clamp_(max=ZERO)
    pairs = codes.view(-1).view(torch.int16)
    into.copy_(pairs.bitwise_right_shift(4).bitwise_or_(pairs)[:len(into)])
    unlike = codes.add_(1).bitwise_right_shift_(4).mul_(exponents.clamp(max=1))
    near = unlike.amax(1).nonzero().view(-1)
    found = unlike[near].nonzero()
    places = near[found[:, 0]] * BLOCK + found[:, 1]
    return places, exponents.view(-1)[places]


def _counts(data: Tensor) -> Tensor:
    """By row, the number of listed exponents, or ALL."""
    return data[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.int32).view(-1)


def lacks_exponents(data: Tensor, among: Tensor | None = None) -> bool:
    """Whether any row says ALL; then all rows of `among`, if given, are made to say so."""
    if not data.shape[1] or not bool((_counts(data) == ALL).any()):
        return False
    if among is not None:
        among[:, -4:] = 255
    return True


def unpack(data: Tensor, elements: int, dtype: torch.dtype, exponents: Tensor | None) -> Tensor:
    """The values of a row; `exponents` are its own where it says ALL."""
    parts, count = _parts(data, elements, dtype.itemsize), int(_counts(data.view(1, -1)))
    if count == ALL and exponents is None:
        raise ValueError("a lossless row lists no exponents, and none came besides")
    found = torch.empty(elements, dtype=dtype, device=data.device)
    own = _listed(parts, elements, count) if exponents is None or count != ALL else exponents
    for start in range(0, elements, CHUNK):
        end = min(elements, start + CHUNK)
        first, others, _, _ = parts.chunk(start, end)
        _join(first, others, own[start:end], found[start:end])
    return found


def _listed(parts: _Parts, elements: int, count: int) -> Tensor:
    """The exponents of a row that has `count` of them in its list."""
    own = torch.empty(elements, dtype=torch.uint8, device=parts.first.device)
    for start in range(0, elements, CHUNK):
        end = min(elements, start + CHUNK)
        _, _, codes, largest = parts.chunk(start, end)
        pairs = codes.to(torch.int16)
        codes = pairs.bitwise_or_(pairs.bitwise_left_shift(4)).bitwise_and_(0x0F0F).view(torch.uint8)
        blocks = torch.full((len(largest), BLOCK), ZERO, dtype=torch.uint8, device=own.device)
        blocks.view(-1)[:end - start] = codes[:end - start]
        known = 1 - (blocks + 1).bitwise_right_shift_(4)
        own[start:end] = (largest.unsqueeze(1) - blocks).mul_(known).view(-1)[:end - start]
    if count:
        own[parts.places[:4 * count].clone().view(torch.int32).long()] = parts.listed[:count]
    return own


def _join(first: Tensor, others: Tensor, exponents: Tensor, into: Tensor) -> None:
    """Puts values together again from the parts of their bits."""
    high = first.to(torch.int16)
    high = high.bitwise_and(128).bitwise_left_shift_(8).bitwise_or_(high.bitwise_and_(127)).bitwise_or_(
        exponents.to(torch.int16).bitwise_left_shift_(7))
    if into.element_size() == 2:
        into.view(torch.int16).copy_(high)
        return
    low = others.clone().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    into.view(torch.int32).copy_(high.to(torch.int32).bitwise_left_shift_(16).bitwise_or_(low))
