"""Maps a function over many arguments, on one or several processes.

The processes are forked, so they know what their parent knew, and only arguments and results travel. Results come in
the order of the arguments, whatever the number of processes. An interrupt reaches the parent alone, which then ends
the others. They end as well when the parent is killed.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from struct import pack, unpack
from typing import Any

from autoddl.core.errors import MachineError
from autoddl.core.processes import die_with_parent, forks, signals_default, signals_raise, signals_wait

__all__ = ["Answer", "SharedLeast", "beside", "mapper", "processor_seconds"]

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""

Map = Callable[[Sequence[Any]], Iterator[Any]]
Key = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A forked process; `known` has the keys of the arguments that it has worked on."""

    process: ForkProcess
    pipe: Connection
    known: set[Any] = field(default_factory=set)

    def receive(self) -> tuple[int, Any, BaseException | None]:
        try:
            found: tuple[int, Any, BaseException | None] = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise _ended() from None
        return found

    def send(self, number: int, argument: Any) -> None:
        try:
            self.pipe.send((number, argument))
        except ConnectionError:
            raise _ended() from None

    def end(self) -> None:
        """Ends the process, unless it has ended."""
        if not self.pipe.closed:
            self.process.kill()
            self.process.join()
            self.pipe.close()


def _ended() -> MachineError:
    return MachineError("a process of the search ended early, perhaps for lack of memory; search with one worker")


def _keep_freed() -> None:
    """Makes glibc keep freed memory for the next job: new pages for large tables cost as much as filling them."""
    if _LIBC is not None and hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_MMAP_MAX, 0)
        _LIBC.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    """Receives (number, argument) and sends (number, result, exception), until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals_default(ends=signal.getsignal(signal.SIGTERM) is not signal.default_int_handler)
    die_with_parent()
    _keep_freed()
    while (job := pipe.recv()) is not None:
        try:
            pipe.send((job[0], function(job[1]), None))
        except Exception as error:
            pipe.send((job[0], None, error))


def _start(function: Callable[[Any], Any]) -> _Worker:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(function, there), daemon=True)
    with signals_wait():
        process.start()
    there.close()
    return _Worker(process, here)


def _results(workers: Sequence[_Worker], arguments: Sequence[Any], key: Key) -> Iterator[Any]:
    """Yields the results in order. A worker that is done gets another argument.

    Arguments whose key it knows come first, then those whose key no worker knows.
    """
    left, done, idle = dict(enumerate(arguments)), dict[int, Any](), list(workers)
    for number in range(len(arguments)):
        while number not in done:
            while idle and left:
                worker, at = min(product(idle, left), key=lambda pair: _rank(pair[0], workers, key(left[pair[1]])))
                idle.remove(worker)
                worker.known.add(key(left[at]))
                worker.send(at, left.pop(at))
            for pipe in wait([w.pipe for w in workers if w not in idle]):
                worker = next(w for w in workers if w.pipe is pipe)
                at, result, error = worker.receive()
                if error is not None:
                    raise error
                done[at] = result
                idle.append(worker)
        yield done.pop(number)


def _rank(worker: _Worker, workers: Sequence[_Worker], key: Any) -> int:
    """The rank of a key for a worker, best first: 0 if it knows it, 1 if no worker does, 2 if another does."""
    return 0 if key in worker.known else 1 + any(key in other.known for other in workers)


@contextmanager
def mapper(function: Callable[[Any], Any], workers: int, key: Key = id) -> Iterator[Map]:
    """A context that yields a map of `function` on `workers` processes.

    The map runs in this process where one is asked for, or where forking is not possible. Arguments of one `key` go to
    one process if it is idle, because it may remember results.
    """
    if workers < 2 or not forks():
        yield lambda arguments: map(function, arguments)
        return
    started = list[_Worker]()
    with signals_raise():
        try:
            for _ in range(workers):
                started.append(_start(function))
            yield lambda arguments: _results(started, arguments, key)
        finally:
            for worker in started:
                worker.end()


@dataclass(frozen=True, slots=True)
class Answer:
    """What another process works out: a call waits for the result, and raises the exception if there was one."""

    worker: _Worker

    def __call__(self) -> Any:
        _, result, error = self.worker.receive()
        if error is not None:
            raise error
        return result

    @property
    def is_ready(self) -> bool:
        """Whether a call need not wait."""
        return self.worker.pipe.poll()

    def end(self) -> None:
        """Ends the other process before its context does."""
        self.worker.end()


class SharedLeast:
    """The least of some numbers, which this process and those that are forked from it tell each other."""

    def __init__(self, first: float) -> None:
        self._memory = mmap(-1, 8)
        self._memory[:] = pack("d", first)

    @property
    def value(self) -> float:
        """The least so far."""
        return float(unpack("d", self._memory[:])[0])

    def tell(self, value: float) -> None:
        """Tells another number. One that is told by two at once may be lost, until it is told again."""
        if value < self.value:
            self._memory[:] = pack("d", value)


@contextmanager
def beside(function: Callable[[Any], Any], argument: Any) -> Iterator[Answer]:
    """A context that runs `function(argument)` in a forked process meanwhile, and yields its answer."""
    with signals_raise():
        worker = _start(function)
        try:
            worker.send(0, argument)
            yield Answer(worker)
        finally:
            worker.end()


def processor_seconds() -> float:
    """Seconds that processors have worked for this process, and for those that it started and that have ended."""
    return sum(os.times()[:4])
