"""Counts the kernels of recurrent layers and their cells: the steps of a layer run one after another.

Of each layer, with T steps, b rows, G gates of h values, inputs of i values, and d directions that a GPU takes
together,

    forward     the inputs of all steps          one product (d, T b, G h, i)
                every step                       a product (d, b, G h, h), and the gates
    backward    every step                       the gates, and a product (d, b, h, G h)
                the inputs of all steps          one product (d, T b, i, G h)
                weights                          products (d, i, G h, T b) and (d, h, G h, T b)

An LSTM that projects states to p values has a product (d, b, p, h) in every step. Those above have p for h. The gates
of a step read what both products wrote, and the last state. They write gates and state, which their backward reads with
the gradients. cuDNN multiplies float32 as TF32 here, as in convolutions. A cell is a layer of one step, but PyTorch
multiplies it as linear layers.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.operators.families import family_of
from autoddl.operators.kernel_work import KernelWork

__all__ = ["is_recurrent", "is_recurrent_layer", "recurrent_work"]

RECURRENT = " recurrent"
"""Ends the names of products that cuDNN multiplies in a layer."""
Shapes = tuple[tuple[int, ...], ...]


def is_recurrent(name: str) -> bool:
    """Whether the operator of this base name is a recurrent layer or the cell of one."""
    return family_of(name).rule == "recurrent"


def is_recurrent_layer(op: Op) -> bool:
    """Whether an operator is a recurrent layer, and no cell."""
    name = ".".join(op.target.split(".")[:2])
    return is_recurrent(name) and not name.endswith("_cell")


def recurrent_work(op: Op, graph: Graph, inputs: Shapes, needs: bool
                   ) -> tuple[tuple[KernelWork, ...], tuple[KernelWork, ...]]:
    """Returns the kernels of a recurrent op, forward and backward, on pieces of shapes `inputs`; none backward unless
    it `needs` gradients."""
    size, rows = graph.tensors[op.inputs[0]].itemsize, inputs[1][-2]
    steps = prod(inputs[0][:-1]) // max(1, rows)
    ways = 2 if dict(op.args).get("bidirectional") else 1
    forward, backward = list[KernelWork](), list[KernelWork]()
    for into, again, projected in _layers(op, inputs, ways):
        gates = _gates(ways * rows, again[0], projected[1] or again[1], steps, size)
        whole, state = _products(into, ways, rows * steps, 1, size), _products(again, ways, rows, steps, size)
        narrowed = _products(projected, ways, rows, steps, size) if projected[0] else ()
        forward += [whole[0], state[0], gates[0], *narrowed[:1]]
        weights = [_product(ways, n, k, rows * steps, 1, size) for n, k in (into, again, projected) if n]
        backward += [*narrowed[1:], gates[1], state[1], whole[1], *weights]
    if not is_recurrent_layer(op):
        forward, backward = ([replace(one, name=one.name.removesuffix(RECURRENT)) for one in kernels]
                             for kernels in (forward, backward))
    return tuple(forward), tuple(backward) if needs else ()


def _layers(op: Op, inputs: Shapes, ways: int) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]:
    """Yields, of every layer, the matrices of its input, of its state, and of its projection, (0, 0) where it has none.

    Those of the other direction are as large."""
    states = [shape[-1] for slot, shape in zip(op.slots, inputs, strict=True) if slot.startswith("hx")]
    found = [(shape[0], shape[1]) for slot, shape in zip(op.slots, inputs, strict=True)
             if len(shape) == 2 and not slot.startswith(("input", "hx"))]
    each = 3 if states[0] != states[-1] else 2
    for at in range(0, len(found), each * ways):
        yield found[at], found[at + 1], found[at + 2] if each == 3 else (0, 0)


def _product(batch: int, m: int, n: int, k: int, times: int, size: int) -> KernelWork:
    moved, batched = float(batch * (m * k + k * n + m * n) * size), " batched" if batch > 1 else ""
    return KernelWork(2.0 * batch * m * n * k, moved, "matmul", (batch, m, n, k), name=f"matmul{batched}{RECURRENT}",
                      times=times)


def _products(matrix: tuple[int, int], batch: int, rows: int, times: int, size: int) -> tuple[KernelWork, KernelWork]:
    """The product of rows with a matrix (n, k), and that of their gradients with it."""
    n, k = matrix
    return _product(batch, rows, n, k, times, size), _product(batch, rows, k, n, times, size)


def _gates(rows: int, gates: int, hidden: int, steps: int, size: int) -> tuple[KernelWork, KernelWork]:
    """The elementwise kernels of a step, forward and backward: all gates three and four times, the state as often."""
    moved = rows * (gates + hidden) * size
    return (KernelWork(0.0, 3.0 * moved, name="exponential", times=steps),
            KernelWork(0.0, 4.0 * moved, name="exponential backward", times=steps))
