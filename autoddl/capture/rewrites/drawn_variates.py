"""Rewrites draws whose numbers are tensors: uniform numbers by position, and the quantile function of the law.

    poisson(a), binomial(n, p)       variate(u, ..), without a gradient
    _standard_gamma(a)               variate(u, ..), with the gradient of the quantile
    _sample_dirichlet(a)             gamma numbers of a, divided by their sum along the last dim

From these torch.distributions makes Gamma, Beta, Chi2, StudentT, FisherSnedecor, InverseGamma, NegativeBinomial and
Wishart.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from autoddl.capture.fx_tools import insert, replace
from autoddl.capture.rewrites.drawing import cast, detached, draw
from autoddl.operators.kernels import custom_ops

__all__ = ["VARIATES"]

Values = dict[str, Any]


def _variate(node: Node, law: str, key: int, *numbers: Node) -> Node:
    """The draw of a law, in the shape and dtype of what `node` yields."""
    value = node.meta["val"]
    u = draw(node, ("uniform", 0.0, 1.0), key, like=torch.empty_like(value, dtype=torch.float32))
    return cast(node, insert(node, custom_ops.variate, (u, law, *numbers),
                             torch.empty_like(value, dtype=numbers[0].meta["val"].dtype)), value.dtype)


def _poisson(node: Node, values: Values, key: int) -> None:
    replace(node, _variate(node, "poisson", key, detached(node, values["self"])))


def _binomial(node: Node, values: Values, key: int) -> None:
    numbers = (detached(node, values[name]) for name in ("count", "prob"))
    replace(node, _variate(node, "binomial", key, *numbers))


def _gamma(node: Node, values: Values, key: int) -> None:
    replace(node, _variate(node, "gamma", key, values["self"]))


def _dirichlet(node: Node, values: Values, key: int) -> None:
    drawn, value = _variate(node, "gamma", key, values["self"]), node.meta["val"]
    total = insert(node, torch.ops.aten.sum.dim_IntList, (drawn, [-1], True), value[..., :1])
    replace(node, insert(node, torch.ops.aten.div.Tensor, (drawn, total), value))


VARIATES: Mapping[str, Callable[[Node, Values, int], None]] = {
    "poisson.default": _poisson, "binomial.default": _binomial, "_standard_gamma.default": _gamma,
    "_sample_dirichlet.default": _dirichlet}
"""By operator, its rewriting: the node, its arguments by name, and the number of its draw."""
