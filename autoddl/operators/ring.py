"""Says what ring attention computes and sends: keys and values are split along the sequence and pass round a ring.

Of c ranks each has n = queries / c and m = keys / c of the sequence. In c steps it meets the keys and values of every
rank, which it gets from the rank before it. Each step yields an output o_t and the logarithm l_t of a sum of
exponentials. These merge to those of all keys (Milakov & Gimelshein 2018; Liu et al. 2023, "Ring Attention"):

    l = log(sum exp(l_t))        o = sum exp(l_t - l) o_t

In backward l is known, so each step adds its part to the gradient of the queries. The gradients of keys and values
travel with these, and one hop more brings them home.

Causal attention in plain order would leave the last rank (2c-1)/c times the mean work. So ranks trade halves first:
of 2c chunks rank i gets chunks i and 2c-1-i (head and tail). Then each step but the first computes half a block:

    own keys            n x m, causal
    from rank j < i     all queries x the keys of chunk j
    from rank j > i     the queries of chunk 2c-1-i x all keys

    messages forward    [q, k, v traded]  c-1 shifts of (k, v)  [output traded]                  [..]: where causal
    messages backward   [its gradient traded]  shifts of (k, v) and of (dk, dv) in turn  [dq, dk, dv traded]
"""

from dataclasses import dataclass, replace
from math import prod

from autoddl.core.graph import OFFERED_RING, Graph, Op
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.operators.flexible import FLEXIBLE

__all__ = ["ATTENTION", "LONG", "SHIFT", "Block", "Message", "RingSizes", "is_attention", "offers_ring", "ring_blocks",
           "ring_messages", "ring_sizes", "ring_turns", "with_rings"]

SHIFT = "shift"
"""The kind of a message in which each rank of a group sends to the next one."""
ATTENTION = "aten.scaled_dot_product_attention.default"
"""The operator that can go round."""
LONG = 16384
"""Keys from which on the search tries rings by itself."""
Shapes = tuple[tuple[int, ...], ...]
Message = tuple[str, str, int]
"""('forward' | 'backward', 'shift' | 'exchange', bytes that a rank sends)."""


@dataclass(frozen=True, slots=True)
class Block:
    """The block of a step: so many queries times so many keys, of which a `causal` one skips half."""

    queries: int
    keys: int
    causal: bool


@dataclass(frozen=True, slots=True)
class RingSizes:
    """The sizes of one rank of a ring.

        ranks     ranks of the ring
        causal    whether a query sees no later key
        q         elements of its queries
        k         of its keys
        v         of its values
        out       of its output
        lse       of its log-sum-exp
    """

    ranks: int
    causal: bool
    q: int
    k: int
    v: int
    out: int
    lse: int


def is_attention(op: Op) -> bool:
    """Whether an op is attention: torch's, ours with dropout, or FlexAttention."""
    return op.target in (ATTENTION, FLEXIBLE, "autoddl.attention")


def with_rings(graph: Graph) -> Graph:
    """The graph whose attention may go round a ring, however short it is."""
    return replace(graph, ops=tuple(replace(op, args=(*op.args, (OFFERED_RING, True))) if op.target == ATTENTION else op
                                    for op in graph.ops))


def offers_ring(op: Op, graph: Graph) -> bool:
    """Whether the search tries rings for an op: where its keys are at least `LONG`, or its graph asks for it.

    It is true of ops that are no attention."""
    return (op.target != ATTENTION or graph.tensors[op.inputs[1]].shape[-2] >= LONG
            or bool(dict(op.args).get(OFFERED_RING)))


def ring_turns(way: str, ranks: int) -> tuple[tuple[str, int], ...]:
    """Lists what a rank does in one pass: ('start' | 'wait', number of a shift), or ('compute', number of a step).

    A shift is on its way from its start to the wait for it.
    """
    found: list[tuple[str, int]] = []
    last = ranks - 1
    for turn in range(ranks):
        if way == "forward":
            on_way = [("start", turn)] * (turn < last)
            found += [*on_way, ("compute", turn), *(("wait", k) for _, k in on_way)]
            continue
        on_way = [("start", 2 * turn)] * (turn < last)
        back = [("wait", 2 * turn - 1)] * (turn > 0) + [("start", 2 * turn + (turn < last))]
        found += [*on_way, ("compute", turn), *back, *(("wait", k) for _, k in on_way)]
    return (*found, ("wait", 2 * last)) if way == "backward" else tuple(found)


def ring_sizes(op: Op, keys: int, inputs: Shapes) -> RingSizes:
    """The sizes of a rank with pieces of shapes `inputs` of an op whose sequence has `keys` keys."""
    q, k, v = inputs[:3]
    rows = prod(q[:-1])
    return RingSizes(keys // k[-2], bool(dict(op.args).get("is_causal")), prod(q), prod(k), prod(v), rows * v[-1], rows)


def ring_blocks(sizes: RingSizes, queries: int, keys: int) -> tuple[Block, ...]:
    """The block of each step, with so many queries and keys on a rank."""
    other = Block(queries, keys // 2, False) if sizes.causal else Block(queries, keys, False)
    return (Block(queries, keys, sizes.causal), *(other,) * (sizes.ranks - 1))


def ring_messages(sizes: RingSizes, itemsize: int) -> tuple[Message, ...]:
    """The messages of a rank, in order; gradients of half precision travel as float32, since c of them add up."""
    own, wide = (sizes.k + sizes.v) * itemsize, (sizes.k + sizes.v) * max(4, itemsize)
    found: list[Message] = [("forward", SHIFT, own)] * (sizes.ranks - 1)
    back: list[Message] = [("backward", SHIFT, own), ("backward", SHIFT, wide)] * (sizes.ranks - 1)
    back += [("backward", SHIFT, wide)]
    if not sizes.causal:
        return (*found, *back)
    traded, out = (sizes.q + sizes.k + sizes.v) * itemsize, sizes.out * itemsize
    return (("forward", EXCHANGE, traded), *found, ("forward", EXCHANGE, out),
            ("backward", EXCHANGE, out), *back, ("backward", EXCHANGE, traded))
