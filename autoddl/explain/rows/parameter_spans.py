"""Adds the spans of a parameter: what a rank stores, gathered copies, and gradients."""

from math import prod

from autoddl.core.codecs import codecs_of, part_in_flight
from autoddl.core.hubs import HUB
from autoddl.core.layout import Layout, Split, local_shape
from autoddl.core.state_layouts import divide_steps, summed_layout
from autoddl.explain.rows.rank_spans import RankSpans
from autoddl.schedule.buckets import has_collective

__all__ = ["add_parameter_spans", "own_bytes"]


def add_parameter_spans(rank: RankSpans, t: int) -> None:
    """Adds what a rank has of parameter t: its own piece with the optimizer's state, copies, and gradients."""
    tensor, end, m = rank.graph.tensors[t], 3 * rank.count, rank.plan.microbatches
    stored = next((s for s in rank.plan.stored if s.fqn == tensor.fqn), None)
    if stored is None:
        return
    if not rank.readers[t]:
        rank.add(0, end, float(tensor.nbytes))
        return
    trained = t in rank.flows
    rank.add(0, end, own_bytes(rank, t) * (1 + rank.optimizer.copies(tensor) * trained))
    rank.add(end, end, own_bytes(rank, t) * trained)
    if tensor.name in rank.sparse:
        residual = rank.piece(t, stored.layout) * tensor.gradient.itemsize / tensor.itemsize
        rank.add(0, end, residual * rank.sparse[tensor.name].copies)
    wide = tensor.gradient.itemsize / tensor.itemsize
    for j, k in rank.readers[t]:
        _gathered(rank, j, k)
        if not (trained and rank.yields(j)):
            continue
        edge = rank.parsed.edge(rank.graph.ops[j], k)
        assert edge is not None and edge.gradient is not None
        own, made = rank.piece(t, stored.layout) * wide, rank.piece(t, edge.gradient) * wide
        summed = summed_layout(stored.layout, edge.gradient, stored.depths)
        passes = rank.graph.ops[j].target == HUB or rank.views[j] or k in rank.whole[j].passes
        if m > max(1, rank.plan.in_flight):  # a forward comes behind the first backward
            each, last = divide_steps(edge.backward, edge.gradient, summed)
            between = rank.piece(t, summed) * wide if has_collective(each) else made
            rank.add(0, rank.back(j), between if has_collective(last) else own)
        if m > 1 or not passes:
            codecs = codecs_of(rank.codecs, "gradients", tensor.gradient.dtype)
            part = part_in_flight(codecs, tensor.gradient.itemsize)
            rank.add(rank.back(j) + 1, end - 1, part * min(own, made))


def _gathered(rank: RankSpans, j: int, k: int) -> None:
    """The copies of a parameter that op j reads: the one that is kept, and the one that is gathered from there."""
    t = rank.graph.ops[j].inputs[k]
    edge = rank.parsed.edges[rank.graph.tensors[t].fqn]
    once, each = map(has_collective, divide_steps(edge.forward, edge.conversion.source, edge.kept))
    local = bool(edge.tensor.master) and not (once or each)
    read, weight = rank.read(j, k), 0.0
    if once and each:
        weight = rank.piece(t, edge.kept)
    elif once or local:
        weight = read
    savers = sorted(set(rank.savers(j, k)))
    if rank.plan.microbatches > 1:
        rank.add(0, 2 * j - 1, weight)
    rank.add(2 * j, 2 * j + 1, read * (once or each or local) + weight * (once and each))
    part = rank.again.get(j)
    if part is not None and not rank.views[j]:
        last = rank.back(min(j, part.trigger)) if savers else rank.back(part.trigger) - 1
        rank.add(2 * j + 2, last, weight)
        rank.add(rank.back(part.trigger), last, read * each)
    elif savers == [j]:
        rank.add(2 * j + 2, rank.back(j), weight)
        rank.add(rank.back(j), rank.back(j), read * each)
    elif savers:
        last = max(i for o in rank.graph.ops[j].outputs for i, _ in rank.readers[o])
        rank.add(2 * j + 2, 2 * last - 1, weight)
        _passed_on(rank, j, 2 * last, weight, read * each)
    if rank.graph.ops[j].target == HUB:
        for i, slot in rank.readers[rank.graph.ops[j].outputs[0]]:
            nbytes = rank.read(i, slot) * bool(rank.converted(i, slot))
            if not rank.views[i] and slot in rank.whole[i].saves:
                rank.keep_input(2 * i, i, slot, nbytes)
            else:
                rank.add(2 * i, 2 * i + 1, nbytes)


def _passed_on(rank: RankSpans, j: int, start: int, kept: float, again: float) -> None:
    """A parameter's copy behind op j, a hub or a view, while the first op keeps it that none sends it to.

    A copy that is split on every axis is left out.
    """
    keepers = [] if j in rank.again else [found for found in _keepers(rank, j) if found[0] not in rank.again]
    if not keepers:
        return
    first, path = min(keepers)
    end, counts = rank.back(first), _some(rank, rank.reads[j][0], 1.0)
    rank.add(start, end, kept * counts)
    rank.add(end, end, again * counts)
    for i, k in path:
        t, edge = rank.graph.ops[i].inputs[k], rank.parsed.edge(rank.graph.ops[i], k)
        source = edge.source if edge else rank.reads[i][k]
        before = _some(rank, source, rank.piece(t, source))
        if rank.converted(i, k):
            rank.add(start, end, -before)
        elif rank.views[i]:
            rank.add(start, end, _some(rank, rank.reads[i][k], rank.read(i, k)) - before)


def _some(rank: RankSpans, layout: Layout, nbytes: float) -> float:
    """The bytes, none of a layout that splits a tensor on every axis."""
    return 0.0 if all(isinstance(state, Split) for state in layout) else nbytes


def _keepers(rank: RankSpans, j: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """The ops that keep the input of op j, a hub or a view of all of it. Each comes with the reads on the way."""
    op, tensors, found = rank.graph.ops[j], rank.graph.tensors, []
    if len(op.inputs) != 1 or len(op.outputs) != 1:
        return []
    (t,) = op.outputs
    for i, k in rank.readers[t] if tensors[t].nbytes == tensors[op.inputs[0]].nbytes else ():
        if rank.views[i]:
            found += [(saver, ((i, k), *path)) for saver, path in _keepers(rank, i)]
        elif k in rank.whole[i].saves:
            found.append((i, ((i, k),)))
    return found


def own_bytes(rank: RankSpans, t: int) -> float:
    """Bytes that a rank stores of parameter t."""
    tensor = rank.graph.tensors[t]
    layout = _stored(rank, tensor.fqn)
    return float(prod(local_shape(tensor.shape, layout, rank.mesh)) * tensor.stored.itemsize) if layout else 0.0


def _stored(rank: RankSpans, fqn: str) -> Layout | None:
    return next((s.layout for s in rank.plan.stored if s.fqn == fqn), None)
