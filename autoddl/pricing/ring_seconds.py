"""Counts the seconds by which the messages of ring attention outlast the blocks that are computed meanwhile.

    exposed = sum over steps max(0, seconds of the messages on their way - seconds of a block) + those of the last hop

A message is on its way from its start to the wait for it (`operators.ring.ring_turns`). Messages that are on their way
together follow each other. All blocks take as long.
"""

from collections.abc import Sequence

from autoddl.operators.ring import ring_turns

__all__ = ["exposed_seconds"]


def exposed_seconds(way: str, ranks: int, block: float, shifts: Sequence[float]) -> float:
    """Seconds in which a rank waits for shifts of so many seconds, where each of its `ranks` blocks takes `block`."""
    now = waited = free = 0.0
    done: dict[int, float] = {}
    for what, k in ring_turns(way, ranks):
        if what == "start":
            free = done[k] = max(free, now) + shifts[k]
        elif what == "compute":
            now += block
        elif done[k] > now:
            waited += done[k] - now
            now = done[k]
    return waited
