"""Adds up the bytes of a rank at every moment of a step again, from the layouts that the plan names.

A *span* is the moments over which a storage has so many bytes. At every moment each storage counts once:

    bytes at t == sum over storages of  the bytes of the first of its spans that has t
"""

from collections.abc import Hashable, Sequence

from autoddl.core.graph import RECEIVE, Graph, Kind
from autoddl.core.hubs import HUB
from autoddl.core.plan import Plan
from autoddl.core.stages import SEND
from autoddl.cost_models import Cluster
from autoddl.explain.rows.gradient_spans import add_gradient_spans, shared_storages
from autoddl.explain.rows.parameter_spans import add_parameter_spans, own_bytes
from autoddl.explain.rows.rank_spans import RankSpans
from autoddl.explain.rows.storage_spans import add_storage_spans
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.waiting import kept_for_weights
from autoddl.pricing.optimizers import optimizer_of

__all__ = ["bytes_at_moments"]


def bytes_at_moments(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, codecs: Sequence[str] = ()
                     ) -> list[float]:
    """By moment, the bytes of a rank under one plan, with each storage counted once.

    Each other microbatch in flight adds what it keeps between forward and backward, at all moments but the update's.
    Each that waits for W adds what W needs.
    """
    rank = RankSpans(plan, graph, optimizer_of(optimizer), cluster.device, codecs)
    once = _add_everything(rank)
    count, found = 3 * len(graph.ops) + 1, list[float]()
    change = [0.0] * (count + 1)
    for spans in rank.spans.values():
        if len(spans) == 1:
            start, end, nbytes = spans[0]
            change[start], change[end + 1] = change[start] + nbytes, change[end + 1] - nbytes
            continue
        for n in range(min(s for s, _, _ in spans), max(e for _, e, _ in spans) + 1):
            nbytes = next((b for start, end, b in spans if start <= n <= end), 0.0)
            change[n], change[n + 1] = change[n] + nbytes, change[n + 1] - nbytes
    total, others = 0.0, (plan.in_flight - 1) * _kept_between(rank, once) + plan.waiting * _needed_by_weights(rank)
    for n in range(count):
        total += change[n]
        found.append(total + others * (n < count - 1))
    return found


def _add_everything(rank: RankSpans) -> frozenset[Hashable]:
    """Adds all spans of a step; returns the storages that are there once for all microbatches."""
    shared = shared_storages(rank)
    graph, dependent, end = rank.graph, rank.graph.dependent(), 3 * rank.count
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind is Kind.PARAMETER:
            add_parameter_spans(rank, t)
        elif tensor.kind in (Kind.INPUT, Kind.BUFFER, Kind.CONSTANT):
            times = rank.plan.microbatches if tensor.kind is Kind.INPUT else 1
            rank.add(0, end, float(tensor.nbytes * times))
    for i, op in enumerate(graph.ops):
        if op.target in (SEND, RECEIVE):  # on the way to another stage
            rank.add(0, end - 1, rank.read(i, 0) if op.inputs else rank.written(i, 0))
    once = frozenset(rank.spans)
    trained = [t for t, x in enumerate(graph.tensors) if x.kind is Kind.PARAMETER and t in rank.flows]
    if trained and rank.optimizer.is_adam:  # two temporaries of AdamW
        rank.add(end, end, 2 * own_bytes(rank, max(trained, key=lambda t: graph.tensors[t].nbytes)))
    for i, op in enumerate(graph.ops):
        if not rank.views[i] and dependent.intersection(op.outputs):
            add_storage_spans(rank, i)
        if rank.yields(i):
            add_gradient_spans(rank, i, shared)
    for part in rank.parsed.parts:
        _read_by(rank, part, dependent)
    return once


def _read_by(rank: RankSpans, part: RecomputedPart, dependent: frozenset[int]) -> None:
    """Adds the tensors of other ops that a part reads: they stay until it has run again."""
    writers = rank.graph.producers()
    for t in part.reads:
        i = writers.get(t)
        if i is None or t not in dependent:
            continue
        op = rank.graph.ops[i]
        root = op.inputs[0] if op.target == HUB else t
        source = writers.get(root)
        if source is not None and (not rank.views[source] or _cuts(rank, source)):
            start = max(_free_from(rank, t, i, part), _free_from(rank, root, source, part))
            rank.add(start, rank.back(part.trigger) - 1, rank.written(i, op.outputs.index(t)),
                     ("read by a part", root))


def _cuts(rank: RankSpans, i: int) -> bool:
    """Whether view i cuts a tensor that no other op reads, and that is no view: the pieces count one by one."""
    op, writers = rank.graph.ops[i], rank.graph.producers()
    alone = len(rank.readers[op.inputs[0]]) == 1 and op.inputs[0] in writers
    return alone and len(op.outputs) > 1 and not rank.views[writers[op.inputs[0]]]


def _free_from(rank: RankSpans, t: int, i: int, part: RecomputedPart) -> int:
    """From when on no other span counts the storage of tensor t, which op i writes."""
    held = [2 * s + 1 if rank.again.get(s) is part or at in part.copies else rank.back(s)
            for at in rank.readers[t] for s in rank.savers(*at)]
    if not rank.views[i] and rank.graph.ops[i].outputs.index(t) in rank.whole[i].keeps:
        held.append(rank.back(i))
    return max(held or [2 * rank.last_reader(t) + 1]) + 1


def _needed_by_weights(rank: RankSpans) -> float:
    """Bytes that a microbatch keeps from B to W; of what several ops read, the first counts."""
    found, seen = 0.0, set[int]()
    for i, kept in kept_for_weights(rank.graph).items():
        found += sum(rank.written(i, n) for n in range(len(rank.graph.ops[i].outputs))) if kept.results else 0.0
        found += sum(rank.read(i, k) for k, storage in kept.reads if storage not in seen)
        seen.update(storage for _, storage in kept.reads if storage is not None)
    return found


def _kept_between(rank: RankSpans, once: frozenset[Hashable]) -> float:
    """Bytes that a microbatch keeps of its own from the last forward to the first backward."""
    last = 2 * rank.count - 1
    alive = [next(((end, nbytes) for start, end, nbytes in spans if start <= last <= end), (last, 0.0))
             for key, spans in rank.spans.items() if key not in once]
    return sum(nbytes for end, nbytes in alive if end > last)
