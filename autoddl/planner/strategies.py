"""Makes regions of the space of plans that are the strategies with names, like ZeRO-3.

A strategy gives every axis of the mesh a role:

    data     the ranks of the axis split the batch, read whole parameters, and store them whole
    zero     split the batch, read whole parameters, and store a piece of each that can be cut
    zero-1   as `zero`, with the optimizer's state alone in pieces
    zero-2   as `zero-1`, and gradients may be in pieces too
    zero-3   as `zero`, with weights in pieces too, but for those of tied parameters (`core.state_layouts`)
    tensor   no rank splits the batch; parameters are split however it is cheapest

A word before these changes what is split:

    context data, context zero-1 ...   the length of the sequences instead of the batch
    ring data, ring zero-1 ...         the same, and keys and values of attention pass round a ring
    halves data, halves zero-1 ...     the same, and ranks have all keys and trade halves of the queries
    expert ...                         as the rest says, but experts lie apart: parameters of 3 dims or more, along the
                                       first
    split tensor                       as `tensor`, and products read weights that are split wherever they can
    whole tensor                       as `split tensor`, and no rank splits the length of the sequences either

The batch is split where an op reads it together with a parameter, on as many of the axes as possible, the outermost
first. It is recognised by the leading dim of the first input. Where a view has folded that away, the ops around decide.
The length is dim 1 of a first input of 2 dims that holds tokens, or of one of 3 dims. A split of it is asked for of the
same ops. No strategy splits the places of an image.

Data parallel is `data` on all axes, ZeRO-1, 2 and 3 are those roles on all axes, tensor parallel is `tensor` on all.
HSDP is `zero-3` on the inner axes and `data` on the outer ones. A Megatron grid is `tensor` on the inner axes and
`data` on the outer ones. Everything that roles do not fix is free, so a strategy is priced at its best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError
from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import B, Layout, Mesh, Split, State, is_legal
from autoddl.core.stages import SEND
from autoddl.operators.ring import ROUND, goes_round, is_attention
from autoddl.operators.rules.table import options
from autoddl.operators.windows import WINDOWED
from autoddl.operators.work import is_product
from autoddl.planner.candidates import Candidate
from autoddl.planner.task import PlanTask
from autoddl.pricing.space import Choice, Region

__all__ = ["ROLES", "RolesRegion", "check_experts", "degrees_of", "grids_of_stages", "named_strategies", "strategy"]

_LENGTHS = ("context", "ring", "halves")
"""What is split by roles that split the length."""
_STATES = ("data", "zero", "zero-1", "zero-2", "zero-3")
_PLAIN = (*_STATES, "tensor", "split tensor", "whole tensor",
          *(f"{split} {states}" for split in _LENGTHS for states in _STATES))
ROLES = (*_PLAIN, *(f"expert {role}" for role in _PLAIN if role != "tensor"))
"""The roles that an axis of a mesh may have."""


def strategy(graph: Graph, mesh: Mesh, roles: Mapping[str, str], whole: Graph | None = None) -> Region:
    """The region in which every axis of `mesh` has the role that `roles` gives it, by the name of the axis.

    Of a stage, `whole` is the graph that it is a part of, whose inputs say what a batch is. Without it, what the stage
    receives says so too. Raises InputError for a
    split of a length that no input has, and of experts that the model has not.
    """
    axes = tuple(_AxisRole(mesh.index(name), *_role(role)) for name, role in roles.items())
    place = _Place(graph, whole or graph, mesh)
    _check(place, axes)
    divided = _divided(place, axes)
    cuttable = {t.name: {one.axis for one in axes if _can_cut(t, mesh, one.axis)} for t in graph.tensors
                if t.kind is Kind.PARAMETER}
    weights = _split_weights(place, [one.axis for one in axes if one.split in ("split", "whole")])
    forbidden = {one.split: [place.forbidden(t, one.split) for t in range(len(graph.tensors))]
                 for one in axes if one.is_tensor}
    sends = partial(_sends_as_asked, *_asked_to_send(axes))

    def stores(tensor: Tensor, choice: Choice) -> bool:
        zero = any(one.states.startswith("zero") for one in axes)
        return (zero or not choice.regather) and all(
            one.stores(tensor, choice, one.axis in cuttable[tensor.name], tensor.name in place.tied) for one in axes)

    def computes(op: Op, choice: Choice) -> bool:
        if any(choice.inputs[k][a] == B for k, a in weights.get(op.name, ())):
            return False
        if op.target in ROUND and not sends(op, choice.inner, choice.inputs[1]):
            return False
        if op.target in WINDOWED and choice.inner:
            return False
        batch, split = divided.get(op.name, (frozenset(), frozenset()))
        for one in axes:
            a = one.axis
            for t, layout in zip(op.inputs, choice.inputs, strict=True):
                if one.fixes(place, t) and layout[a] != one.read(place.source(t)):
                    return False
                if t in batch and a in split and layout[a] != Split(one.dim):
                    return False
            if one.is_tensor and any(layout[a] in forbidden[one.split][t] for t, layout in zip(
                    (*op.inputs, *op.outputs), (*choice.inputs, *choice.outputs), strict=True)):
                return False
        return True

    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        return stores(item, choice) if isinstance(item, Tensor) else computes(item, choice)

    return allowed


_DEPTHS = {"zero-1": (0,), "zero-2": (0, 1), "zero-3": (2,)}
"""The depths that a role allows where a parameter is split."""

_APART = "expert "
"""Beginning of the roles in which experts lie apart."""
_STACKED = 3
"""Least dims of a parameter that holds experts, one behind the other along the first."""


def _role(role: str) -> tuple[str, str, bool]:
    """(what is split, how parameters are stored, whether experts lie apart) of a role as it is written."""
    split, _, states = role.removeprefix(_APART).rpartition(" ")
    return split or ("tensor" if states == "tensor" else "batch"), states, role.startswith(_APART)


@dataclass(frozen=True, slots=True)
class _AxisRole:
    """The role of an axis: what is split on it, and how parameters are stored."""

    axis: int
    split: str
    states: str
    apart: bool

    @property
    def is_tensor(self) -> bool:
        """Whether products are split on the axis, and the batch is not."""
        return self.states == "tensor"

    @property
    def dim(self) -> int:
        """The dim of a batch that is split on the axis."""
        return 1 if self.split in _LENGTHS else 0

    def is_apart(self, tensor: Tensor) -> bool:
        """Whether a parameter holds experts that lie apart on the axis."""
        return self.apart and len(tensor.shape) >= _STACKED

    def fixes(self, place: "_Place", t: int) -> bool:
        """Whether the role says in which state tensor t is read."""
        return place.is_parameter(t) and (not self.is_tensor or self.is_apart(place.source(t)))

    def read(self, tensor: Tensor) -> State:
        """The state in which a parameter is read."""
        return Split(0) if self.is_apart(tensor) else B

    def stores(self, tensor: Tensor, choice: Choice, can_cut: bool, tied: bool) -> bool:
        """Whether a parameter may be stored so on the axis."""
        state = choice.outputs[0][self.axis]
        if self.is_apart(tensor):
            return state == Split(0) and not choice.depths[self.axis]
        if self.states == "data":
            return state == B
        if self.states.startswith("zero") and can_cut and state == B:
            return False
        if self.states not in _DEPTHS or state == B:
            return True
        return choice.depths[self.axis] in _DEPTHS["zero-2" if self.states == "zero-3" and tied else self.states]


def _given(graph: Graph) -> list[Tensor]:
    """The inputs of a graph, then what it receives from other stages."""
    received = (graph.tensors[t] for op in graph.ops if op.target == RECEIVE for t in op.outputs)
    return [*(t for t in graph.tensors if t.kind is Kind.INPUT), *received]


class _Place:
    """A graph on a mesh, with what is asked of it again and again; of a stage, `whole` is what it is a part of."""

    def __init__(self, graph: Graph, whole: Graph, mesh: Mesh) -> None:
        self.graph, self.whole, self.mesh = graph, whole, mesh
        self.behind = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.target == HUB}
        self.tied = {graph.tensors[i].name for i in self.behind.values()}
        inputs = [t for t in _given(whole) if t.shape]
        self.batches = frozenset(t.shape[0] for t in inputs)
        self.batch, self.length = inputs[0].shape[0] if inputs else None, _length(inputs)

    def source(self, t: int) -> Tensor:
        """The tensor itself, or the one of which it is a hub's copy."""
        return self.graph.tensors[self.behind.get(t, t)]

    def is_parameter(self, t: int) -> bool:
        """Whether a tensor is a parameter, or a hub's copy of one."""
        return self.source(t).kind is Kind.PARAMETER

    def forbidden(self, t: int, split: str) -> frozenset[State]:
        """The splits that a tensor may not have on an axis of tensor parallelism."""
        shape = self.graph.tensors[t].shape
        if not shape or self.is_parameter(t):
            return frozenset()
        found = {0} if shape[0] in self.batches else set[int]()
        if split == "whole" and self.length is not None:
            found |= {0} if shape[0] in {size * self.length for size in self.batches} else set()
            inner = range(1, max(2, len(shape) - 1)) if shape[0] in self.batches else ()
            found |= {d for d in inner if shape[d:d + 1] == (self.length,)}
        return frozenset(map(Split, found))


