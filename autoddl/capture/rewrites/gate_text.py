"""Writes the function between the two products of an expert as text, which `operators.gate_expressions` reads.

The function is traced on one element of each input. It works on single elements if all its calls are elementwise ones
of tensors with one element; any other has no text.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoddl.operators.gate_expressions import is_elementwise

__all__ = ["gate_text"]

Texts = dict[fx.Node, str | None]


def gate_text(function: Callable[[Tensor], Tensor], inputs: int) -> str | None:
    """The text of a function from `inputs` times n elements in the last dim to n; None where it has none."""
    try:
        traced = make_fx(lambda row: function(row))(torch.zeros(1, inputs))
    except Exception:  # whatever a module of the user's does with one element
        return None
    text: Texts = {}
    for node in traced.graph.nodes:
        if node.op == "output":
            return text.get(node.args[0])
        if node.op == "placeholder":
            text[node] = "a" if inputs == 1 else None
        else:
            text[node] = _written(node, text) if node.op == "call_function" else None
    return None


def _written(node: fx.Node, text: Texts) -> str | None:
    """The text of one call: an input of its own, or an elementwise operator."""
    value, source = node.meta.get("val"), node.args[0]
    if isinstance(source, fx.Node) and text[source] is None:
        if source.op == "placeholder" or source.target is torch.ops.aten.split.Tensor:
            return _half(node, value)
        return None
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    if not isinstance(value, Tensor) or value.numel() != 1 or not is_elementwise(name):
        return None
    parts = [_argument(x, text) for x in node.args]
    named = {k: _argument(x, text) for k, x in node.kwargs.items()}
    if None in parts or None in named.values():
        return None
    return f"{name}({', '.join([*map(str, parts), *(f'{k}={x}' for k, x in named.items())])})"


def _half(node: fx.Node, value: object) -> str | None:
    """`a` or `b` where a node takes that element of the two; None for the split itself, and for anything else."""
    if node.target is operator.getitem:
        return "ab"[int(str(node.args[1]))]
    if node.target is torch.ops.aten.slice.Tensor and isinstance(value, Tensor) and value.shape[-1] == 1:
        return "ab"[int(str((*node.args, 0, 0)[2]))]
    return None


def _argument(value: Any, text: Texts) -> str | None:
    if isinstance(value, fx.Node):
        return text[value]
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    return repr(value) if isinstance(value, float) and abs(value) < float("inf") else None
