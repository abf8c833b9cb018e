"""Counts the kernels of attention: of one call, and of queries that are split along the sequence (`ring`).

    flops    2 * batch * heads * queries * keys * (a + b)        a: width of queries and keys, b: of values
             backward with 3 a + 2 b in place of a + b           2.5 times as many where a = b (Dao 2023)
             half of it where causal, if all queries are here
             of FlexAttention the share of the blocks that its mask leaves, on the busiest rank
    split    a kernel for each block, what adds it to the others, and the copies of halves that are cut and joined

    written  attention whose mask gets a gradient runs as two products around a softmax, in float32 at least
             (`written_attention`)

Blocks of FlexAttention in a ring are taken to have equal shares of that work, of which a mask may give some turns more.
"""

from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.operators.flexible import FLEXIBLE, seen_share
from autoddl.operators.kernel_work import KernelWork
from autoddl.operators.ring import Block, RingSizes, ring_blocks, ring_sizes

__all__ = ["attention_backward", "attention_work", "ring_work", "written_attention"]

Shapes = tuple[tuple[int, ...], ...]
Kernels = tuple[KernelWork, ...]


def attention_work(op: Op, graph: Graph, inputs: Shapes, moved: float) -> KernelWork:
    """The kernel of attention in forward, which moves so many bytes, on pieces of shapes `inputs`.

    Of a part of the queries all keys are computed, under a mask that starts at the first of them."""
    queries, whole = inputs[0][-2], graph.tensors[op.inputs[0]].shape[-2]
    block = Block(queries, inputs[1][-2], bool(dict(op.args).get("is_causal")) and queries == whole)
    return _kernel(inputs, block, moved, seen_share(op, queries, whole) if op.target == FLEXIBLE else 1.0)


def ring_work(op: Op, graph: Graph, inputs: Shapes, flows: bool) -> tuple[Kernels, Kernels]:
    """The kernels of a rank whose queries are split, forward and backward, the latter where a gradient `flows`.

    Of causal blocks but the first, half have half the queries. Where all keys are here, FlexAttention is one block."""
    sizes, size = ring_sizes(op, graph, inputs), graph.tensors[op.inputs[1]].itemsize
    wide, joined = max(4, size), sizes.k + sizes.v
    queries, share, blocks = inputs[0][-2], *_blocks(op, graph, sizes, inputs)
    merged = sizes.out * (3 * wide + (size + wide) * (size < wide))
    forward, backward = list[KernelWork](), list[KernelWork]()
    for turn, block in enumerate(blocks):
        part = block.queries / queries, block.keys / inputs[1][-2]
        read, out = (part[0] * sizes.q + part[1] * joined) * size, part[0] * sizes.out * size
        forward.append(_kernel(inputs, block, read + out, share))
        backward.append(attention_backward(forward[-1], inputs, 2 * read + 2 * out))
        rows = 0.75 if sizes.trades and not sizes.gathered and op.target != FLEXIBLE else part[0]
        forward += [KernelWork(0.0, rows * merged, name="add")] * (turn > 0)
        backward.append(KernelWork(0.0, (part[0] * sizes.q + part[1] * joined) * (2 * wide + size), name="add"))
    here = sizes.q + joined * (not sizes.gathered)
    traded = [4.0 * here * size, 4.0 * sizes.out * size] if sizes.trades else []
    packed = [] if sizes.gathered else [2.0 * joined * size]
    copies = [KernelWork(0.0, nbytes, name="copy") for nbytes in (*traded, *packed)]
    return (*forward, *copies), (*backward, *copies) if flows else ()


