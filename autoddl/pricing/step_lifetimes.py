"""Lists the lifetimes of a step: all terms of its graph (`lifetimes`).

    parameter    own piece, optimizer state, residual of a sparse sum: always; the gradient at U, and from B of its
                 reader to U;
                 gathered copies: at their readers, and until the backward that reads them unless gathered again
    op           operands read: W..F; kept for backward: to B; outputs: from F to their readers;
                 temporaries: at W, F or B; gradients given and yielded: at B
    hub          a gradient that waits for those of the other readers of its tensor
    send, receive    a tensor, or its gradient, on the way to another stage: at all moments but U

What backward runs again and brings back (`operators.recomputed`) lives from B of the op that triggers it on, as copies
do that conversions make again. Until then live the tensors that are read for that. Such a term depends on the level of
one block: that of the op that keeps, or that of the part that reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from autoddl.core.graph import RECEIVE, Graph
from autoddl.core.hubs import HUB
from autoddl.core.stages import SEND
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.waiting import kept_for_weights
from autoddl.pricing.gradient_terms import add_gradients
from autoddl.pricing.lifetimes import IN_TRANSIT, Lifetimes, Owner, What
from autoddl.pricing.optimizers import Optimizer
from autoddl.pricing.parameter_terms import add_parameters
from autoddl.pricing.step_terms import StepTerms
from autoddl.pricing.storage_terms import add_storages

__all__ = ["lifetimes_of"]


def lifetimes_of(graph: Graph, optimizer: Optimizer, microbatches: int, processor: bool,
                 parts: Sequence[RecomputedPart] = (), in_flight: int = 1,
                 kept: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}), sparse: bool = False,
                 waiting: int = 0) -> Lifetimes:
    """The lifetimes in a step of `graph`, with hubs, of one of `microbatches`, of which some are `in_flight` at once.

    The gradients of weights of `waiting` microbatches wait for W. `processor` says whether the device is a CPU; `parts`
    run again in backward. Hubs of `kept` say whether their tensor is kept by the readers that are named. With `sparse`
    the gradients of some parameters may add up sparse.
    """
    found = StepTerms(graph, optimizer, microbatches, processor, parts, in_flight, kept, sparse)
    add_parameters(found)
    for i, op in enumerate(graph.ops):
        if op.target in (SEND, RECEIVE):
            found.add(("op", i, 0), IN_TRANSIT, 0, found.update - 1)
        if not found.is_view[i] and set(op.outputs) & found.dependent:
            add_storages(found, i, op)
    add_gradients(found)
    for part in parts:
        _read_by(found, part)
    return Lifetimes(graph, tuple(found.terms), {op.name: i for i, op in enumerate(graph.ops)}, in_flight, waiting,
                     tuple(_waiting(graph)) if waiting else ())


def _waiting(graph: Graph) -> Iterator[tuple[Owner, What]]:
    """What a microbatch keeps for W; of what several ops read, the first counts: others may read it in another layout.
    """
    seen = set[int]()
    for i, kept in kept_for_weights(graph).items():
        yield from ((("op", i, 0), ("written", n)) for n in range(len(graph.ops[i].outputs)) if kept.results)
        yield from ((("op", i, 0), ("read", k)) for k, storage in kept.reads if storage not in seen)
        seen.update(storage for _, storage in kept.reads if storage is not None)


def _read_by(terms: StepTerms, part: RecomputedPart) -> None:
    """Adds what a part reads of other ops: it lives until the part has run again."""
    for t in part.reads:
        i = terms.writer.get(t)
        if i is None or t not in terms.dependent:
            continue
        op = terms.graph.ops[i]
        root = op.inputs[0] if op.target == HUB else t
        source = terms.writer.get(root)
        if source is None or (terms.is_view[source] and not _is_cut(terms, source)):
            continue  # a hub of a parameter, whose copies the edges count; a view of what lives anyway
        start = max(_free_from(terms, t, i, part), _free_from(terms, root, source, part))
        terms.add(("op", i, 0), ("written", op.outputs.index(t)), start, terms.backward(part.trigger) - 1,
                 ("read by a part", root), part.block.name)


def _is_cut(terms: StepTerms, i: int) -> bool:
    """Whether op i cuts what an op wrote, and alone reads it: its pieces count on their own."""
    op = terms.graph.ops[i]
    source = terms.writer.get(op.inputs[0])
    return (len(op.outputs) > 1 and source is not None and not terms.is_view[source]
            and len(terms.readers[op.inputs[0]]) == 1)


def _free_from(terms: StepTerms, t: int, i: int, part: RecomputedPart) -> int:
    """From when on no other term has the storage of tensor t, which op i writes, whatever runs again beside `part`.
    """
    ends = list[int]()
    if not terms.is_view[i] and terms.graph.ops[i].outputs.index(t) in terms.made[i].keeps:
        ends.append(terms.backward(i))
    for at in terms.readers[t]:
        ends += [terms.forward(s) if terms.again.get(s) is part or at in part.copies else terms.backward(s)
                 for s in terms.savers(*at)]
    return max(ends, default=terms.forward(terms.last_reader(t))) + 1
