"""The graph of a part of a model, for any sizes, from one capture of each structure.

    template    the part captured once with sizes that are all different: primes, and what is made of them
    graph       the template with every size replaced by the one that stands in its place in the asked shape

A capture takes a third of a second, a replacement under a millisecond; a test compares both on real shapes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph, Op, Value
from autoddl.core.hubs import planned
from autoddl.validation.layers import Embedding, Head, Layer, Shape

__all__ = ["captured", "graph_of"]

PARTS: Mapping[str, type[nn.Module]] = {"layer": Layer, "embedding": Embedding, "head": Head}


def captured(what: str, shape: Shape) -> Graph:
    """The planned graph of a part, from the meta device."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    x = torch.empty(shape.batch, shape.length, shape.width, dtype=dtype, device="meta")
    ids = torch.zeros(shape.batch, shape.length, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = PARTS[what](shape).to(dtype)
    return planned(capture(model, {"layer": (x,), "embedding": (ids,), "head": (x, ids)}[what]).graph)


def graph_of(what: str, shape: Shape) -> Graph:
    """The same as `captured`, from the template of the shape's structure."""
    like = _template_shape(shape)
    sizes = dict(zip(_sizes(like), _sizes(shape), strict=True))
    graph = _template(what, like)
    tensors = tuple(replace(t, shape=tuple(sizes[size] for size in t.shape)) for t in graph.tensors)
    return replace(graph, tensors=tensors, ops=tuple(_resized(op, sizes) for op in graph.ops))


@lru_cache(maxsize=64)
def _template(what: str, shape: Shape) -> Graph:
    return captured(what, shape)


def _template_shape(shape: Shape) -> Shape:
    """The same structure with sizes that are products of different primes."""
    each = 1 if shape.heads == shape.groups else 79
    experts, top = (71, 59) if shape.experts else (0, 0)
    return replace(shape, width=103 * 107, heads=73 * each, groups=73, head=83, hidden=97, vocab=89 * 109, batch=53,
                   length=61 * 71, experts=experts, top=top)


def _sizes(shape: Shape) -> tuple[int, ...]:
    """Every size that a tensor of a part may have, in one order; 1 to 3 stand for themselves."""
    each, sent = shape.heads // shape.groups, shape.length * shape.top // max(1, shape.experts)
    narrow = (shape.heads + 2 * shape.groups) * shape.size
    return (1, 2, 3, shape.batch, shape.length, shape.width, shape.heads, shape.groups, each, each + 2, shape.size,
            narrow, shape.heads * shape.size, shape.hidden, 2 * shape.hidden, shape.vocab, shape.batch * shape.length,
            shape.experts, shape.top, sent, sent * shape.batch)


def _resized(op: Op, sizes: Mapping[int, int]) -> Op:
    """Sizes among the arguments are those above 50; numbers of dims are below."""
    def value(old: Value) -> Value:
        if isinstance(old, tuple):
            return tuple(map(value, old))
        return sizes[old] if isinstance(old, int) and not isinstance(old, bool) and old > 50 and old in sizes else old
    return replace(op, args=tuple((name, value(old)) for name, old in op.args))
