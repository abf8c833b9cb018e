"""A reduce-scatter at the bound of the links, over point-to-point messages: gloo's own takes what an all-reduce takes.

    n ranks in a ring, the buffer in n equal chunks c_0 .. c_{n-1}, each in segments:
    in round s = 0 .. n-2, rank r sends its sum of c_{r-s-1} to r+1, receives c_{r-s-2} from r-1 and adds its own to it
    after the last round it has the whole sum of c_r, having sent (n-1)/n of the buffer

A message starts when its receiver is ready, and the word of that waits behind bulk data: so every receive is posted
before the first send. Each sum is made in the order of the ring, so results are the same bits in every run.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SEGMENT_BYTES", "reduce_scatter"]

SEGMENT_BYTES = 2**19
"""256 KiB to 1 MiB fill a link; smaller ones cost calls, larger ones wait for the whole to arrive."""


def reduce_scatter(buffer: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over the ranks of `group` of their chunk number `rank` of `buffer`, cut into equal chunks.

    One at a time in a group: its messages are told apart by their tags, from 0.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = buffer.reshape(n, -1)
    if n == 1:
        return chunks[0].clone()
    arriving = torch.empty((n - 1, chunks.shape[1]), dtype=buffer.dtype, device=buffer.device)
    length = max(1, SEGMENT_BYTES // buffer.element_size())
    received = [row.split(length) for row in arriving]
    mine = [chunks[(rank - s - 1) % n].split(length) for s in range(n)]
    k = len(mine[0])
    waits = [[dist.irecv(one, group=group, group_src=(rank - 1) % n, tag=s * k + i) for i, one in enumerate(row)]
             for s, row in enumerate(received)]
    sends = _rounds(mine, received, waits, group, (rank + 1) % n)
    for send in sends:
        send.wait()
    return arriving[-1].clone()


def _rounds(mine: list[tuple[Tensor, ...]], received: list[tuple[Tensor, ...]], waits: list[list[Any]],
            group: dist.ProcessGroup | None, to: int) -> list[Any]:
    """Send, wait, add: what arrives in round s, with this rank's own part, is what leaves in round s + 1."""
    k = len(mine[0])
    sends = [dist.isend(one, group=group, group_dst=to, tag=i) for i, one in enumerate(mine[0])]
    for s, row in enumerate(received):
        for i, segment in enumerate(row):
            waits[s][i].wait()
            segment.add_(mine[s + 1][i])
            if s + 1 < len(received):
                sends.append(dist.isend(segment, group=group, group_dst=to, tag=(s + 1) * k + i))
    return sends
