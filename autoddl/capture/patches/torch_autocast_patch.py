"""Patches torch 2.13 so that a trace shows every region of `torch.autocast`, also for devices that are not here.

    autocast.__init__       On a machine without CUDA, `torch.autocast("cuda")` disables itself. A trace is made of
    autocast.__enter__      tensors on the CPU, so each region becomes one of the CPU: Python code of the model sees the
    autocast.__exit__       dtypes that products have there. Export would cut the program at regions, and loses
                            `no_grad` within one; instead every operator is marked (`autocast_region`).
    is_autocast_enabled     A program that is cast as a whole is traced without autocast, but a model that asks is told
                            that it is enabled. Some disable it for a few operators only where it is.

All are in place inside the context manager alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from autoddl.capture.rewrites.autocast_region import mark

__all__ = ["MADE_FOR", "PATCHED", "enter_autocast_anywhere"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch:autocast.__init__": "self, device_type, dtype, enabled, cache_enabled",
           "torch:autocast.__enter__": "self", "torch:autocast.__exit__": "self, exc_type, exc_val, exc_tb"}
"""The patched functions with the names of their parameters; a test compares both with the installed torch."""


def _traced() -> Graph | None:
    """The graph that a trace is writing; None outside a trace."""
    modes = torch.overrides._get_current_function_mode_stack()
    tracer = next((mode.tracer for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)), None)
    return None if tracer is None else tracer.graph


@contextmanager
def enter_autocast_anywhere(enabled: bool) -> Iterator[None]:
    """While open, `torch.autocast` of any device type is one of the CPU and marks the operators traced in it.

    Whoever asks outside such a region whether autocast is enabled is told `enabled`.
    """
    init, enter, leave, is_enabled = (torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__,
                                      torch.is_autocast_enabled)
    opened: list[tuple[str, Graph | None, int]] = []

    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
              cache_enabled: bool | None = None) -> None:
        asked = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        init(self, "cpu", asked, enabled, cache_enabled)

    def enter_here(self: Any) -> Any:
        graph = _traced()
        opened.append((self.device, graph, 0 if graph is None else len(graph.nodes)))
        self.device = "cpu"
        with torch._C.DisableTorchFunction():  # the trace does not see it
            return enter(self)  # type: ignore[no-untyped-call]

    def leave_here(self: Any, *raised: Any) -> Any:
        with torch._C.DisableTorchFunction():
            found = leave(self, *raised)
        self.device, graph, before = opened.pop()
        if graph is not None:
            mark(islice(graph.nodes, before, None), self.fast_dtype if self._enabled else None)
        return found

    def told(*device_type: str) -> bool:
        return is_enabled("cpu") if opened else enabled

    replaced: list[tuple[Any, str, Any]] = [
        (torch.autocast, "__init__", begin), (torch.autocast, "__enter__", enter_here),
        (torch.autocast, "__exit__", leave_here), (torch, "is_autocast_enabled", told)]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, (init, enter, leave, is_enabled), strict=True):
            setattr(owner, name, original)
