"""Finds the products of experts in a graph, and counts what programs move around them besides.

    experts     a product of rows with a matrix for each of many experts. Heads have a matrix each too, but their rows
                were cut from longer ones, whatever was computed on them since
    first       the product that a row meets first in a layer of experts, and the last. A gate and what it multiplies
                may be two products that read the same rows: one of them is first

Rows that only views lead to the experts are put in their order all the same. The kernels are no operators of the graph:
Megatron-Core's moe/token_dispatcher.py permutes twice, by those of TransformerEngine's permutation.py.

    permuted    a token is read once and written to each of its experts; the way back is a weighted sum, an operator
    sorted      rows that came from other ranks lie by rank: a rank of several experts copies them to lie by expert, and
                back behind the experts
    backward    moves as much

A bias behind the last product is weighted by the router's probability, in float32, and added part by part
(moe/experts.py, _apply_bias). Gates that are clamped are cut, clamped and joined before the kernel of the activation
(fusions/fused_bias_geglu.py). Their bytes are those that PyTorch's kernels read and write, as a test counts.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import HUB
from autoddl.core.split_backward import weights_of
from autoddl.operators.families import family_of
from autoddl.operators.work import VIEWS, base, is_product, letters

__all__ = ["BIASED", "CLAMPED", "ExpertProduct", "clamped_gates", "expert_products", "is_weighted"]

BIASED = (28, 40)
"""Bytes a value, forward and backward, of adding a bias in rows behind the experts."""
CLAMPED = (8, 15)
"""Bytes a value, forward and backward, of clamping a gate apart from its activation."""
MATRICES = 3
"""Dims of weights that hold a matrix for each expert."""
CLAMPS = ("aten.clamp", "aten.clamp_max", "aten.clamp_min")


class ExpertProduct(NamedTuple):
    """A product with a matrix for each of many experts."""

    rows: int
    """The tensor of rows."""
    matrices: int
    """The tensor of matrices."""
    tokens: int
    """The tensor that only views and copies turn into these rows."""
    first: bool
    """Whether its rows were not multiplied in this layer before, nor read by another first product."""
    last: bool = False
    """Whether no other product of the layer follows."""
    biased: bool = False
    """Whether a bias is added to what it writes."""


def is_weighted(op: Op, weights: frozenset[int]) -> bool:
    """Whether an op multiplies by weights something that is none."""
    read = [t in weights for t in op.inputs]
    return is_product(op) and any(read) and not all(read)


@lru_cache(maxsize=64)
def expert_products(graph: Graph) -> Mapping[str, ExpertProduct]:
    """By name, the products of experts of a graph, in order."""
    weights, behind, found = weights_of(graph), dict[int, frozenset[str]](), dict[str, ExpertProduct]()
    source, cut, last, read = dict[int, int](), dict[int, int](), frozenset[str](), set[int]()
    for op in graph.ops:
        before = frozenset[str]().union(*(behind.get(t, ()) for t in op.inputs))
        elementwise = family_of(base(op)).rule == "elementwise"
        if _copies(op):
            source.update(dict.fromkeys(op.outputs, source.get(op.inputs[0], op.inputs[0])))
        if _copies(op) or elementwise or family_of(base(op)).curve == "normalise":
            cut.update(dict.fromkeys(op.outputs, cut.get(op.inputs[0], op.inputs[0])))
        if is_weighted(op, weights) and (product := _product(op, graph, weights)) is not None:
            rows, matrices = product
            tokens, whole = source.get(rows, rows), cut.get(rows, rows)
            if not before and graph.tensors[whole].shape[-1:] > graph.tensors[rows].shape[-1:]:
                continue  # heads, whose rows were cut from longer ones
            found[op.name] = ExpertProduct(rows, matrices, tokens, not before and tokens not in read)
            read.add(tokens)
            last = (last - before) | {op.name}
            behind.update(dict.fromkeys(op.outputs, frozenset((op.name,))))
        elif before and (_copies(op) or elementwise):
            behind.update(dict.fromkeys(op.outputs, before))
    biased = _biased(graph, found)
    return MappingProxyType({name: one._replace(last=name in last, biased=name in biased)
                             for name, one in found.items()})


@lru_cache(maxsize=64)
def clamped_gates(graph: Graph) -> tuple[Op, ...]:
    """The ops that clamp what a first product of experts wrote."""
    made = {t for op in graph.ops if (one := expert_products(graph).get(op.name)) and not one.last for t in op.outputs}
    found = []
    for op in graph.ops:
        if not made.isdisjoint(op.inputs):
            if base(op) in CLAMPS:
                found.append(op)
            elif _copies(op) or _adds_bias(op, graph):
                made.update(op.outputs)
    return tuple(found)


def _copies(op: Op) -> bool:
    """Whether an op writes the values that it reads, in another order or place."""
    return base(op) in VIEWS or op.target == HUB or base(op) == "aten.clone"


def _adds_bias(op: Op, graph: Graph) -> bool:
    """Whether an op adds a parameter."""
    return base(op) == "aten.add" and any(graph.tensors[t].kind is Kind.PARAMETER for t in op.inputs)


def _biased(graph: Graph, found: Mapping[str, ExpertProduct]) -> frozenset[str]:
    """Names of the products to whose outputs a parameter is added."""
    added = {t for op in graph.ops if _adds_bias(op, graph) for t in op.inputs}
    return frozenset(op.name for op in graph.ops if op.name in found and not added.isdisjoint(op.outputs))


def _product(op: Op, graph: Graph, weights: frozenset[int]) -> tuple[int, int] | None:
    """The tensors of the rows and of the matrices that a product multiplies expert by expert; None for any other."""
    shapes = [graph.tensors[t].shape for t in op.inputs]
    matrices = next((k for k, t in enumerate(op.inputs) if t in weights and len(shapes[k]) == MATRICES), None)
    rows = next(k for k, t in enumerate(op.inputs) if t not in weights)
    if matrices is None:
        return None
    if base(op) == "aten.einsum":
        dims, written = letters(str(op.arg("equation")), [len(shape) for shape in shapes])
        grouped = dims[matrices][0] in set(dims[rows]) & set(written)
    else:
        grouped = base(op) == "autoddl.grouped_mm" or shapes[rows][-3:-2] == shapes[matrices][:1]
    return (op.inputs[rows], op.inputs[matrices]) if grouped else None
