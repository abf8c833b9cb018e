"""Starts the program `autoddl` with fixed hashes of strings, so that equal models have equal graphs in every process.

Some libraries go through sets of names while a model is built or run (transformers, masks by type of layer). The order
of such a set depends on hashes, which Python draws anew in every process; a graph has its operators in that order.
"""

import os
import sys

__all__ = ["program"]


def program() -> None:
    """Runs the shell; where hashes are drawn, in a new start of the same command."""
    if "PYTHONHASHSEED" not in os.environ and sys.flags.hash_randomization:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from autoddl.cli.main import program as run
    run()
