"""Starts the program `autoddl` with fixed hashes of strings, so that equal models have equal graphs in every process.

Some libraries go through sets of names while a model is built or run (transformers, masks by type of layer). The order
of such a set depends on hashes, which Python draws anew in every process; a graph has its operators in that order.

Ctrl-C before the shell can answer ends the process at once, without a traceback. Between the two starts it waits.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["program"]


def program() -> None:
    """Runs the shell; where hashes are drawn, in a new start of the same command."""
    with _interrupts_end():
        if "PYTHONHASHSEED" not in os.environ and sys.flags.hash_randomization:
            os.environ["PYTHONHASHSEED"] = "0"
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        from autoddl.cli.main import program as run
    run()


@contextmanager
def _interrupts_end() -> Iterator[None]:
    """Within the block SIGINT ends the process at once, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
