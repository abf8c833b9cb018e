"""How many reductions of gradients are under way at once, so that what was sent is freed while backward still runs.

Waiting for a bucket's last step frees what it sent if that is larger than what comes: behind a reduce-scatter, but not
behind an all-reduce, whose buffer is what comes. Of the buckets that free at most `IN_FLIGHT` are under way, or as many
as they have steps: before another one starts the oldest are waited for. That depends on how many there are and never on
the time, so every rank does the same in every run.
"""

from collections.abc import Sequence
from typing import TypeVar

from autoddl.traffic import Bucket

__all__ = ["IN_FLIGHT", "frees", "overdue"]

IN_FLIGHT = 2
T = TypeVar("T")


def frees(bucket: Bucket) -> bool:
    """Whether the bucket holds less when its last step is done."""
    return bool(bucket.steps) and bucket.steps[-1].kind in ("reduce-scatter", "all-to-all")


def overdue(under_way: Sequence[T], another: bool) -> Sequence[T]:
    """Of the buckets that free and are under way, the oldest first, those to be waited for before the next one starts;
    `another`: that frees too."""
    return under_way[:max(0, len(under_way) + another - IN_FLIGHT)]
