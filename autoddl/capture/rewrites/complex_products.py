"""Writes the rotation of a real tensor by complex numbers with real ones, as positions of Llama 4 and DeepSeek-V2 are.

    view_as_real(view_as_complex(x) * c)  ->  (x0 Re c - x1 Im c, x0 Im c + x1 Re c)

Here x has pairs (x0, x1) in its last dim. So no complex number depends on a parameter, whose gradient would be complex
too; c, which depends on none, stays as it is.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import insert, name_of, operators, replace

__all__ = ["real_rotations"]

aten = torch.ops.aten


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


def _is_pairs(value: Any) -> bool:
    return isinstance(value, Node) and name_of(value.target) == "view_as_complex.default"


def _rotated(node: Node, x: Any, c: Node) -> Node:
    """The product in real numbers, in front of `node`."""
    def call(target: Any, *args: Any) -> Node:
        values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
        return insert(node, target, args, target(*values))

    parts = call(aten.view_as_real.default, c)
    (x0, x1), (real, imaginary) = ([call(aten.select.int, pair, -1, k) for k in (0, 1)] for pair in (x, parts))
    mul = aten.mul.Tensor
    return call(aten.stack.default, [call(aten.sub.Tensor, call(mul, x0, real), call(mul, x1, imaginary)),
                                     call(aten.add.Tensor, call(mul, x0, imaginary), call(mul, x1, real))], -1)
