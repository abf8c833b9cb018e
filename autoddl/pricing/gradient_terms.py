"""Adds the terms of gradients of activations: given to an op, yielded by it, and waiting at a hub."""

from collections.abc import Hashable
from dataclasses import dataclass

from autoddl.core.graph import Kind
from autoddl.core.hubs import HUB
from autoddl.pricing.step_terms import StepTerms

__all__ = ["add_gradients"]


def add_gradients(terms: StepTerms) -> None:
    """Adds what is given to an op, yielded by it, and waits at a hub for the gradients of later readers."""
    shared = _shared_gradients(terms)
    for i, op in enumerate(terms.graph.ops):
        if not terms.yielding[i]:
            continue
        now, owner = terms.backward(i), ("op", i, 0)
        if not terms.is_view[i] and any(t in terms.flows for t in op.inputs):
            given = next(o for o in op.outputs if o in terms.flows)
            terms.add(owner, ("written", op.outputs.index(given)), now, now, shared.find(("given", given)))
            terms.add(owner, ("yields",), now, now)
            terms.add(owner, ("back",), now, now)
        if op.target == HUB and op.inputs[0] in terms.flows and not _is_parameter(terms, op.inputs[0]):
            reads = _yielding(terms, op.outputs[0])
            if len(reads) > 1:
                first, second = terms.backward(reads[-1]), terms.backward(reads[-2])
                terms.add(owner, ("waiting",), first + 1, second, shared.find(("waits", op.outputs[0])))
                terms.add(owner, ("waiting",), second + 1, now - 1)


def _yielding(terms: StepTerms, t: int) -> list[int]:
    """The readers of t that yield a gradient of it, in order."""
    return [i for i, _ in terms.readers[t] if terms.yielding[i]]


def _is_parameter(terms: StepTerms, t: int) -> bool:
    return terms.graph.tensors[t].kind is Kind.PARAMETER


def _shared_gradients(terms: StepTerms) -> "_Sets":
    """Which gradients may be one storage: those that views, hubs and ops pass on as they are."""
    found = _Sets({})
    for i, op in enumerate(terms.graph.ops):
        if not terms.yielding[i]:
            continue
        if op.target == HUB or terms.is_view[i]:
            for o in op.outputs:
                found.join(("given", op.inputs[0]), ("given", o))
            continue
        for k in terms.made[i].passes:
            t = op.inputs[k]
            if t in terms.flows and not _is_parameter(terms, t):
                _passed(terms, found, i, t)
    return found


def _passed(terms: StepTerms, found: "_Sets", i: int, t: int) -> None:
    """Op i passes its gradient on to t: behind a hub with several readers, as what waits if it is the first."""
    writer, reads, own = terms.writer.get(t), _yielding(terms, t), ("given", terms.graph.ops[i].outputs[0])
    if writer is None or terms.graph.ops[writer].target != HUB or len(reads) < 2:
        found.join(("given", t), own)
    elif reads[-1] == i:
        found.join(("waits", t), own)


@dataclass(frozen=True, slots=True)
class _Sets:
    """Disjoint sets."""

    parent: dict[Hashable, Hashable]

    def find(self, a: Hashable) -> Hashable:
        while self.parent.get(a, a) != a:
            a = self.parent[a]
        return a

    def join(self, a: Hashable, b: Hashable) -> None:
        self.parent[self.find(a)] = self.find(b)
