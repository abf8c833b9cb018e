"""Writes some uses of complex numbers with real ones.

    view_as_real(view_as_complex(x) * c)  ->  (x0 Re c - x1 Im c, x0 Im c + x1 Re c)
    x[..., a:b] = y                       ->  view_as_complex of the same on the pairs of x and y

The first is the rotation of positions as Llama 4 and DeepSeek-V2 have it. There x has pairs (x0, x1) in its last dim,
and c stays as it is. So no complex number is kept for backward. The second, of Fourier neural operators, has no
derivative in torch.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import insert, name_of, operators, replace

__all__ = ["real_rotations", "real_scatters"]

aten = torch.ops.aten
SCATTERS = ("slice_scatter.default", "select_scatter.default")


def real_rotations(module: GraphModule) -> None:
    """Rewrites such products in place; complex numbers in any other use stay."""
    for node in operators(module):
        product = node.args[0] if name_of(node.target) == "view_as_real.default" else None
        if isinstance(product, Node) and name_of(product.target) == "mul.Tensor":
            first, second = product.args
            pairs, other = (first, second) if _is_pairs(first) else (second, first)
            if _is_pairs(pairs) and isinstance(other, Node):
                replace(node, _rotated(node, pairs.args[0], other))  # type: ignore[union-attr]
    module.graph.eliminate_dead_code()
    module.recompile()


def real_scatters(module: GraphModule) -> None:
    """Rewrites writes into pieces of complex tensors in place."""
    for node in operators(module):
        if name_of(node.target) in SCATTERS and node.meta["val"].is_complex():
            (x, y, *others), rank = node.args, node.meta["val"].dim()
            dim = int(str(others[0])) % rank if others else 0
            pairs = [_called(node, aten.view_as_real.default, one) for one in (x, y)]
            replace(node, _called(node, aten.view_as_complex.default,
                                  _called(node, node.target, *pairs, dim, *others[1:])))
    module.recompile()


def _is_pairs(value: Any) -> bool:
    return isinstance(value, Node) and name_of(value.target) == "view_as_complex.default"


def _rotated(node: Node, x: Any, c: Node) -> Node:
    """The product in real numbers, in front of `node`."""
    def call(target: Any, *args: Any) -> Node:
        return _called(node, target, *args)

    parts = call(aten.view_as_real.default, c)
    (x0, x1), (real, imaginary) = ([call(aten.select.int, pair, -1, k) for k in (0, 1)] for pair in (x, parts))
    mul = aten.mul.Tensor
    return call(aten.stack.default, [call(aten.sub.Tensor, call(mul, x0, real), call(mul, x1, imaginary)),
                                     call(aten.add.Tensor, call(mul, x0, imaginary), call(mul, x1, real))], -1)


def _called(node: Node, target: Any, *args: Any) -> Node:
    """A call in front of `node`."""
    values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
    return insert(node, target, args, target(*values))
