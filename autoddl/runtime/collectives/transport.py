"""Starts collectives: the library's own, or ours on messages or in switches, as the cost model chooses.

Every rank asks one pure function about the same cluster, so all choose alike. Collectives by messages run in the
caller's thread, or asynchronously in one thread of this rank. Their order is that of their start, which is the same on
every rank. Each has tags of its own in its group. So no two wait for each other in a circle.

Switches reduce where the launcher offers them (`switches.offered`). Elsewhere the cluster is taken as one whose levels
do not reduce, so all ranks take the algorithm that is the next best.

After a failure, the thread fails everything that is started later: a group that lost a rank does not recover.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from autoddl.cost_models import Cluster, Group, collective
from autoddl.runtime.collectives.message_collectives import TAGS, exchange, swap
from autoddl.runtime.collectives.sparse_sum import Swap
from autoddl.runtime.collectives.switch_collectives import SwitchReducer
from autoddl.runtime.switches.offered import offered_switches, with_offered
from autoddl.schedule.message_programs import chosen_ways

__all__ = ["Transport"]

SERIALS = 2**14
"""Number of collectives of a group after which tags are used again."""

_LIBRARY: dict[str, Callable[..., Any]] = {
    "all-gather": dist.all_gather_single, "reduce-scatter": dist.reduce_scatter_single,
    "all-to-all": dist.all_to_all_single}


class _Later:
    """Work of the thread, like torch.distributed's Work; `wait` raises the error of the collective."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action
        self._future: Future[None] = Future()

    def run(self, failure: Exception | None) -> Exception | None:
        """Runs, or fails with an earlier `failure`; returns the failure, None without one."""
        action, self.action = self.action, None
        try:
            if failure is None and action is not None:
                action()
        except Exception as error:
            failure = error
        if failure is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(failure)  # type: ignore[arg-type]
        return failure

    def wait(self) -> None:
        self._future.wait()

    def get_future(self) -> "Future[None]":
        return self._future


def _serve(queue: "SimpleQueue[_Later | None]") -> None:
    failure: Exception | None = None
    while (later := queue.get()) is not None:
        failure = later.run(failure)
        del later


class Transport:
    """Starts collectives of one rank: all of the library without a `cluster`. A message takes at most `timeout`."""

    def __init__(self, cluster: Cluster | None = None, timeout: timedelta | None = None) -> None:
        switches = offered_switches()
        self._cluster, self._timeout = with_offered(cluster, switches) if cluster else None, timeout
        self._reducer = SwitchReducer(self._cluster, switches, timeout) if self._cluster and switches else None
        self._serials: Counter[str] = Counter()
        self._ways: dict[tuple[str, dist.ProcessGroup, int, str], tuple[int, ...] | None] = {}
        self._queue: SimpleQueue[_Later | None] | None = None

    def start(self, kind: str, got: Tensor, given: Tensor, group: dist.ProcessGroup, extents: Group,
              asynchronous: bool = True, how: str = "sum") -> Any:
        """Starts a collective in `group`, whose sizes and strides are `extents`, on tensors as `exchange` takes them.

        Complex numbers go as pairs. Returns work with `wait` and `get_future`, or None if it ran already. Raises
        RuntimeError where a peer is gone.
        """
        if got.is_complex():
            got, given = (torch.view_as_real(one).view(-1) for one in (got, given))
        key = kind, group, max(got.nbytes, given.nbytes), got.device.type
        here = got.device.type == "cpu" and dist.get_backend(group) == "gloo"
        if here and self._reducer is not None and self._reducer.chosen(kind, extents, key[2], got.dtype):
            reduce = partial(self._reducer.reduce, got, dist.get_process_group_ranks(group), dist.get_rank(), extents,
                             how, "later" if asynchronous else "now")
            return self._later(reduce) if asynchronous else reduce()
        if key not in self._ways:
            self._ways[key] = chosen_ways(self._cluster, kind, extents, key[2]) if here and self._cluster else None
        ways = self._ways[key]
        if ways is None:
            return _library(kind, got, given, group, asynchronous, how)
        tag = self._serials[group.group_name] % SERIALS * TAGS
        self._serials[group.group_name] += 1
        action = partial(exchange, kind, got, given, ways, group, tag, how, self._timeout)
        return self._later(action) if asynchronous else action()

    def start_swaps(self, action: Callable[[Swap], None], group: dist.ProcessGroup, asynchronous: bool = True) -> Any:
        """Starts an action that swaps flat tensors of one dtype with all members of `group`, several times.

        With gloo the swaps are messages, else all-to-alls of the library, in the caller's thread. Returns work as
        `start` does.
        """
        if dist.get_backend(group) != "gloo":
            return action(partial(_swap, group))
        tags = iter(range(self._serials[group.group_name] % SERIALS * TAGS, 2**31))
        self._serials[group.group_name] += 1
        run = partial(action, lambda given, expected: swap(group, next(tags), self._timeout, given, expected))
        return self._later(run) if asynchronous else run()

    def algorithm(self, kind: str, extents: Group, nbytes: int) -> str:
        """The name of the algorithm by which the cost model sends a full buffer of `nbytes`; "" without a cluster."""
        return str(collective(self._cluster, kind, extents, float(nbytes)).algorithm) if self._cluster else ""

    def _later(self, action: Callable[[], None]) -> _Later:
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), name="autoddl transport", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        later = _Later(action)
        self._queue.put(later)
        return later


def _swap(group: dist.ProcessGroup, given: Sequence[Tensor], expected: Sequence[int]) -> list[Tensor]:
    """`message_collectives.swap` as an all-to-all of the library."""
    got = given[0].new_empty(sum(expected))
    dist.all_to_all_single(got, torch.cat(list(given)), list(expected), [len(x) for x in given], group=group)
    return list(got.split(list(expected)))


def _library(kind: str, got: Tensor, given: Tensor, group: dist.ProcessGroup, asynchronous: bool, how: str) -> Any:
    if kind == "all-reduce":
        operation = dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM
        return dist.all_reduce(got, operation, group=group, async_op=asynchronous)
    return _LIBRARY[kind](got, given, group=group, async_op=asynchronous)
