"""Says which products a program computes in a narrower dtype, such as float8, and what casting their factors moves.

    narrow      products with weights behind which another one comes. Attention by two products has no weight. What no
                product follows is the head, whose logits stay wide (Megatron-Core, output_layer is no module of
                TransformerEngine; torchtitan filters `output`)
    x           read and written as it is and transposed, for the gradient of the weight: 4 bytes a value
                (TransformerEngine, common/transpose/cast_transpose.cu). A kernel of a norm by hand writes both itself
    dy          the same
    weights     once a step, which is a tenth of what the update moves (TransformerEngine, is_first_microbatch): not
                counted here

    experts     a product with a matrix for each of many experts wants rows in multiples of 16. Rows are copied to where
                they are padded before the first product, and back behind the last: 4 bytes a value, and of the
                gradients as many (Megatron-Core, moe/experts.py: quantization_padding, quantization_unpadding)

Ranks that share a product cast each its part, and then gather it (TransformerEngine with sequence parallelism). What
they gather is transposed alone: 1 byte read, 1 written.

A scale of the values themselves (`current`) is read from all of them first, which takes 2 bytes a value more. What a
norm writes is then wide. With `delayed` scaling it is that of earlier steps.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from autoddl.core.graph import Graph, Op
from autoddl.core.split_backward import weights_of
from autoddl.core.stages import SEND
from autoddl.cost_models import Device
from autoddl.operators.expert_rows import expert_products, is_weighted
from autoddl.operators.families import family_of
from autoddl.operators.work import VIEWS, base, work

__all__ = ["CAST", "PADDED", "Cast", "cast_bytes", "narrow_products"]

CAST = 4
"""Bytes that a cast moves per value: 2 read, 1 written, 1 written transposed."""
TURNED = 2
"""Bytes that transposing moves per value that was cast elsewhere."""
SCALED = 2
"""Bytes more per value where the scale is that of the values themselves."""
PADDED = 4
"""Bytes that copying rows of experts to where they are padded, or back, moves per value: 2 read, 2 written."""


class Cast(NamedTuple):
    """Values that a narrow product casts."""

    places: tuple[int, ...]
    """Places of its inputs that are no weights."""
    read: float
    """Values of these inputs, on all ranks together."""
    written: float
    """Values of its output, whose gradient is cast."""
    flops: float
    """Its flops, on all ranks together."""
    normed: bool = False
    """Whether a norm made what it reads."""
    padded: float = 0.0
    """Values that are copied to pad rows of experts and to take the padding out, on all ranks together."""


@lru_cache(maxsize=64)
def narrow_products(graph: Graph) -> Mapping[str, Cast]:
    """By name, the narrow products and what they cast."""
    weights, ahead, found = weights_of(graph), set[int](), dict[str, Cast]()
    for op in reversed(graph.ops):
        product = is_weighted(op, weights)
        if product and not ahead.isdisjoint(op.outputs):
            found[op.name] = _cast(op, graph, weights)
        if product or op.target == SEND or not ahead.isdisjoint(op.outputs):
            ahead.update(op.inputs)
    normed = set[int]()
    for op in graph.ops:
        if op.name in found:
            found[op.name] = found[op.name]._replace(normed=any(t in normed for t in op.inputs))
        if family_of(base(op)).curve == "normalise" or (base(op) in VIEWS and not normed.isdisjoint(op.inputs)):
            normed.update(op.outputs)
    for name, values in _padded(graph, found).items():
        found[name] = found[name]._replace(padded=values)
    return MappingProxyType(found)


def _padded(graph: Graph, found: Mapping[str, Cast]) -> dict[str, float]:
    """By name of a product of experts, the values that are copied for padding: before the first and behind the last."""
    return {name: found[name].read * one.first + found[name].written * one.last
            for name, one in expert_products(graph).items() if name in found}


def _cast(op: Op, graph: Graph, weights: frozenset[int]) -> Cast:
    places = tuple(k for k, t in enumerate(op.inputs) if t not in weights)
    inputs, outputs = (tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs))
    forward, _ = work(op, graph, inputs, outputs, frozenset())
    return Cast(places, sum(prod(inputs[k]) for k in places), prod(outputs[0]), forward[0].flops)


def cast_bytes(device: Device, read: float, own: float, normed: bool = False) -> float:
    """Bytes that a rank moves to cast `own` of the values that it reads, or that a norm wrote, and to transpose all."""
    each = CAST + SCALED if device.scaling == "current" else 0 if normed and device.by_hand else CAST
    return each * own + TURNED * max(0.0, read - own)
