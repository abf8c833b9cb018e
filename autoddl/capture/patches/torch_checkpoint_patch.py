"""Patches torch 2.13 so that a trace notices calls of torch.utils.checkpoint.

    _checkpoint_without_reentrant_generator    It runs around every checkpointed function and leaves nothing in an
                                               exported program. The patched one notes the function first.

The form with `use_reentrant=True` is an autograd Function, which `autograd_function_patch` notices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

__all__ = ["MADE_FOR", "PATCHED", "note_checkpoints"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.utils.checkpoint:_checkpoint_without_reentrant_generator":
           "fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, **kwargs"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""


@contextmanager
def note_checkpoints() -> Iterator[list[Callable[..., Any]]]:
    """While open, every function that is checkpointed is appended to the list that this yields."""
    found: list[Callable[..., Any]] = []
    original = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def noted(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found.append(fn)
        return original(fn, *args, **kwargs)

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = noted
    try:
        yield found
    finally:
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = original
