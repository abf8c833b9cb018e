"""Writes what ranks and switches say to each other as bytes, and reads it; nothing is unpickled.

    hello      magic, token, group, number of hops; per hop from the first switch on: place, children, blocks
    request    dtype, reduction, bytes of a block, bytes of the buffer; the buffer follows
    reply      0, then the sum; or 1, the length of a text, and the text

Integers are big-endian. A connection carries one hello, and then requests and replies in turn. The token is a secret of
the launcher: whoever does not know it is not answered.
"""

import struct
from dataclasses import dataclass

from autoddl.core.errors import InputError

__all__ = ["DTYPES", "HEAD", "HOP", "REDUCTIONS", "REPLY", "REQUEST", "TOKEN_BYTES", "Hello", "Hop", "SumRequest",
           "error_reply"]

MAGIC = b"AUTODDL1"
TOKEN_BYTES = 16
GROUP_BYTES = 16

HEAD = struct.Struct(f"!8s{TOKEN_BYTES}s{GROUP_BYTES}sB")
HOP = struct.Struct("!HHH")
REQUEST = struct.Struct("!BBIQ")
REPLY = struct.Struct("!BH")

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
"""Dtypes that a switch adds, by their number."""
REDUCTIONS = ("sum", "max", "sparse sum")


@dataclass(frozen=True, slots=True)
class Hop:
    """The place of a child among the `children` of one group at a switch, and the blocks of each under way."""

    place: int
    children: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects: the launcher's token, the group, and the hops from here to the outermost switch."""

    token: bytes
    group: bytes
    hops: tuple[Hop, ...]

    def to_bytes(self) -> bytes:
        """The frame."""
        hops = b"".join(HOP.pack(hop.place, hop.children, hop.blocks) for hop in self.hops)
        return HEAD.pack(MAGIC, self.token, self.group, len(self.hops)) + hops

    @classmethod
    def parse(cls, data: bytes) -> "Hello | None":
        """The hello that `data` begins with; None where it is not whole yet. Raises InputError where it is none."""
        if len(data) < HEAD.size:
            return None
        magic, token, group, count = HEAD.unpack_from(data)
        if magic != MAGIC or not count:
            raise InputError("the peer speaks another protocol than the switches of AutoDDL")
        if len(data) < HEAD.size + count * HOP.size:
            return None
        hops = tuple(Hop(*HOP.unpack_from(data, HEAD.size + k * HOP.size)) for k in range(count))
        if any(not 0 <= hop.place < hop.children or not hop.blocks for hop in hops):
            raise InputError(f"no such place at a switch: {hops}")
        return cls(token, group, hops)

    @property
    def size(self) -> int:
        """Bytes of the frame."""
        return HEAD.size + len(self.hops) * HOP.size


@dataclass(frozen=True, slots=True)
class SumRequest:
    """One all-reduce: dtype, reduction, bytes of a block and of the buffer.

    Of a sparse sum they are the indices of a range, and the numbers of the whole vector (`sparse`)."""

    dtype: str
    how: str
    block: int
    nbytes: int

    def to_bytes(self) -> bytes:
        """The frame."""
        return REQUEST.pack(DTYPES.index(self.dtype), REDUCTIONS.index(self.how), self.block, self.nbytes)

    @classmethod
    def parse(cls, data: bytes) -> "SumRequest":
        """The request that `data` is. Raises InputError where it is none."""
        dtype, how, block, nbytes = REQUEST.unpack(data)
        if dtype >= len(DTYPES) or how >= len(REDUCTIONS) or not block or not nbytes:
            raise InputError(f"no such request at a switch: {dtype}, {how}, blocks of {block}, {nbytes} bytes")
        return cls(DTYPES[dtype], REDUCTIONS[how], block, nbytes)


def error_reply(text: str) -> bytes:
    """The reply that says why there is no sum."""
    said = text.encode()[:1000]
    return REPLY.pack(1, len(said)) + said