def _length(inputs: Sequence[Tensor]) -> int | None:
    """The length of the sequences that a model with these inputs reads; None where none says it."""
    if not inputs or len(inputs[0].shape) not in (2, 3) or (len(inputs[0].shape) == 2 and inputs[0].is_floating):
        return None
    return inputs[0].shape[1]


def _check(place: _Place, axes: Sequence[_AxisRole]) -> None:
    """Raises InputError for a split of what the model has not."""
    splits, apart = {one.split for one in axes}, any(one.apart for one in axes)
    if splits.intersection(_LENGTHS) and place.length is None:
        raise InputError("the length of sequences is dim 1 of a first input of tokens, or of one of 3 dims, and this "
                         "model has none: leave cp out")
    if apart:
        check_experts(place.whole)
    rings, halves = _asked_to_send(axes)
    if rings and halves:
        raise InputError("attention passes keys round a ring or trades halves of its queries, and not both: say ring, "
                         "or halves, of every axis that splits the length")
    stays = next((op for op in place.graph.ops if rings | halves and is_attention(op) and not any(
        _sends_as_asked(rings, halves, op, one.inner, one.inputs[1]) for one in options(op, place.graph, place.mesh))),
        None)
    if stays is not None:
        raise InputError(_stays(stays, "ring" if rings else "halves"))
    whole = next(filter(partial(_needs_all, place), place.graph.ops), None) if apart else None
    if whole is not None:
        raise InputError(f"{whole.module or whole.name} picks among all experts at once ({whole.target}), so that they "
                         "cannot lie apart: leave ep out, or multiply by all of them, as with torch.bmm")


