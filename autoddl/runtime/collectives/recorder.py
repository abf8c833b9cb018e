"""Records the collectives of a rank as they run, and with `timed` their times.

    start      just before the collective is handed over
    done       when it completed: by a callback of its future, which runs on the library's own thread; a collective that
               blocks, or whose work has no future, is done when waiting for it ended
    waited     when this rank began to wait for it; for one that blocks, its start
    resumed    when waiting ended

All are nanoseconds of `perf_counter_ns`. A callback costs 50 to 100 us of a core, the other marks 1 us. The host does
not see when a collective of a GPU ends: there, the marks are the times of the host's calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from autoddl.runtime.collectives.sparse_sum import SparseSent

__all__ = ["ExecutedCollective", "Mark", "Recorder"]


@dataclass(frozen=True, slots=True)
class ExecutedCollective:
    """A collective that ran: `axes` like `net+node`, `nbytes` of its full buffer."""

    direction: str
    kind: str
    axes: str
    nbytes: int


@dataclass(slots=True)
class Mark:
    """The times of a collective, in nanoseconds of `perf_counter_ns`, 0 as long as they are not known.

        executed    the collective
        origin      the tensor or op for which it ran, for people
        algorithm   by which it was sent, as the cost model chose it
        start       just before it is handed over
        waited      when the rank began to wait for it
        resumed     when waiting ended
        done        when it completed
        words       of 4 bytes that the rank sent for a sparse sum, known when it is waited for
    """

    executed: ExecutedCollective
    origin: str
    start: int
    waited: int = 0
    resumed: int = 0
    done: int = 0
    algorithm: str = ""
    words: int = 0

    def wait(self) -> None:
        """Marks that the rank begins to wait."""
        self.waited = perf_counter_ns()

    def resume(self) -> None:
        """Marks that waiting ended."""
        self.resumed = perf_counter_ns()
        self.done = min(self.done or self.resumed, self.resumed)


class Recorder:
    """The collectives that ran since `clear`, in order of their start; `direction` is the pass that the program is in.

    With `timed`, `marks` has their times, and `passes` when each pass began. With `checks`, `coded_share` is the
    largest error of a value that was coded, over what its codec allows. `besides` are collectives that no plan has:
    those of exponents for which lossless rows had no room. A sparse sum is noted with the entries that it may keep;
    `sparse` has the words that each sent.
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed, self.checks = timed, False
        self.clear()

    def clear(self) -> None:
        """Forgets the last step."""
        self._again = False
        self.coded_share = 0.0
        self.besides: list[ExecutedCollective] = []
        self.sparse: list[SparseSent] = []
        self.executed: list[ExecutedCollective] = []
        self.marks: list[Mark] = []
        self.passes: list[tuple[str, int]] = []
        self.direction = "forward"

    @property
    def direction(self) -> str:
        """The pass of the program, "forward" or "backward"."""
        return self._direction

    @direction.setter
    def direction(self, direction: str) -> None:
        self._direction = direction
        if self.timed:
            self.passes.append((direction, perf_counter_ns()))

    @contextmanager
    def computing_again(self) -> Iterator[None]:
        """While open, what forward sends is noted as backward's: a block is computed again there."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def note(self, direction: str, kind: str, axes: str, nbytes: int, origin: str = "", algorithm: str = "") -> None:
        """Notes that a collective is about to start."""
        one = ExecutedCollective("backward" if self._again else direction, kind, axes, nbytes)
        self.executed.append(one)
        if self.timed:
            self.marks.append(Mark(one, origin, perf_counter_ns(), algorithm=algorithm))

    def started(self, work: Any) -> Mark | None:
        """The mark of the last noted collective, which `work` runs; without work it is done. None if not `timed`."""
        if not self.timed:
            return None
        mark = self.marks[-1]
        if work is None:
            mark.waited = mark.start
            mark.resume()
        else:
            _when_done(work, mark)
        return mark


def _when_done(work: Any, mark: Mark) -> None:
    """Marks when `work` completes, if its backend can tell."""
    def done(_: object) -> None:
        mark.done = perf_counter_ns()

    with suppress(AttributeError, NotImplementedError, RuntimeError):
        work.get_future().then(done)
