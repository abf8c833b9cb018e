"""Describes a plan as a configuration: what every axis of its mesh does, by the parameters for which it does so.

Each parameter has a say on each axis, with its bytes, by how ops read it there:

    a piece               tensor
    whole, and a batch    data; zero-1, 2 or 3 where it is stored in pieces (`core.state_layouts`)
    whole, and rows       context: what is read with it is split along its second dim
    whole, and all        idle: ranks repeat each other's work, and no trainer has such; they are said to be data
                          parallel, or tensor parallel

A parameter of experts that is read split by experts has no say: those ranks share the batch. The role of an axis is
the one with the most bytes. What the others do is lost, and is named.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoddl.core.errors import InputError
from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor, graph_from_text
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.layout import B, Layout, Split
from autoddl.core.names import fold_names
from autoddl.core.pipeline import sizes_text
from autoddl.core.plan import Plan
from autoddl.core.precision import Precision
from autoddl.export.configuration import DATA_ROLES, Configuration, Degree, degrees_of
from autoddl.export.recompute_policy import short_policy
from autoddl.export.subject import Subject
from autoddl.export.target import TensorPiece
from autoddl.operators.work import base

__all__ = ["Described", "describe_plan", "has_idle_axes", "norm_modules", "tensor_pieces"]

_PARALLEL = {"tensor": "tensor parallel", "data": "data parallel", "zero-1": "data parallel, zero-1,"}

IDLE = "idle"
"""The say of a parameter where ranks of an axis read all of it with all of what is read with it."""

PRODUCTS = tuple(f"aten.{name}" for name in (
    "linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "einsum", "convolution", "conv2d", "embedding"))
"""Operators whose layout says nothing of a sequence between products."""


@dataclass(frozen=True, slots=True)
class Described:
    """A plan as a configuration, and what of it no configuration of degrees says."""

    configuration: Configuration
    lost: tuple[str, ...]


def describe_plan(plan: Plan, subject: Subject, idle: str = "tensor") -> Described:
    """The configuration that is nearest to a plan, in which idle ranks have the role `idle`: tensor, data or zero-1.

    Raises InputError where the rows of a microbatch do not split evenly over the ranks that split the batch. Raises it
    for stages of different numbers of ranks, and for parameters of a dtype that no recipe of precision has.
    """
    if plan.pipeline is not None and plan.pipeline.sizes:
        raise InputError(f"the stages of this plan have {sizes_text(plan.pipeline.sizes)} ranks, and a configuration "
                         "has as many for every stage: plan without --stage-ranks")
    parts = [_Part(one, idle) for one in _stage_plans(plan)]
    main = max(parts, key=lambda part: part.nbytes)
    lost = [text for part in parts[:1 if plan.pipeline is None else 0] for text in part.exceptions]
    if plan.pipeline is not None:
        lost += _stages_lost(parts, main)
    layers = _layers(plan, subject)
    degrees = main.degrees
    found = Configuration(degrees, _rows(subject, degrees), plan.microbatches,
                          1 if plan.pipeline is None else len(plan.pipeline.ranks),
                          "1f1b" if plan.pipeline is None else plan.pipeline.name, layers,
                          main.sequence and any(one.role == "tensor" for one in degrees), main.experts,
                          _precision(plan, subject), _recompute(plan, subject))
    lost += [f"axis {name}: its {size} ranks repeat each other's work, and are {_PARALLEL[idle]} here"
             for name, (role, size) in zip(main.plan.mesh.names, main.axes, strict=True) if role == IDLE and size > 1]
    if plan.codecs:
        lost.append(f"messages are sent coded as {', '.join(plan.codecs)}, and are not here")
    if plan.sparse_sums:
        lost.append(f"gradients of {len(plan.sparse_sums)} parameters add up sparse, and do whole here")
    return Described(found, tuple(lost))


def tensor_pieces(plan: Plan) -> tuple[TensorPiece, ...]:
    """The parameters that a plan without stages splits over its axes of tensor parallelism, each along one dim."""
    part, found = _Part(plan, "tensor"), list[TensorPiece]()
    axes = [a for a, (role, size) in enumerate(part.axes) if role == "tensor" and size > 1]
    for tensor, reads in _reads(part.graph, plan).items():
        states = {layout[a] for _, layout, _ in reads for a in axes}
        dims = {state.dim for state in states if isinstance(state, Split)}
        if len(states) == len(dims) == 1:
            found.append(TensorPiece(tensor.fqn, min(dims), base(reads[0][0]).removeprefix("aten.")))
    return tuple(found)


def norm_modules(graph: Graph) -> tuple[str, ...]:
    """The modules beside products that read parameters of one dim, in order."""
    return tuple(dict.fromkeys(op.module for op in graph.ops if op.module and _is_norm(op, graph)))


def _stage_plans(plan: Plan) -> list[Plan]:
    return [plan] if plan.pipeline is None else [stage.plan for stage in plan.pipeline.stages]


def has_idle_axes(plan: Plan) -> bool:
    """Whether ranks along some axis of a plan repeat each other's work for most parameters."""
    return any(role == IDLE and size > 1 for one in _stage_plans(plan) for role, size in _Part(one, IDLE).axes)


