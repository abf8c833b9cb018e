"""Adds up sparse vectors in a switch: what leaves is the union of the indices that came, with the sums of their values.

A vector of n numbers is cut into ranges of `block` indices. A child sends one frame per range, in order:

    count, then that many indices, rising, as 4-byte numbers in the order of this machine, then their values

The sum of a range leaves when every child has sent its frame. Values are added in the order of the children, so the
bits do not depend on the order of arrival. A rank sends k (4 + itemsize) bytes for k values, and receives as much per
index of the union; each range adds 4 bytes.
"""

import struct

import numpy as np
import numpy.typing as npt

from autoddl.core.errors import InputError
from autoddl.runtime.switches.frames import SumRequest
from autoddl.runtime.switches.sums import Adder, adder_of

__all__ = ["FrameReader", "SparseRound", "block_bytes", "ranges_of", "to_frames"]

COUNT = struct.Struct("!I")
INDEX = np.dtype(np.uint32)
NOTHING = memoryview(b"")

Indices = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.generic]


def ranges_of(request: SumRequest) -> int:
    """The number of frames of a vector of `request.nbytes` numbers."""
    return -(-request.nbytes // request.block)


def block_bytes(request: SumRequest) -> int:
    """Bytes of a frame at most."""
    return COUNT.size + request.block * (INDEX.itemsize + adder_of(request.dtype, "sum").itemsize)


def to_frames(indices: Indices, values: Numbers, request: SumRequest) -> bytes:
    """The frames of a vector whose `values`, bytes of a number a row, stand at rising `indices`."""
    itemsize = adder_of(request.dtype, "sum").itemsize
    data = np.ascontiguousarray(values).view(np.uint8).reshape(len(indices), itemsize)
    cuts = np.searchsorted(indices, np.arange(1, ranges_of(request)) * request.block)
    return b"".join(COUNT.pack(len(some)) + some.tobytes() + rows.tobytes()
                    for some, rows in zip(np.split(indices, cuts), np.split(data, cuts), strict=True))


class FrameReader:
    """Takes the frames of a vector from a stream of bytes, `itemsize` per value."""

    def __init__(self, request: SumRequest, itemsize: int) -> None:
        self._request, self._width = request, INDEX.itemsize + itemsize
        self._head = True
        self._part, self._filled = bytearray(COUNT.size), 0
        self.count = 0

    @property
    def is_over(self) -> bool:
        """Whether all frames are here."""
        return self.count == ranges_of(self._request)

    def room(self) -> memoryview:
        """Where the next bytes go: those that the present frame misses."""
        return NOTHING if self.is_over else memoryview(self._part)[self._filled:]

    def arrived(self, nbytes: int) -> tuple[Indices, bytes] | None:
        """Notes bytes that were put there; returns the indices and values of a frame that is whole now.

        Raises InputError for indices that do not rise, or are of another range."""
        self._filled += nbytes
        if self._filled < len(self._part):
            return None
        done, self._filled = self._part, 0
        if self._head:
            count = COUNT.unpack(done)[0]
            if count > self._request.block:
                raise InputError(f"a frame of {count} values in a range of {self._request.block}")
            self._part, self._head = bytearray(count * self._width), False
            return self.arrived(0) if not count else None
        self._part, self._head = bytearray(COUNT.size), True
        return self._frame(bytes(done))

    def _frame(self, done: bytes) -> tuple[Indices, bytes]:
        count, first = len(done) // self._width, self.count * self._request.block
        indices = np.frombuffer(done, INDEX, count)
        end = min(first + self._request.block, self._request.nbytes)
        rise = bool(np.all(np.diff(indices.astype(np.int64)) > 0))
        if count and not (first <= indices[0] and indices[-1] < end and rise):
            raise InputError(f"indices of a frame do not rise from {first} to below {end}")
        self.count += 1
        return indices, done[count * INDEX.itemsize:]


class SparseRound:
    """One sparse sum at a switch, with `blocks` ranges of each child under way at most; like `round.Round`."""

    def __init__(self, request: SumRequest, children: int, blocks: int, above: bool = False) -> None:
        self.request, self._blocks, self._above = request, blocks, above
        self._adder: Adder = adder_of(request.dtype, "sum")
        self._readers = [FrameReader(request, self._adder.itemsize) for _ in range(children)]
        self._waiting: list[dict[int, tuple[Indices, bytes]]] = [{} for _ in range(children)]
        self._sums: list[bytes] = []
        self._whole = self._sums if not above else list[bytes]()
        self._falling = FrameReader(request, self._adder.itemsize)
        self._returned = [(0, 0)] * children
        self._rose = (0, 0)

    @property
    def is_over(self) -> bool:
        """Whether every child has the whole sum."""
        return min(self._returned)[0] == ranges_of(self.request)

    def room(self, child: int) -> memoryview:
        """Where the next bytes of a child go; empty where there is no room, or they are all here."""
        reader = self._readers[child]
        return reader.room() if reader.count < min(self._returned)[0] + self._blocks else NOTHING

    def only_waits(self, child: int) -> bool:
        """Whether a child has sent everything, and misses some of the sum."""
        return self._readers[child].is_over and self._returned[child][0] < ranges_of(self.request)

    def arrived(self, child: int, nbytes: int) -> bool:
        """Notes bytes that were put there; returns whether more of the sum is known."""
        frame, known = self._readers[child].arrived(nbytes), len(self._sums)
        if frame is not None:
            self._waiting[child][self._readers[child].count - 1] = frame
            if all(known in one for one in self._waiting):
                self._sums.append(self._added([one.pop(known) for one in self._waiting]))
        return len(self._sums) > known

    def leaving(self, child: int) -> memoryview:
        """Bytes of the sum that may leave to a child."""
        return _at(self._whole, self._returned[child])

    def left(self, child: int, nbytes: int) -> None:
        """Notes that bytes left to a child; a range that all have is forgotten."""
        self._returned[child] = _after(self._whole, self._returned[child], nbytes)
        for k in range(min(self._returned)[0] - 1, -1, -1):
            if not self._whole[k]:
                break
            self._whole[k] = b""

    def rising(self) -> memoryview:
        """Bytes of this switch's sum that may rise."""
        return _at(self._sums, self._rose)

    def rose(self, nbytes: int) -> None:
        """Notes that bytes rose."""
        self._rose = _after(self._sums, self._rose, nbytes)

    def falling(self) -> memoryview:
        """Where the next bytes of the whole sum go."""
        return self._falling.room()

    def fell(self, nbytes: int) -> None:
        """Notes that bytes fell."""
        frame = self._falling.arrived(nbytes)
        if frame is not None:
            self._whole.append(COUNT.pack(len(frame[0])) + frame[0].tobytes() + frame[1])

    def _added(self, frames: list[tuple[Indices, bytes]]) -> bytes:
        """The frame of the union, with the values of every child added in their order."""
        union = np.unique(np.concatenate([indices for indices, _ in frames]))
        total = np.zeros(len(union), self._adder.wide)
        for indices, values in frames:
            total[np.searchsorted(union, indices)] += self._adder.widen(np.frombuffer(values, np.uint8))
        return COUNT.pack(len(union)) + union.tobytes() + self._adder.narrow(total).tobytes()


def _at(frames: list[bytes], place: tuple[int, int]) -> memoryview:
    """The rest of the frame at a place, (frame, bytes of it that are gone)."""
    return memoryview(frames[place[0]])[place[1]:] if place[0] < len(frames) else NOTHING


def _after(frames: list[bytes], place: tuple[int, int], nbytes: int) -> tuple[int, int]:
    """The place so many bytes further; they are of one frame."""
    k, gone = place[0], place[1] + nbytes
    return (k + 1, 0) if gone == len(frames[k]) else (k, gone)
