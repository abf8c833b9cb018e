"""Rewrites the raw exported program in place, before anything makes it functional.

    whole_dropout        feature, alpha and in-place dropout in terms of dropout
    shifted_numbers      x.random_(low, high), whose name is no Python, by x.random_(high - low)
    inline_regions       no_grad written out: it becomes detach
    check_averages       running averages of instances, which no operator yields, are refused
    needs_decomposition  whether run_decompositions({}) has anything to do
    has_composite_views  whether it has composites of views to write out, which nothing else does
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import call_arguments, dtype_of, insert, name_of, operators, replace
from autoddl.capture.rewrites.passes import DROPOUTS, OURS
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError

__all__ = ["check_averages", "has_composite_views", "inline_regions", "link_users", "needs_decomposition",
           "shifted_numbers", "whole_dropout"]

aten = torch.ops.aten
SATURATED = -1.7580993408473766
"""Where SELU ends on the left: -scale * alpha."""

STATEFUL = {"batch_norm.default", "instance_norm.default"}


def needs_decomposition(module: GraphModule) -> bool:
    """Whether an operator writes in place, or is a composite of views that is not in our vocabulary."""
    writes = (node.target._schema.is_mutable or name_of(node.target) in STATEFUL  # type: ignore[union-attr]
              for node in operators(module))
    return any(writes) or has_composite_views(module)


def has_composite_views(module: GraphModule) -> bool:
    """Whether an operator is a composite of views that is not in our vocabulary."""
    for node in operators(module):
        target: Any = node.target
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
        if composite and name_of(target) not in OURS and any(one.alias_info for one in target._schema.arguments):
            return True
    return False


def check_averages(module: GraphModule) -> None:
    """Raises CaptureError where an instance norm in training keeps running averages, which no graph shows."""
    for node in operators(module):
        values = call_arguments(node) if name_of(node.target) == "instance_norm.default" else {}
        if values.get("running_mean") is not None and values["use_input_stats"]:
            raise CaptureError(f"the instance norm at {line_of(node.meta.get('stack_trace'))} keeps running averages, "
                               "which a graph does not show: write track_running_stats=False, or GroupNorm(c, c)")


def shifted_numbers(module: GraphModule) -> None:
    """Rewrites x.random_(low, high) as x.random_(high - low) + low: `from` in its name is a keyword of Python."""
    for node in operators(module):
        if name_of(node.target) == "random_.from":
            values, value = call_arguments(node), node.meta["val"]
            low, high = values["from"], values["to"]
            drawn = insert(node, aten.random_.to, (values["self"], (2**63 if high is None else high) - low), value)
            replace(node, insert(node, aten.add_.Tensor, (drawn, low), value))


def whole_dropout(module: GraphModule) -> None:
    """Rewrites feature and alpha dropout in terms of dropout, and dropout in place as a copy.

        feature_dropout(x)    x * dropout(ones of (n, c, 1, 1)); alpha_dropout takes such a mask too
        f_(x)                 copy_(x, f(x)), which run_decompositions makes functional
    """
    for node in operators(module):
        name = name_of(node.target)
        if not name.endswith(("dropout.default", "dropout_.default")) or name in DROPOUTS:
            continue
        x, p, train = node.args
        new: Any = x
        if train and p:
            new = (_saturated if "alpha" in name else _masked)(node, x, p, "feature" in name)
            if name.endswith("_.default"):
                new = insert(node, aten.copy_.default, (x, new), x.meta["val"])  # type: ignore[union-attr]
        replace(node, new)
    module.recompile()


def _saturated(node: Node, x: Any, p: Any, feature: bool) -> Node:
    """Alpha dropout (Klambauer et al. 2017): x m + s (1 - m), scaled and shifted to mean 0 and variance 1; m is 0 at p.

    dropout(ones) is m / (1 - p); s = -scale * alpha of SELU.
    """
    value = x.meta["val"]
    shape = [*value.shape[:2], *[1] * (value.dim() - 2)] if feature else list(value.shape)
    ones = insert(node, aten.new_ones.default, (x, shape), value.new_empty(shape))
    kept = insert(node, aten.dropout.default, (ones, p, True), ones.meta["val"])
    scale = ((1 - p) * (1 + p * SATURATED ** 2)) ** -0.5 if p < 1 else 0.0
    taken = insert(node, aten.mul.Tensor, (kept, (1 - p) * scale), kept.meta["val"])
    given = insert(node, aten.add.Tensor, (insert(node, aten.mul.Tensor, (taken, -SATURATED), kept.meta["val"]),
                                           SATURATED * scale * (1 - p)), kept.meta["val"])
    return insert(node, aten.add.Tensor, (insert(node, aten.mul.Tensor, (x, taken), value), given), value)


def _masked(node: Node, x: Any, p: Any, feature: bool) -> Node:
    value = x.meta["val"]
    if not feature:
        return insert(node, aten.dropout.default, (x, p, True), value)
    shape = [*value.shape[:2], *[1] * (value.dim() - 2)]
    ones = insert(node, aten.new_ones.default, (x, shape), value.new_empty(shape))
    mask = insert(node, aten.dropout.default, (ones, p, True), ones.meta["val"])
    return insert(node, aten.mul.Tensor, (x, mask), value)


def link_users(module: GraphModule) -> None:
    """Adds to the users of every node those that read it: torch.export forgets some beside regions of no_grad."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for read in node.all_input_nodes:
                read.users.setdefault(node)


def inline_regions(module: GraphModule) -> None:
    """Writes out the bodies of set_grad_enabled; without gradient, their inputs are detached."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name, line = str(node.target), line_of(_trace_of(module, node))
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = node.args
        else:
            raise CaptureError(f"{name} at {line} cannot be captured; write it with plain tensor operators")
        inner = getattr(module, body.target)
        inline_regions(inner)
        _inline(node, inner, inputs if enabled else [_detached(node, x) for x in inputs])
    module.graph.eliminate_dead_code()
    module.recompile()


def _trace_of(module: GraphModule, node: Node) -> str | None:
    """Stack trace of a region, which is that of the first operator in it."""
    bodies = [getattr(module, str(x.target)) for x in node.args if isinstance(x, Node) and x.op == "get_attr"]
    inside = [x for body in bodies if isinstance(body, GraphModule) for x in body.graph.nodes]
    return next((x.meta["stack_trace"] for x in (node, *inside) if x.meta.get("stack_trace")), None)


def _detached(before: Node, x: Any) -> Any:
    floating = isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor) and dtype_of(x).is_floating_point
    if not floating:
        return x
    node = insert(before, aten.detach.default, (x,), x.meta["val"])
    node.meta = {**x.meta}
    return node


def _inline(node: Node, body: GraphModule, inputs: list[Any]) -> None:
    holes = [hole for hole in body.graph.nodes if hole.op == "placeholder"]
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(body.graph, dict(zip(holes, inputs, strict=True)))
    for user in list(node.users):
        replace(user, results[user.args[1]])  # type: ignore[index]
    node.graph.erase_node(node)