class _Part:
    """Tells what the axes of a plan without stages do, or those of one stage."""

    def __init__(self, plan: Plan, idle: str) -> None:
        self.plan, self.graph, self.idle = plan, add_hubs(graph_from_text(plan.source["graph"])), idle
        self.stored = plan.index().stored

    def known(self, role: str) -> str:
        """The role that a configuration has for a role of an axis."""
        return self.idle if role == IDLE else role

    @property
    def degrees(self) -> tuple[Degree, ...]:
        """The axes as a configuration has them."""
        return degrees_of(Degree(self.known(role), size) for role, size in self.axes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return sum(t.stored.nbytes for t in self.graph.tensors if t.kind is Kind.PARAMETER)

    @cached_property
    def says(self) -> Mapping[str, tuple[tuple[str, ...], int]]:
        """By name of a parameter, its role on every axis, and its bytes."""
        found: dict[str, tuple[tuple[str, ...], int]] = {}
        for tensor, layouts in _reads(self.graph, self.plan).items():
            stored = self.stored.get(tensor.fqn)
            if stored is None or not layouts:
                continue
            roles = tuple(_role(tensor, a, layouts, stored.layout, stored.depths)
                          for a in range(len(self.plan.mesh.axes)))
            found[tensor.fqn] = roles, tensor.stored.nbytes
        return found

    @cached_property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(role, size) of every axis."""
        found = []
        for a, axis in enumerate(self.plan.mesh.axes):
            votes = Counter[str]()
            for roles, nbytes in self.says.values():
                votes[roles[a]] += nbytes
            votes.pop("experts", None)
            found.append((votes.most_common(1)[0][0] if votes else "data", axis.size))
        return tuple(found)

    @property
    def exceptions(self) -> tuple[str, ...]:
        """The parameters that have another role than their axis."""
        others: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for a, (name, (role, size)) in enumerate(zip(self.plan.mesh.names, self.axes, strict=True)):
            for fqn, (roles, _) in self.says.items():
                if roles[a] != "experts" and self.known(roles[a]) != self.known(role) and size > 1:
                    others[name, role, roles[a]].append(fqn)
        return tuple(f"axis {name}: {_folded(fqns)} {_DOES[mine]}, where the configuration is {self.known(role)}"
                     for (name, role, mine), fqns in others.items())

    @property
    def experts(self) -> int:
        """Ranks over which experts are split."""
        sizes = self.plan.mesh.sizes
        return max((_product(size for size, role in zip(sizes, roles, strict=True) if role == "experts")
                    for roles, _ in self.says.values()), default=1)

    @property
    def sequence(self) -> bool:
        """Whether most of what norms read is split along its sequence over the axes of tensor parallelism."""
        tensor, votes = [a for a, (role, _) in enumerate(self.axes) if self.known(role) == "tensor"], Counter[bool]()
        decisions = self.plan.index().decisions
        for op in self.graph.ops:
            if not _is_norm(op, self.graph) or op.name not in decisions:
                continue
            layout, shape = decisions[op.name].inputs[0], self.graph.tensors[op.inputs[0]].shape
            split = any(isinstance(layout[a], Split) and layout[a] != Split(len(shape) - 1) for a in tensor)
            votes[split] += self.graph.tensors[op.inputs[0]].nbytes
        return votes[True] > votes[False]


_DOES = {"data": "are read and stored whole", "zero-1": "are whole but for the optimizer's state",
         "zero-2": "are whole but for gradients and the optimizer's state", "zero-3": "are gathered anew for each use",
         "context": "are read with a part of the sequence", "tensor": "are read in pieces",
         IDLE: "are read by ranks that repeat each other's work"}


def _product(sizes: Iterator[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _folded(names: list[str]) -> str:
    found = list(fold_names(names))
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"{', '.join(found[:4])}{more}"


def _is_norm(op: Op, graph: Graph) -> bool:
    """Whether an op reads a parameter of one dim, and is no product."""
    behind = {one.outputs[0]: one.inputs[0] for one in graph.ops if one.target == HUB}
    read = [graph.tensors[behind.get(t, t)] for t in op.inputs]
    return base(op) not in PRODUCTS and op.target != HUB and bool(read) and read[0].kind is not Kind.PARAMETER and any(
        t.kind is Kind.PARAMETER and len(t.shape) == 1 for t in read) and len(read[0].shape) > 1


_Read = tuple[Op, Layout, tuple[Layout, ...]]
"""An op that reads a parameter, the layout in which it does, and those of what it reads besides."""


def _reads(graph: Graph, plan: Plan) -> dict[Tensor, list[_Read]]:
    """By parameter, how ops read it together with what depends on an input."""
    behind = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.target == HUB}
    found: dict[Tensor, list[_Read]] = {t: [] for t in graph.tensors if t.kind is Kind.PARAMETER}
    decisions, batches = plan.index().decisions, {i for i, t in enumerate(graph.tensors) if t.kind is Kind.INPUT}
    for op in graph.ops:
        if op.target == RECEIVE or not batches.isdisjoint(op.inputs):
            batches.update(op.outputs)
        if op.target == HUB or op.name not in decisions or batches.isdisjoint(op.inputs):
            continue
        layouts, tensors = decisions[op.name].inputs, [graph.tensors[behind.get(t, t)] for t in op.inputs]
        others = tuple(layout for t, layout in zip(op.inputs, layouts, strict=True) if t in batches)
        for t, layout in zip(tensors, layouts, strict=True):
            if t.kind is Kind.PARAMETER:
                found[t].append((op, layout, others))
    return found


def _role(tensor: Tensor, a: int, reads: list[_Read], stored: Layout, depths: tuple[int, ...]) -> str:
    """The role that a parameter gives an axis."""
    pieces = [(op, layout) for op, layout, _ in reads if layout[a] != B]
    if pieces:
        by_experts = len(tensor.shape) > 2 and all(
            base(op) in ("aten.bmm", "aten.einsum") and layout[a] == Split(0) for op, layout in pieces)
        return "experts" if by_experts else "tensor"
    others = {layout[a] for _, _, every in reads for layout in every}
    if Split(0) in others:
        return "data" if stored[a] == B else DATA_ROLES[1 + depths[a]]
    if Split(1) in others:
        return "context"
    return IDLE


def _stages_lost(parts: list[_Part], main: _Part) -> list[str]:
    """Names what is lost where stages differ from the one with most parameters."""
    found = []
    for s, part in enumerate(parts):
        if part.degrees != main.degrees:
            grid = " ".join(f"{role}={size}" for role, size in part.axes)
            found.append(f"stage {s} is {grid}, and all stages are alike here")
    rows = dict.fromkeys(text for part in parts for text in part.exceptions)
    return [*found, *rows]


def _layers(plan: Plan, subject: Subject) -> tuple[int, ...]:
    """Blocks by stage, () for equally many. Raises InputError where a cut is inside a block."""
    if plan.pipeline is None:
        return ()
    found = subject.layers(plan.pipeline.cuts)
    if found is None:
        raise InputError(f"stages of this plan begin inside of blocks, or {plan.model} has none, and other trainers "
                         "cut between the members of a list of modules: name cuts with --cut, or plan without stages")
    return found


def _rows(subject: Subject, degrees: tuple[Degree, ...]) -> int:
    """Rows of a microbatch on one rank."""
    data = Configuration(degrees).data
    if subject.rows % data:
        raise InputError(f"a microbatch has {subject.rows} rows, which {data} ranks do not split evenly: other "
                         "trainers give each as many, so plan with a batch that is a multiple, or fewer microbatches")
    return subject.rows // data


def _precision(plan: Plan, subject: Subject) -> str:
    """The recipe; the one with the dtype of the parameters where they are used as they are written."""
    if plan.precision != "as-written":
        return plan.precision
    dtypes = {t.dtype for t in subject.graph.tensors if t.kind is Kind.PARAMETER and t.is_floating}
    name = {"float32": "float32", "bfloat16": "bf16"}.get(next(iter(dtypes), "float32")) if len(dtypes) < 2 else None
    if name is None:
        raise InputError(f"the parameters of {plan.model} have {' and '.join(sorted(dtypes))}, and other trainers "
                         "store them in float32 or bfloat16: plan with --precision float32, bf16-mixed or bf16")
    return str(Precision(name))


def _recompute(plan: Plan, subject: Subject) -> str:
    names = [name for one in _stage_plans(plan) for name in one.recompute]
    return short_policy(subject.hubs, names)
