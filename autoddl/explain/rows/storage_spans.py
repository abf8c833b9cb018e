"""Adds the spans of storages that ops write: through views, to the first op that keeps them or the last reader."""

from math import prod

from autoddl.core.hubs import HUB
from autoddl.core.layout import local_shape
from autoddl.explain.rows.rank_spans import RankSpans
from autoddl.operators.footprints.view_storages import (
    is_expanded,
    is_moved,
    is_plain,
    is_reshape,
    kept_reads,
    moved_reads,
)
from autoddl.operators.work import base

__all__ = ["add_storage_spans"]


def add_storage_spans(rank: RankSpans, i: int) -> None:
    """Adds what op i, no view, writes, keeps for backward, and takes for a while."""
    local, now = rank.local[i], 2 * i + 1
    rank.keep(now, i, local.beside)
    rank.add(now, now, local.during)
    rank.add(now - 1, now - 1, local.before)
    for n, t in enumerate(rank.graph.ops[i].outputs):
        if n in rank.whole[i].keeps:
            rank.keep(now, i, rank.written(i, n) * (n in local.keeps))
            for at in kept_reads(rank.graph, t, rank.whole):
                _kept_copy(rank, *at)
            _moved(rank, t)
        else:
            _followed(rank, t, now, rank.written(i, n))


def _followed(rank: RankSpans, t: int, start: int, nbytes: float) -> None:
    """A storage of `nbytes` from `start` on, through views, to the first op that keeps it or the last reader."""
    keeping = [(_holder(rank, savers), *at) for at in rank.readers[t] if (savers := rank.savers(*at))]
    if not rank.readers[t]:
        return
    hub = rank.graph.producers()[t]
    if rank.graph.ops[hub].target == HUB and hub not in rank.part_at and len(_keeping_reads(rank, hub)) > 1:
        _kept_by_several(rank, _keeping_reads(rank, hub), start, nbytes)
        return
    holder = _holder(rank, [saver for saver, _, _ in keeping]) if keeping else None
    i, k = min((i, k) for saver, i, k in keeping if saver == holder) if keeping else max(rank.readers[t])
    rank.add(start, 2 * i - 1, nbytes)
    op = rank.graph.ops[i]
    if not rank.views[i]:
        rank.add(2 * i, 2 * i + 1, rank.read(i, k))
        if keeping:
            rank.saved_input(i, k)
    elif len(op.outputs) > 1:
        for n, o in enumerate(op.outputs):
            _followed(rank, o, 2 * i, rank.written(i, n))
        _rest(rank, i)
    else:
        first = rank.read(i, 0)
        through = first if base(op) == "aten.expand" else min(first, rank.written(i, 0))
        _followed(rank, op.outputs[0], 2 * i, through)
        _rest(rank, i)
    for j, slot in rank.readers[t]:
        if (j, slot) != (i, k) and not rank.views[j] and slot in rank.whole[j].saves:
            _kept_copy(rank, j, slot)


def _holder(rank: RankSpans, savers: list[int]) -> int:
    """Who counts a storage: of the savers in the block of the first, the first that does not run again, if any."""
    near = [i for i in sorted(savers) if rank.part_at.get(i) is rank.part_at.get(min(savers))]
    return next((i for i in near if i not in rank.again), near[0])


def _keeping_reads(rank: RankSpans, hub: int) -> list[tuple[int, int]]:
    """The reads of a hub's tensor that backward needs; none where they are in several blocks."""
    reads = sorted((i, k) for i, k in rank.readers[rank.graph.ops[hub].outputs[0]]
                   if not rank.views[i] and k in rank.whole[i].saves)
    blocks = {rank.block.get(i) for i in (hub, *(i for i, _ in reads))}
    return reads if len(blocks) == 1 else []


def _kept_by_several(rank: RankSpans, reads: list[tuple[int, int]], start: int, nbytes: float) -> None:
    """A hub's tensor that several ops keep: as it is until backward comes to the last, if any reads it so."""
    (first, k), (last, _), t = reads[0], reads[-1], rank.graph.ops[reads[0][0]].inputs[reads[0][1]]
    written = rank.writes[rank.graph.producers()[t]][0]
    as_it_is = any(rank.reads[i][slot] == written for i, slot in reads)
    rank.add(start, 2 * last - 1, nbytes)
    rank.add(2 * last, rank.back(last), nbytes * as_it_is)
    copy, other = rank.copied(first, k), rank.reads[first][k] != written
    rank.add(2 * first, 2 * last - 1, rank.read(first, k) * copy)
    rank.add(2 * last, rank.back(last), rank.read(first, k) * (copy or (other and not as_it_is)))
    rank.add(rank.back(last) + 1, rank.back(first), rank.read(first, k) * (k in rank.local[first].saves))
    for i, slot in reads[1:]:
        rank.add(2 * i, rank.back(i), rank.read(i, slot) * rank.copied(i, slot))


