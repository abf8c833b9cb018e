"""Codes rows of values as bytes and back, as `core.codecs` says: what a coded collective sends.

    encode    (rows, elements) of any float dtype -> (rows, row_bytes) of uint8
    decode    back, in float32; of the lossless codec in the dtype of the values

A row of blocks has all values first, then the scales of its blocks. Rows are coded one after the other, so that what
they take besides is that of one row. Lossless rows are those of `lossless_rows`, blocks of four of `block_transform`.
"""

from math import inf

import torch
from torch import Tensor

from autoddl.core.codecs import BLOCK, CODECS
from autoddl.runtime.collectives.block_transform import decode_blocks, encode_blocks
from autoddl.runtime.collectives.lossless_rows import exponents_of, lacks_exponents, pack, unpack

__all__ = ["decode", "decode_sum", "encode", "error_share"]

TINY = torch.finfo(torch.float32).tiny

LESS = 1 + 2.0**-22
"""By so much is a scale too small, so that the largest float32 does not round to infinity when it is decoded."""


def encode(name: str, rows: Tensor) -> Tensor:
    """The bytes of each row."""
    codec = CODECS[name]
    found = torch.empty(len(rows), codec.row_bytes(rows.shape[1], rows.element_size()), dtype=torch.uint8,
                        device=rows.device)
    for row, into in zip(rows, found, strict=True):
        if codec.lossless and len(row):
            pack(row, into)
        elif codec.group > 1:
            into.copy_(encode_blocks(codec.bits, row))
        elif codec.scaled:
            _encode_blocks(codec.bits, row, into)
        elif not codec.lossless:
            into.copy_(row.to(getattr(torch, name)).view(torch.uint8))
    return found


def _blocks(bits: int, elements: int) -> tuple[int, int]:
    """Number of blocks of a row, and bytes of all its values."""
    return -(-elements // BLOCK), -(-elements * bits // 8)


def _encode_blocks(bits: int, row: Tensor, into: Tensor) -> None:
    """Writes the values of a row, then their scales."""
    blocks, size = _blocks(bits, len(row))
    x = torch.zeros(blocks, BLOCK, device=row.device)
    x.view(-1)[:len(row)].copy_(row)
    scale = x.abs().amax(1, keepdim=True).div_((2 ** (bits - 1) - 1) * LESS).clamp_min_(TINY)
    into[size:].copy_(scale.view(-1).view(torch.uint8))
    q = x.div_(scale).round_().nan_to_num_(nan=0.0).view(-1)
    if bits == 4:
        q.add_(8)
        into[:size].copy_(torch.add(q[0::2], q[1::2], alpha=16)[:size])
    else:
        into[:size].copy_(q[:len(row)].to(_integers(bits)).view(torch.uint8))


def _integers(bits: int) -> torch.dtype:
    return torch.int16 if bits == 16 else torch.int8


def _decode_row(name: str, data: Tensor, elements: int, dtype: torch.dtype, exponents: Tensor | None) -> Tensor:
    """The values of a row."""
    codec = CODECS[name]
    if not elements:
        return torch.empty(0, device=data.device)
    if codec.lossless:
        return unpack(data, elements, dtype, exponents)
    if codec.group > 1:
        return decode_blocks(codec.bits, data, elements)
    if not codec.scaled:
        return data.view(getattr(torch, name)).float()
    blocks, size = _blocks(codec.bits, elements)
    scale = data[size:].clone().view(torch.float32).unsqueeze(1)
    q = torch.zeros(blocks * BLOCK, device=data.device)
    if codec.bits == 4:
        q[0:2 * size:2], q[1:2 * size:2] = data[:size] & 15, data[:size] >> 4
        q.sub_(8)
    else:
        q[:elements] = data[:size].view(_integers(codec.bits))
    return q.view(blocks, BLOCK).mul_(scale).view(-1)[:elements]


def decode(name: str, data: Tensor, elements: int, dtype: torch.dtype = torch.float32,
           exponents: Tensor | None = None) -> Tensor:
    """The values of every row, (rows, elements), which were of `dtype`.

    `exponents`, (rows, elements), are those of lossless rows that say so.
    """
    return torch.stack([_decode_row(name, row, elements, dtype, None if exponents is None else exponents[k])
                        for k, row in enumerate(data)])


def decode_sum(name: str, data: Tensor, elements: int, dtype: torch.dtype = torch.float32,
               exponents: Tensor | None = None) -> Tensor:
    """The sum of the values of all rows, (1, elements), added up in float32 in the order of the rows."""
    total = torch.zeros(0)
    for k, row in enumerate(data):
        values = _decode_row(name, row, elements, dtype, None if exponents is None else exponents[k])
        total = total.add_(values) if k else values.to(torch.float32, copy=True)
    return total.unsqueeze(0)


def error_share(name: str, rows: Tensor, data: Tensor) -> float:
    """The largest error of coded rows over what their codec allows, by `core.codecs`.

    Blocks are those that the codec's error is relative to: four values of zfp16 and zfp8. Those with a value that is
    not finite are left out. It is infinite where a finite value comes back otherwise, and where a lossless row comes
    back with any bit changed.
    """
    codec, elements = CODECS[name], rows.shape[1]
    if not rows.numel():
        return 0.0
    besides = exponents_of(rows) if codec.lossless and lacks_exponents(data) else None
    found = decode(name, data, elements, rows.dtype, besides)
    if codec.lossless:
        return 0.0 if torch.equal(found.view(torch.uint8), rows.contiguous().view(torch.uint8)) else inf
    size = codec.group if codec.group > 1 else BLOCK
    x = torch.nn.functional.pad(rows.double(), (0, -elements % size)).view(len(rows), -1, size)
    largest = x.abs().amax(2, keepdim=True)
    if not codec.is_cast:
        allowed = (largest * codec.error + TINY).expand_as(x)
    else:
        dtype = torch.finfo(getattr(torch, name))
        allowed = x.abs() * dtype.eps / 2 + dtype.smallest_normal * dtype.eps / 2
    error = (torch.nn.functional.pad(found.double(), (0, -elements % size)).view_as(x) - x).abs()
    shares = (error / allowed)[torch.isfinite(largest).expand_as(x)].nan_to_num(nan=inf)
    return float(shares.max()) if shares.numel() else 0.0
