"""An export without what nobody reads: a third of its time.

    unwritten    the Python code of dozens of graph modules that are never called
    own_frames   of every operator's stack, torch's own eighty frames; those of the model and of torch.nn stay
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.utils._traceback import CapturedTraceback

__all__ = ["own_frames", "unwritten"]

TORCH = os.path.dirname(torch.__file__) + os.sep
LAYERS = os.path.join(TORCH, "nn") + os.sep


@contextmanager
def unwritten() -> Iterator[None]:
    """Graph modules write their Python code when they are first called: a quarter of an export's time went into code
    that nobody calls. Those with a calling convention of their own take it from what is written, so they write it."""
    write = GraphModule.recompile

    def first(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        write(module)
        return module.forward(*args, **kwargs)

    def later(module: GraphModule) -> Any:
        if type(module.graph._codegen) is not CodeGen:
            return write(module)
        type(module).forward = first
        return None

    GraphModule.recompile = later  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GraphModule.recompile = write  # type: ignore[method-assign]


@contextmanager
def own_frames() -> Iterator[None]:
    """An operator's stack is asked for where it is traced, so the frames that are there are read instead of the names
    of all that led to them being looked up: a sixth of an export's time."""
    whole = CapturedTraceback.summary
    CapturedTraceback.summary = _frames  # type: ignore[method-assign]
    try:
        yield
    finally:
        CapturedTraceback.summary = whole  # type: ignore[method-assign]


def _frames(_: CapturedTraceback) -> StackSummary:
    """The frames of the caller that are not torch's own, outermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) or file.startswith(LAYERS):
            found.append(FrameSummary(file, frame.f_lineno, frame.f_code.co_name, lookup_line=False))
        frame = frame.f_back  # type: ignore[assignment]
    return StackSummary.from_list(found[::-1])
