"""A stretch of work without the search for cycles.

Imports and exports make millions of objects that live until the end of the work; a fifth to a quarter of the time goes
into looking through them for garbage that is not there.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """While open, no cycles are looked for, unless the caller looks."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
