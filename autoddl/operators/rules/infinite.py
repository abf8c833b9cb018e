"""Which tensors hold infinities, as the masks of attention do: written by the model, or given in buffers and batch.

A product of an infinite value and a partial sum is no number, though the product of the whole values is infinite:

    -inf * (3 + -2) = -inf          -inf * 3 + -inf * -2 = nan          -inf * 1 + -inf * 0 = nan

So an op that reads such a tensor reads nothing else as P on an axis where that tensor is B (`drop_undefined`).
"""

from collections.abc import Collection, Iterable

from autoddl.core.graph import Graph, Op, Value
from autoddl.core.layout import B, P
from autoddl.operators.rules.dimension_strings import Signature

__all__ = ["HUGE", "drop_undefined", "infinite_tensors", "positions"]

HUGE = 1e30
"""A number as large as this counts as infinite: its products with partial sums overflow."""

FINITE = frozenset({
    "aten._safe_softmax", "aten._softmax", "aten.arctan", "aten.atan", "aten.clamp", "aten.clamp_max", "aten.clamp_min",
    "aten.erf", "aten.exp", "aten.hardtanh", "aten.logsumexp", "aten.nan_to_num", "aten.reciprocal",
    "aten.scaled_dot_product_attention", "aten.sigmoid", "aten.sign", "aten.softmax", "aten.tanh", "autoddl.attention",
    "autoddl.flex_attention", "autoddl.token_loss"})
"""What makes finite values of infinite ones, or ends with what is meant to be finite."""


def infinite_tensors(graph: Graph) -> frozenset[int]:
    """The floating tensors that an infinite number of the program's own, of a buffer or of the batch reaches."""
    found = {t for t, tensor in enumerate(graph.tensors) if tensor.infinite}
    for op in graph.ops:
        if not FINITE.isdisjoint((op.target, op.target.rpartition(".")[0])):
            continue
        if not found.isdisjoint(op.inputs) or any(_is_huge(value) for _, value in op.args):
            found.update(t for t in op.outputs if graph.tensors[t].is_floating)
    return frozenset(found)


def _is_huge(value: Value) -> bool:
    if isinstance(value, tuple):
        return any(_is_huge(one) for one in value)
    return isinstance(value, float) and abs(value) >= HUGE


def drop_undefined(signatures: Iterable[Signature], infinite: Collection[int]) -> tuple[Signature, ...]:
    """The signatures without those that read a partial sum beside a whole input of the positions `infinite`."""
    return tuple(s for s in signatures if not any(
        s.inputs[i] == B and any(state == P for state in s.inputs) for i in infinite))


def positions(op: Op, tensors: Collection[int]) -> tuple[int, ...]:
    """The positions at which the op reads one of the tensors."""
    return tuple(k for k, t in enumerate(op.inputs) if t in tensors)
