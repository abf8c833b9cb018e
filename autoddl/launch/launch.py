"""Starts ranks as processes of this machine, as torchrun would, and ends them together.

    with torchrun's environment:  RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS

Ranks find each other by a file (`AUTODDL_STORE`) that this user alone can read. They listen on loopback alone, or on
the interface that GLOO_SOCKET_IFNAME names. Python starts them without the current folder on its path
(`python_module`): a `random.py` that lies there is not run.

A rank that fails writes its one line to `$AUTODDL_FAILURES/RANK.json` (`report_failure`). The first failure ends all
ranks and becomes the launcher's own error. If the launcher dies in whatever way, the kernel ends the ranks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autoddl.core import errors
from autoddl.core.errors import AutoDDLError, MachineError
from autoddl.core.files import write_atomically
from autoddl.core.processes import STORE, die_with_parent, forks
from autoddl.launch.forked_ranks import Fork, ForkedRank, fork_here, start_forks
from autoddl.launch.temporary import temporary_folder

__all__ = ["Place", "RanksLost", "launch", "leave", "python_module", "report_failure"]

_Process = subprocess.Popen[bytes] | ForkedRank | Fork

FAILURES = "AUTODDL_FAILURES"
GRACE_SECONDS = 1.0
"""Seconds in which the other ranks may fail too, so that the cause can be told from its consequences."""

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Makes glibc keep freed memory for the next step; asking the kernel for large tensors again costs 0.4 s per GB."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The end of a rank that failed: `kind` is a class of `core.errors`, or "" where the rank left no message."""

    rank: int
    status: int
    kind: str = ""
    message: str = ""
    when: float = 0.0

    @property
    def order(self) -> tuple[int, float]:
        """Causes first: a failing machine may be one, losing touch with another rank is a consequence."""
        return {"MachineError": 1, "PeerError": 2}.get(self.kind, 0), self.when

    @property
    def is_silent(self) -> bool:
        """Whether the rank died without a word: it was killed, or its machine failed."""
        return not self.message

    def error(self) -> AutoDDLError:
        known = getattr(errors, self.kind, None)
        if isinstance(known, type) and known is not errors.Infeasible:
            made = known(f"rank {self.rank}: {self.message}")
            assert isinstance(made, AutoDDLError), self.kind
            return made
        if self.message:
            return MachineError(f"rank {self.rank} failed: {self.message}")
        return MachineError(f"rank {self.rank} {_ended(self.status)}; all ranks were ended")


def _ended(status: int) -> str:
    """How a process ended that left no word."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status} and left no word"


class RanksLost(MachineError):
    """Ranks died without a word, or hung; the others are well. `ranks` are those that are lost."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: words before its command, such as `ip netns exec NODE`, and variables it gets besides."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def launch(ranks: int, command: Sequence[str], *, timeout: float | None = None, tick: Callable[[], None] | None = None,
           quiet: bool = False, places: Sequence[Place] | None = None, forked: bool = False,
           here: Callable[[], object] | None = None) -> None:
    """Runs `command` as `ranks` local processes and waits for all of them; none outlives the call.

    `tick` is called while waiting, `quiet` drops the output of the ranks, and `places` has a place for each rank.

    With `forked` the command is that of `python_module`, and the module has a `main()`. The ranks are then forks of one
    process that imports it (`forked_ranks`), unless a place has a prefix or this system cannot fork safely.

    With `here` they are forks of this process, which call that in the place of the command (`fork_here`). That is so
    where it can be forked, ranks are not `quiet` and no place has a prefix.

    Raises the failed rank's own error, or MachineError if one died or `timeout` seconds passed.
    """
    given = places or [Place()] * ranks
    with temporary_folder("ranks") as made:
        folder = str(made)
        environments = [{**environment, **place.environment}
                        for environment, place in zip(_environments(ranks, folder), given, strict=True)]
        processes: list[_Process] = []
        try:
            plain = not any(place.prefix for place in given)
            if here is not None and forks() and plain and not quiet:
                for environment in environments:
                    processes.append(fork_here(environment, here))
            elif forked and forks() and plain:
                processes += start_forks(environments, command, folder, *_outputs(quiet))
            else:
                for environment, place in zip(environments, given, strict=True):
                    processes.append(_start((*place.prefix, *command), environment, quiet))
            _watch(processes, folder, timeout, tick or (lambda: None))
        finally:
            _end(processes)


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package, whatever lies in the current folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _environments(ranks: int, folder: str) -> list[dict[str, str]]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    common = {"OMP_NUM_THREADS": str(threads), **KEEP_MEMORY, **loopback, **os.environ, "WORLD_SIZE": str(ranks),
              STORE: str(Path(folder, "store")),
              "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), FAILURES: folder}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _start(command: Sequence[str], environment: Mapping[str, str], quiet: bool) -> subprocess.Popen[bytes]:
    output, errors = _outputs(quiet)
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                            preexec_fn=die_with_parent)


