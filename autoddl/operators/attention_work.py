"""Counts the kernels of attention: of one call, and of queries that are split along the sequence (`ring`).

    flops    4 * batch * heads * queries * keys * head size      both products, backward 2.5 times as many (Dao 2023)
             half of it where causal, if all queries are here
             of FlexAttention the share of the blocks that its mask leaves, on the busiest rank
    split    a kernel for each block, what adds it to the others, and the copies of halves that are cut and joined

Blocks of FlexAttention in a ring are taken to have equal shares of that work, of which a mask may give some turns more.
"""

from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.operators.flexible import FLEXIBLE, seen_share
from autoddl.operators.kernel_work import KernelWork
from autoddl.operators.ring import Block, RingSizes, ring_blocks, ring_sizes

__all__ = ["attention_backward", "attention_work", "ring_work"]

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
        backward.append(attention_backward(forward[-1], 2 * read + 2 * out))
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
    """The kernel of a block, of whose keys a share is computed; of a causal one half is skipped."""
    *batch, _, size = inputs[0]
    flops = 4.0 * prod(batch) * block.queries * size * block.keys / (1 + block.causal) * share
    keys = max(1, round(block.keys * share))
    return KernelWork(flops, moved, "attention", (prod(batch), block.queries, keys, size, int(block.causal)),
                      name=f"attention {'causal' if block.causal else 'full'}")


def attention_backward(forward: KernelWork, moved: float) -> KernelWork:
    """The kernel that computes the gradients of a block."""
    return KernelWork(2.5 * forward.flops, moved, "attention backward", forward.shape, name=f"{forward.name} backward")
