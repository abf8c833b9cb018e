"""Codes rows of values as bytes and back, as `core.codecs` says: what a coded collective sends.

    encode    (rows, elements) of any float dtype -> (rows, row_bytes) of uint8
    decode    back, in float32

A row of blocks has all values first, then the scales of its blocks. Rows are coded one after the other, so that what
they take besides is that of one row.
"""

import torch
from torch import Tensor

from autoddl.core.codecs import BLOCK, CODECS

__all__ = ["decode", "decode_sum", "encode"]

TINY = torch.finfo(torch.float32).tiny


def encode(name: str, rows: Tensor) -> Tensor:
    """The bytes of each row."""
    found = torch.empty(len(rows), CODECS[name].row_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
    for row, into in zip(rows, found, strict=True):
        if CODECS[name].scaled:
            _encode_blocks(CODECS[name].bits, row, into)
        else:
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
    scale = x.abs().amax(1, keepdim=True).div_(2 ** (bits - 1) - 1).clamp_min_(TINY)
    into[size:].copy_(scale.view(-1).view(torch.uint8))
    q = x.div_(scale).round_().nan_to_num_(nan=0.0).view(-1)
    if bits == 4:
        q.add_(8)
        into[:size].copy_(torch.add(q[0::2], q[1::2], alpha=16)[:size])
    else:
        into[:size].copy_(q[:size].to(torch.int8).view(torch.uint8))


def _decode_row(name: str, data: Tensor, elements: int) -> Tensor:
    """The values of a row, in float32."""
    codec = CODECS[name]
    if not elements:
        return torch.empty(0, device=data.device)
    if not codec.scaled:
        return data.view(getattr(torch, name)).float()
    blocks, size = _blocks(codec.bits, elements)
    scale = data[size:].clone().view(torch.float32).unsqueeze(1)
    q = torch.zeros(blocks * BLOCK, device=data.device)
    if codec.bits == 4:
        q[0:2 * size:2], q[1:2 * size:2] = data[:size] & 15, data[:size] >> 4
        q.sub_(8)
    else:
        q[:size] = data[:size].view(torch.int8)
    return q.view(blocks, BLOCK).mul_(scale).view(-1)[:elements]


def decode(name: str, data: Tensor, elements: int) -> Tensor:
    """The values of every row, (rows, elements)."""
    return torch.stack([_decode_row(name, row, elements) for row in data])


def decode_sum(name: str, data: Tensor, elements: int) -> Tensor:
    """The sum of the values of all rows, (1, elements), added up in the order of the rows."""
    total = _decode_row(name, data[0], elements).clone()
    for row in data[1:]:
        total.add_(_decode_row(name, row, elements))
    return total.unsqueeze(0)
