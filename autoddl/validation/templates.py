"""Makes the graph of a model for any sizes, from one capture of each structure.

    template    the model captured once with sizes that are all different: primes, and what is made of them
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
from autoddl.core.precision import Precision
from autoddl.validation.layers import Decoder, Shape

__all__ = ["model", "model_graph"]

def model(shape: Shape, layers: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Returns a whole model on the meta device, with its sample of `shape.batch` sequences."""
    with torch.device("meta"):
        ids = torch.zeros(shape.batch, shape.length, dtype=torch.int64)
        return Decoder(shape, layers).to(getattr(torch, shape.dtype)), (ids, ids)


def model_graph(shape: Shape, layers: int, precision: str) -> Graph:
    """Returns the captured graph of a whole model in a recipe of precision, without hubs (`core.precision`)."""
    like = _template_shape(shape)
    return _resized(_model_template(like, layers, precision), like, shape)


@lru_cache(maxsize=64)
def _model_template(shape: Shape, layers: int, precision: str) -> Graph:
    module, sample = model(shape, layers)
    return capture(module, sample, Precision.parse(precision)).graph


def _resized(graph: Graph, like: Shape, shape: Shape) -> Graph:
    """The graph of one shape, with its sizes replaced by those of another shape of the same structure."""
    sizes = dict(zip(_sizes(like), _sizes(shape), strict=True))
    tensors = tuple(replace(t, shape=tuple(sizes[size] for size in t.shape)) for t in graph.tensors)
    return replace(graph, tensors=tensors, ops=tuple(_resize(op, sizes) for op in graph.ops))


def _template_shape(shape: Shape) -> Shape:
    """Returns a shape of the same structure whose sizes are products of different primes."""
    each = 1 if shape.heads == shape.kv_heads else 79
    experts, top_k = (71, 59) if shape.experts else (0, 0)
    kv_rank, rope_dim, v_dim = (127, 151, 101) if shape.kv_rank else (0, 0, 0)
    return replace(shape, width=103 * 107, heads=73 * each, kv_heads=73, head_dim=83, hidden=97, vocab=89 * 109,
                   batch=53, length=61 * 71, experts=experts, top_k=top_k, q_rank=113 * (shape.q_rank > 0),
                   kv_rank=kv_rank, rope_dim=rope_dim, v_dim=v_dim, shared=131 * (shape.shared > 0))


def _sizes(shape: Shape) -> tuple[int, ...]:
    """Every size that a tensor may have, in one order; 1 to 3 stand for themselves."""
    each, head = shape.heads // shape.kv_heads, shape.head_width
    sent = shape.length * shape.top_k // max(1, shape.experts)
    return (1, 2, 3, shape.batch, shape.length, shape.width, shape.heads, shape.kv_heads, each, each + 2, head,
            (shape.heads + 2 * shape.kv_heads) * head, shape.heads * head, shape.hidden, 2 * shape.hidden, shape.vocab,
            shape.batch * shape.length, shape.experts, shape.top_k, sent, sent * shape.batch, shape.shared,
            2 * shape.shared, *_latent_sizes(shape))


def _latent_sizes(shape: Shape) -> tuple[int, ...]:
    """Sizes of latent attention alone; empty where attention is not latent."""
    if not shape.kv_rank:
        return ()
    made = shape.head_width + shape.v_dim
    return (shape.q_rank, shape.kv_rank, shape.rope_dim, shape.v_dim, shape.key_width, shape.kv_rank + shape.rope_dim,
            made, shape.heads * shape.key_width, shape.heads * made, shape.heads * shape.v_dim)


def _resize(op: Op, sizes: Mapping[int, int]) -> Op:
    """Sizes among the arguments are those above 50; numbers of dims are below."""
    def value(old: Value) -> Value:
        if isinstance(old, tuple):
            return tuple(map(value, old))
        return sizes[old] if isinstance(old, int) and not isinstance(old, bool) and old > 50 and old in sizes else old
    return replace(op, args=tuple((name, value(old)) for name, old in op.args))
