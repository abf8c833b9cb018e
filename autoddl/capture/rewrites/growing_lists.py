"""Writes concatenations of growing lists as chains, as DenseNet and other networks of dense connections have them.

    cat([a, b, c, d]) behind p = cat([a, b, c])  ->  cat([p, d])

Either way as many numbers are copied, and the values are the same. Gradients add up in the same order. Where other ops
read a part too, their sums may round differently. Without chains every part has a reader per concatenation, each with a
layout of its own, and no order of elimination is narrow (`search`).
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import call_arguments, dtype_of, operators

__all__ = ["chained"]

aten = torch.ops.aten


def chained(program: GraphModule) -> None:
    """Replaces parts of a concatenation by the longest earlier one of these parts, next to each other, in place."""
    known: dict[tuple[Node, ...], Node] = {}
    for node in operators(program):
        if node.target is aten.cat.default:
            parts = tuple(call_arguments(node)["tensors"])
            if len(parts) > 2:
                _shorten(node, parts, known)
            if len({dtype_of(part) for part in parts}) == 1:
                known.setdefault(parts, node)
    program.recompile()


def _shorten(node: Node, parts: tuple[Node, ...], known: dict[tuple[Node, ...], Node]) -> None:
    """Reads the longest known concatenation of some of the parts along the same dim, if there is one."""
    for count in range(len(parts), 1, -1):
        for start in range(len(parts) - count + 1):
            other = known.get(parts[start:start + count])
            if other is not None and _dim(other) == _dim(node):
                node.args = ([*parts[:start], other, *parts[start + count:]], _dim(node))
                node.kwargs = {}
                return


def _dim(node: Node) -> Any:
    """The dim along which a concatenation joins, from 0."""
    return call_arguments(node)["dim"] % node.meta["val"].dim()
