"""Tells what a microbatch keeps between B and W for the gradients of weights, as the runtime does.

    a product                    what it reads besides weights, and the gradients of its results
    any other op                 the gradients of its weights, which its backward computes with all others
    ... without other gradients  the gradients of its results: nothing of it runs in B
    a message with a weight      the gradient that came back

What several ops read is there once. All else that forward kept is gone after B (`runtime.weight_gradients`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from autoddl.core.graph import Graph
from autoddl.core.hubs import HUB
from autoddl.core.split_backward import waiting_inputs
from autoddl.core.stages import SEND
from autoddl.operators.work import VIEWS, base, is_product

__all__ = ["Kept", "kept_for_weights"]


class Kept(NamedTuple):
    """What an op keeps for W.

        reads     places of inputs whose values, or gradients, are kept, with the storage of each; None: its own
        results   whether the gradients of its results are
    """

    reads: tuple[tuple[int, int | None], ...]
    results: bool


def kept_for_weights(graph: Graph) -> Mapping[int, Kept]:
    """By op whose gradients of weights wait for W, what it keeps of one microbatch."""
    flows, writers, found = graph.differentiable(), graph.producers(), dict[int, Kept]()
    for i, late in waiting_inputs(graph).items():
        op = graph.ops[i]
        others = [k for k in range(len(op.inputs)) if k not in late]
        if is_product(op):
            roots = [(k, _root(graph, writers, op.inputs[k])) for k in others]
            found[i] = Kept(tuple((k, root) for k, root in roots if root in writers), True)
        elif op.target == SEND or any(op.inputs[k] in flows for k in others):
            found[i] = Kept(tuple((k, None) for k in late), False)
        else:
            found[i] = Kept((), True)
    return found


def _root(graph: Graph, writers: Mapping[int, int], t: int) -> int:
    """The tensor that t views, or t."""
    while t in writers and (graph.ops[writers[t]].target == HUB or base(graph.ops[writers[t]]) in VIEWS):
        t = graph.ops[writers[t]].inputs[0]
    return t
