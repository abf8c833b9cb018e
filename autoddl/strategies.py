"""Regions of the space of plans: the strategies that people name.

A strategy gives every axis of the mesh a role:

    data     the ranks of the axis split the batch, read whole parameters, and store them whole
    zero     split the batch, read whole parameters, and store a piece of each that can be cut
    tensor   nobody splits the batch; parameters are split however it is cheapest

The batch is split where an op reads it beside a parameter, if it can be: its leading dim stands for the batch.

Data parallel is `data` everywhere, ZeRO-3 `zero` everywhere, tensor parallel `tensor` everywhere, a Megatron grid
`tensor` on some axes and `data` on the others. Within a role all is free, so a strategy is priced at its best.
"""

from collections.abc import Callable, Mapping, Sequence

from autoddl.graph import Graph, Kind, Op, Tensor
from autoddl.hubs import HUB
from autoddl.layout import B, Layout, Mesh, Split, is_legal
from autoddl.rules import options
from autoddl.space import Choice, Region

__all__ = ["strategy"]


def strategy(graph: Graph, mesh: Mesh, roles: Mapping[str, str]) -> Region:
    """The region in which every axis has the role that `roles` gives it."""
    batches = _batches(graph)
    behind = {t: i for op in graph.ops if op.target == HUB for t, i in ((op.outputs[0], op.inputs[0]),)}
    axes = tuple((mesh.index(name), role) for name, role in roles.items())
    cuttable = {t.name: {a for a, _ in axes if _can_cut(t, mesh, a)} for t in graph.tensors if t.kind is Kind.PARAMETER}

    def is_parameter(t: int) -> bool:
        return graph.tensors[behind.get(t, t)].kind is Kind.PARAMETER

    divided = _divided(graph, mesh, [a for a, role in axes if role != "tensor"], is_parameter)

    def stores(tensor: Tensor, choice: Choice) -> bool:
        part = choice.outputs[0]
        if any(role == "zero" for _, role in axes):
            full = all(part[a] != B for a, role in axes if role == "zero" and a in cuttable[tensor.name])
            return full and all(part[a] == B for a, role in axes if role == "data")
        return not choice.regather and all(part[a] == B for a, role in axes if role == "data")

    def computes(op: Op, choice: Choice) -> bool:
        for a, role in axes:
            for t, layout in zip(op.inputs, choice.inputs, strict=True):
                if role != "tensor" and is_parameter(t) and layout[a] != B:
                    return False
                if role != "tensor" and t in divided.get(op.name, ()) and layout[a] != Split(0):
                    return False
            if role == "tensor":
                for t, layout in zip((*op.inputs, *op.outputs), (*choice.inputs, *choice.outputs), strict=True):
                    tensor = graph.tensors[t]
                    if layout[a] == Split(0) and not is_parameter(t) and tensor.shape[0] in batches:
                        return False
        return True

    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        return stores(item, choice) if isinstance(item, Tensor) else computes(item, choice)

    return allowed


def _batches(graph: Graph) -> frozenset[int]:
    """Sizes of the leading dim of the inputs."""
    return frozenset(t.shape[0] for t in graph.tensors if t.kind is Kind.INPUT and t.shape)


def _divided(graph: Graph, mesh: Mesh, axes: Sequence[int], is_parameter: Callable[[int], bool]
             ) -> dict[str, frozenset[int]]:
    """Per op that reads a parameter, its inputs that are a batch (made of an input, the leading dim as long), where it
    can read them split on `axes` and the parameters whole."""
    batches, made = _batches(graph), {t for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.INPUT}
    found = {}
    for op in graph.ops:
        if not made.isdisjoint(op.inputs):
            made.update(op.outputs)
        if any(map(is_parameter, op.inputs)):
            split = frozenset(t for t in op.inputs if t in made and {*graph.tensors[t].shape[:1]} & batches)
            wanted = [Split(0) if t in split else B if is_parameter(t) else None for t in op.inputs]
            if any(all(want in (None, layout[a]) for want, layout in zip(wanted, one.inputs, strict=True) for a in axes)
                   for one in options(op, graph, mesh)):
                found[op.name] = split
    return found


def _can_cut(tensor: Tensor, mesh: Mesh, axis: int) -> bool:
    """Whether some dim of `tensor` can be split on all axes up to `axis` of the mesh."""
    part = Mesh(mesh.axes[:axis + 1])
    return any(is_legal(tensor.shape, _all(Split(d), part), part) for d in range(len(tensor.shape)))


def _all(split: Split, mesh: Mesh) -> Layout:
    return Layout((split,) * len(mesh.axes))
