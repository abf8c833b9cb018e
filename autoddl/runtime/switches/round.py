"""One sum of one group in one switch, without sockets: where bytes of a child go, and which bytes may leave.

    child      room -> arrived         leaving -> left          bytes of its buffer in, bytes of the sum out
    above      rising -> rose          falling -> fell          bytes of this switch's sum up, bytes of the whole sum in

Blocks of every child wait in a ring of W blocks of its own, until all children before it have theirs. So the order of
addition is that of the children, whatever the order of arrival. A ring takes block b + W when the sum of block b has
left to every child.
"""

import numpy as np

from autoddl.runtime.switches.frames import SumRequest
from autoddl.runtime.switches.sums import Bytes, adder_of

__all__ = ["Round"]


class Round:
    """One all-reduce of `children` children at a switch, with `blocks` blocks of each under way at most.

    With `above` the sum goes up, and the whole sum comes down from there.
    """

    def __init__(self, request: SumRequest, children: int, blocks: int, above: bool = False) -> None:
        self.request, self._above = request, above
        self._blocks = min(blocks, -(-request.nbytes // request.block))
        self._adder = adder_of(request.dtype, request.how)
        size = self._blocks * request.block
        self._rings = [np.empty(size, np.uint8) for _ in range(children)]
        self._total = np.empty(size // self._adder.itemsize, self._adder.wide)
        self._sums = np.empty(size, np.uint8)
        self._whole = np.empty(size, np.uint8) if above else self._sums
        self._got, self._returned = [0] * children, [0] * children
        self._turn = [0] * self._blocks
        self._added = self._rose = self._fell = 0

    @property
    def is_over(self) -> bool:
        """Whether every child has the whole sum."""
        return min(self._returned) == self.request.nbytes

    def room(self, child: int) -> memoryview:
        """Where the next bytes of a child go; empty where there is no room, or they are all here."""
        begun = min(self._returned) // self.request.block * self.request.block
        return self._span(self._rings[child], self._got[child], begun + len(self._sums))

    def arrived(self, child: int, nbytes: int) -> bool:
        """Notes bytes that were put there; returns whether more of the sum is known."""
        before, known = self._whole_blocks(child), self._added
        self._got[child] += nbytes
        for block in range(before, self._whole_blocks(child)):
            if self._turn[block % self._blocks] == child:
                self._add(block)
        return self._added > known

    def leaving(self, child: int) -> memoryview:
        """Bytes of the sum that may leave to a child."""
        return self._span(self._whole, self._returned[child], self._fell if self._above else self._added)

    def only_waits(self, child: int) -> bool:
        """Whether a child has sent everything, and misses some of the sum: it has nothing more to say."""
        return self._got[child] == self.request.nbytes > self._returned[child]

    def left(self, child: int, nbytes: int) -> None:
        """Notes that bytes left to a child."""
        self._returned[child] += nbytes

    def rising(self) -> memoryview:
        """Bytes of this switch's sum that may rise."""
        return self._span(self._sums, self._rose, self._added)

    def rose(self, nbytes: int) -> None:
        """Notes that bytes rose."""
        self._rose += nbytes

    def falling(self) -> memoryview:
        """Where the next bytes of the whole sum go; no more than have risen."""
        return self._span(self._whole, self._fell, self._rose)

    def fell(self, nbytes: int) -> None:
        """Notes that bytes fell."""
        self._fell += nbytes

    def _span(self, ring: Bytes, start: int, stop: int) -> memoryview:
        """The bytes from `start` to at most `stop` of the buffer that lie in one piece of the ring."""
        at = start % len(ring)
        return ring.data[at:at + max(0, min(stop, self.request.nbytes) - start)]

    def _whole_blocks(self, child: int) -> int:
        """How many blocks of a child are here; the last may be shorter."""
        got = self._got[child]
        return -(-got // self.request.block) if got == self.request.nbytes else got // self.request.block

    def _add(self, block: int) -> None:
        """Adds the block of every child whose turn it is."""
        slot, width = block % self._blocks, self.request.block
        first = block * width
        size = min(width, self.request.nbytes - first)
        here = slice(slot * width, slot * width + size)
        total = self._total[slot * width // self._adder.itemsize:][:size // self._adder.itemsize]
        while self._turn[slot] < len(self._rings) and self._whole_blocks(self._turn[slot]) > block:
            child = self._turn[slot]
            numbers = self._adder.widen(self._rings[child][here])
            if child:
                self._adder.into(total, numbers)
            else:
                total[:] = numbers
            self._turn[slot] += 1
        if self._turn[slot] == len(self._rings):
            self._sums[here] = self._adder.narrow(total)
            self._turn[slot] = 0
            self._added = first + size