def _blocks(op: Op, graph: Graph, sizes: RingSizes, inputs: Shapes) -> tuple[float, tuple[Block, ...]]:
    """(share of a block's keys that is computed, blocks) of a rank."""
    queries, keys = inputs[0][-2], inputs[1][-2]
    if op.target != FLEXIBLE:
        return 1.0, ring_blocks(sizes, queries, keys, bool(dict(op.args).get("is_causal")))
    share = seen_share(op, queries, graph.tensors[op.inputs[0]].shape[-2], sizes.trades)
    return share, (Block(queries, keys, False),) if sizes.gathered else ring_blocks(sizes, queries, keys, False)


def _kernel(inputs: Shapes, block: Block, moved: float, share: float) -> KernelWork:
    """The kernel of a block, of whose keys a share is computed; of a causal one half is skipped.

    Its head size is the mean of both widths."""
    batch, size = inputs[0][:-2], (inputs[0][-1] + inputs[2][-1]) / 2
    flops = 4.0 * prod(batch) * block.queries * size * block.keys / (1 + block.causal) * share
    keys = max(1, round(block.keys * share))
    return KernelWork(flops, moved, "attention", (prod(batch), block.queries, keys, round(size), int(block.causal)),
                      name=f"attention {'causal' if block.causal else 'full'}")


def attention_backward(forward: KernelWork, inputs: Shapes, moved: float) -> KernelWork:
    """The kernel that computes the gradients of a block.

    Scores again and the gradients of queries and keys are as wide as these, the other two products as values."""
    keys, values = inputs[0][-1], inputs[2][-1]
    return KernelWork((3 * keys + 2 * values) / (keys + values) * forward.flops, moved, "attention backward",
                      forward.shape, name=f"{forward.name} backward")


def written_attention(op: Op, graph: Graph, inputs: Shapes) -> tuple[Kernels, Kernels]:
    """Returns the kernels of attention that is written out, forward and backward, on pieces of shapes `inputs`.

    PyTorch computes half precision in float32 there (ATen, transformers/attention.cpp,
    _scaled_dot_product_attention_math). It casts queries, keys and values, scales two of them, adds the mask to the
    scores, and casts the probabilities and the output. Backward does each of it again the other way round."""
    size, (batch, queries, keys, wide) = graph.tensors[op.inputs[0]].itemsize, _sizes(inputs)
    full, out = max(4, size), prod(inputs[0][:-1]) * inputs[2][-1]
    q, k, v = (float(prod(shape)) for shape in inputs[:3])
    scores, mask = float(batch * queries * keys), float(prod(inputs[op.slot("attn_mask") or 3]))
    dtype = "float32" if size < full else ""

    def cast(values: float) -> list[KernelWork]:
        return [KernelWork(0.0, values * (size + full), name="copy")] * (size != full)

    def product(m: int, n: int, inner: int) -> KernelWork:
        moved = float(batch * (m * inner + inner * n + m * n) * full)
        return KernelWork(2.0 * batch * m * n * inner, moved, "matmul", (batch, m, n, inner), name="matmul batched",
                          dtype=dtype)

    scaled = KernelWork(0.0, 2 * full * (q + k), name="multiply")
    weighed = product(queries, inputs[2][-1], keys)
    forward = [*cast(q + k + v), scaled, product(queries, keys, wide),
               KernelWork(0.0, 2 * full * scores + size * mask, name="add"),
               KernelWork(0.0, 2 * full * scores, name="normalise"), *cast(scores), weighed, *cast(out)]
    back = [*cast(out), product(keys, inputs[2][-1], queries), product(queries, keys, inputs[2][-1]),
            KernelWork(0.0, 3 * full * scores, name="normalise backward"),
            KernelWork(0.0, full * (scores + mask), name="reduce"), *cast(mask),
            product(queries, wide, keys), product(keys, wide, queries), scaled, *cast(q + k + v)]
    return tuple(forward), tuple(back)


def _sizes(inputs: Shapes) -> tuple[int, int, int, int]:
    """(batch times heads, queries, keys, width of a head) of attention."""
    *batch, queries, wide = inputs[0]
    return prod(batch), queries, inputs[1][-2], wide
