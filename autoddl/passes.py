"""Rewrites of the exported fx graph, in place, each one a small step towards one vocabulary of operators.

    raw program                                            functional program
    whole_dropout     feature and in-place dropout         normalise    reshape, to, chunk; copies dropped
                      in terms of dropout                  randomness   dropout, attention -> ours, numbered
    inline_regions    no_grad regions -> detach            losses       mean cross entropy -> sum / weight
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl import functions
from autoddl.errors import CaptureError
from autoddl.source import line_of

__all__ = ["dtype_of", "gradients", "inline_regions", "losses", "needs_decomposition", "normalise", "on_device", "randomness",
           "whole_dropout"]

aten = torch.ops.aten
Target = Any

RESHAPES = {"view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int",
            "view_as.default", "reshape_as.default"}
COPIES = {"clone.default", "alias.default", "lift_fresh.default", "lift_fresh_copy.default", "contiguous.default"}
CASTS = {"_to_copy.default", "to.dtype", "to.device", "to.dtype_layout", "to.other", "type_as.default"}
CHECKS = {"_assert_tensor_metadata.default", "_assert_async.msg", "_assert_scalar.default"}
DROPOUTS = {"dropout.default", "native_dropout.default"}
OURS = RESHAPES | COPIES | CASTS | CHECKS | DROPOUTS | {"chunk.default"}
"""Operators that `normalise` and `randomness` write out whether or not the program was decomposed."""
STATEFUL = {"batch_norm.default", "instance_norm.default"}


def name_of(target: Target) -> str:
    """`linear.default` for an aten operator, else the text of the target."""
    return str(target).removeprefix("aten.")


def dtype_of(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def arguments(node: Node) -> dict[str, Any]:
    """Every argument of an operator call by name, defaults included."""
    values = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else None
        values[argument.name] = (node.args[position] if position < len(node.args)
                                 else node.kwargs.get(argument.name, default))
    return values


def operators(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def insert(before: Node, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Node:
    """A new call in front of `before`, at its source line, with `value` the fake tensor that it yields."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    node.meta = {**before.meta, "val": value}
    return node


def replace(node: Node, new: Any) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def needs_decomposition(module: GraphModule) -> bool:
    """Whether an operator writes in place, or is a composite of views that is not in our vocabulary."""
    for node in operators(module):
        target, name = node.target, name_of(node.target)
        schema = target._schema  # type: ignore[union-attr]
        if schema.is_mutable or name in STATEFUL:
            return True
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")  # type: ignore[union-attr]
        if composite and name not in OURS and any(argument.alias_info for argument in schema.arguments):
            return True
    return False


def whole_dropout(module: GraphModule) -> None:
    """feature_dropout(x) -> x * dropout(ones of (n, c, 1, 1)); f_(x) -> copy_(x, f(x)), for run_decompositions."""
    for node in operators(module):
        name = name_of(node.target)
        if not name.endswith(("dropout.default", "dropout_.default")) or name in DROPOUTS:
            continue
        if "alpha" in name:
            raise CaptureError(f"aten.{name} at {line_of(node.meta.get('stack_trace'))} has no rule; use dropout")
        x, p, train = node.args
        new: Any = x
        if train and p:
            new = _masked(node, x, p, "feature" in name)
            if name.endswith("_.default"):
                new = insert(node, aten.copy_.default, (x, new), x.meta["val"])  # type: ignore[union-attr]
        replace(node, new)
    module.recompile()


def _masked(node: Node, x: Any, p: Any, feature: bool) -> Node:
    value = x.meta["val"]
    if not feature:
        return insert(node, aten.dropout.default, (x, p, True), value)
    shape = [*value.shape[:2], *[1] * (value.dim() - 2)]
    ones = insert(node, aten.new_ones.default, (x, shape), value.new_empty(shape))
    mask = insert(node, aten.dropout.default, (ones, p, True), ones.meta["val"])
    return insert(node, aten.mul.Tensor, (x, mask), value)


