"""Rewrites the functional program in place, each pass a small step towards one vocabulary of operators.

    normalise        reshape, _to_copy, split under one name each; copies and checks dropped; gradients of tables dense
    unmerged         products whose rows are merged before and apart again behind -> products of the rows as they were
    gradients        detach only where a gradient would pass
    own_functions    layers of experts, products of sorted rows, losses of sequences -> ours
    losses           mean cross entropy -> token_loss / token_weight
    bags             embedding bags of equal length -> ours; batch norms without averages -> those with averages of
                     one step
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.capture.fx_tools import call_arguments, dtype_of, insert, name_of, operators, replace
from autoddl.capture.rewrites.autocast_region import is_disabled
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError
from autoddl.operators.kernels import custom_ops

__all__ = ["bags", "gradients", "losses", "normalise", "own_functions", "unmerged"]

aten = torch.ops.aten

RESHAPES = {"view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int",
            "view_as.default", "reshape_as.default"}
COPIES = {"clone.default", "alias.default", "lift_fresh.default", "lift_fresh_copy.default", "contiguous.default"}
CASTS = {"_to_copy.default", "to.dtype", "to.device", "to.dtype_layout", "to.other", "type_as.default"}
CHECKS = {"_assert_tensor_metadata.default", "_assert_async.msg", "_assert_scalar.default"}
DROPOUTS = {"dropout.default", "native_dropout.default"}
OURS = RESHAPES | COPIES | CASTS | CHECKS | DROPOUTS | {"chunk.default"}
"""Operators that `normalise` and `randomness.randomness` write out whether or not the program was decomposed."""


STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)
"""Operators that read, or write, places of memory."""

FILLED = frozenset(("empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like",
                    "zeros_like"))
"""Tensors of one number, zero where it is left open: none depends on the value of what it is made like."""


def normalise(module: GraphModule, mixed: bool = False) -> None:
    """Gives equal operations one name (reshape, _to_copy, split, full), and drops copies and checks.

    A value that is written over another takes its place. A tensor that is concatenated with empty ones is itself. The
    gradient of an embedding is made dense, as collectives need it; its numbers stay the same.

    In a `mixed` program a cast that changes nothing yet stays where autocast is disabled: casts to come may need it.
    """
    strided = {node: _memory_order(node) for node in operators(module) if node.target in STRIDED}
    for node in operators(module):
        name = name_of(node.target)
        if name in CHECKS:
            node.graph.erase_node(node)
        elif name in COPIES or (name in CASTS and _keeps_dtype(node) and not (mixed and is_disabled(node))):
            replace(node, node.args[0])
        elif name in CASTS:
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype_of(node)}
        elif name in RESHAPES:
            node.target, node.kwargs = aten.reshape.default, {}
            node.args = (node.args[0], list(node.meta["val"].shape))
        elif name == "chunk.default":
            _split(node)
        elif name == "_is_all_true.default":
            node.target = aten.all.default
        elif name.partition(".")[0] in FILLED:
            _filled(node)
        elif name == "broadcast_tensors.default":
            _expand(node)
        elif name == "copy.default":
            _written(node)
        elif name == "cat.default":
            _joined(node)
        elif name == "embedding.default" and call_arguments(node)["sparse"]:
            node.args, node.kwargs = tuple({**call_arguments(node), "sparse": False}.values()), {}
    for node, order in strided.items():
        _dense(node, order)
    module.recompile()


def _memory_order(node: Node) -> list[int]:
    """The dims of what as_strided reads as they lie in memory, the outermost first.

    Raises CaptureError where its values do not lie in a row there, and where such places are written.
    """
    value = call_arguments(node)["self"].meta["val"]
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride()[dim], dim))
    is_row = value.permute(order).is_contiguous() and value.storage_offset() == 0
    if node.target is aten.as_strided.default and is_row:
        return order
    does = "reads places of memory of a tensor whose values do not lie in a row there" if not is_row else \
        "writes places of memory"
    raise CaptureError(f"{name_of(node.target)} at {line_of(node.meta.get('stack_trace'))} {does}, and a plan keeps "
                       "values, not strides: call x.contiguous() first, or use x.unfold or slices")


def _dense(node: Node, order: list[int]) -> None:
    """Copies what as_strided reads into a row, in this order of dims: it reads places of memory, rewrites keep values.
    """
    x: Node = node.args[0]  # type: ignore[assignment]
    value = x.meta["val"].permute(order)
    turned = x if order == sorted(order) else insert(node, aten.permute.default, (x, order), value)
    copy = insert(node, aten.clone.default, (turned,), value.contiguous())
    copy.kwargs = {"memory_format": torch.contiguous_format}
    node.args = (copy, *node.args[1:])


def _keeps_dtype(cast: Node) -> bool:
    return dtype_of(cast.args[0]) == dtype_of(cast)  # type: ignore[arg-type]


def unmerged(module: GraphModule) -> None:
    """Rewrites reshape(linear(reshape(x, [a b, c]), w), [a, b, d]) as linear(reshape(x, [a, b, c]), w).

    torch's own multi-head attention merges sequence and batch so. A split of the batch, the inner one, would be none of
    the merged rows.
    """
    for node in operators(module):
        after, merged = list(node.users), node.args[0] if node.target is aten.linear.default else None
        if (not isinstance(merged, Node) or merged.target is not aten.reshape.default or len(merged.users) != 1
                or not after or any(one.target is not aten.reshape.default for one in after)):
            continue
        before, lead = merged.args[0], tuple(after[0].meta["val"].shape[:-1])
        if (all(one.meta["val"].shape == (*lead, node.meta["val"].shape[-1]) for one in after)
                and merged.meta["val"].dim() == 2 < len(lead) + 1
                and before.meta["val"].shape[:len(lead)] == lead):  # type: ignore[union-attr]
            shape = [*lead, merged.meta["val"].shape[-1]]
            merged.args, merged.meta["val"] = (before, shape), merged.meta["val"].reshape(shape)
            node.meta["val"] = after[0].meta["val"]
            for one in after:
                replace(one, node)


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


def _filled(node: Node) -> None:
    """Rewrites a tensor of one number as an expanded scalar, which depends on no other tensor's values."""
    value, name = node.meta["val"], name_of(node.target).partition(".")[0]
    fill = call_arguments(node)["fill_value"] if "full" in name else int("ones" in name)
    one = insert(node, aten.full.default, ([1] * value.dim(), fill), value.new_empty([1] * value.dim()))
    one.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    replace(node, one if value.numel() == 1 else insert(node, aten.expand.default, (one, list(value.shape)), value))


