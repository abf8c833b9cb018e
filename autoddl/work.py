"""What an op costs a device: flops and bytes moved, forward and backward, and what it keeps for backward.

    flops   matmul family   2 * elements of the output * length of the contraction      (multiply and add)
            attention       4 * batch * heads * queries * keys * head size              (both products)
            convolution     2 * elements of the output * input channels / groups * kernel elements
            others          none: they are bound by the bytes they move
    bytes   every tensor of the op once; backward reads the outputs' gradients and what was kept, and writes a gradient
            for each input that needs one
    backward of the matmul family is one product of the same size for each input that needs a gradient

A view moves nothing and launches nothing. What an op keeps follows from its derivative: a product keeps its factors, a
sum nothing, relu and softmax their output.
"""

from dataclasses import dataclass
from math import prod

from autoddl.graph import Graph, Op, Tensor

__all__ = ["VIEWS", "Work", "base", "keeps_input", "keeps_output", "kept_beside", "work"]

Shapes = tuple[tuple[int, ...], ...]

VIEWS = frozenset(f"aten.{name}" for name in (
    "reshape", "view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "detach", "alias", "flatten", "unflatten", "narrow", "diagonal",
    "numpy_T", "mT", "swapaxes", "movedim", "unfold", "view_as")) | {"autoddl.hub"}

_PRODUCTS = {"aten.linear": ("input", "weight"), "aten.mm": ("self", "mat2"), "aten.bmm": ("self", "mat2"),
             "aten.matmul": ("self", "other"), "aten.addmm": ("mat1", "mat2"), "aten.baddbmm": ("batch1", "batch2"),
             "aten.mv": ("self", "vec"), "aten.dot": ("self", "tensor")}
_ATTENTION = ("aten.scaled_dot_product_attention", "autoddl.attention")
_CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")

_KEEP_NOTHING = frozenset(f"aten.{name}" for name in (
    "add", "sub", "neg", "sum", "mean", "cat", "stack", "_to_copy", "embedding", "constant_pad_nd", "roll", "flip",
    "repeat", "copy", "clone", "cumsum", "zeros_like", "ones_like", "full_like", "arange", "full", "index_select",
    "gather", "index", "avg_pool2d", "adaptive_avg_pool2d", "masked_fill", "where")) | VIEWS
_KEEP_OUTPUT = frozenset(f"aten.{name}" for name in (
    "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "softmax", "_softmax", "log_softmax", "_log_softmax"))
_KEEP_MASK = frozenset(("autoddl.dropout",))


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    nbytes: float


def base(op: Op) -> str:
    """`aten.add.Tensor` -> `aten.add`."""
    return ".".join(op.target.split(".")[:2])


def keeps_input(op: Op, k: int, graph: Graph, differentiable: frozenset[int]) -> bool:
    """Whether backward of `op` reads the value of input `k`."""
    name = base(op)
    if name in _KEEP_NOTHING or name in _KEEP_OUTPUT or name in _KEEP_MASK or op.slots[k] == "bias":
        return False
    if name in _PRODUCTS:
        others = [op.inputs[i] for i, slot in enumerate(op.slots) if slot in _PRODUCTS[name] and i != k]
        return op.slots[k] in _PRODUCTS[name] and any(t in differentiable for t in others)
    if name in ("aten.mul", "aten.div"):
        return len(op.inputs) > 1
    return any(t in differentiable for t in op.inputs)


def keeps_output(op: Op, differentiable: frozenset[int]) -> bool:
    """Whether backward of `op` reads its own output."""
    name = base(op)
    return (name in _KEEP_OUTPUT or name in _ATTENTION) and any(t in differentiable for t in op.outputs)


def kept_beside(op: Op, outputs: Shapes, differentiable: frozenset[int]) -> float:
    """Bytes kept that are neither an input nor an output: a dropout's mask, one byte an element."""
    return float(prod(outputs[0])) if base(op) in _KEEP_MASK and op.outputs[0] in differentiable else 0.0


def _flops(op: Op, inputs: Shapes, outputs: Shapes) -> float:
    """Multiplications and additions of the local op, forward."""
    name = base(op)
    if name in _PRODUCTS:
        slot = op.slot(_PRODUCTS[name][0])
        return 2.0 * prod(outputs[0]) * inputs[slot if slot is not None else 0][-1]
    if name in _ATTENTION:
        *batch, queries, size = inputs[0]
        causal = 0.5 if dict(op.args).get("is_causal") else 1.0
        return 4.0 * prod(batch) * queries * size * inputs[1][-2] * causal
    if name in _CONVOLUTIONS:
        return 2.0 * prod(outputs[0]) * prod(inputs[1][1:])
    return 0.0


def _moved(tensors: tuple[Tensor, ...], shapes: Shapes) -> float:
    return float(sum(prod(shape) * tensor.itemsize for tensor, shape in zip(tensors, shapes, strict=True)))


def work(op: Op, graph: Graph, inputs: Shapes, outputs: Shapes, differentiable: frozenset[int]) -> tuple[Work, Work]:
    """Forward and backward work of `op` on local pieces of shapes `inputs` and `outputs`."""
    if base(op) in VIEWS:
        return Work(0.0, 0.0), Work(0.0, 0.0)
    reads, writes = tuple(graph.tensors[t] for t in op.inputs), tuple(graph.tensors[t] for t in op.outputs)
    if base(op) in ("aten.embedding", "aten.index", "aten.gather", "aten.index_select"):
        forward = Work(0.0, 2 * _moved(writes, outputs))
    else:
        forward = Work(_flops(op, inputs, outputs), _moved(reads, inputs) + _moved(writes, outputs))
    needs = [k for k, t in enumerate(op.inputs) if t in differentiable]
    if not needs or not any(t in differentiable for t in op.outputs):
        return forward, Work(0.0, 0.0)
    products = sum(op.slots[k] in _PRODUCTS.get(base(op), op.slots) for k in needs)
    scale = {True: float(products), False: 2.5}[base(op) not in _ATTENTION]
    kept = sum(_moved((reads[k],), (inputs[k],)) for k in range(len(reads))
               if keeps_input(op, k, graph, differentiable))
    written = sum(_moved((reads[k],), (inputs[k],)) for k in needs)
    return forward, Work(forward.flops * scale, _moved(writes, outputs) + kept + written)
