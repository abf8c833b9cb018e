"""Ranks as forks of one process that has imported what they need, so that torch is imported once and not by each.

    launcher  --starts-->  python -P -m autoddl.launch.forked_ranks RANKS.json MODULE JOB  --forks-->  ranks

The process imports MODULE, forks a rank for every environment in RANKS.json, and calls `MODULE.main()` there with JOB
on the command line. It tells the launcher on a pipe: `started RANK PID`, then `ended RANK STATUS`, as
`Popen.returncode` has it. Nothing of torch runs before the fork: neither threads nor a GPU's context are copied.

    launcher  --forks-->  ranks                     `fork_here`: they have all that the launcher has made by then
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from autoddl.core.processes import die_with_parent, end_with, signals_default, signals_wait

__all__ = ["Fork", "ForkServer", "ForkedRank", "fork_here", "start_forks"]

PIPE = "AUTODDL_RANKS_PIPE"
"""Environment variable with the descriptor of the pipe."""


@dataclass
class ForkServer:
    """The process that forks, seen from the launcher.

        process    the process
        pipe       the end of the pipe from which its lines are read
        rest       what has come of a line that is not whole yet
        pids       process of each rank, once it is known
        ended      status of each rank that has ended
    """

    process: "subprocess.Popen[bytes]"
    pipe: int
    rest: bytes = b""
    pids: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)

    def read(self) -> None:
        """Takes in what the process has told by now."""
        if self.pipe < 0:
            return
        try:
            while block := os.read(self.pipe, 1 << 16):
                self.rest += block
        except BlockingIOError:
            pass
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            what, rank, number = line.decode().split()
            (self.pids if what == "started" else self.ended)[int(rank)] = int(number)

    def close(self) -> None:
        """Takes in what is left on the pipe, and closes it."""
        if self.pipe >= 0:
            self.read()
            os.close(self.pipe)
            self.pipe = -1

    def status(self, rank: int) -> int | None:
        """The status of a rank that has ended, or which the process that forks did not outlive; else None."""
        self.read()
        if rank not in self.ended and self.process.poll() is not None:
            self.read()
            return self.ended.get(rank, self.process.returncode or 1)
        return self.ended.get(rank)


    @property
    def lost(self) -> int | None:
        """The status of the process where it ended before it told how all of its ranks did; else None."""
        code = self.process.poll()
        self.read()
        return code if code else None


@dataclass(frozen=True)
class ForkedRank:
    """One rank, with the methods of `subprocess.Popen` that a launcher needs."""

    server: ForkServer
    rank: int

    @property
    def returncode(self) -> int | None:
        """As of `Popen`."""
        return self.server.status(self.rank)

    def poll(self) -> int | None:
        """As of `Popen`."""
        return self.returncode

    def kill(self) -> None:
        """Ends the rank; before it is started, all of them."""
        self.server.read()
        with suppress(ProcessLookupError):
            os.kill(self.server.pids.get(self.rank, self.server.process.pid), signal.SIGKILL)

    def wait(self) -> int:
        """Waits until the process that forks is gone, which is when all ranks are."""
        self.server.process.wait()
        return self.returncode or 0

    def close(self) -> None:
        """Closes the pipe; the status stays."""
        self.server.close()


@dataclass
class Fork:
    """One rank that is a fork of the launcher itself, with the methods of `subprocess.Popen` that a launcher needs."""

    pid: int
    returncode: int | None = None
    """As of `Popen`."""

    def poll(self) -> int | None:
        """As of `Popen`."""
        return self._ended(os.WNOHANG)

    def kill(self) -> None:
        """As of `Popen`."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """As of `Popen`."""
        return self._ended(0) or 0

    def _ended(self, how: int) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, how))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode


def fork_here(environment: Mapping[str, str], work: Callable[[], object]) -> Fork:
    """Starts a rank as a fork of this process that does the work and ends; it writes where this process writes.

    Only the thread that calls goes on in a fork, so nothing may need another: no process group, no GPU in use.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with signals_wait():
        pid = os.fork()
        if not pid:
            gc.freeze()
            _run(work, environment, sys.argv, parent)
    return Fork(pid)


def start_forks(environments: Sequence[Mapping[str, str]], command: Sequence[str], folder: str,
                output: int | None, errors: int | None) -> list[ForkedRank]:
    """Starts the ranks of `python -P -m MODULE JOB`; every environment holds all variables of its rank."""
    python, safe, _, module, *arguments = command
    Path(folder, "environments").write_text(json.dumps([dict(one) for one in environments]), encoding="utf-8")
    here, there = os.pipe()
    os.set_blocking(here, False)
    try:
        process = subprocess.Popen(
            [python, safe, "-m", __name__, str(Path(folder, "environments")), module, *arguments], pass_fds=[there],
            env={**environments[0], PIPE: str(there)}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            preexec_fn=die_with_parent)
    finally:
        os.close(there)
    server = ForkServer(process, here)
    return [ForkedRank(server, rank) for rank in range(len(environments))]


def _serve(environments: str, module: str, arguments: list[str]) -> NoReturn:
    """Forks the ranks and tells how each ended; ends when all have."""
    pipe = int(os.environ.pop(PIPE))
    main = importlib.import_module(module).main
    gc.freeze()
    ranks = dict[int, int]()
    for rank, environment in enumerate(json.loads(Path(environments).read_text(encoding="utf-8"))):
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            os.close(pipe)
            _run(main, environment, [module, *arguments], parent)
        ranks[pid] = rank
        os.write(pipe, f"started {rank} {pid}\n".encode())
    while ranks:
        pid, status = os.wait()
        os.write(pipe, f"ended {ranks.pop(pid)} {os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(main: object, environment: Mapping[str, str], argv: list[str], parent: int) -> NoReturn:
    """Runs one rank in its fork."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signals_default()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    assert callable(main)
    end_with(main)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], sys.argv[3:])