def _expand(node: Node) -> None:
    """Rewrites broadcast_tensors(xs)[i] as expand(xs[i]), so that each depends on its own tensor alone."""
    for item in list(node.users):
        x, shape = node.args[0][item.args[1]], list(item.meta["val"].shape)  # type: ignore[index]
        with node.graph.inserting_before(item):
            wide = node.graph.call_function(aten.expand.default, (x, shape))
        wide.meta = dict(item.meta)
        replace(item, wide)
    node.graph.erase_node(node)


def _written(node: Node) -> None:
    """Rewrites copy(x, y) as y in the dtype and shape of x."""
    new: Node = node.args[1]  # type: ignore[assignment]
    value, given = node.meta["val"], new.meta["val"]
    if given.dtype != value.dtype:
        new = insert(node, aten._to_copy.default, (new,), given.to(value.dtype))
        new.kwargs = {"dtype": value.dtype}
    if given.shape != value.shape:
        new = insert(node, aten.expand.default, (new, list(value.shape)), value)
    replace(node, new)


def _joined(node: Node) -> None:
    """Rewrites cat([empty, x]) as x: caches of transformers begin with tensors of shape (0,)."""
    values = call_arguments(node)
    full = [x for x in values["tensors"] if x.meta["val"].shape != (0,)]
    if not full or len(full) == len(values["tensors"]):
        return
    value = torch.cat([x.meta["val"] for x in full], values["dim"])
    new = full[0] if len(full) == 1 else insert(node, aten.cat.default, (full, values["dim"]), value)
    if dtype_of(new) != dtype_of(node):
        new = insert(node, aten._to_copy.default, (new,), node.meta["val"])
        new.kwargs = {"dtype": dtype_of(node)}
    replace(node, new)


