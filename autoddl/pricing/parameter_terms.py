"""Adds the terms of parameters: own pieces, optimizer state, gathered copies and gradients.

A gathered copy behind a hub or a view lives on until backward comes to the first reader that keeps it. Where that
reader sends it on, it does not. Whether it is gathered is up to one edge, whether it is sent on to another. So terms of
what is *taken off* (`TAKEN_OFF`) are negative, and undo the copy where it is sent on. They count at the moments of the
copy (`passed`), and may take off more than was there, never less. Copies of layouts that split the tensor on every axis
are left out: few gather these, and many send them on.
"""

from autoddl.core.graph import Kind
from autoddl.core.hubs import HUB
from autoddl.pricing.lifetimes import RESIDUAL, TIED
from autoddl.pricing.step_terms import StepTerms

__all__ = ["add_parameters"]


def add_parameters(terms: StepTerms) -> None:
    """Adds the terms of all parameters, and of every copy and gradient of theirs that an op reads or yields."""
    graph, largest = terms.graph, None
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind is not Kind.PARAMETER:
            continue
        trained, owner = t in terms.flows, ("parameter", t, 0)
        terms.add(owner, ("own", 1 + terms.optimizer.copies(tensor) * trained), 0, terms.update)
        if trained:
            terms.add(owner, ("own", 1), terms.update, terms.update)
            if terms.sparse:
                terms.add(owner, RESIDUAL, 0, terms.update)
            if terms.optimizer.is_adam and (largest is None or tensor.nbytes > graph.tensors[largest].nbytes):
                largest = t
        for j, k in terms.readers[t]:
            _gathered(terms, j, k)
            if trained and terms.yielding[j]:
                _reduced(terms, j, k)
    if largest is not None:  # AdamW holds two temporaries of the parameter at hand
        terms.add(("parameter", largest, 0), ("own", 2), terms.update, terms.update)


def _gathered(terms: StepTerms, j: int, k: int) -> None:
    """The gathered copy that op j reads, `kept` or gathered `again` in backward."""
    edge, savers, part = ("edge", j, k), sorted(set(terms.savers(j, k))), terms.again.get(j)
    if terms.microbatches > 1:
        terms.add(edge, ("gathered kept",), 0, terms.before(j) - 1)
    terms.add(edge, ("gathered",), terms.before(j), terms.forward(j))
    if part is not None and not terms.is_view[j]:
        then = terms.backward(part.trigger)
        last = max(then, terms.backward(j)) if savers else then - 1  # gone before the trigger's own backward
        terms.add(edge, ("gathered kept",), terms.forward(j) + 1, last)
        terms.add(edge, ("gathered again",), then, last)
    elif savers == [j]:
        terms.add(edge, ("gathered kept",), terms.forward(j) + 1, terms.backward(j))
        terms.add(edge, ("gathered again",), terms.backward(j), terms.backward(j))
    elif savers:  # behind a hub or a view each reader may send it on, and keep what it received instead
        last = max(i for o in terms.graph.ops[j].outputs for i, _ in terms.readers[o])
        terms.add(edge, ("gathered kept",), terms.forward(j) + 1, terms.before(last) - 1)
        _passed_on(terms, j, k, last)
    if terms.graph.ops[j].target == HUB:
        for i, slot in terms.readers[terms.graph.ops[j].outputs[0]]:
            if terms.saves(i, slot):
                terms.keep_copy(i, slot, terms.before(i))
            else:
                terms.add(("edge", i, slot), ("copy",), terms.before(i), terms.forward(i))


def _passed_on(terms: StepTerms, j: int, k: int, last: int) -> None:
    """The copy of edge (j, k) behind op j, from its `last` reader there on, where one keeps it as it is.

    It depends on the levels of all blocks that read it: with policies it is left out (`policies.Deciders`). Where
    all who read it are outside of blocks, it does not.
    """
    every = _keepers(terms, j)
    keepers = [(i, path) for i, path in every if i not in terms.again]
    if not keepers or j in terms.again:
        return
    first, path = min(keepers)
    start, end = terms.before(last), terms.backward(first)
    block = "" if terms.home.keys().isdisjoint((j, *(i for _, path in every for i, _ in path))) else TIED
    terms.add(("edge", j, k), ("passed kept",), start, end, block=block)
    terms.add(("edge", j, k), ("passed again",), end, end, block=block)
    for at in path[:-1]:
        terms.add(("edge", *at), ("not passed on",), start, end, block=block)
    terms.add(("edge", *path[-1]), ("sent on",), start, end, block=block)


def _keepers(terms: StepTerms, j: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """The ops that keep the input of op j, a hub or a view of all of it. Each comes with the edges on the way."""
    op, tensors = terms.graph.ops[j], terms.graph.tensors
    if len(op.inputs) > 1 or len(op.outputs) > 1 or tensors[op.inputs[0]].nbytes != tensors[op.outputs[0]].nbytes:
        return []
    found = []
    for i, k in terms.readers[op.outputs[0]]:
        if terms.is_view[i]:
            found += [(saver, ((i, k), *path)) for saver, path in _keepers(terms, i)]
        elif terms.saves(i, k):
            found.append((i, ((i, k),)))
    return found


def _reduced(terms: StepTerms, j: int, k: int) -> None:
    """The gradient that op j yields of a parameter, from then on; of several microbatches it is summed up."""
    edge, op = ("edge", j, k), terms.graph.ops[j]
    passes = op.target == HUB or terms.is_view[j] or k in terms.made[j].passes
    if terms.has_sums:
        terms.add(edge, ("gradient summed",), 0, terms.backward(j))
    if terms.microbatches > 1 or not passes:
        terms.add(edge, ("gradient",), terms.backward(j) + 1, terms.update - 1)
