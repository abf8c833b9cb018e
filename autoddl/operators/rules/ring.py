"""The signature of ring attention (`operators.ring`): queries, keys and values split along the sequence, inner.

    q S(s), k S(s), v S(s), mask S(its queries) -> S(s)

It is there where torch's attention in one kernel is called on tensors of four dims with one batch, without dropout.
All ranks have equally much. A causal ring trades halves, so twice its ranks divide the length, which queries and keys
share. Queries are not split over other axes beside whole keys.
"""

from autoddl.core.graph import Graph, Op
from autoddl.core.layout import B, Layout, Mesh, Split, State, local_shape
from autoddl.operators.ring import ATTENTION, ring_messages, ring_sizes
from autoddl.operators.rules.dimension_strings import Signature
from autoddl.operators.rules.writing import Tensors, get

__all__ = ["QUERIES", "inner_messages", "ring_signatures"]

QUERIES = "l"
"""Name of the dim of queries in the rule of attention."""


def ring_signatures(op: Op, inputs: Tensors) -> tuple[Signature, ...]:
    """The signature of the ring, where attention is one that can go round."""
    q, k, v = (t.shape for t in inputs[:3])
    if op.target != ATTENTION or get(op, "dropout_p", 0.0) or not len(q) == len(k) == len(v) == 4 or q[0] != k[0]:
        return ()
    causal, masks = bool(get(op, "is_causal", False)), inputs[3:]
    if causal and (masks or q[2] != k[2] or q[2] % 2):
        return ()
    pieces: tuple[State, ...] = tuple(
        Split(len(t.shape) - 2) if len(t.shape) > 1 and t.shape[-2] > 1 else B for t in masks)
    divides = (q[2] // 2,) if causal else tuple(dict.fromkeys((q[2], k[2])))
    return (Signature((Split(2),) * 3 + pieces, (Split(2),), QUERIES, divides, inner=True),)


def inner_messages(op: Op, graph: Graph, read: Layout, mesh: Mesh, coordinate: tuple[int, ...] | None
                   ) -> tuple[tuple[str, str, int], ...]:
    """(pass, kind, bytes) of what a rank sends, in order; `read` is the layout of its queries, and so of its keys."""
    q, k, v = (graph.tensors[t] for t in op.inputs[:3])
    pieces = tuple(local_shape(t.shape, read, mesh, coordinate) for t in (q, k, v))
    return ring_messages(ring_sizes(op, k.shape[2], pieces), k.itemsize)
