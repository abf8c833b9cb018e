"""Computes the bytes of every term of `lifetimes` for every option; a row over moments adds them up.

    parameter    own            the piece that is stored
                 residual       what a sparse sum of its gradients has not sent yet, as large as the gradient's piece
    op           read k, saved k, written n, kept n, through, beside, during, before, back, yields    (`Footprint`)
                 max of sums of these, at an `around`; in transit, of ops that send or receive
    view         rest           what it reads less output n, no more than so many times that
                 moved          its output, where it copies what it reads in that order of dims
    hub          the piece that it reads and writes, the same where it is kept, and the gradient that waits
    edge         copy               the piece that is read, where a conversion copies it
                 copy unless kept   and where the hub's tensor is not kept and is not read as it is
                 gathered           the piece that is read, where a collective brings it
                 passed             that of a hub or a view, unless it is split on every axis
                 sent on            less this piece, where a collective sends it
                 not passed on      less this piece, but for what is read of it without a collective
                 converted          less so many times the piece that is written, where a conversion copies it
                 gradient           no more than the smaller of what the reader yields and what is stored; where it
                                    may be sent coded, that part of it which is there meanwhile (`Routes.part`)

A row of a problem is the sum of weight * bytes over the terms that a moment counts (`Lifetimes.patterns`). Bytes of a
table are not negative. Of what is taken off it has the rest of the whole tensor; `taken_off` is what that is too much.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from autoddl.core.cost_table import Array, Cells, Rows
from autoddl.core.graph import RECEIVE, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import Mesh
from autoddl.core.layout_codes import PARTIAL, Codes, decode_states, local_shapes
from autoddl.core.sparse import SparseRule
from autoddl.core.stages import SEND
from autoddl.operators.footprints.footprint import Footprint, LocalOp, has_local_kernel
from autoddl.operators.footprints.storages import Shape, Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.footprints.view_storages import is_moved, moved_reads
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.choice_classes import pieces_of
from autoddl.pricing.choices import Choice, numbered
from autoddl.pricing.edge_tables import Ends
from autoddl.pricing.lifetimes import IN_TRANSIT, RESIDUAL, TAKEN_OFF, Pattern, What
from autoddl.pricing.price import Pricing
from autoddl.pricing.routes import Routes

__all__ = ["Sizes", "bytes_of_edge", "sizes_of", "taken_off", "weighted"]

Sizes = Mapping[What, Array]
"""Bytes of every kind of term of one variable, over the classes of its own table."""


def sizes_of(pricing: Pricing, item: Op | Tensor, choices: Sequence[Choice]) -> Sizes:
    """Bytes on rank 0 of the terms that one variable owns, over the classes of its choices."""
    given = numbered(choices)
    if isinstance(item, Tensor):
        copies = SparseRule.parse(pricing.sparse).copies if pricing.sparse else 0
        return {("own",): _local(item.stored, given.outputs[0], pricing.mesh),
                RESIDUAL: _local(item.gradient, given.outputs[0], pricing.mesh) * given.sparse * copies}
    if item.target == HUB:
        tensor = pricing.graph.tensors[item.outputs[0]]
        piece = _local(tensor, given.outputs[0], pricing.mesh)
        return {("read", 0): piece, ("saved", 0): piece, ("written", 0): piece, ("through",): piece,
                ("kept",): piece * given.kept, ("waiting",): _local(tensor, given.wanted[0], pricing.mesh)}
    return _op_sizes(pricing, item, choices)


def _local(tensor: Tensor, layouts: Codes, mesh: Mesh) -> Array:
    """Bytes of rank 0's piece in the layout of each number."""
    elements: Codes = local_shapes(tensor.shape, decode_states(layouts, len(mesh.axes)), mesh).prod(axis=1)
    return (elements * tensor.itemsize).astype(np.float64)


def _op_sizes(pricing: Pricing, op: Op, choices: Sequence[Choice]) -> Sizes:
    """The sizes of an op's terms, for every class of pieces."""
    graph = pricing.graph
    found = pieces_of(choices, [graph.tensors[t].shape for t in (*op.inputs, *op.outputs)], pricing.mesh)
    inner = numbered(choices).inner[found.first].astype(bool).tolist()
    flows, rows = graph.differentiable(), defaultdict[What, list[float]](list)
    needs = tuple([k for k, t in enumerate(op.inputs) if t in flows]) if any(o in flows for o in op.outputs) else ()
    sizes = [tuple([graph.tensors[t].itemsize for t in ts]) for ts in (op.inputs, op.outputs)]
    for shapes, reduces in zip(found.shapes, inner, strict=True):
        reads, writes = shapes[:len(op.inputs)], shapes[len(op.inputs):]
        values = tuple([Value(-1, shape, contiguous(shape), size)
                        for shape, size in zip(reads, sizes[0], strict=True)])
        call = LocalOp(op, values, writes, sizes[1], needs, has_local_kernel(op, graph, reads, reduces),
                       pricing.cluster.device.kind == "cpu", reduces,
                       graph.tensors[op.inputs[0]].shape if op.inputs else (), pricing.cluster.device.by_hand)
        moved = _moved(pricing, op, reads[0], writes[0], sizes[1][0]) if base(op) in VIEWS else {}
        for what, nbytes in (_call_sizes(call) | moved).items():
            rows[what].append(nbytes)
    return {what: np.array(column) for what, column in rows.items()}


def _moved(pricing: Pricing, op: Op, reads: Shape, writes: Shape, itemsize: int) -> dict[What, float]:
    """The bytes of a reshape's output where it copies what it reads in each of the orders that the graph has."""
    orders = set(moved_reads(pricing.graph, pricing.cluster.device.kind == "cpu").values())
    return {("moved", order): float(prod(writes) * itemsize) * is_moved(reads, order, writes)
            for order in orders if len(order) == len(reads)}