def _outputs(quiet: bool) -> tuple[int | None, int | None]:
    """File descriptors for stdout and stderr of a rank; stdout is kept free for the launcher's answer."""
    if quiet:
        return subprocess.DEVNULL, subprocess.DEVNULL
    return sys.stderr.fileno() if _has_fileno(sys.stderr) else None, None


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, AttributeError, ValueError):
        return False
    return True


def _watch(processes: Sequence[_Process], folder: str, timeout: float | None, tick: Callable[[], None]
           ) -> None:
    began = time.monotonic()
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if timeout is not None and time.monotonic() - began > timeout:
            running = [str(rank) for rank, process in enumerate(processes) if process.poll() is None]
            raise MachineError(f"after {timeout:g} s rank {', '.join(running)} still ran; all ranks were ended")
        tick()
        time.sleep(0.02)
    tick()
    if any(process.poll() for process in processes):
        raise _cause(processes, folder)


def _cause(processes: Sequence[_Process], folder: str) -> AutoDDLError:
    """The error that came first: after a moment for all ranks to fail, causes go before consequences.

    Where some only miss their peers, those are lost that died without a word, or still run."""
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(0.02)
    found = []
    for rank, process in enumerate(processes):
        if process.poll():
            path = Path(folder, f"{rank}.json")
            word = json.loads(path.read_text()) if path.exists() else {}
            found.append(_Failure(rank, process.returncode or 0, **word))
    first, silent = min(found, key=lambda failure: failure.order), [one.rank for one in found if one.is_silent]
    if first.is_silent:
        one = processes[first.rank]
        status = one.server.lost if isinstance(one, ForkedRank) and first.rank not in one.server.ended else None
        said = str(first.error()) if status is None else (
            f"the process of which all ranks are forks {_ended(status)}, and they ended with it: start again, with "
            "--resume where there are checkpoints")
        return RanksLost(said, silent)
    running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    if first.kind == "PeerError" and running:
        return RanksLost(f"{first.error()}; rank {', '.join(map(str, running))} still ran and was ended", running)
    return first.error()


def _end(processes: Sequence[_Process]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        if isinstance(process, ForkedRank):
            process.close()


def report_failure(error: BaseException) -> None:
    """Writes this rank's error as one line for its launcher; without a launcher it does nothing."""
    folder = os.environ.get(FAILURES)
    if folder and Path(folder).is_dir():
        kind = type(error).__name__ if isinstance(error, AutoDDLError) else ""
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        word = {"kind": kind, "message": " ".join(text.split()), "when": time.time()}
        write_atomically(Path(folder, f"{os.environ['RANK']}.json"), json.dumps(word))


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code.

    A rank that succeeded waits for the others. torch's teardown, which aborts now and then, is skipped."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        sys.exit(code)
    with suppress(Exception):
        if code == 0:
            dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