def _split(node: Node) -> None:
    """Rewrites chunk(x, n, dim) as split(x, ceil(size / n), dim)."""
    values = call_arguments(node)
    x, dim = values["self"], values["dim"]
    width = -(-x.meta["val"].shape[dim] // values["chunks"])
    node.target, node.args, node.kwargs = aten.split.Tensor, (x, width, dim), {}


GROUPED = {"_grouped_mm.default", "transformers.grouped_mm_fallback.default"}
"""Products of sorted rows and a matrix per group; torch's own computes in half precision, and on few shapes."""


TRACED: Mapping[str, Callable[..., Any]] = {
    "autoddl.experts.default": custom_ops.experts, "autoddl.ctc_loss.default": custom_ops.ctc_loss}
"""Operators that stand for our own functions in a trace."""


def own_functions(module: GraphModule) -> None:
    """Calls our own functions for the operators that stand for them, and for products of sorted rows."""
    for node in operators(module):
        name = name_of(node.target)
        if name in TRACED:
            node.target = TRACED[name]
        elif name in GROUPED:
            _grouped(node)
        elif name == "autoddl.flex_attention.default":
            _flexible(node)
    module.recompile()


def _flexible(node: Node) -> None:
    """Calls our FlexAttention, which returns the log-sum-exp only to a model that reads it."""
    items, (out, sums), args = list(node.users), node.meta["val"], node.args[:7]
    if any(item.args[1] for item in items):
        node.target, node.args, node.meta["val"] = custom_ops.flex_attention, (*args, True), (out, sums)
        return
    new = insert(node, custom_ops.flex_attention, args, out)
    for item in items:
        replace(item, new)
    node.graph.erase_node(node)


def _grouped(node: Node) -> None:
    """Rewrites a product of rows [rows, in], matrices [groups, in, out] and ends; other forms stay."""
    values = list(call_arguments(node).values())
    rows, weight, ends = values[:3]
    shaped = rows.meta["val"].dim() == 2 and weight.meta["val"].dim() == 3 and ends is not None
    if shaped and values[3:] in ([], [None, None]):
        count = weight.meta["val"].shape[0]
        replace(node, insert(node, custom_ops.grouped_mm, (rows, weight, ends, count), node.meta["val"]))


def losses(module: GraphModule) -> None:
    """Rewrites cross entropy by class index: a mean as token_loss / token_weight, a sum as token_loss."""
    for node in operators(module):
        if name_of(node.target) != "cross_entropy_loss.default":
            continue
        values = call_arguments(node)
        logits, target, weight, skip = (values[name] for name in ("self", "target", "weight", "ignore_index"))
        if values["reduction"] == 0 or dtype_of(target).is_floating_point:
            continue
        dtype = torch.float32 if dtype_of(node) in (torch.float16, torch.bfloat16) else dtype_of(node)
        value = node.meta["val"].to(dtype)
        new = insert(node, custom_ops.token_loss, (logits, target, weight, skip, values["label_smoothing"]), value)
        if values["reduction"] == 1:
            count = insert(node, custom_ops.token_weight, (target, weight, skip, dtype), value)
            new = insert(node, aten.div.Tensor, (new, count), value)
        if dtype != dtype_of(node):
            new = insert(node, aten._to_copy.default, (new,), node.meta["val"])
            new.kwargs = {"dtype": dtype_of(node)}
        replace(node, new)
    module.recompile()


def bags(module: GraphModule) -> None:
    """Writes embedding bags of equal length as ours, which take (bags, indices).

    A batch norm without averages becomes one with averages that nobody reads."""
    for node in operators(module):
        name = name_of(node.target)
        if name == "embedding_bag.padding_idx":
            _bag(node)
        elif name == "_native_batch_norm_legit.no_stats":
            values, value = call_arguments(node), node.meta["val"]
            first = node.args[0].meta["val"]  # type: ignore[union-attr]
            averages = [_constant(node, first.new_empty(first.shape[1], dtype=value[1].dtype), n) for n in (0.0, 1.0)]
            order = (*(values[k] for k in ("input", "weight", "bias")), *averages,
                     *(values[k] for k in ("training", "momentum", "eps")))
            kept = tuple(one.meta["val"] for one in averages)
            replace(node, insert(node, aten._native_batch_norm_legit_functional.default, order, (*value, *kept)))
    module.recompile()


def _constant(before: Node, like: torch.Tensor, value: float) -> Node:
    """A tensor of one number."""
    made = insert(before, aten.full.default, (list(like.shape), value), like)
    made.kwargs = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
    return made


def _bag(node: Node) -> None:
    """Rewrites bags whose offsets count up by a fixed length, and of which only the result is read."""
    values, items = call_arguments(node), list(node.users)
    offsets, indices = values["offsets"], values["indices"]
    if name_of(offsets.target) != "arange.start_step" or any(item.args[1] != 0 for item in items) or \
            values["padding_idx"] is not None or values["include_last_offset"] or values["scale_grad_by_freq"]:
        return
    start, end, length = (*offsets.args, 1)[:3]
    if start != 0 or end != indices.meta["val"].numel() or end % length:
        return
    shape = [end // length, length]
    rows = [None if x is None else insert(node, aten.reshape.default, (x, shape), x.meta["val"].reshape(shape))
            for x in (indices, values["per_sample_weights"])]
    found = insert(node, custom_ops.embedding_bag, (values["weight"], *rows, values["mode"]), node.meta["val"][0])
    for item in items:
        replace(item, found)
    node.graph.erase_node(node)
