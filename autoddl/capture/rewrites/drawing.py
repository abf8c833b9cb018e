"""Inserts calls that draw by position, and the few operators around them, into a captured program."""

from typing import Any

import torch
from torch.fx import Node

from autoddl.capture.fx_tools import dtype_of, insert
from autoddl.operators.kernels import custom_ops

__all__ = ["Law", "cast", "detached", "draw"]

Law = tuple[str, float, float]
"""A law of `operators.kernels.draws`, and its two numbers."""

aten = torch.ops.aten


def draw(before: Node, law: Law, key: int, expected: float | None = None, like: torch.Tensor | None = None) -> Node:
    """A draw in the shape and dtype of `like`, by default of what `before` yields."""
    value = before.meta["val"] if like is None else like
    return insert(before, custom_ops.draw,
                  (list(value.shape), *law, value.dtype, torch.device("cpu"), key, expected), value)


def cast(before: Node, x: Node, dtype: torch.dtype) -> Node:
    """`x` in a dtype."""
    if dtype_of(x) is dtype:
        return x
    node = insert(before, aten._to_copy.default, (x,), x.meta["val"].to(dtype))
    node.kwargs = {"dtype": dtype}
    return node


def detached(before: Node, x: Any) -> Any:
    """`x` without a gradient; numbers stay as they are."""
    return insert(before, aten.detach.default, (x,), x.meta["val"]) if isinstance(x, Node) else x
