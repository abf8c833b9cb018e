"""Forks processes from a server that was forked off when the tests were collected: it has their imports, and no more.

    server = ForkServer()                         early, before this process has done what others must not see
    pids = server.start(function, args, pipes)    function(k, *args, pipes[k]) in process k, a fork of the server
    server.end(pids, kill=True)                   their exit codes, negative for a signal
    server.poll(pids)                             the same without waiting; None for one that runs

The server ends with the process that made it, whose end of their channel is closed then. What processes print to stdout
is dropped.
"""

import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO, TextIOWrapper
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

__all__ = ["ForkServer"]


class ForkServer:
    def __init__(self) -> None:
        self._channel, there = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if not os.fork():
            self._channel.close()
            _serve(there)
        there.close()

    def start(self, function: Callable[..., None], args: tuple[Any, ...], pipes: Sequence[Connection]) -> list[int]:
        """The ids of the processes, one for each pipe; the pipes are closed here."""
        self._channel.send((function, args, len(pipes)))
        for pipe in pipes:
            send_handle(self._channel, pipe.fileno(), 0)
            pipe.close()
        pids: list[int] = self._channel.recv()
        return pids

    def end(self, pids: Sequence[int], kill: bool) -> list[int]:
        """Waits for processes, or kills them; a second call says the same."""
        self._channel.send((_end, (pids, kill), 0))
        codes: list[int] = self._channel.recv()
        return codes

    def poll(self, pids: Sequence[int]) -> list[int | None]:
        """As `end`, of what has ended by now."""
        self._channel.send((_poll, (pids,), 0))
        codes: list[int | None] = self._channel.recv()
        return codes


def _serve(channel: "Connection[Any, Any]") -> NoReturn:
    """Forks and waits until the channel is closed, with streams and filters of its own: tests capture theirs, and take
    warnings for errors."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(fd, "w", closefd=False), write_through=True) for fd in (1, 2))
    logging.getLogger().handlers.clear()
    warnings.simplefilter("ignore")
    ended = dict[int, int]()
    with suppress(EOFError, BrokenPipeError):
        while True:
            function, args, count = channel.recv()
            channel.send(_start(channel, function, args, count) if count else function(ended, *args))
    os._exit(0)


def _start(channel: "Connection[Any, Any]", function: Callable[..., None], args: tuple[Any, ...], count: int
           ) -> list[int]:
    pipes, pids = [Connection(recv_handle(channel)) for _ in range(count)], []
    for k, mine in enumerate(pipes):
        pids.append(os.fork())
        if not pids[-1]:
            for other in (channel, *pipes[:k], *pipes[k + 1:]):
                other.close()
            try:
                function(k, *args, mine)
            except EOFError:
                os._exit(0)  # the tests have ended
            except BaseException:
                traceback.print_exc()
            os._exit(1)
    for pipe in pipes:
        pipe.close()
    return pids


def _end(ended: dict[int, int], pids: Sequence[int], kill: bool) -> list[int]:
    for pid in pids:
        if pid not in ended:
            if kill:
                os.kill(pid, signal.SIGKILL)
            ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [ended[pid] for pid in pids]


def _poll(ended: dict[int, int], pids: Sequence[int]) -> list[int | None]:
    for pid in pids:
        if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
            ended[pid] = os.waitstatus_to_exitcode(found[1])
    return [ended.get(pid) for pid in pids]
