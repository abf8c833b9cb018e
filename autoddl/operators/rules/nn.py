"""Rules of neural network operators, beside matrix products and elementwise ones.

    embedding        "v d, i -> i d | 0"                  S(v) of the table: a rank looks up its own rows, output P
    embedding bag    "v d, b . -> b d | 0"                likewise; a maximum takes whole columns of the table
    attention        "b h l ., b h . ., b h . . -> b h l ."   batch, heads (groups of them in GQA), queries
    normalisation    "b s ., ., . -> b s ."               not along what is normalised

Some kernels communicate by themselves over the mesh axis (`Signature.inner`), which no string says:

    token loss       logits S(v), target B -> B           all-reduce of the maxima, then of sums of exponentials
    batch norm       input S(0), rest B -> S(0), B ..     all-reduce of (count, mean, squares), and two sums backward
    experts          everything S(0) -> S(0)              all-to-alls of tokens and results (`experts`)
    attention        q, k, v S(sequence) -> S(sequence)   keys and values pass round a ring (`ring`)
    windows, norms   x S(place), rest B -> S(place)       halos, or sums of a group's values (`places`)
"""

from collections.abc import Sequence
from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.core.layout import B, Layout, Mesh, Split, State, local_shape
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.operators.ring import ROUND
from autoddl.operators.rules.dimension_strings import Rule, Signature
from autoddl.operators.rules.experts import rows_sent
from autoddl.operators.rules.places import halo_messages, halo_signatures, place_dims, place_signatures
from autoddl.operators.rules.ring import QUERIES, inner_messages, ring_signatures
from autoddl.operators.rules.writing import RuleOf, Tensors, aligned, fixed, get, names, rule_text
from autoddl.operators.windows import WINDOWED, place_name

__all__ = ["REDUCING", "RULES", "Inner", "inner_collectives"]

Inner = tuple[str, str, tuple[int, ...], int]
"""('forward' | 'backward', 'all-reduce' | 'exchange' | 'shift' | 'halo', mesh axes, bytes of the buffer)."""


def leading_dims_rule(position: int, linear: bool = False) -> RuleOf:
    """Makes the rule of ops on one tensor that leave the dims before `position` alone, so that these may be split.

    A negative `position` counts from the end; `linear` says that the op is linear."""
    def rule(op: Op, inputs: Tensors, outputs: Tensors) -> str:
        rank = len(inputs[0].shape)
        letters = names(rank)[:position] if rank >= abs(position) else []
        dims = letters + ["."] * (rank - len(letters))
        return rule_text([dims], [dims] * len(outputs), " | 0" if linear else "")
    return rule


