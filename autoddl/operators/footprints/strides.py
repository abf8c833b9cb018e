"""Computes strides of views and gradients, which say whether a tensor shares its input's memory or is a copy.

    transposed, expanded, cut     look at the input                    their gradients: transposed back, summed, and
    reshaped                      looks at it where strides allow      put into zeros of the input's size
"""

from autoddl.core.graph import Op
from autoddl.operators.footprints.attention import written_out
from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Heap, Shape, Value, contiguous, is_contiguous, token_major, viewed
from autoddl.operators.work import base

__all__ = ["back_through", "drops_or_cuts", "elementwise_strides", "gradient_strides", "order_of", "output_strides",
           "reshaped", "view"]

_CUT = ("slice", "narrow", "split", "split_with_sizes", "chunk", "diagonal", "unfold")
_DROPPING = ("select", "unbind")


def order_of(op: Op, rank: int) -> tuple[int, ...] | None:
    """Returns the permutation of dims that the op makes, None if it makes none."""
    name, args = base(op).partition(".")[2], dict(op.args)
    order = list(range(rank))
    if name == "permute" and isinstance(args.get("dims"), tuple):
        return tuple(int(str(d)) % rank for d in args["dims"])  # type: ignore[union-attr]
    if name in ("t", "numpy_T"):
        return tuple(reversed(order))
    pair = {"mT": (-2, -1), "transpose": (args.get("dim0"), args.get("dim1")),
            "swapaxes": (args.get("axis0"), args.get("axis1"))}.get(name)
    if name == "movedim" and isinstance(args.get("source"), int) and isinstance(args.get("destination"), int):
        moved = order.pop(int(str(args["source"])))
        order.insert(int(str(args["destination"])) % rank, moved)
        return tuple(order)
    if pair is None or not all(isinstance(d, int) for d in pair):
        return None
    a, b = (int(str(d)) for d in pair)
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def drops_or_cuts(op: Op) -> bool:
    """Whether a view looks at a part of its input."""
    return base(op).partition(".")[2] in (*_CUT, *_DROPPING)


def reshaped(heap: Heap, x: Value, shape: Shape, kind: str) -> Value:
    """Returns `x` in another shape: another reference to its storage, or a copy where the strides demand one."""
    strides = viewed(x.shape, x.strides, shape) if 0 not in x.shape else contiguous(shape)
    if strides is None:
        return heap.value(shape, x.itemsize, kind)
    return Value(heap.keep(x.storage), shape, strides, x.itemsize)


def view(heap: Heap, op: Op, x: Value, shape: Shape) -> Value:
    """Returns the output, of shape `shape`, of the view `op` of `x`."""
    name, order = base(op).partition(".")[2], order_of(op, len(x.shape))
    if order is not None:
        strides = tuple(x.strides[d] for d in order)
    elif name in _CUT and len(shape) == len(x.shape):
        strides = x.strides
    elif name in _DROPPING:
        dim = int(str(dict(op.args).get("dim", 0))) % len(x.shape)
        strides = x.strides[:dim] + x.strides[dim + 1:]
    elif name == "expand":
        lead = len(shape) - len(x.shape)
        strides = (0,) * lead + tuple(0 if m != n else s for n, m, s in zip(x.shape, shape[lead:], x.strides,
                                                                         strict=True))
    else:
        return reshaped(heap, x, shape, "activations")
    return Value(heap.keep(x.storage), shape, strides, x.itemsize)


def back_through(heap: Heap, op: Op, gradient: Value, shape: Shape) -> Value:
    """Returns the gradient of the view's input, of shape `shape`, from the gradient of its output."""
    name, order = base(op).partition(".")[2], order_of(op, len(shape))
    if order is not None:
        back = [order.index(d) for d in range(len(order))]
        return Value(heap.keep(gradient.storage), shape, tuple(gradient.strides[d] for d in back), gradient.itemsize)
    if name in _CUT or name in _DROPPING or (name == "expand" and gradient.shape != shape):
        return heap.value(shape, gradient.itemsize, "transient")
    return reshaped(heap, gradient, shape, "transient")


def output_strides(call: LocalOp, shape: Shape) -> Shape:
    """Returns the strides of an op's output; attention in one kernel writes its output in the order of the queries."""
    if "attention" in call.op.target and (call.sends or not written_out(call)):
        return elementwise_strides(shape, call.inputs[:1])
    return contiguous(shape)


def gradient_strides(call: LocalOp, k: int, shape: Shape) -> Shape:
    """Returns the strides of the gradient of input k.

    Attention in one kernel writes the heads of one query next to each other. Attention written out as products makes
    the gradient of the transposed keys."""
    if "attention" not in call.op.target or len(shape) != 4:
        return contiguous(shape)
    if call.sends:
        return contiguous(shape)
    if not written_out(call):
        return token_major(shape)
    turned = contiguous((*shape[:2], shape[3], shape[2]))
    return (*turned[:2], turned[3], turned[2]) if call.op.slots[k] == "key" else contiguous(shape)


def elementwise_strides(shape: Shape, operands: tuple[Value, ...]) -> Shape:
    """Returns the strides of an elementwise result: dense, its dims in the order of the first operand of its shape."""
    for x in operands:
        if x.shape == shape:
            if is_contiguous(shape, x.strides) or 0 in x.strides:
                break
            found, step = [0] * len(shape), 1
            for dim in sorted(range(len(shape)), key=lambda d: (x.strides[d], -d)):
                found[dim], step = step, step * shape[dim]
            return tuple(found)
    return contiguous(shape)
