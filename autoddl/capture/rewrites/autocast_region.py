"""Marks the operators that a module runs under `torch.autocast`; the innermost region decides.

A mark is kept in `meta["custom"]`, which torch keeps when it traces a program again.
"""

from collections.abc import Iterable
from enum import Enum

import torch
from torch.fx import Node

from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError

__all__ = ["Region", "is_disabled", "mark", "region_of"]

KEY = "autoddl.autocast"


class Region(Enum):
    """Says whether autocast is enabled around an operator, or disabled; `NONE`: the module does not say."""

    ON = "bfloat16"
    OFF = "disabled"
    NONE = "none"


def mark(nodes: Iterable[Node], dtype: torch.dtype | None) -> None:
    """Marks nodes of a region that computes in `dtype`, None: disabled; those of a region within keep their mark."""
    kind = Region.OFF.value if dtype is None else str(dtype).removeprefix("torch.")
    for node in nodes:
        node.meta["custom"] = {KEY: kind, **node.meta.get("custom", {})}


def region_of(node: Node) -> Region:
    """The region that a node was traced in. Raises CaptureError where it computes in float16."""
    mark = (node.meta.get("custom") or {}).get(KEY, Region.NONE.value)
    try:
        return Region(mark)
    except ValueError:
        line = line_of(node.meta.get("stack_trace"))
        raise CaptureError(f"autocast at {line} computes in {mark}, which needs scaled losses, and a plan scales none: "
                           "write dtype=torch.bfloat16") from None


def is_disabled(cast: Node) -> bool:
    """Whether a cast is made, or its result read, where autocast is disabled."""
    return any(region_of(node) is Region.OFF for node in (cast, *cast.users))
