"""Reads the functions that FlexAttention is given, which are written as text.

A mask says which keys a query sees, a score function what becomes of a score. Both are functions of single elements:

    s            the score                       b h q k      batch, head, query and key, whole numbers
    x0, x1 ..    tensors, read by element        x0[b, q]     an element of such a tensor
    ge(q, k)     torch's elementwise operators by name, with numbers, inf, None, True and False
    as_float     a cast to the dtype of the scores; as_int and as_bool likewise

    bitwise_and(ge(q, k), eq(x0[b, q], x0[b, k]))        documents that are packed into one row, each of them causal

So one rank's part of batch, heads and queries is the same text, whose indices begin elsewhere. A tensor that is read at
[b, ..] alone may be split along with the batch, and likewise by head and query.
"""

import ast
from functools import lru_cache

from autoddl.core.graph import SEEN_SHARES, Op, Value
from autoddl.operators.gate_expressions import is_elementwise, parsed

__all__ = ["CASTS", "FLEXIBLE", "INDICES", "SCORES", "elementwise_text", "index_reads", "parsed_text", "seen_share"]

FLEXIBLE = "autoddl.flex_attention"
"""FlexAttention as an operator of a graph."""
INDICES = ("b", "h", "q", "k")
"""The names of the indices."""
CASTS = ("as_float", "as_int", "as_bool")
"""The names of the casts."""
SCORES = 2**22
"""Scores of a block of queries that runs at once, unless one row has more."""


def parsed_text(text: str) -> ast.expr:
    """The expression of a mask or of scores. Raises InputError for a text that is none."""
    return parsed(text, "s, b, h, q and k", "ge(q, k)")


def elementwise_text(name: str) -> bool:
    """Whether a text may call `name`: an elementwise operator of torch, or a cast."""
    return name in CASTS or is_elementwise(name)


@lru_cache(maxsize=1000)
def index_reads(texts: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """By number of a tensor, what each of its dims is read at: an expression, or '' where reads differ."""
    found: dict[int, tuple[str, ...]] = {}
    for text in filter(None, texts):
        for node in ast.walk(parsed_text(text)):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                at, number = _places(node), int(node.value.id[1:])
                before = found.get(number, at)
                found[number] = tuple(a if a == b else "" for a, b in zip(before, at, strict=True))
    return found


def _places(node: ast.Subscript) -> tuple[str, ...]:
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return tuple(ast.unparse(part) for part in parts)


def seen_share(op: Op, queries: int, whole: int, halves: bool = False) -> float:
    """The share of the keys with which the busiest piece of `queries` of `whole` queries computes.

    A piece lies together, or is two `halves` as `ring` says. The share is 1 where nothing was counted."""
    shares: Value = dict(op.args).get(SEEN_SHARES)
    if not isinstance(shares, tuple):
        return 1.0
    numbers = [float(share) for share in shares if isinstance(share, int | float)]
    pieces = max(1, round(whole / queries)) * (1 + halves)
    found = []
    for piece in range(pieces):
        first, last = len(numbers) * piece / pieces, len(numbers) * (piece + 1) / pieces
        parts = [(max(0.0, min(last, i + 1) - max(first, i)), share) for i, share in enumerate(numbers)]
        found.append(sum(part * share for part, share in parts) / (last - first))
    return max((head + tail) / 2 for head, tail in zip(found, reversed(found), strict=True)) if halves else max(found)
