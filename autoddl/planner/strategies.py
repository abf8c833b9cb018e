"""Makes regions of the space of plans that are the strategies with names, like ZeRO-3.

A strategy gives every axis of the mesh a role:

    data     the ranks of the axis split the batch, read whole parameters, and store them whole
    zero     split the batch, read whole parameters, and store a piece of each that can be cut
    zero-1   as `zero`, with the optimizer's state alone in pieces
    zero-2   as `zero-1`, and gradients may be in pieces too
    zero-3   as `zero`, with weights in pieces too, but for those of tied parameters (`core.state_layouts`)
    tensor   no rank splits the batch; parameters are split however it is cheapest

The batch is split where an op reads it together with a parameter, on as many of the axes as possible, the outermost
first. It is recognised by the leading dim of the first input. Where a view has folded that away, the ops around decide.

Data parallel is `data` on all axes, ZeRO-1, 2 and 3 are those roles on all axes, tensor parallel is `tensor` on all.
HSDP is `zero-3` on the inner axes and `data` on the outer ones. A Megatron grid is `tensor` on the inner axes and
`data` on the outer ones. Everything that roles do not fix is free, so a strategy is priced at its best.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import B, Layout, Mesh, Split, is_legal
from autoddl.operators.rules.table import options
from autoddl.planner.candidates import Candidate
from autoddl.planner.task import PlanTask
from autoddl.pricing.space import Choice, Region

__all__ = ["grids_of_stages", "named_strategies", "strategy"]


def strategy(graph: Graph, mesh: Mesh, roles: Mapping[str, str], whole: Graph | None = None) -> Region:
    """The region in which every axis of `mesh` has the role that `roles` gives it, by the name of the axis.

    Of a stage, `whole` is the graph that it is a part of, whose inputs say what a batch is.
    """
    batches = _batches(whole or graph)
    behind = {t: i for op in graph.ops if op.target == HUB for t, i in ((op.outputs[0], op.inputs[0]),)}
    axes = tuple((mesh.index(name), role) for name, role in roles.items())
    cuttable = {t.name: {a for a, _ in axes if _can_cut(t, mesh, a)} for t in graph.tensors if t.kind is Kind.PARAMETER}

    def is_parameter(t: int) -> bool:
        return graph.tensors[behind.get(t, t)].kind is Kind.PARAMETER

    divided = _divided(graph, whole or graph, mesh, [a for a, role in axes if role != "tensor"], is_parameter)

    tied = {graph.tensors[i].name for i in behind.values()}

    def deep(tensor: Tensor, choice: Choice, a: int, role: str) -> bool:
        if role not in _DEPTHS or choice.outputs[0][a] == B:
            return True
        return choice.depths[a] in _DEPTHS["zero-2" if role == "zero-3" and tensor.name in tied else role]

    def stores(tensor: Tensor, choice: Choice) -> bool:
        part = choice.outputs[0]
        if not all(deep(tensor, choice, a, role) for a, role in axes):
            return False
        if any(role.startswith("zero") for _, role in axes):
            full = all(part[a] != B for a, role in axes if role.startswith("zero") and a in cuttable[tensor.name])
            return full and all(part[a] == B for a, role in axes if role == "data")
        return not choice.regather and all(part[a] == B for a, role in axes if role == "data")

    def computes(op: Op, choice: Choice) -> bool:
        batch, split = divided.get(op.name, (frozenset(), frozenset()))
        for a, role in axes:
            for t, layout in zip(op.inputs, choice.inputs, strict=True):
                if role != "tensor" and is_parameter(t) and layout[a] != B:
                    return False
                if t in batch and a in split and layout[a] != Split(0):
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


_DEPTHS = {"zero-1": (0,), "zero-2": (0, 1), "zero-3": (2,)}
"""The depths that a role allows where a parameter is split."""


def _batches(graph: Graph) -> frozenset[int]:
    """The sizes that the leading dims of the inputs have."""
    return frozenset(t.shape[0] for t in graph.tensors if t.kind is Kind.INPUT and t.shape)


def _divided(graph: Graph, whole: Graph, mesh: Mesh, axes: Sequence[int], is_parameter: Callable[[int], bool]
             ) -> dict[str, tuple[frozenset[int], frozenset[int]]]:
    """By name of an op that reads a parameter, (its inputs that are a batch, the axes on which it can split them).

    A batch depends on an input of the model, or of the stage, and has the leading dim of the model's first one. The
    axes are the first of `axes` on which the op can read batches split and parameters whole.
    """
    batch = next((t.shape[:1] for t in whole.tensors if t.kind is Kind.INPUT and t.shape), ())
    made = {t for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.INPUT}
    found = {}
    for op in graph.ops:
        if op.target == RECEIVE or not made.isdisjoint(op.inputs):
            made.update(op.outputs)
        split = frozenset(t for t in op.inputs if t in made and batch and graph.tensors[t].shape[:1] == batch)
        if split and any(map(is_parameter, op.inputs)):
            wanted = [Split(0) if t in split else B if is_parameter(t) else None for t in op.inputs]
            every = [one.inputs for one in options(op, graph, mesh)]
            most = next(n for n in range(len(axes), -1, -1) if not n or any(
                all(want in (None, part[a]) for want, part in zip(wanted, inputs, strict=True) for a in axes[:n])
                for inputs in every))
            found[op.name] = split, frozenset(axes[:most])
    return found


def _can_cut(tensor: Tensor, mesh: Mesh, axis: int) -> bool:
    """Whether some dim of `tensor` can be split on all axes up to `axis` of the mesh."""
    part = Mesh(mesh.axes[:axis + 1])
    return any(is_legal(tensor.shape, _all(Split(d), part), part) for d in range(len(tensor.shape)))


def _all(split: Split, mesh: Mesh) -> Layout:
    return Layout((split,) * len(mesh.axes))


def named_strategies(task: PlanTask, tried: tuple[Mesh, ...]) -> dict[str, list[Candidate]]:
    """By title, every named strategy as candidates: a mesh and a role for each of its axes.

    A role on all axes is one region on every mesh, so only meshes of few axes are listed. A grid is tensor parallel
    inside and data parallel outside, once for every size of the inside.
    """
    fewest = min(len(mesh.axes) for mesh in tried)
    coarse = [mesh for mesh in tried if len(mesh.axes) <= max(2, fewest)]
    found = {title: [_as(mesh, (role,) * len(mesh.axes)) for mesh in coarse] for title, role in (
        ("data parallel", "data"), ("ZeRO-1", "zero-1"), ("ZeRO-2", "zero-2"), ("ZeRO-3", "zero-3"),
        ("tensor parallel", "tensor"))}
    return found | {"HSDP": _grids(tried, "zero-3"), "tensor x data grid": _grids(tried, "tensor")}


def _grids(tried: Sequence[Mesh], inner: str) -> list[Candidate]:
    """Candidates with the role `inner` inside and data parallel outside, once for every size of the inside."""
    grids: dict[int, Candidate] = {}
    for mesh in sorted(tried, key=lambda mesh: len(mesh.axes)):
        for outside in range(1, len(mesh.axes)):
            inside = len(mesh.axes) - outside
            grids.setdefault(mesh.strides[outside - 1], _as(mesh, ("data",) * outside + (inner,) * inside))
    return list(grids.values())


def grids_of_stages(tried: Sequence[Mesh], whole: Graph) -> dict[tuple[int, int], Candidate]:
    """By (data parallel, tensor parallel) ranks, grids of the stages of a model: tensor inside and data outside.

    Either may be 1. `whole` is the graph that the stages are parts of.
    """
    found: dict[tuple[int, int], Candidate] = {}
    for mesh in sorted(tried, key=lambda mesh: len(mesh.axes)):
        for outside in range(len(mesh.axes) + 1):
            roles = ("data",) * outside + ("tensor",) * (len(mesh.axes) - outside)
            data = prod(mesh.sizes[:outside])
            found.setdefault((data, mesh.size // data), _as(mesh, roles, whole))
    return found


def _as(mesh: Mesh, roles: tuple[str, ...], whole: Graph | None = None) -> Candidate:
    return Candidate(mesh, partial(_region, dict(zip(mesh.names, roles, strict=True)), whole))


def _region(roles: Mapping[str, str], whole: Graph | None, graph: Graph, mesh: Mesh) -> Region:
    return strategy(graph, mesh, roles, whole)
