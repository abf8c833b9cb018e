"""Says which views look at a storage as it is, whatever layouts are chosen, and which reshapes copy.

    plain      a permutation, or a reshape that only divides dims: any strides allow it
    row-major  a tensor whose dims are in order of their strides: what most ops write, elementwise ops where all that
               they read is, attention where its query is
    moved      a reshape of a permutation of a row-major tensor, which copies where it joins dims that do not follow
               each other in memory
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType

from autoddl.core.graph import Graph, Op
from autoddl.core.hubs import HUB
from autoddl.operators.footprints.footprint import Footprint
from autoddl.operators.footprints.storages import Shape, contiguous, viewed
from autoddl.operators.footprints.strides import drops_or_cuts, order_of
from autoddl.operators.footprints.table import has_footprint, whole_footprints
from autoddl.operators.work import VIEWS, base

__all__ = ["is_expanded", "is_moved", "is_plain", "is_reshape", "kept_reads", "moved_reads"]


def is_plain(op: Op, graph: Graph) -> bool:
    """Whether the output of a view with one input and one output looks at its input's storage under any layout."""
    shape, new = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape
    return op.target == HUB or order_of(op, len(shape)) is not None or (is_reshape(op, graph) and _divides(shape, new))


def is_reshape(op: Op, graph: Graph) -> bool:
    """Whether a view is another shape of all elements, in their order."""
    shape, new = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape
    return (op.target != HUB and order_of(op, len(shape)) is None and not drops_or_cuts(op)
            and base(op) != "aten.expand" and _elements(shape) == _elements(new))


def _elements(shape: Shape) -> int:
    return contiguous((2, *shape))[0]


def _divides(shape: Shape, new: Shape) -> bool:
    """Whether each dim of `shape` is a product of dims of `new` that follow each other."""
    at = 0
    for size in shape:
        span = 1
        while span < size and at < len(new):
            span *= new[at]
            at += 1
        if span != size:
            return False
    return all(size == 1 for size in new[at:])


def is_expanded(graph: Graph, t: int) -> bool:
    """Whether a view before tensor t shows elements of its storage several times."""
    i = graph.producers().get(t)
    if i is None or base(graph.ops[i]) not in VIEWS:
        return False
    before, tensors = graph.ops[i].inputs[0], graph.tensors
    return prod(tensors[t].shape) > prod(tensors[before].shape) or is_expanded(graph, before)


def kept_reads(graph: Graph, t: int, made: Sequence[Footprint]) -> Iterator[tuple[int, int]]:
    """The reads of tensor t, itself or behind views, that their op keeps for backward: (op, number of the input).

    `made` has by op its footprint on whole tensors.
    """
    for i, k in graph.consumers()[t]:
        if base(graph.ops[i]) in VIEWS:
            for o in graph.ops[i].outputs:
                yield from kept_reads(graph, o, made)
        elif k in made[i].saves:
            yield i, k


@lru_cache(maxsize=8)
def moved_reads(graph: Graph, on_cpu: bool) -> Mapping[int, tuple[int, ...]]:
    """The reshapes that read a permutation of a row-major tensor, by number, with the order of its dims."""
    writer, row_major, found = graph.producers(), _row_major(graph, on_cpu), dict[int, tuple[int, ...]]()
    for i, op in enumerate(graph.ops):
        source = graph.ops[writer[op.inputs[0]]] if op.inputs and op.inputs[0] in writer else None
        if source is None or base(op) not in VIEWS or len(op.outputs) != 1 or not is_reshape(op, graph):
            continue
        order = order_of(source, len(graph.tensors[op.inputs[0]].shape)) if base(source) in VIEWS else None
        if order is not None and order != tuple(sorted(order)) and source.inputs[0] in row_major:
            found[i] = order
    return MappingProxyType(found)


def _row_major(graph: Graph, on_cpu: bool) -> frozenset[int]:
    """The tensors that are row-major under any choice; those that are given are."""
    made, found = whole_footprints(graph, on_cpu), set(range(len(graph.tensors))) - set(graph.producers())
    for i, op in enumerate(graph.ops):
        if base(op) in VIEWS:
            known = op.target == HUB or (len(op.outputs) == 1 and is_reshape(op, graph))
            found.update(op.outputs if known and op.inputs[0] in found else ())
            continue
        reads = op.inputs if made[i].output_shaped or not has_footprint(base(op)) else ()
        if found.issuperset(op.inputs[:1] if "attention" in op.target else reads):
            found.update(op.outputs[:1])
        found.update(op.outputs[1:])
    return frozenset(found)


def is_moved(shape: Shape, order: tuple[int, ...], new: Shape) -> bool:
    """Whether a reshape to `new` copies a permutation of shape `shape`, whose dim d is dim order[d] in memory."""
    before = [0] * len(shape)
    for d, at in enumerate(order):
        before[at] = shape[d]
    strides = contiguous(tuple(before))
    return 0 not in shape and viewed(shape, tuple([strides[at] for at in order]), new) is None
