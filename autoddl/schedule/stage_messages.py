"""Lists the messages by which a tensor goes from one stage of a pipeline to another, whatever their layouts.

A rank of a stage has a box of the tensor: (offset, size) along every dim. Each receiver gets its own box, put together
from the boxes of senders that meet it. Several replicas may have a box. The rank at the receiver's own place in its
stage sends it, else the one that has sent least so far. So equal layouts on equal meshes are one message for each rank,
to the rank at its place. Gradients take the same way back, with the roles exchanged.
"""

from collections import defaultdict
from functools import lru_cache
from math import prod
from typing import NamedTuple

from autoddl.core.codecs import CODECS
from autoddl.core.layout import Layout, Mesh, extents

__all__ = ["Box", "Message", "busiest", "messages"]

Box = tuple[tuple[int, int], ...]
"""(offset, size) along every dim."""


class Message(NamedTuple):
    """A box of the tensor, in global coordinates, from rank `sender` of a stage to rank `receiver` of another."""

    sender: int
    receiver: int
    box: Box

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(size for _, size in self.box)

    def nbytes(self, itemsize: int, codec: str = "") -> int:
        """Bytes that are sent of elements of `itemsize`, coded or not."""
        return CODECS[codec].row_bytes(self.numel, itemsize) if codec else self.numel * itemsize


@lru_cache(maxsize=10_000)
def messages(shape: tuple[int, ...], source: Layout, senders: Mesh, target: Layout, receivers: Mesh
             ) -> tuple[Message, ...]:
    """The messages that bring a tensor from `source` on the ranks of one stage to `target` on those of another.

    They are sorted by receiver. Both layouts split or repeat the tensor: partial sums are not sent.
    """
    holders = defaultdict[Box, list[int]](list)
    for rank in range(senders.size):
        holders[extents(shape, source, senders, senders.coordinate(rank))].append(rank)
    sent, found = [0] * senders.size, list[Message]()
    for receiver in range(receivers.size):
        wanted = extents(shape, target, receivers, receivers.coordinate(receiver))
        for box, ranks in holders.items():
            common = _common(box, wanted)
            if all(size > 0 for _, size in common):
                sender = receiver if receiver in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
                found.append(Message(sender, receiver, common))
                sent[sender] += found[-1].numel
    return tuple(found)


def _common(one: Box, other: Box) -> Box:
    """The box in which two boxes meet; a size is 0 or less where they do not."""
    starts = [max(a, b) for (a, _), (b, _) in zip(one, other, strict=True)]
    ends = [min(a + n, b + k) for (a, n), (b, k) in zip(one, other, strict=True)]
    return tuple((start, end - start) for start, end in zip(starts, ends, strict=True))


@lru_cache(maxsize=10_000)
def busiest(shape: tuple[int, ...], source: Layout, senders: Mesh, target: Layout, receivers: Mesh, itemsize: int = 1,
            codec: str = "") -> int:
    """Bytes of elements of `itemsize` that the busiest rank sends or receives of `messages`, coded or not."""
    load = defaultdict[tuple[str, int], int](int)
    for one in messages(shape, source, senders, target, receivers):
        nbytes = one.nbytes(itemsize, codec)
        load["sends", one.sender] += nbytes
        load["receives", one.receiver] += nbytes
    return max(load.values(), default=0)
