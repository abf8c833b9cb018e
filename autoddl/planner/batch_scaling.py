"""Derives the graph of another batch size from two that were captured.

    number(m) = a                    where it is a in both graphs
              = a * m1 / m           where it is a with m1 microbatches and a * m1 / m2 with m2: it counts rows

The result is a guess: its user captures the model again and compares.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoddl.core.graph import Graph

__all__ = ["scaled_sample", "stretched"]


class _Unlike(Exception):
    """Two values that do not follow the rule."""


def stretched(first: Graph, m1: int, second: Graph, m2: int, m: int) -> Graph | None:
    """The graph of one of m microbatches, from those of one of m1 and of m2; None where these do not determine it."""
    if len(first.tensors) != len(second.tensors) or len(first.ops) != len(second.ops):
        return None
    try:
        tensors = tuple(replace(a, shape=_number(a.shape, b.shape, m1, m2, m))
                        for a, b in zip(first.tensors, second.tensors, strict=True))
        ops = tuple(replace(a, args=_number(a.args, b.args, m1, m2, m))
                    for a, b in zip(first.ops, second.ops, strict=True))
    except _Unlike:
        return None
    return replace(first, tensors=tensors, ops=ops)


def _number(a: Any, b: Any, m1: int, m2: int, m: int) -> Any:
    """Applies the rule to a number, and inside tuples. Raises `_Unlike` where it does not hold."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_number(x, y, m1, m2, m) for x, y in zip(a, b, strict=True))
    if type(a) is type(b) and a == b:
        return a
    if type(a) is int and type(b) is int and a * m1 == b * m2 and a * m1 % m == 0:
        return a * m1 // m
    raise _Unlike


def scaled_sample(tree: Any, m1: int, m: int) -> Any:
    """The described sample of one of m microbatches, from that of one of m1: dim 0 of every tensor counts rows."""
    if isinstance(tree, Mapping):
        if "tensor" in tree and "dtype" in tree:
            return {**tree, "tensor": [n if d else n * m1 // m for d, n in enumerate(tree["tensor"])]}
        return {key: scaled_sample(part, m1, m) for key, part in tree.items()}
    return [scaled_sample(part, m1, m) for part in tree] if isinstance(tree, list | tuple) else tree
