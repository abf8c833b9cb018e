"""Starts `autoddl` as forks of a process that has imported what it needs: a second of a processor in place of twenty.

    this process  --forks-->  launcher  --forks-->  the process that forks the ranks  --forks-->  ranks

Launcher and ranks are those of `autoddl run`, with their signals, pipes and deaths. What is left out is that the first
two forks are new processes of Python there, which import torch.
"""

import atexit
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoddl.core.processes import die_with_parent, end_with, signals_default
from autoddl.launch import forked_ranks

__all__ = ["WarmRun", "is_warm", "warm"]

NEEDED = ("autoddl.cli.main", "autoddl.launch.worker", "autoddl.capture.capture", "autoddl.runtime.parallelize",
          "torch._dynamo", "torch.export._trace")


def warm() -> None:
    """Imports what the forks need. Raises SystemExit where that has started threads, which forks would lack."""
    for name in NEEDED:
        importlib.import_module(name)
    threads = len([*Path("/proc/self/task").iterdir()])
    if threads > 1:
        raise SystemExit(f"{threads} threads after the imports, and forks have but one: set OMP_NUM_THREADS=1")
    vars(forked_ranks)["subprocess"] = SimpleNamespace(Popen=_server, DEVNULL=subprocess.DEVNULL)


def is_warm() -> bool:
    """Whether `warm` was called."""
    return isinstance(vars(forked_ranks)["subprocess"], SimpleNamespace)


class Forked:
    """A child of this process that runs `work`, with the methods of `subprocess.Popen` that a launcher needs."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            atexit._clear()  # what this process does at its end
            end_with(work)

    def poll(self) -> int | None:
        """As of `Popen`."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self) -> int:
        """As of `Popen`."""
        while self.poll() is None:
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """As of `Popen`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmRun(Forked):
    """The shell with these words."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        (out, its_out), (errors, its_errors) = os.pipe(), os.pipe()
        self._pipes = out, errors
        super().__init__(lambda: _shell(words, environment, its_out, its_errors))
        os.close(its_out)
        os.close(its_errors)

    def communicate(self, timeout: float = 600.0) -> tuple[str, str]:
        """As of `Popen`: what the run said, when no process holds its output any more. Raises TimeoutExpired."""
        until, said = time.monotonic() + timeout, (bytearray(), bytearray())
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        while [pipe for pipe, heard in zip(self._pipes, said, strict=True) if not _drained(pipe, heard)]:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("autoddl", timeout)
            time.sleep(0.005)
        self.wait()
        for pipe in self._pipes:
            os.close(pipe)
        return said[0].decode(), said[1].decode()


def _drained(pipe: int, heard: bytearray) -> bool:
    """Takes in what is in a pipe; returns whether its other end is closed."""
    try:
        while block := os.read(pipe, 1 << 16):
            heard += block
    except BlockingIOError:
        return False
    return True


def _streams(out: int | None, errors: int | None) -> None:
    """Gives this process its input and outputs, as a new one has them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    for stream, given in ((1, out), (2, errors)):
        if given is not None:
            os.dup2(nothing if given == subprocess.DEVNULL else given, stream)


def _shell(words: Sequence[str], environment: Mapping[str, str], out: int, errors: int) -> None:
    """Is `autoddl` with these words."""
    from autoddl.cli.main import program

    _streams(out, errors)
    os.close(out)
    os.close(errors)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.update(environment)
    sys.argv = ["autoddl", *words]
    program()


def _server(command: Sequence[str], *, env: Mapping[str, str], stdout: int | None, stderr: int | None, **_: Any
            ) -> Forked:
    """The process that forks the ranks: of `python -P -m MODULE ENVIRONMENTS WORK JOB`."""
    parent, (environments, work, *arguments) = os.getpid(), command[4:]

    def serve() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        _streams(stdout, stderr)
        signals_default()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        forked_ranks._serve(environments, work, arguments)

    return Forked(serve)
