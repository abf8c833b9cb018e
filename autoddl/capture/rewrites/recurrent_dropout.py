"""Writes recurrent layers with dropout between them as layers of their own, with our dropout between.

    out, h, c = lstm(x, (h, c), weights, .., layers, p)
    ->  x1, h1, c1 = lstm(x, (h[0:d], c[0:d]), weights of layer 1, .., 1 layer)          d directions
        x2, h2, c2 = lstm(dropout(x1, p), (h[d:2d], c[d:2d]), weights of layer 2, .., 1 layer)
        ..                                                                 h = cat(h1, h2, ..) along dim 0

A layer's weights follow those of the layer before, as many for each. Packed sequences stay as they are.
"""

from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from autoddl.capture.fx_tools import insert, replace
from autoddl.operators.kernels import custom_ops

__all__ = ["RECURRENT", "layers_apart"]

RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
"""Layers over sequences of one length."""

aten = torch.ops.aten


def layers_apart(node: Node, values: dict[str, Any], key: int) -> int:
    """Writes a recurrent layer with dropout as one of each depth; returns how many draws it has, from `key` on."""
    depth: int = values["num_layers"]
    directions = 1 + values["bidirectional"]
    each, out = len(values["params"]) // depth, values["input"]
    states = values["hx"] if isinstance(values["hx"], list | tuple) else [values["hx"]]
    ends: list[list[Node]] = [[] for _ in states]
    for layer in range(depth):
        start = [_rows(node, state, layer * directions, directions) for state in states]
        found = _layer(node, values, out, start, values["params"][layer * each:(layer + 1) * each])
        for end, state in zip(ends, found[1:], strict=True):
            end.append(state)
        out = found[0]
        if layer < depth - 1:
            out = insert(node, custom_ops.dropout, (out, values["dropout"], key + layer), out.meta["val"])
    for place, result in enumerate([out, *(_joined(node, end) for end in ends)]):
        for reader in [user for user in node.users if user.args[1] == place]:
            replace(reader, result)
    node.graph.erase_node(node)
    return depth - 1


def _layer(node: Node, values: dict[str, Any], x: Node, start: list[Node], weights: list[Node]) -> list[Node]:
    """The output and the last states of one layer."""
    hx = start if isinstance(values["hx"], list | tuple) else start[0]
    settings = (values["has_biases"], 1, 0.0, values["train"], values["bidirectional"], values["batch_first"])
    shapes = node.meta["val"][0], *(state.meta["val"] for state in start)
    call = insert(node, node.target, (x, hx, weights, *settings), shapes)  # type: ignore[arg-type]
    return [insert(node, getitem, (call, place), shape) for place, shape in enumerate(shapes)]


def _rows(before: Node, state: Node, first: int, count: int) -> Node:
    value = state.meta["val"]
    return insert(before, aten.slice.Tensor, (state, 0, first, first + count), value[first:first + count])


def _joined(before: Node, parts: list[Node]) -> Node:
    return insert(before, aten.cat.default, (parts, 0), torch.cat([part.meta["val"] for part in parts]))
