"""Codes rows of values at a fixed rate, in blocks of four, as `core.codecs` says of `zfp8` and `zfp16`.

A block is one whole number of 4 R bits. From its lowest bit it has 8 of the exponent e, one of the mode, four numbers.

    e        least with |x| < 2^e for its four values, at least -126; written as e + 126, and 255 where one of these is
             not finite: then it decodes to four NaN
    plain    q_i = round(x_i / 2^e (2^(w-1) - 1)), of w bits; w are those of `plain_widths`
    smooth   3 bits s, then c_i, of w bits: R, and three times R - 4; c are X_i = round(x_i 2^(30-e)) lifted, c_0 in
             steps of 2^(31-w), the others, which are below 2^(30-s), in steps of 2^(31-w-s)

Lifting takes sums and differences of four numbers, by additions and halvings alone, so a smooth row has small c_1 to
c_3. The encoder takes the mode whose largest error in the block is less. Every block takes the same bytes, and equal
values give equal bytes on any machine. Lifting and common exponents are those of Lindstrom 2014, "Fixed-rate
compressed floating-point arrays"; its numbers have as many bits as fit, ours a fixed number.
"""

import torch
from torch import Tensor

__all__ = ["decode_blocks", "encode_blocks", "plain_widths"]

POINT = 30
"""Binary digits of the numbers that are lifted."""

SKIPPED = 7
"""Most leading binary digits of c_1 to c_3 that are left out: s has 3 bits."""

NOT_FINITE = 255

CHUNK = 1 << 14
"""Values that are coded at once."""


def plain_widths(bits: int) -> tuple[int, ...]:
    """Bits of the four numbers of a block in plain mode, whose values have `bits` each."""
    return tuple((4 * bits - 9 + 3 - i) // 4 for i in range(4))


def _smooth_widths(bits: int) -> tuple[int, ...]:
    """Bits of the four numbers in smooth mode."""
    return bits, bits - 4, bits - 4, bits - 4


def encode_blocks(bits: int, row: Tensor) -> Tensor:
    """The bytes of a row of values, (blocks * bits / 2), chunk by chunk: what is needed besides stays small."""
    return torch.cat([_encoded(bits, chunk) for chunk in row.split(CHUNK)])


def _encoded(bits: int, row: Tensor) -> Tensor:
    """The bytes of a chunk."""
    x = torch.zeros(-(-len(row) // 4), 4, dtype=torch.float64, device=row.device)
    x.view(-1)[:len(row)].copy_(row)
    finite = torch.isfinite(x).all(1)
    x = torch.where(finite[:, None], x, 0.0)
    exponent = _exponent(x.abs().amax(1)).clamp_(min=-126)
    y = x * _power(-exponent)[:, None]
    plain, smooth = _plain(bits, y), _smooth(bits, y)
    worse = (_decoded(bits, smooth) - y).abs().amax(1) >= (_decoded(bits, plain) - y).abs().amax(1)
    word = torch.where(worse, plain, smooth) | torch.where(finite, exponent + 126, NOT_FINITE)
    return word.to(torch.int32 if bits == 8 else torch.int64).view(torch.uint8)


def decode_blocks(bits: int, data: Tensor, elements: int) -> Tensor:
    """The values of a row that `encode_blocks` wrote, in float32."""
    return torch.cat([_decoded_chunk(bits, chunk) for chunk in data.split(CHUNK * bits // 8)])[:elements]


def _exponent(x: Tensor) -> Tensor:
    """The least e with x < 2^e, of numbers in float64 that are 0 or more; -1022 of 0."""
    return (x.view(torch.int64) >> 52) - 1022


def _power(exponent: Tensor) -> Tensor:
    """2^e in float64."""
    return (exponent + 1023 << 52).view(torch.float64)


def _decoded_chunk(bits: int, data: Tensor) -> Tensor:
    """The values of a chunk, with those that only fill its last block."""
    word = data.clone().view(torch.int32 if bits == 8 else torch.int64).long()
    written = word & 255
    y = _decoded(bits, word) * _power(written - 126)[:, None]
    largest = torch.finfo(torch.float32).max
    y = torch.where((written == NOT_FINITE)[:, None], torch.nan, y.clamp_(-largest, largest))
    return y.float().view(-1)


def _plain(bits: int, y: Tensor) -> Tensor:
    """The numbers of plain mode, as bits of a whole number."""
    word, at = torch.zeros(len(y), dtype=torch.int64, device=y.device), 9
    for i, width in enumerate(plain_widths(bits)):
        most = (1 << width - 1) - 1
        word |= (torch.round(y[:, i] * most).long() + most) << at
        at += width
    return word


def _smooth(bits: int, y: Tensor) -> Tensor:
    """The numbers of smooth mode, with the bit of the mode."""
    first, *others = _lifted((y * 2**POINT).round().long().unbind(1))
    largest = torch.stack(others).abs().amax(0).double()
    skipped = (POINT - _exponent(largest)).clamp_(0, SKIPPED)
    word, at = 1 << 8 | skipped << 9, 12
    for i, (number, width) in enumerate(zip((first, *others), _smooth_widths(bits), strict=True)):
        step, most = POINT + 1 - width - skipped * (i > 0), (1 << width - 1) - 1
        quotient = (number.double() * _power(-step)).round_().clamp_(-most, most)
        word = word | (quotient.long() + most) << at
        at += width
    return word


def _decoded(bits: int, word: Tensor) -> Tensor:
    """The values of blocks over 2^e."""
    skipped, widths = word >> 9 & SKIPPED, _smooth_widths(bits)
    plain = [number.double() / ((1 << width - 1) - 1)
             for number, width in zip(_numbers(word, 9, plain_widths(bits)), plain_widths(bits), strict=True)]
    numbers = [number << POINT + 1 - width - (skipped if i else 0)
               for i, (number, width) in enumerate(zip(_numbers(word, 12, widths), widths, strict=True))]
    smooth = torch.stack(_unlifted(numbers), 1).double() / 2**POINT
    return torch.where((word >> 8 & 1)[:, None] == 1, smooth, torch.stack(plain, 1))


def _numbers(word: Tensor, at: int, widths: tuple[int, ...]) -> list[Tensor]:
    """The numbers of these widths that lie in a word from bit `at` on."""
    found = []
    for width in widths:
        found.append((word >> at & (1 << width) - 1) - ((1 << width - 1) - 1))
        at += width
    return found


def _lifted(values: tuple[Tensor, ...]) -> list[Tensor]:
    """Sums and differences of four numbers, none larger than the largest of these."""
    x, y, z, w = values
    x, w = _halves(x, w)
    z, y = _halves(z, y)
    x, z = _halves(x, z)
    w, y = _halves(w, y)
    w = w + (y >> 1)
    return [x, y - (w >> 1), z, w]


def _halves(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Half the sum, and half the difference from a."""
    mean = a + b >> 1
    return mean, b - mean


def _unlifted(numbers: list[Tensor]) -> list[Tensor]:
    """The four numbers whose `_lifted` these are, to the last few bits."""
    x, y, z, w = numbers
    y = y + (w >> 1)
    w = w - (y >> 1)
    w, y = _wholes(w, y)
    x, z = _wholes(x, z)
    z, y = _wholes(z, y)
    x, w = _wholes(x, w)
    return [x, y, z, w]


def _wholes(mean: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers whose `_halves` these are."""
    b = half + mean
    return (mean << 1) - b, b
