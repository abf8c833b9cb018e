"""The signatures of attention whose sequence is split (`operators.ring`), both inner:

    q S(s), k S(s), v S(s), mask S(its queries) -> S(s)         a ring
    q S(s), k B, v B -> S(s)                                    halves of the queries are traded, all keys are here

They are there where torch's attention in one kernel is called on tensors of four dims with one batch, without dropout.
FlexAttention has them too, and reads its other tensors whole. All ranks have equally much. Where they trade halves,
twice their number divides the length, which queries and keys share. Queries are split over other axes in no other way.
"""

from collections.abc import Sequence

from autoddl.core.graph import Graph, Op
from autoddl.core.layout import B, Layout, Mesh, Split, State, local_shape
from autoddl.operators.flexible import FLEXIBLE
from autoddl.operators.ring import ATTENTION, ring_messages, ring_sizes, trades_halves
from autoddl.operators.rules.dimension_strings import Signature
from autoddl.operators.rules.writing import Tensors, get

__all__ = ["QUERIES", "inner_messages", "ring_signatures"]

QUERIES = "l"
"""Name of the dim of queries in the rule of attention."""


def ring_signatures(op: Op, inputs: Tensors, outputs: int = 1) -> tuple[Signature, ...]:
    """The signatures above, where attention is such; FlexAttention may have two `outputs`."""
    q, k, v = (t.shape for t in inputs[:3])
    if not len(q) == len(k) == len(v) == 4:
        return ()
    if op.target == FLEXIBLE:
        pieces: tuple[State, ...] = (B,) * len(inputs[3:])
    elif op.target != ATTENTION or get(op, "dropout_p", 0.0) or q[0] != k[0]:
        return ()
    else:
        pieces = tuple(Split(len(t.shape) - 2) if len(t.shape) > 1 and t.shape[-2] > 1 else B for t in inputs[3:])
    ends = (Split(2),) * outputs
    if not trades_halves(op):
        return (Signature((Split(2),) * 3 + pieces, ends, QUERIES, tuple(dict.fromkeys((q[2], k[2]))), inner=True),)
    if q[2] != k[2] or q[2] % 2 or (op.target == ATTENTION and inputs[3:]):
        return ()
    return tuple(Signature((Split(2), keys, keys, *pieces), ends, QUERIES, (q[2] // 2,), inner=True)
                 for keys in (Split(2), B))


def inner_messages(op: Op, graph: Graph, reads: Sequence[Layout], mesh: Mesh, coordinate: tuple[int, ...] | None
                   ) -> tuple[tuple[str, str, int], ...]:
    """(pass, kind, bytes) of what a rank sends, in order; `reads` are the layouts of its queries, keys and values."""
    shapes = [graph.tensors[t].shape for t in op.inputs[:3]]
    pieces = tuple(local_shape(shape, read, mesh, coordinate) for shape, read in zip(shapes, reads, strict=False))
    return ring_messages(ring_sizes(op, graph, pieces), graph.tensors[op.inputs[1]].itemsize)
