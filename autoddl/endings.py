"""How processes end with each other: what is to be cleaned up is, and nothing outlives what started it.

    signals_raise     SIGTERM and SIGHUP unwind the stack, as SIGINT does, so that `finally` and `with` do their part;
                      one that is ignored, as under nohup, stays ignored
    die_with_parent   in a child: the kernel ends it when its parent is gone, whatever ended that (Linux)
"""

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["Ended", "die_with_parent", "signals_default", "signals_raise"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """A signal asked this process to end."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise Ended; only the main thread may say so, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in _ENDING
              if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signals_default() -> None:
    """In a forked child: SIGTERM ends it at once, and so does SIGHUP if it is not ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def die_with_parent() -> None:
    """In the child: be killed when the parent is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(128 + number)
