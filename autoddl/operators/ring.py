"""Says what attention of a split sequence computes and sends: keys pass round a ring, or every rank has all of them.

Of c ranks each has n = queries / c of the sequence. In a ring it has m = keys / c too. In c steps it meets the keys and
values of every rank, which it gets from the rank before it. Each step yields an output o_t and the logarithm l_t of a
sum of exponentials. These merge to those of all keys (Milakov & Gimelshein 2018; Liu et al. 2023, "Ring Attention"):

    l = log(sum exp(l_t))        o = sum exp(l_t - l) o_t

In backward l is known, so each step adds its part to the gradient of the queries. The gradients of keys and values
travel with these, and one hop more brings them home.

Causal attention in plain order would leave the last rank (2c-1)/c times the mean work. So ranks trade halves first:
of 2c chunks rank i gets chunks i and 2c-1-i (head and tail). Then each step but the first computes half a block:

    own keys            n x m, causal
    from rank j < i     all queries x the keys of chunk j
    from rank j > i     the queries of chunk 2c-1-i x all keys

Where every rank has all keys, halves of queries alone are traded. Llama 3 was trained so, with halves that lie there
from the start (Llama team 2024, "The Llama 3 herd of models", section 3.3.2). A half that is chunk j meets the keys of
j chunks, and its own chunk causally:

    h x i h  and  h x (2c-1-i) h, full        h x h twice, causal        h = n / 2        as much on every rank

FlexAttention goes the same ways. Where it has a mask, halves are traded, whatever the mask: most are causal.

    messages forward    [q, k, v traded]  c-1 shifts of (k, v)  [output traded]                  [..]: with halves
    messages backward   [its gradient traded]  shifts of (k, v) and of (dk, dv) in turn  [dq, dk, dv traded]
    with all keys       [q traded]  [output traded]        [its gradient traded]  [dq traded]
    log-sum-exps        are traded behind the output, where they are an output too
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoddl.core.graph import OFFERED_RING, Graph, Op
from autoddl.core.layout import Layout, Split
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.operators.flexible import FLEXIBLE

__all__ = ["ATTENTION", "LONG", "ROUND", "SHIFT", "Block", "Message", "RingSizes", "exposed_seconds", "gathers_keys",
           "goes_round", "half_goes_to", "is_attention", "offers_ring", "ring_blocks", "ring_messages", "ring_sizes",
           "ring_turns", "trades_halves", "with_rings"]

SHIFT = "shift"
"""The kind of a message in which each rank of a group sends to the next one."""
ATTENTION = "aten.scaled_dot_product_attention.default"
"""torch's attention."""
ROUND = (ATTENTION, FLEXIBLE)
"""The operators that can go round."""
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
    """The sizes of one rank of those that split a sequence.

        ranks       their number
        gathered    whether each has all keys
        trades      whether halves are traded
        q           elements of its queries
        k           of its keys
        v           of its values
        out         of its output
        lse         of its log-sum-exp, where that is an output too; else 0
    """

    ranks: int
    gathered: bool
    trades: bool
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
    return replace(graph, ops=tuple(replace(op, args=(*op.args, (OFFERED_RING, True))) if op.target in ROUND else op
                                    for op in graph.ops))


def offers_ring(op: Op, graph: Graph) -> bool:
    """Whether the search tries rings for an op: where its keys are at least `LONG`, or its graph asks for it.

    It is true of ops that are no attention."""
    return (op.target not in ROUND or graph.tensors[op.inputs[1]].shape[-2] >= LONG
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


def exposed_seconds(way: str, ranks: int, block: float, shifts: Sequence[float]) -> float:
    """Seconds in which a rank waits for shifts of so many seconds, where each of its `ranks` blocks takes `block`.

    Shifts that are on their way together follow each other.
    """
    now = waited = free = 0.0
    done: dict[int, float] = {}
    for what, k in ring_turns(way, ranks):
        if what == "start":
            free = done[k] = max(free, now) + shifts[k]
        elif what == "compute":
            now += block
        elif done[k] > now:
            waited += done[k] - now
            now = done[k]
    return waited


def goes_round(op: Op, keys: Layout, axes: Collection[int]) -> bool:
    """Whether keys that an op reads in a layout are split along the sequence on all of these axes."""
    return op.target in ROUND and all(keys[a] == Split(2) for a in axes)


def gathers_keys(op: Op, inputs: Sequence[Layout]) -> bool:
    """Whether an op is attention that reads all keys on every rank, of layouts `inputs`."""
    return op.target in ROUND and Split(2) not in inputs[1].states


def trades_halves(op: Op) -> bool:
    """Whether the ranks of a ring trade halves: attention that is causal, or that has a mask for its elements."""
    return bool(dict(op.args).get("mask" if op.target == FLEXIBLE else "is_causal"))


def half_goes_to(chunk: int, ranks: int) -> int:
    """The rank of a group that computes with a chunk, of twice as many as there are ranks; rank i's are 2i and 2i+1."""
    return min(chunk, 2 * ranks - 1 - chunk)


def ring_sizes(op: Op, graph: Graph, inputs: Shapes) -> RingSizes:
    """The sizes of a rank with pieces of shapes `inputs` of an op whose queries are split along the sequence."""
    q, k, v = inputs[:3]
    queries, keys = (graph.tensors[t].shape[-2] for t in op.inputs[:2])
    rows, gathered = prod(q[:-1]), k[-2] == keys
    return RingSizes(queries // q[-2], gathered, gathered or trades_halves(op), prod(q), prod(k), prod(v),
                     rows * v[-1], rows * (len(op.outputs) > 1))


def ring_blocks(sizes: RingSizes, queries: int, keys: int, causal: bool) -> tuple[Block, ...]:
    """The blocks of a rank of so many queries and keys here; where all keys are here, those of the first rank."""
    if sizes.gathered:
        half = queries // 2
        return Block(half, keys - half, False), Block(half, half, True), Block(half, half, True)
    other = Block(queries, keys // 2, False) if causal else Block(queries, keys, False)
    return (Block(queries, keys, causal), *(other,) * (sizes.ranks - 1))


def ring_messages(sizes: RingSizes, itemsize: int) -> tuple[Message, ...]:
    """The messages of a rank, in order; gradients of half precision travel as float32, since c of them add up."""
    own, wide = (sizes.k + sizes.v) * itemsize, (sizes.k + sizes.v) * max(4, itemsize)
    shifts = 0 if sizes.gathered else sizes.ranks - 1
    found: list[Message] = [("forward", SHIFT, own)] * shifts
    back: list[Message] = [("backward", SHIFT, own), ("backward", SHIFT, wide)] * shifts
    back += [("backward", SHIFT, wide)] * (not sizes.gathered)
    if not sizes.trades:
        return (*found, *back)
    there = (sizes.q + (sizes.k + sizes.v) * (not sizes.gathered)) * itemsize
    ends = [sizes.out * itemsize, *[sizes.lse * max(4, itemsize)] * (sizes.lse > 0)]
    return (("forward", EXCHANGE, there), *found, *(("forward", EXCHANGE, end) for end in ends),
            *(("backward", EXCHANGE, end) for end in ends), *back, ("backward", EXCHANGE, there))