def _rest(rank: RankSpans, c: int) -> None:
    """Adds what lives on of a storage of which view c shows a part that one op keeps, and parts that none keeps."""
    op, tensors = rank.graph.ops[c], rank.graph.tensors
    kept = [n for n, o in enumerate(op.outputs) if any(rank.savers(*at) for at in rank.readers[o])]
    if len(kept) != 1 or is_expanded(rank.graph, op.inputs[0]):
        return
    ratio = prod(tensors[op.inputs[0]].shape) / prod(tensors[op.outputs[kept[0]]].shape)
    if ratio > 1:
        last = [rank.last_reader(o) for n, o in enumerate(op.outputs) if n != kept[0]]
        nbytes = min(max(rank.read(c, 0) - rank.written(c, kept[0]), 0.0), (ratio - 1) * rank.written(c, kept[0]))
        _while_shown(rank, c, _way(rank, op.outputs[kept[0]]), max([2 * c, *(2 * i + 2 for i in last)]), nbytes,
                     ratio - 1)


def _moved(rank: RankSpans, t: int) -> None:
    """Copies by reshapes behind a permutation of an output that its op keeps too."""
    for i, _ in rank.readers[t]:
        if rank.views[i] and len(rank.graph.ops[i].outputs) == 1:
            (o,) = rank.graph.ops[i].outputs
            order = moved_reads(rank.graph, rank.processor).get(i)
            if order is None:
                _moved(rank, o)
            elif way := _way(rank, o, True):
                reads, writes = (local_shape(rank.graph.tensors[t].shape, at, rank.mesh)
                                 for t, at in ((rank.graph.ops[i].inputs[0], rank.reads[i][0]),
                                               (o, rank.writes[i][0])))
                nbytes = rank.written(i, 0) * is_moved(reads, order, writes)
                _while_shown(rank, i, way, 2 * way[-1][0] + 1, nbytes, 1.0)


def _while_shown(rank: RankSpans, c: int, way: list[tuple[int, int]], start: int, nbytes: float, share: float) -> None:
    """Bytes behind view c until the backward of the op at the end of `way`, less those that an edge frees."""
    if not way or len({rank.block.get(i) for i in (c, *(i for i, _ in way))}) > 1:
        return
    saver, k = way[-1]
    spans = [(start, rank.back(saver))]
    if saver in rank.again or (saver, k) in rank.copies or rank.brought(saver, k):
        spans = [(start, 2 * saver + 1), (rank.back(rank.part_at[saver].trigger), rank.back(saver))]
    for begin, end in spans:
        rank.add(begin, end, nbytes)
        for i, slot in way:
            if rank.copied(i, slot):
                edge = rank.parsed.edge(rank.graph.ops[i], slot)
                assert edge is not None
                rank.add(begin, end, -share * rank.piece(rank.graph.ops[i].inputs[slot], edge.source))


def _way(rank: RankSpans, t: int, row_major: bool = False) -> list[tuple[int, int]]:
    """The reads from tensor t, perhaps row-major, to the only op that keeps it, if no view between ever copies."""
    keeping = [at for at in rank.readers[t] if rank.savers(*at)]
    if len(keeping) != 1:
        return []
    (i, k), = keeping
    if not rank.views[i]:
        return [(i, k)]
    op = rank.graph.ops[i]
    stays = row_major and is_reshape(op, rank.graph)
    alone = len(op.inputs) == len(op.outputs) == 1
    behind = _way(rank, op.outputs[0], stays) if alone and (stays or is_plain(op, rank.graph)) else []
    return [(i, k), *behind] if behind else []


def _kept_copy(rank: RankSpans, i: int, k: int) -> None:
    """The copy that op i keeps of its input k, if its edge makes one."""
    if rank.copied(i, k):
        rank.keep_input(2 * i + 1, i, k, rank.read(i, k))
