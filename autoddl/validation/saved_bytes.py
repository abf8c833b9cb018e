"""Bytes that backward of a part reads: each storage once, as its writer laid it out, and masks besides.

Nothing inside a fused chain is kept: its backward computes it again. The core's share is that of softmax and its
dropout, which selective recomputation drops.
"""

from collections.abc import Iterator
from math import prod

from autoddl.core.graph import Graph, Op, Tensor
from autoddl.core.layout import Layout, Mesh, local_shape
from autoddl.operators.work import VIEWS, base, keeps_input, keeps_output, kept_mask_bytes
from autoddl.validation.layers import ATTENTION
from autoddl.validation.part import Part, PartChoice, add_parts

__all__ = ["is_core", "local_numel", "saved_bytes"]

_RECOMPUTED = frozenset(f"aten.{name}" for name in ("gelu", "silu", "relu", "mul"))
"""Operators that a fused chain computes again in backward."""
_CORE = ("aten.softmax", "autoddl.dropout")
"""Operators whose outputs recomputation of the core drops."""


def saved_bytes(fuses: bool, found: PartChoice) -> Part:
    """Returns the bytes that backward reads, in all and of the core."""
    return add_parts((*_tensors(fuses, found), *_masks(found)))


def _tensors(fuses: bool, found: PartChoice) -> Iterator[Part]:
    """Every storage that backward reads."""
    graph, makers = found.pricing.graph, found.pricing.graph.producers()
    layouts = {t: layout for op, choice in found.operators()
               for t, layout in zip(op.outputs, choice.outputs, strict=True)}
    for t in _storages(fuses, found, layouts):
        nbytes = local_numel(graph.tensors[t], layouts[t], found.pricing.mesh) * graph.tensors[t].itemsize
        op = graph.ops[makers[t]]
        yield Part(saved=nbytes, core_saved=nbytes * (is_core(op) and base(op) in _CORE))


def _storages(fuses: bool, found: PartChoice, layouts: dict[int, Layout]) -> set[int]:
    """Tensors that backward reads, each by the writer of its storage."""
    graph, storages = found.pricing.graph, set[int]()
    makers, users = graph.producers(), graph.consumers()
    read = {t for op in graph.ops for k, t in enumerate(op.inputs)
            if keeps_input(op, k, graph, found.differentiable)} | {
        t for op in graph.ops if keeps_output(op, found.differentiable) for t in op.outputs}
    for t in read:
        while t in makers and base(graph.ops[makers[t]]) in VIEWS and graph.ops[makers[t]].inputs[0] in layouts:
            t = graph.ops[makers[t]].inputs[0]
        if not (fuses and t in makers and _is_recomputed(graph, graph.ops[makers[t]], users[t])):
            storages.add(t)
    return storages & layouts.keys()


def _is_recomputed(graph: Graph, maker: Op, users: tuple[tuple[int, int], ...]) -> bool:
    """Whether a tensor stays inside a fused chain, which computes it again."""
    return base(maker) in _RECOMPUTED and len(users) == 1 and base(graph.ops[users[0][0]]) in _RECOMPUTED


def _masks(found: PartChoice) -> Iterator[Part]:
    """Bytes that operators keep besides tensors of the graph."""
    for op, choice in found.operators():
        local = tuple(local_shape(found.pricing.graph.tensors[t].shape, layout, found.pricing.mesh)
                      for t, layout in zip(op.outputs, choice.outputs, strict=True))
        mask = kept_mask_bytes(op, local, found.differentiable)
        yield Part(saved=mask, core_saved=mask * is_core(op))


def is_core(op: Op) -> bool:
    """Whether an op is of the attention core: both products and what is between."""
    return op.module == ATTENTION and base(op) not in VIEWS


def local_numel(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    """Returns how many elements of a tensor one rank has."""
    return prod(local_shape(tensor.shape, layout, mesh))