def _softmax(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    dims = names(len(inputs[0].shape))
    if dims:
        dims[int(str(op.arg("dim")))] = "."
    return rule_text([dims], [dims])


def _dropout(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    dims = names(len(inputs[0].shape))
    return rule_text([dims], [dims], " | 0")


def _embedding(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """With scale_grad_by_freq the gradient needs the counts of all tokens, so tokens and rows stay whole."""
    scaled = bool(get(op, "scale_grad_by_freq", False))
    tokens = ["."] * len(inputs[1].shape) if scaled else names(len(inputs[1].shape), "i")
    return rule_text([["." if scaled else "v", "d"], tokens], [[*tokens, "d"]], " | 0")


def _embedding_bag(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Bags of equal length: a sum (0) with weights or without, a mean (1) or a maximum (2) of rows."""
    if get(op, "mode", 0) == 2:
        return rule_text([[".", "d"], ["b", "."]], [["b", "d"]])
    return rule_text([["v", "d"], *([["b", "."]] * (len(inputs) - 1))], [["b", "d"]],
                     " | 0*2" if len(inputs) > 2 else " | 0")


def _bags(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Bags that begin at offsets, whose lengths depend on values: columns of the table split, and in a sum it may be
    partial."""
    whole = tuple(B for _ in inputs[1:])
    rows = tuple(Split(1) if len(t.shape) == 2 else B for t in outputs)
    columns = Signature((Split(1), *whole), rows, "d")
    plain = len(inputs) == 3 and inputs[0].shape[1] > 1
    return Rule(fixed(inputs, outputs), (columns,) if plain else ())


def _attention(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Keys and values are whole along their sequence, or go round; where q has more heads than k, a rank takes whole
    groups."""
    out, q, k = outputs[0].shape, inputs[0].shape, inputs[1].shape
    batch = names(len(out) - 2, "b")
    heads = batch
    if get(op, "enable_gqa", False) and q[-3] != k[-3]:
        batch, heads = [*batch[:-1], f"(h:{k[-3]} r)"], [*batch[:-1], "h"]
    dims = [*batch, QUERIES, "."]
    grouped = (*out[:-3], k[-3], *out[-2:]) if heads is not batch else out
    keys = [[*aligned(t.shape[:-2], grouped[:-2], heads), ".", "."] for t in inputs[1:3]]
    masks = [[*aligned(t.shape[:-1], out[:-1], dims[:-1]), "."] for t in inputs[3:]]
    return Rule(rule_text([[*aligned(q[:-1], out[:-1], dims[:-1]), "."], *keys, *masks], [dims]),
                ring_signatures(op, inputs))


def _normalised(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """layer_norm, native_layer_norm, rms_norm: everything before the normalised dims; statistics keep those as 1."""
    shape = get(op, "normalized_shape")
    count = len(shape) if isinstance(shape, tuple) else 1
    lead = names(len(inputs[0].shape) - count, "b")
    dims = lead + ["."] * count
    return rule_text([dims, *(["."] * count for _ in inputs[1:])], [dims] * len(outputs))


def _group_norm(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Whole groups of channels; of one group, none. Places by a reduction inside the kernel."""
    groups, count = int(str(op.arg("num_groups"))), inputs[0].shape[1]
    channels = f"(g:{groups} .:{count // groups})" if groups < count else "g"
    dims = ["b", channels] + ["."] * (len(inputs[0].shape) - 2)
    places = (d for d, size in enumerate(inputs[0].shape) if d > 1 and size > 1)
    return Rule(rule_text([dims, *([channels] for _ in inputs[1:])], [dims]),
                place_signatures(len(inputs), places))


def _batch_norm(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Training: channels, or another dim with statistics reduced inside. Evaluation: any dim."""
    training, found = bool(get(op, "training", False)), []
    for dim, size in enumerate(inputs[0].shape):
        if size > 1:
            vector: State = Split(0) if dim == 1 else B
            rest = tuple(vector if t.numel else B for t in outputs[1:])
            found.append(Signature((Split(dim), *(vector for _ in inputs[1:])), (Split(dim), *rest),
                                   place_name(dim) if training and dim > 1 else f"d{dim}", (), training and dim != 1))
    return Rule(fixed(inputs, outputs), tuple(found))


REDUCING = frozenset(("autoddl.token_loss", "autoddl.experts", "aten._native_batch_norm_legit_functional.default",
                      "aten.group_norm.default", *ROUND, *WINDOWED))
"""Targets whose kernel may communicate by itself."""


def inner_collectives(op: Op, graph: Graph, reads: Sequence[Layout], axes: tuple[int, ...], mesh: Mesh,
                      coordinate: tuple[int, ...] | None = None) -> tuple[Inner, ...]:
    """Returns the collectives that the kernel of `op` itself issues over `axes` (`Option.inner`).

    `reads` are the layouts of its inputs, `coordinate` the place of the rank in the mesh (rank 0 by default)."""
    if not axes:
        return ()
    read = reads[0]
    if op.target == "autoddl.experts":
        return tuple((way, EXCHANGE, axes, nbytes) for way, nbytes in rows_sent(op, graph, read, mesh, coordinate))
    if op.target in ROUND:
        return tuple((way, kind, axes, nbytes) for way, kind, nbytes in inner_messages(op, graph, reads, mesh,
                                                                                       coordinate))
    if op.target in WINDOWED:
        return tuple((way, kind, axes, nbytes) for way, kind, nbytes in halo_messages(op, graph, read, mesh,
                                                                                      coordinate))
    x = graph.tensors[op.inputs[0]]
    shape = local_shape(x.shape, read, mesh, coordinate)
    width = max(4, x.itemsize)
    if op.target == "autoddl.token_loss":
        row = prod(shape) // shape[min(1, len(shape) - 1)] * width
        sums = 3 if get(op, "label_smoothing") else 2
        return ("forward", "all-reduce", axes, row), ("forward", "all-reduce", axes, sums * row)
    if op.target == "aten.group_norm.default":
        statistics = 2 * shape[0] * int(str(op.arg("num_groups"))) * shape[1] // x.shape[1]
        back = ("backward", "all-reduce", axes, statistics * width)
        return ("forward", "all-reduce", axes, statistics * 8), *(
            (back,) if op.outputs[0] in graph.differentiable() else ())
    return ("forward", "all-reduce", axes, 2 * shape[1] * 8), ("backward", "all-reduce", axes, 2 * shape[1] * width)


def _pool(spatial: int, linear: bool = False) -> RuleOf:
    """Places are split as `places` says."""
    def rule(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
        lead = names(len(inputs[0].shape) - spatial)
        read, written = place_dims(op, inputs, outputs, spatial)
        return Rule(rule_text([[*lead, *read]], [[*lead, *written]], " | 0" if linear else ""),
                    halo_signatures(op, inputs, outputs))
    return rule


RULES: dict[str, RuleOf] = {
    "aten.embedding.default": _embedding,
    "autoddl.embedding_bag": _embedding_bag,
    "aten.embedding_bag.padding_idx": _bags,
    "aten.scaled_dot_product_attention.default": _attention,
    "autoddl.attention": _attention,
    "autoddl.dropout": _dropout,
    "aten.softmax.int": _softmax,
    "aten.log_softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._safe_softmax.default": _softmax,
    "aten.layer_norm.default": _normalised,
    "aten.native_layer_norm.default": _normalised,
    "aten.rms_norm.default": _normalised,
    "aten.group_norm.default": _group_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.max_pool1d.default": _pool(1),
    "aten.max_pool2d.default": _pool(2),
    "aten.max_pool2d_with_indices.default": leading_dims_rule(-2),
    "aten.max_pool3d.default": _pool(3),
    "aten.avg_pool1d.default": _pool(1, linear=True),
    "aten.avg_pool2d.default": _pool(2, linear=True),
    "aten.avg_pool3d.default": _pool(3, linear=True),
    "aten.adaptive_avg_pool1d.default": leading_dims_rule(-1, linear=True),
    "aten.adaptive_avg_pool2d.default": leading_dims_rule(-2, linear=True),
    "aten._adaptive_avg_pool2d.default": leading_dims_rule(-2, linear=True),
    "aten.adaptive_avg_pool3d.default": leading_dims_rule(-3, linear=True),
}
