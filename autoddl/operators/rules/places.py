"""Signatures that split the places of images, volumes and sequences, where windows look over the edge of a piece.

    convolution            x S(place), weight B, bias B -> S(place)    ranks send each other the halos of their pieces:
    pool, interpolation    x S(place) -> S(place)                      inner; a roll has them too
    group norm             x S(place), weight B, bias B -> S(place)    ranks reduce the statistics of each group: inner

Where no window looks over an edge, the dim has a name in the rule, and nothing is sent:

    1 x 1                                "b c place2 . -> b c place2 ."
    windows of 2 that do not overlap     "b c (place2 .:2) . -> b c place2 ."
    the same, transposed                 "b c place2 . -> b c (place2 .:2) ."
"""

from collections.abc import Iterable
from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.core.layout import B, Layout, Mesh, Split
from autoddl.operators.rules.dimension_strings import Signature
from autoddl.operators.rules.writing import Tensors
from autoddl.operators.windows import HALO, Window, halo_box, halo_elements, is_aligned, place_name, windows_of

__all__ = ["halo_messages", "halo_parts", "halo_signatures", "place_dims", "place_signatures"]


def place_dims(op: Op, inputs: Tensors, outputs: Tensors, count: int) -> tuple[list[str], list[str]]:
    """The names of the last `count` dims of an op's input and output: a place where its dim is aligned, else `.`."""
    rank, windows = len(inputs[0].shape), _windows(op, inputs)
    read, written = ["."] * count, ["."] * count
    for dim, window in windows.items():
        size, out = inputs[0].shape[dim], outputs[0].shape[dim]
        if out > 1 and is_aligned(window, size, out):
            name, k = place_name(dim), dim - rank + count
            read[k], written[k] = _as_block(name, window.stride), _as_block(name, window.parts)
    return read, written


def _as_block(name: str, size: int) -> str:
    """A place with so many elements."""
    return name if size == 1 else f"({name} .:{size})"


def halo_signatures(op: Op, inputs: Tensors, outputs: Tensors) -> tuple[Signature, ...]:
    """A signature for each dim along which windows look over the edges of pieces."""
    x, y = inputs[0].shape, outputs[0].shape
    return place_signatures(len(inputs), (dim for dim, window in _windows(op, inputs).items()
                                              if y[dim] > 1 and not is_aligned(window, x[dim], y[dim])))


def place_signatures(count: int, dims: Iterable[int]) -> tuple[Signature, ...]:
    """The first of `count` inputs and the output split along each of `dims`; the kernel communicates."""
    return tuple(Signature((Split(dim), *(B,) * (count - 1)), (Split(dim),), place_name(dim), (), True) for dim in dims)


def halo_messages(op: Op, graph: Graph, read: Layout, mesh: Mesh, coordinate: tuple[int, ...] | None
                  ) -> tuple[tuple[str, str, int], ...]:
    """(pass, kind, bytes) of what a rank sends, in order; `read` is the layout of its input."""
    x, y = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
    windows = tuple(windows_of(op, tuple(graph.tensors[t].shape for t in op.inputs)).items())
    sent, received = halo_elements(x.shape, y.shape, windows, read, mesh, coordinate)
    back = (("backward", HALO, received * x.itemsize),) if op.inputs[0] in graph.differentiable() else ()
    return ("forward", HALO, sent * x.itemsize), *back


def halo_parts(op: Op, graph: Graph, read: Layout, mesh: Mesh, axes: tuple[int, ...], at: tuple[int, ...],
               backward: bool = False) -> tuple[int, ...]:
    """Bytes that the rank at `at` sends each member of its group over `axes`, in their order; in backward, gradients.

    They add up to those of `halo_messages`."""
    x, y = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
    windows = windows_of(op, tuple(graph.tensors[t].shape for t in op.inputs))
    ends = (((other, at) if backward else (at, other)) for other in mesh.members(axes, at))
    boxes = (() if a == b else halo_box(x.shape, y.shape, windows, read, mesh, a, b) for a, b in ends)
    return tuple(prod(count for _, count in box) * x.itemsize if box else 0 for box in boxes)


def _windows(op: Op, inputs: Tensors) -> dict[int, Window]:
    return windows_of(op, tuple(t.shape for t in inputs))
