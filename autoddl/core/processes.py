"""Signals and ranks: cleanup when a process is ended, children that die with their parent, and launched ranks.

    term_interrupts    SIGTERM interrupts, as Ctrl-C does
    signals_raise      SIGTERM and SIGHUP raise, as SIGINT does, so that `finally` and `with` blocks run; a signal that
                       is ignored, as under nohup, stays ignored
    signals_wait       signals that arrive at a child while it is forked wait until `signals_default`
    signals_default    undoes that in a forked child
    die_with_parent    the kernel kills this child when its parent is gone (Linux)
    end_with           a forked child does its work and ends, with the status that it would have as a program
    forks              whether this process may be forked
    is_rank            whether torchrun or SLURM started this process as a rank
    free_bytes         the memory that processes may still allocate here
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = ["STORE", "Terminated", "die_with_parent", "end_with", "forks", "free_bytes", "is_rank", "signals_default",
           "signals_raise", "signals_wait", "term_interrupts"]

STORE = "AUTODDL_STORE"
"""Environment variable with the file by which ranks of one machine find each other, instead of an address."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def end_with(work: Callable[[], object]) -> NoReturn:
    """Does the work of a forked child, and ends it without what its parent does at its end.

    The status is 0, 1 after an exception, which is printed, or what SystemExit says.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_bytes() -> float:
    """The bytes of memory that processes may still allocate here.

    The kernel's caches count as free. The limit of the process' control group, as a container has one, counts too.
    """
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024.0 * int(words["MemAvailable"].split()[0])
    with suppress(OSError, ValueError):  # no group, or no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, float(limit - used + int(parts.get("inactive_file", 0))))
    return free


class Terminated(SystemExit):
    """SIGTERM or SIGHUP asked this process to end."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise Terminated, or what they raise already. Other threads change nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = (signal.SIG_IGN, signal.default_int_handler)
    before = {number: signal.signal(number, _leave) for number in _ENDING if signal.getsignal(number) not in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def term_interrupts() -> Iterator[None]:
    """Within the block SIGTERM interrupts as Ctrl-C does. In other threads than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Within the block signals that end a process wait: a child that is forked there gets them in `signals_default`.

    Without it a child would forget a signal that comes before Python is ready in it, or leave its parent's blocks.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_default(ends: bool = True) -> None:
    """Let SIGTERM end this forked child at once, and SIGHUP too unless it is ignored; those that wait arrive now.

    Where SIGTERM does not end it, it is ignored.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL if ends else signal.SIG_IGN)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_ENDING, signal.SIGINT))


def die_with_parent() -> None:
    """Have this child killed when its parent is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forks() -> bool:
    """Whether this process may be forked. macOS can fork, but its libraries may fail in the child."""
    return sys.platform != "darwin" and "fork" in multiprocessing.get_all_start_methods()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(128 + number)


def is_rank() -> bool:
    """Whether a launcher started this process as a rank.

    In a step of SLURM the environment variables of torchrun are set from SLURM's.
    """
    environment = os.environ
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    if "SLURM_PROCID" not in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return False  # a batch script has SLURM_PROCID too, but is no step
    environment.update(RANK=environment["SLURM_PROCID"], WORLD_SIZE=environment["SLURM_STEP_NUM_TASKS"],
                       LOCAL_RANK=environment.get("SLURM_LOCALID", "0"))
    environment.setdefault("MASTER_ADDR", _first_host())
    environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000))
    return True


def _first_host() -> str:
    """Name of the first host of the SLURM job."""
    names = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=True)
        return listed.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        head, bracket, rest = names.partition("[")
        return head + rest.split(",")[0].split("-")[0].rstrip("]") if bracket else names.split(",")[0]