def _call_sizes(call: LocalOp) -> dict[What, float]:
    """The sizes of the terms of one call on local pieces."""
    made = Footprint() if base(call.op) in VIEWS else footprint_of(call)
    reads = [float(x.nbytes) for x in call.inputs]
    writes = [float(prod(shape) * size) for shape, size in zip(call.outputs, call.itemsizes, strict=True)]
    yields = [(prod(call.outputs[0]) if made.output_shaped else prod(call.inputs[k].shape)) * call.inputs[k].itemsize
              for k in call.needs if k not in made.passes]
    least = min([*reads[:1], *writes[:1]], default=0.0)
    found: dict[What, float] = {
        ("through",): reads[0] if base(call.op) == "aten.expand" else least, ("beside",): made.beside,
        ("during",): made.during, ("before",): made.before, ("back",): made.back, ("yields",): float(sum(yields))}
    for k, nbytes in enumerate(reads):
        found |= {("read", k): nbytes, ("saved", k): nbytes * (k in made.saves)}
    for n, nbytes in enumerate(writes):
        found |= {("written", n): nbytes, ("kept", n): nbytes * (n in made.keeps)}
    if call.op.target in (SEND, RECEIVE):
        found[IN_TRANSIT] = (reads or writes)[0]
    return found


def weighted(sizes: Sizes, pattern: Pattern) -> Array:
    """The sum of weight * bytes over the terms of a pattern, over the classes of the variable's own table."""
    found: Array = np.sum([weight * _size(sizes, what) for what, weight in pattern], axis=0)
    return found


def _size(sizes: Sizes, what: What) -> Array:
    """Bytes of one term; `max` is the largest of several sums."""
    if what[0] == "own":
        return float(what[1]) * sizes[("own",)]
    if what[0] == "rest":
        piece = sizes["written", what[1]]
        return np.clip(sizes["read", 0] - piece, 0.0, what[2] * piece)
    if what[0] != "max":
        return sizes[what]
    nothing = np.zeros(len(next(iter(sizes.values()))))
    found: Array = np.max([sum((_size(sizes, one) for one in several), nothing) for several in what[1]], axis=0)
    return found


def bytes_of_edge(ends: Ends, pattern: Pattern) -> Cells:
    """The sum of weight * bytes over the terms of a pattern of an edge, some rows at a time."""
    return Cells(ends.shape, partial(_edge_rows, ends, pattern), 0.0)


def taken_off(ends: Ends, pattern: Pattern) -> float:
    """The bytes that every cell of `bytes_of_edge` has too much: a whole tensor for each term that is taken off."""
    return sum(weight * (what[1] if what[0] == "converted" else 1.0)
               for what, weight in pattern if what[0] in TAKEN_OFF) * _whole(ends)


def _whole(ends: Ends) -> float:
    return float(ends.routes.nbytes.max())


def _edge_rows(ends: Ends, pattern: Pattern, rows: Rows) -> Array:
    here, copies = ends.here[rows], _copies(ends, rows)
    found = np.zeros((len(here), len(ends.there)))
    for what, weight in pattern:
        if what[0] in copies:
            found += weight * copies[what[0]]
        if what[0] == "gradient":
            found += weight * ends.back.part * np.minimum(ends.back.nbytes[here][:, None],
                                                          ends.back.nbytes[ends.yields])
        elif what[0] == "gradient summed":
            found += weight * ends.sum_bytes(rows)
        elif what[0] == "converted":
            found += weight * what[1] * copies["not converted"]
    return found


def _copies(ends: Ends, rows: Rows) -> Mapping[str, Array]:
    """Bytes of gathered copies: of the one at its reader, the one that is kept, and the one that is gathered again.

    What is kept is W where it is gathered on from there, else the copy of the reader; a cast is a copy too.
    """
    here, read = ends.here[rows], ends.routes.nbytes[ends.there]
    if ends.tensor is None:
        sent, whole, passed = ends.routes.sends(here, ends.there), _whole(ends), _passed(ends.routes)
        left = whole - passed[here][:, None]
        new = ends.routes.copies(here, ends.there) if ends.intermediate else sent
        other = ~ends.kept_here[rows][:, None] & (here[:, None] != ends.there)
        return {"copy": np.where(new, read, 0.0), "copy unless kept": np.where(new | other, read, 0.0),
                "sent on": np.where(sent, left, whole),
                "not converted": np.where(new, whole - ends.routes.nbytes[here][:, None], whole),
                "not passed on": np.where(sent, left, left + passed[ends.there])}
    kept = np.maximum(ends.kept(rows), 0)
    first, then = ends.gathers(rows)
    both, sent = first & then, first | then
    local = bool(ends.tensor.master) & ~sent
    weight = np.where(both, ends.routes.nbytes[kept], np.where((sent & ~then) | local, read, 0.0))
    again, passes = np.where(then, read, 0.0), _passed(ends.routes)[ends.there] > 0
    return {"copy": np.where(sent, read, 0.0), "gathered": np.where(sent | local, read, 0.0) + weight * both,
            "gathered kept": weight, "gathered again": again, "passed kept": weight * passes,
            "passed again": again * passes}


def _passed(routes: Routes) -> Array:
    """Bytes of each layout's piece, none where every axis splits the tensor."""
    states = decode_states(routes.codes, len(routes.layouts[0]))
    return np.where((states > PARTIAL).all(axis=1), 0.0, routes.nbytes)
