"""Says which ops leave the gradients of weights for later, where a schedule splits backward into B and W.

B computes the gradients of what a stage received, W those of its weights. Tensors that depend on parameters alone are
*weights*, such as a transposed parameter. An op *waits* if it reads a weight and something else. Its gradients of
weights are computed in W, and go on from there to the parameters. So does what comes back for a weight that is sent.
"""

from collections.abc import Mapping

from autoddl.core.graph import RECEIVE, Graph, Kind
from autoddl.core.stages import SEND

__all__ = ["waiting_inputs", "weights_of"]


def weights_of(graph: Graph) -> frozenset[int]:
    """The tensors that depend on parameters alone."""
    found = {t for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.PARAMETER}
    for op in graph.ops:
        if op.target != RECEIVE and op.inputs and found.issuperset(op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def waiting_inputs(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """By op that waits, the places of its inputs whose gradients are computed in W."""
    flows, weights = graph.differentiable(), weights_of(graph)
    found = {}
    for i, op in enumerate(graph.ops):
        late = tuple(k for k, t in enumerate(op.inputs[:1] if op.target == SEND else op.inputs)
                     if t in flows and t in weights)
        if late and not flows.isdisjoint(op.outputs) and (op.target == SEND or weights.isdisjoint(op.outputs)):
            found[i] = late
    return found