def _asked_to_send(axes: Sequence[_AxisRole]) -> tuple[frozenset[int], frozenset[int]]:
    """The axes over which keys of attention are to pass round, and those over which halves of queries are traded."""
    rings, halves = (frozenset(one.axis for one in axes if one.split == split) for split in ("ring", "halves"))
    return rings, halves


def _sends_as_asked(rings: frozenset[int], halves: frozenset[int], op: Op, inner: Sequence[int], keys: Layout) -> bool:
    """Whether attention that communicates over axes `inner` does over all of `rings` and `halves`, each in its way."""
    return rings | halves <= set(inner) and (not rings or goes_round(op, keys, rings)) and (
        not halves or (op.target in ROUND and all(keys[a] == B for a in halves)))


def _stays(op: Op, split: str) -> str:
    """Says why attention does not send as a role asks."""
    what, ends = ("keys and values of {} cannot go round a ring", "choose another cp") if split == "ring" else (
        "ranks cannot trade halves of the queries of {}", "take 'context' in place of 'halves'")
    even = " that the ranks, or twice the ranks where causal or under a mask of FlexAttention, do not divide" if (
        split == "ring") else " that twice the ranks do not divide, or because it is neither causal nor under a mask"
    return (f"{what.format(f'{op.module or op.name} ({op.target})')}, because of dropout or of a length{even}: "
            f"leave {split} out, or {ends}")


def check_experts(graph: Graph) -> None:
    """Raises InputError where a model has no experts that could lie apart; a stage may have none."""
    is_stage = any(op.target in (SEND, RECEIVE) for op in graph.ops)
    if not is_stage and not any(t.kind is Kind.PARAMETER and len(t.shape) >= _STACKED for t in graph.tensors):
        raise InputError("experts lie apart where a parameter holds all of them along its first dim, and no parameter "
                         "of this model has 3 dims: leave ep, or the word expert, out")