def inline_regions(module: GraphModule) -> None:
    """Writes out the bodies of set_grad_enabled and disabled autocast; without gradient, their inputs are detached."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name, line = str(node.target), line_of(node.meta.get("stack_trace"))
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = node.args
        elif name == "wrap_with_autocast" and not node.args[2]:
            enabled, (body, *inputs) = True, node.args[4:]
        else:
            hint = "capture outside autocast" if "autocast" in name else "write it with plain tensor operators"
            raise CaptureError(f"{name} at {line} cannot be captured; {hint}")
        inner = getattr(module, body.target)
        inline_regions(inner)
        _inline(node, inner, inputs if enabled else [_detached(node, x) for x in inputs])
    module.graph.eliminate_dead_code()
    module.recompile()


def _detached(before: Node, x: Any) -> Any:
    floating = isinstance(x, Node) and isinstance(x.meta.get("val"), torch.Tensor) and dtype_of(x).is_floating_point
    return insert(before, aten.detach.default, (x,), x.meta["val"]) if floating else x


def _inline(node: Node, body: GraphModule, inputs: list[Any]) -> None:
    holes = [hole for hole in body.graph.nodes if hole.op == "placeholder"]
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(body.graph, dict(zip(holes, inputs, strict=True)))
    for user in list(node.users):
        replace(user, results[user.args[1]])  # type: ignore[index]
    node.graph.erase_node(node)


def normalise(module: GraphModule) -> None:
    """One name per meaning: reshape, _to_copy, split; what copies or checks without changing a value is dropped."""
    for node in operators(module):
        name = name_of(node.target)
        if name in CHECKS:
            node.graph.erase_node(node)
        elif name in COPIES or (name in CASTS and dtype_of(node.args[0]) == dtype_of(node)):  # type: ignore[arg-type]
            replace(node, node.args[0])
        elif name in CASTS:
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype_of(node)}
        elif name in RESHAPES:
            node.target, node.kwargs = aten.reshape.default, {}
            node.args = (node.args[0], list(node.meta["val"].shape))
        elif name == "chunk.default":
            _split(node)
    module.recompile()


def gradients(module: GraphModule, trained: frozenset[str]) -> None:
    """Drops every detach of a value that no gradient would reach: it depends on no trained placeholder."""
    reached: set[Node] = set()
    for node in list(module.graph.nodes):
        detach = node.target is aten.detach.default
        if node.name in trained or (not detach and any(x in reached for x in node.all_input_nodes)):
            reached.add(node)
        elif detach and node.args[0] not in reached:
            replace(node, node.args[0])
    module.recompile()


def _split(node: Node) -> None:
    """chunk(x, n, dim) -> split(x, ceil(size / n), dim)"""
    values = arguments(node)
    x, dim = values["self"], values["dim"]
    width = -(-x.meta["val"].shape[dim] // values["chunks"])
    node.target, node.args, node.kwargs = aten.split.Tensor, (x, width, dim), {}


def randomness(module: GraphModule) -> None:
    """Dropout and attention with dropout -> ours, numbered in order; at p = 0 they vanish. Other draws are refused."""
    key = 0
    for node in operators(module):
        name = name_of(node.target)
        if name in DROPOUTS:
            x, p, train = node.args
            drops = train is not False and p
            new = insert(node, functions.dropout, (x, p, key), x.meta["val"]) if drops else x  # type: ignore[union-attr]
            key += bool(drops)
            for user in list(node.users) if name.startswith("native") else ():
                replace(user, new)
            replace(node, new)
        elif name == "scaled_dot_product_attention.default":
            values = arguments(node)
            if values["dropout_p"]:
                replace(node, insert(node, functions.attention, (*values.values(), key), node.meta["val"]))
                key += 1
        elif torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
            line = line_of(node.meta.get("stack_trace"))
            raise CaptureError(f"aten.{name} at {line} draws random numbers, which would depend on the layout; "
                               "dropout is the only draw that does not")
    module.recompile()


def losses(module: GraphModule) -> None:
    """cross_entropy_loss by class index: mean -> token_loss / token_weight, sum -> token_loss."""
    for node in operators(module):
        if name_of(node.target) != "cross_entropy_loss.default":
            continue
        values = arguments(node)
        logits, target, weight, skip = (values[name] for name in ("self", "target", "weight", "ignore_index"))
        if values["reduction"] == 0 or dtype_of(target).is_floating_point:
            continue
        dtype = torch.float32 if dtype_of(node) in (torch.float16, torch.bfloat16) else dtype_of(node)
        value = node.meta["val"].to(dtype)
        new = insert(node, functions.token_loss, (logits, target, weight, skip, values["label_smoothing"]), value)
        if values["reduction"] == 1:
            count = insert(node, functions.token_weight, (target, weight, skip, dtype), value)
            new = insert(node, aten.div.Tensor, (new, count), value)
        if dtype != dtype_of(node):
            new = insert(node, aten._to_copy.default, (new,), node.meta["val"])
            new.kwargs = {"dtype": dtype_of(node)}
        replace(node, new)
    module.recompile()


def on_device(module: GraphModule, device: torch.device | str) -> None:
    """Makes the constants that the program creates (arange, full, zeros ...) on `device`."""
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
    module.recompile()
