"""Patches torch 2.13 so that torch.export skips work whose results nobody reads; the exported program is the same.

    GraphModule.recompile        An export makes dozens of graph modules and calls few of them. Their Python code is
                                 written at the first call, which saves a quarter of the export's time.
    CapturedTraceback.summary    Every operator asks for its stack, with about eighty frames of torch's own. Only
                                 frames of the model and of torch.nn are read, which saves a sixth of the time.

Both patches are in place inside their context managers alone. They depend on `GraphModule.graph._codegen`, on
`forward` being looked up on the class, and on `summary` being called where the operator is traced.
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

__all__ = ["MADE_FOR", "PATCHED", "delay_code_generation", "shorten_stacks"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.fx:GraphModule.recompile": "self", "torch.utils._traceback:CapturedTraceback.summary": "self"}
"""The patched functions with the names of their parameters; a test compares both with the installed torch."""

TORCH = os.path.dirname(torch.__file__) + os.sep
LAYERS = os.path.join(TORCH, "nn") + os.sep


@contextmanager
def delay_code_generation() -> Iterator[None]:
    """While open, a graph module writes its Python code when it is first called.

    Modules with a calling convention of their own read it from the written code, so they write it at once."""
    original = GraphModule.recompile

    def forward_first(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        original(module)
        return module.forward(*args, **kwargs)

    def recompile_later(module: GraphModule) -> Any:
        if type(module.graph._codegen) is not CodeGen:
            return original(module)
        type(module).forward = forward_first
        return None

    GraphModule.recompile = recompile_later  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GraphModule.recompile = original  # type: ignore[method-assign]


@contextmanager
def shorten_stacks() -> Iterator[None]:
    """While open, the stack of a traced operator has the frames of the model and of torch.nn alone.

    They are read from the running frames, so the names of torch's own frames are never looked up."""
    original = CapturedTraceback.summary
    CapturedTraceback.summary = _frames  # type: ignore[method-assign]
    try:
        yield
    finally:
        CapturedTraceback.summary = original  # type: ignore[method-assign]


def _frames(_: CapturedTraceback) -> StackSummary:
    """The running frames outside torch and inside torch.nn, outermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) or file.startswith(LAYERS):
            found.append(FrameSummary(file, frame.f_lineno, frame.f_code.co_name, lookup_line=False))
        frame = frame.f_back  # type: ignore[assignment]
    return StackSummary.from_list(found[::-1])
