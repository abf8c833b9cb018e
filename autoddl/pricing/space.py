"""Makes the space of plans on one mesh: a variable for every op, hub and parameter, and the layouts it may choose.

Ops that do not depend on a parameter (the *cone*) are computed by every rank and choose nothing. The others choose:

    op          one signature per axis (rules.options); keys of attention go round a ring where that is offered, and
                places of images are split where a batch has fewer images than the mesh has ranks
    hub         per axis S(d), P, B with gradients added up as B, B with gradients added up as P
    send, receive   per axis S(d) or B, and the gradient alike: no partial sum goes to another stage
    parameter   stored S(d) or B per axis; where it is split, with the optimizer's state alone, its gradients too, or
                its weight as well (`core.state_layouts`); where that is allowed, with or without a sparse sum of its
                gradients (`core.sparse`)

A *region* narrows the space: pins of a user, or a named strategy. It is a function from (graph, op or parameter, its
choice) to bool, never a code path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from autoddl.core.errors import InputError
from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import B, Layout, Mesh, P, Split, State
from autoddl.core.layout_codes import (
    BROADCAST,
    dual_codes,
    encode_layout,
    encode_states,
    legal_mask,
    legal_states,
    state_code,
)
from autoddl.core.stages import SEND, may_be_partial
from autoddl.operators.ring import offers_ring
from autoddl.operators.rules.table import OptionRows, infinite_tensors, option_rows
from autoddl.operators.windows import PLACE
from autoddl.pricing.choices import Choice, Choices

__all__ = ["Choice", "Region", "Variable", "decided", "everything", "may_be_sparse", "variables"]

Region = Callable[[Graph, Op | Tensor, Choice], bool]


@dataclass(frozen=True, slots=True)
class Variable:
    """One decision of a plan: `item` is the op (hubs included) or the parameter, `choices` what it may take."""

    item: Op | Tensor
    choices: Sequence[Choice]

    @property
    def name(self) -> str:
        """The name of the op, or of the parameter in the module."""
        return self.item.fqn if isinstance(self.item, Tensor) else self.item.name


def everything(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
    """Allows every choice: the region that is the whole space."""
    return True


@lru_cache(maxsize=10_000)
def _of_op(found: OptionRows, axes: int, inner: bool, places: bool) -> Choices:
    """The choices of ops that are alike, with the layouts of the gradients that follow from each.

    Without `inner` they are those whose kernel does not communicate, without `places` those that split no image."""
    wanted = tuple(dual_codes(column, axes) for column in found.outputs)
    every = Choices(axes, found.inputs, found.outputs, found.gradients, wanted, found.inner,
                    np.zeros_like(found.inner))
    allowed = np.ones(len(every), dtype=bool) if inner else found.inner == 0
    if not places:
        allowed &= ~np.array([one.split.startswith(PLACE) for one in found.signatures])[found.picked].any(axis=1)
    return every if allowed.all() else every.only(allowed)


@lru_cache(maxsize=10_000)
def _of_hub(shape: tuple[int, ...], mesh: Mesh, partial: bool, gradients: bool) -> Choices:
    """The choices of a hub: a pair (layout, layout of the gradient) per axis; the second is idle without gradients."""
    states: list[tuple[State, State]] = [(Split(d), Split(d)) for d in range(len(shape)) if shape[d] > 1]
    states += [(P, B)] if partial else []
    states += [(B, B), (B, P)] if gradients else [(B, B)]
    codes = [(state_code(s), state_code(g)) for s, g in states]
    every = np.array(list(product(codes, repeat=len(mesh.axes))), dtype=np.int64)
    legal, layouts, back = legal_mask(shape, mesh), encode_states(every[:, :, 0]), encode_states(every[:, :, 1])
    fine = legal[layouts] & legal[back]
    layouts, back = layouts[fine], back[fine]
    inner = np.zeros_like(layouts)
    return Choices(len(mesh.axes), (layouts,), (layouts,), (back,), (back,), inner, inner)


@lru_cache(maxsize=10_000)
def _of_transfer(shape: tuple[int, ...], mesh: Mesh, sends: bool, chained: bool, partial: bool) -> Choices:
    """The choices of an op that sends or receives: one layout per axis, which is that of the gradient too.

    Where it may be `partial` they are those of a hub. Tokens, `chained` where one is read, are whole on every rank.
    """
    layouts = encode_states(legal_states(shape, mesh, partial=False))
    back = layouts
    if partial:
        hub = _of_hub(shape, mesh, True, True)
        layouts, back = hub.outputs[0], hub.wanted[0]
    whole, nothing = np.full_like(layouts, encode_layout(Layout.broadcast(mesh))), np.zeros_like(layouts)
    if not sends:
        return Choices(len(mesh.axes), (), (layouts,), (), (back,), nothing, nothing)
    read, wanted = ((one, whole) if chained else (one,) for one in (layouts, back))
    return Choices(len(mesh.axes), read, (whole,), wanted, (whole,), nothing, nothing)


@lru_cache(maxsize=10_000)
def _of_parameter(shape: tuple[int, ...], mesh: Mesh, kept: bool, several: bool, sparse: bool) -> Choices:
    """The stored layouts of a parameter, with every depth on every axis that is split.

    With one microbatch gradients are reduced once in any case; with `several`, a piece of their sum may be kept. A
    gathered weight is `kept` where it is tied, behind a hub, and where several microbatches are in flight. With
    `sparse` every choice that is whole on some axis is there again with a sparse sum.
    """
    states = legal_states(shape, mesh, partial=False)
    deep = [0, *([1] if several else []), *([] if kept else [2])]
    every = np.array(list(product(deep, repeat=len(mesh.axes))), dtype=np.int64)
    fine = ((every[None] == 0) | (states != BROADCAST)[:, None]).all(axis=2)
    which, depths = np.nonzero(fine)
    layouts, axes = encode_states(states)[which], len(mesh.axes)
    split = every[depths] @ 3 ** np.arange(axes)
    if sparse:
        whole = ((states[which] == BROADCAST) & (np.array(mesh.sizes) > 1)).any(axis=1)
        layouts = np.concatenate([layouts, layouts[whole]])
        split = np.concatenate([split, split[whole] + 3**axes])
    return Choices(axes, (), (layouts,), (), (layouts,), np.zeros_like(layouts), split)


@dataclass(frozen=True, slots=True)
class _Made:
    """Choices made so far, so that ops that are alike share one object (and their tables, by its identity)."""

    graph: Graph
    region: Region
    narrowed: dict[tuple[int, bytes], Choices]

    def variable(self, item: Op | Tensor, choices: Choices) -> Variable:
        """The variable with what the region leaves of its choices."""
        if self.region is everything:
            return Variable(item, choices)
        mask = np.array([self.region(self.graph, item, choice) for choice in choices])
        if not mask.any():
            name = item.fqn if isinstance(item, Tensor) else (
                f"{item.name} ({item.target}, {item.module or item.source})")
            raise InputError(f"the pins leave no layout for {name}; without them it has {len(choices)} choices, like "
                             f"'{choices[0]}'")
        return Variable(item, self.narrowed.setdefault((id(choices), mask.tobytes()), choices.only(mask)))


def offers_places(op: Op, graph: Graph, mesh: Mesh) -> bool:
    """Whether the search tries to split the places of images: where a batch has fewer of them than the mesh has ranks.

    Otherwise a split of the batch computes as little on each rank, and sends no halos."""
    return graph.tensors[op.inputs[0]].shape[:1] < (mesh.size,) if op.inputs else False


def may_be_sparse(tensor: Tensor, sparse: str) -> bool:
    """Whether the gradients of a parameter may add up sparse: that is allowed, and they add up in float32."""
    return bool(sparse) and tensor.trained and tensor.gradient.dtype == "float32"


def decided(graph: Graph) -> tuple[Op | Tensor, ...]:
    """The items that a plan decides about: parameters that are read, then the ops that depend on one, in order."""
    dependent, used = graph.dependent(), {t for op in graph.ops for t in op.inputs}
    parameters = (tensor for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.PARAMETER and t in used)
    return (*parameters, *(op for op in graph.ops if dependent.intersection(op.outputs)))


def variables(graph: Graph, mesh: Mesh, region: Region = everything, microbatches: int = 1, in_flight: int = 1,
              sparse: str = "") -> tuple[Variable, ...]:
    """Every decision on `mesh` within `region`: used parameters first, then ops in order.

    `graph` is the planned one, of one of `microbatches`, of which `in_flight` are between forward and backward at once.
    A `sparse` text (`core.sparse`) lets gradients add up sparse.

    Raises InputError, naming the op or parameter, if the region leaves it no choice.
    """
    differentiable = graph.differentiable()
    tied = {graph.tensors[op.inputs[0]].name for op in graph.ops if op.target == HUB}
    made, axes, infinite = _Made(graph, region, {}), len(mesh.axes), infinite_tensors(graph)
    found = []
    for item in decided(graph):
        if isinstance(item, Tensor):
            choices = _of_parameter(item.shape, mesh, item.name in tied or in_flight > 1,
                                    microbatches > 1 and item.trained, may_be_sparse(item, sparse))
        elif item.target == HUB:
            source = graph.tensors[item.inputs[0]]
            choices = _of_hub(source.shape, mesh, source.is_floating and source.kind is not Kind.PARAMETER,
                              item.inputs[0] in differentiable)
        elif item.target in (SEND, RECEIVE):
            sends = item.target == SEND
            crosses = graph.tensors[item.inputs[0] if sends else item.outputs[0]]
            choices = _of_transfer(crosses.shape, mesh, sends, len(item.inputs) > 1, may_be_partial(item))
        else:
            choices = _of_op(option_rows(item, graph, mesh, infinite), axes, offers_ring(item, graph),
                             offers_places(item, graph, mesh))
        found.append(made.variable(item, choices))
    return tuple(found)
