"""Runs all-reduces in switches that reduce, on real tensors, where the cost model chooses them.

Every rank sends its buffer to its switch and gets the sum. A group connects at its first sum, once for each *lane*:
what blocks runs in the caller's thread, and all else in the transport's. So sums of two lanes may be under way at once,
and each lane has the same order on every rank.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from autoddl.cost_models import Algorithm, Cluster, Group, collective
from autoddl.cost_models.groups import crossings
from autoddl.runtime.switches.client import SwitchLink, connect
from autoddl.runtime.switches.frames import DTYPES, SumRequest
from autoddl.runtime.switches.offered import Switches

__all__ = ["SwitchReducer", "takes"]

SECONDS = 600.0
"""Seconds that a switch may stand still, where nobody says otherwise."""


def takes(dtype: torch.dtype) -> bool:
    """Whether a switch adds numbers of this dtype."""
    return _number(dtype) in DTYPES


def _number(dtype: torch.dtype) -> str:
    """The name of a dtype; that of its parts where it is complex."""
    return str(dtype.to_real()).removeprefix("torch.")


class SwitchReducer:
    """Sums of one rank in the `switches` of its cluster; nothing moves for `timeout` at most."""

    def __init__(self, cluster: Cluster, switches: Switches, timeout: timedelta | None = None) -> None:
        self._cluster, self._switches = cluster, switches
        self._seconds = timeout.total_seconds() if timeout is not None else SECONDS
        self._links: dict[tuple[tuple[int, ...], str], SwitchLink] = {}

    def chosen(self, kind: str, extents: Group, nbytes: int, dtype: torch.dtype) -> bool:
        """Whether the cost model sends a full buffer of `nbytes` through the switches."""
        return takes(dtype) and collective(self._cluster, kind, extents, float(nbytes)
                                           ).algorithm is Algorithm.SWITCH_TREE

    def reduce(self, buffer: Tensor, members: Sequence[int], rank: int, extents: Group, how: str, lane: str) -> None:
        """Replaces the flat `buffer` by the reduction of those of the `members`, global ranks, one of which is `rank`.

        Raises RuntimeError where a switch or another rank is gone. Nothing else of the group works after that.
        """
        key = tuple(members), lane
        if key not in self._links:
            address, hello = self._switches.way(self._cluster, extents, members, rank, lane)
            self._links[key] = connect(address, hello, self._seconds, crossings(self._cluster, extents)[0].level.name)
        data: memoryview = buffer.view(torch.uint8).numpy().data
        request = SumRequest(_number(buffer.dtype), how, self._block(extents), len(data))
        self._links[key].reduce(data, request, self._seconds)

    def _block(self, extents: Group) -> int:
        """Bytes of a block: the least of the levels that are crossed, in whole numbers of any dtype."""
        blocks = [crossing.level.reduces.block for crossing in crossings(self._cluster, extents)
                  if crossing.level.reduces is not None]
        return max(8, int(min(blocks)) // 8 * 8)