def _split_weights(place: _Place, axes: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
    """By product, its inputs that are weights, with the axes of `axes` on which all of them can be read split."""
    found = {}
    for op in place.graph.ops if axes else ():
        weights = [k for k, t in enumerate(op.inputs) if place.is_parameter(t) and len(place.source(t).shape) > 1]
        pairs = [(k, a) for k in weights for a in axes] if is_product(op) else []
        if pairs and any(all(one.inputs[k][a] != B for k, a in pairs) for one in options(op, place.graph, place.mesh)):
            found[op.name] = pairs
    return found


def _needs_all(place: _Place, op: Op) -> bool:
    """Whether an op can read a parameter that holds experts only as a whole."""
    stacks = [k for k, t in enumerate(op.inputs) if place.is_parameter(t) and len(place.source(t).shape) >= _STACKED]
    every = [one.inputs for one in options(op, place.graph, place.mesh)] if stacks and op.target != HUB else []
    return any(all(Split(0) not in inputs[k].states for inputs in every) for k in stacks if every)


def _divided(place: _Place, axes: Sequence[_AxisRole]) -> dict[str, tuple[frozenset[int], frozenset[int]]]:
    """By name of an op that reads a parameter, (its inputs that are a batch, the axes on which it splits them).

    A batch depends on an input of the model, or of the stage, and has the leading dim of the model's first one. The
    axes are the first of those that split the batch or the length on which the op can.
    """
    graph, found = place.graph, {}
    made = {t for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.INPUT}
    for op in graph.ops:
        if op.target == RECEIVE or not made.isdisjoint(op.inputs):
            made.update(op.outputs)
        batch = frozenset(t for t in op.inputs if t in made and place.batch is not None
                          and graph.tensors[t].shape[:1] == (place.batch,))
        if batch and any(map(place.is_parameter, op.inputs)):
            found[op.name] = batch, frozenset(one.axis for one in _splitting(place, op, batch, axes))
    return found


def _splitting(place: _Place, op: Op, batch: frozenset[int], axes: Sequence[_AxisRole]) -> Sequence[_AxisRole]:
    """The first of the axes on which an op can read `batch` split and parameters whole."""
    weights = [place.source(t) for t in op.inputs if place.is_parameter(t)]
    long = all(place.graph.tensors[t].shape[1:2] == (place.length,) for t in batch)
    asked = [one for one in axes if not one.is_tensor and not any(map(one.is_apart, weights)) and (long or not one.dim)]
    every = [one.inputs for one in options(op, place.graph, place.mesh)]

    def reads(inputs: tuple[Layout, ...], one: _AxisRole) -> bool:
        return all(part[one.axis] == (Split(one.dim) if t in batch else B) for t, part in
                   zip(op.inputs, inputs, strict=True) if t in batch or place.is_parameter(t))

    most = next(n for n in range(len(asked), -1, -1)
                if not n or any(all(reads(inputs, one) for one in asked[:n]) for inputs in every))
    return asked[:most]


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


def degrees_of(region: object, mesh: Mesh) -> Degrees | None:
    """The degrees of a named strategy on a mesh; None for another region."""
    if not isinstance(region, RolesRegion):
        return None
    sizes: dict[str, int] = {}
    for role, size in zip((dict(region.roles)[name] for name in mesh.names), mesh.sizes, strict=True):
        sizes[role] = sizes.get(role, 1) * size
    data, tensor = prod(n for role, n in sizes.items() if role != "tensor"), sizes.get("tensor", 1)
    zero = next((role for role in sizes if role in _DEPTHS), "")
    pieces = sizes.get(zero, 0)
    return Degrees(tp=tensor, dp=data if data > 1 else 0, zero=int(zero[-1:] or 0),
                   shard=pieces if pieces < data else 0)


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
    return Candidate(mesh, RolesRegion(tuple(zip(mesh.names, roles, strict=True)), whole))


@dataclass(frozen=True, slots=True)
class RolesRegion:
    """Makes the region of a strategy on a graph and a mesh: the role of each axis by name; `whole` as in `strategy`."""

    roles: tuple[tuple[str, str], ...]
    whole: Graph | None = None

    def __call__(self, graph: Graph, mesh: Mesh) -> Region:
        return strategy(graph, mesh, dict(self.roles), self.whole)
