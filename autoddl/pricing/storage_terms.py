"""Adds the terms of storages that ops write: from the op along views to the op that keeps it, or to its last reader.

Where several readers of a hub keep what they read, its tensor lives on if one of them reads it as it is. No edge knows
that of the others. So in a network for rows the hub says it (`pricing.kept_tensors`). Where it is `kept` it lives until
backward comes to the last of these readers. Where it is not, none of them may read it as it is.

A view may keep more than it shows. Of a cut tensor some op may keep one piece. Where it is read as it is, the whole
storage lives on: the view owns the `rest`. A reshape of a permutation may copy what its source keeps anyway: it owns
what it `moved`. Where an edge behind the view copies, neither is kept, and the edge takes it off (`converted`). Both
are counted where one op keeps the view's output, and no other view on the way there copies.
"""

from collections.abc import Sequence
from math import prod

from autoddl.core.graph import Op
from autoddl.operators.footprints.view_storages import is_expanded, is_plain, is_reshape, kept_reads
from autoddl.pricing.lifetimes import Owner, What
from autoddl.pricing.step_terms import StepTerms

__all__ = ["add_storages"]


def add_storages(terms: StepTerms, i: int, op: Op) -> None:
    """Adds what op i, no view, writes, keeps for backward, and takes for a while."""
    made, owner = terms.made[i], ("op", i, 0)
    terms.keep(owner, ("beside",), terms.forward(i), i)
    terms.add(owner, ("during",), terms.forward(i), terms.forward(i))
    terms.add(owner, ("before",), terms.before(i), terms.before(i))
    for n, o in enumerate(op.outputs):
        if n in made.keeps:
            terms.keep(owner, ("kept", n), terms.forward(i), i)
            for reader, k in kept_reads(terms.graph, o, terms.made):
                terms.keep_copy(reader, k, terms.forward(reader))
            _moved(terms, o)
        else:
            _storage(terms, o, owner, ("written", n), terms.forward(i))


def _storage(terms: StepTerms, t: int, owner: Owner, what: What, start: int) -> None:
    """The storage of tensor t from `start` on, along the views to the first op that keeps it or the last reader."""
    source = terms.writer.get(t, -1)
    if source in terms.kept and source not in terms.block:
        _kept_storage(terms, terms.kept[source], owner, what, start)
        return
    found = [(terms.first(savers), i, k) for i, k in terms.readers[t] if (savers := terms.savers(i, k))]
    if not found and not terms.readers[t]:
        return
    first = terms.first([saver for saver, _, _ in found]) if found else -1
    i, k = min((i, k) for saver, i, k in found if saver == first) if found else max(terms.readers[t])
    terms.add(owner, what, start, terms.forward(i) - 2)
    op, reader = terms.graph.ops[i], ("op", i, 0)
    if not terms.is_view[i]:
        terms.add(reader, ("read", k), terms.before(i), terms.forward(i))
        if found:
            terms.save(i, k)
    elif len(op.outputs) > 1:  # it cuts: the pieces live on their own
        for n, o in enumerate(op.outputs):
            _storage(terms, o, reader, ("written", n), terms.before(i))
        _rest(terms, i)
    else:
        _storage(terms, op.outputs[0], reader, ("through",), terms.before(i))
        _rest(terms, i)
    for i2, k2 in terms.readers[t]:
        if (i2, k2) != (i, k) and terms.saves(i2, k2):
            terms.keep_copy(i2, k2, terms.forward(i2))


def _kept_storage(terms: StepTerms, reads: Sequence[tuple[int, int]], hub: Owner, what: What, start: int) -> None:
    """The storage of a hub that says whether it is kept by one of `reads`, and the copies that these keep."""
    (first, k), (last, _) = reads[0], reads[-1]
    terms.add(hub, what, start, terms.before(last) - 1)
    terms.add(hub, ("kept",), terms.before(last), terms.backward(last))
    terms.add(("edge", first, k), ("copy",), terms.before(first), terms.before(last) - 1)
    terms.add(("edge", first, k), ("copy unless kept",), terms.before(last), terms.backward(last))
    terms.add(("op", first, 0), ("saved", k), terms.backward(last) + 1, terms.backward(first))
    for i, slot in reads[1:]:
        terms.add(("edge", i, slot), ("copy",), terms.before(i), terms.backward(i))


def _moved(terms: StepTerms, t: int) -> None:
    """The copies of an output that its own op keeps which reshapes make, and other ops keep."""
    for i, _ in terms.readers[t]:
        if not terms.is_view[i] or len(terms.graph.ops[i].outputs) > 1:
            continue
        if i in terms.moved:
            way = _way(terms, terms.graph.ops[i].outputs[0], True)
            _behind(terms, i, ("moved", terms.moved[i]), 1.0, terms.forward(way[-1][0]) if way else 0, way)
        else:
            _moved(terms, terms.graph.ops[i].outputs[0])


def _rest(terms: StepTerms, c: int) -> None:
    """Adds what a storage has beyond the one output of view c that is kept, after the last reader of the others."""
    op, tensors = terms.graph.ops[c], terms.graph.tensors
    pieces = [n for n, o in enumerate(op.outputs) if any(terms.savers(*at) for at in terms.readers[o])]
    if len(pieces) != 1 or is_expanded(terms.graph, op.inputs[0]):
        return
    whole, piece = (prod(tensors[t].shape) for t in (op.inputs[0], op.outputs[pieces[0]]))
    others = [terms.forward(terms.last_reader(o)) + 1 for n, o in enumerate(op.outputs) if n != pieces[0]]
    if whole > piece:
        share = whole / piece - 1
        _behind(terms, c, ("rest", pieces[0], share), share, max([terms.before(c), *others]),
                _way(terms, op.outputs[pieces[0]]))


def _behind(terms: StepTerms, c: int, what: What, share: float, start: int, way: Sequence[tuple[int, int]]) -> None:
    """Bytes of view c from `start` on that the last op of `way` keeps, taken off where an edge on the way copies.

    They are `share` times what the op reads. All must be in one block, or outside of blocks.
    """
    if not way or len({terms.home.get(i, -1) for i in (c, *(i for i, _ in way))}) > 1:
        return
    saver, k = way[-1]
    spans = [(start, terms.backward(saver))]
    if saver in terms.again or terms.comes_back(saver, k):
        spans = [(start, terms.forward(saver)), (terms.backward(terms.block[saver].trigger), terms.backward(saver))]
    for begin, end in spans:
        terms.add(("op", c, 0), what, begin, end)
        for i, slot in way:
            terms.add(("edge", i, slot), ("converted", share), begin, end)


def _way(terms: StepTerms, t: int, row_major: bool = False) -> tuple[tuple[int, int], ...]:
    """The edges from tensor t to the one op that keeps it, behind views that copy it under no layout; else none.

    Of a `row_major` tensor no reshape copies.
    """
    keeping = [at for at in terms.readers[t] if terms.savers(*at)]
    if len(keeping) != 1:
        return ()
    (i, k), = keeping
    if not terms.is_view[i]:
        return ((i, k),)
    op = terms.graph.ops[i]
    row_major = row_major and is_reshape(op, terms.graph)
    if len(op.inputs) > 1 or len(op.outputs) > 1 or not (row_major or is_plain(op, terms.graph)):
        return ()
    rest = _way(terms, op.outputs[0], row_major)
    return ((i, k), *rest) if rest else ()
