"""Adds the spans of gradients of activations: given to an op, yielded by it, and waiting at a hub."""

from collections.abc import Hashable
from math import prod

from autoddl.core.graph import Kind
from autoddl.core.hubs import HUB
from autoddl.core.layout import local_shape
from autoddl.explain.rows.rank_spans import RankSpans

__all__ = ["StorageNames", "add_gradient_spans", "shared_storages"]


def add_gradient_spans(rank: RankSpans, i: int, shared: "StorageNames") -> None:
    """Adds what is given to op i, yielded by it, or waits at it; `shared` names the gradients of one storage."""
    op, now, local = rank.graph.ops[i], rank.back(i), rank.local[i]
    if not rank.views[i] and rank.flows.intersection(op.inputs):
        n = next(n for n, o in enumerate(op.outputs) if o in rank.flows)
        rank.add(now, now, rank.written(i, n), shared.find(("given", op.outputs[n])))
        rank.add(now, now, local.back)
        for k in rank.parsed.calls[i].needs:
            if k not in local.passes:
                itemsize = rank.graph.tensors[op.inputs[k]].itemsize
                shape = local_shape(rank.graph.tensors[op.inputs[k]].shape, rank.reads[i][k], rank.mesh)
                whole = rank.parsed.calls[i].outputs[0] if local.output_shaped else shape
                rank.add(now, now, float(prod(whole) * itemsize))
    if op.target == HUB and op.inputs[0] in rank.flows and not _is_parameter(rank, op.inputs[0]):
        readers = [j for j, _ in rank.readers[op.outputs[0]] if rank.yields(j)]
        layout = rank.plan.index().decisions[op.name].gradient
        if len(readers) > 1 and layout is not None:
            waits, first, second = rank.piece(op.outputs[0], layout), rank.back(readers[-1]), rank.back(readers[-2])
            rank.add(first + 1, second, waits, shared.find(("waits", op.outputs[0])))
            rank.add(second + 1, now - 1, waits)


def shared_storages(rank: RankSpans) -> "StorageNames":
    """Which gradients may be one storage: views, hubs and ops that pass their gradient on as it is."""
    found, writers = StorageNames(), rank.graph.producers()
    for i, op in enumerate(rank.graph.ops):
        if not rank.yields(i):
            continue
        if op.target == HUB or rank.views[i]:
            for o in op.outputs:
                found.join(("given", op.inputs[0]), ("given", o))
            continue
        for t in (op.inputs[k] for k in rank.whole[i].passes):
            if t not in rank.flows or _is_parameter(rank, t):
                continue
            readers, hub = [j for j, _ in rank.readers[t] if rank.yields(j)], writers.get(t)
            if hub is None or rank.graph.ops[hub].target != HUB or len(readers) < 2:
                found.join(("given", t), ("given", op.outputs[0]))
            elif readers[-1] == i:
                found.join(("waits", t), ("given", op.outputs[0]))
    return found


def _is_parameter(rank: RankSpans, t: int) -> bool:
    return rank.graph.tensors[t].kind is Kind.PARAMETER


class StorageNames:
    """Names of gradients that may be one storage."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, name: Hashable) -> Hashable:
        while name in self.parent:
            name = self.parent[name]
        return name

    def join(self, one: Hashable, other: Hashable) -> None:
        if self.find(one) != self.find(other):
            self.parent[self.find(one)] = self.find(other)
