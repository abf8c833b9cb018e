"""The space of plans on one mesh: a variable for every op, hub and parameter, and the layouts it may choose.

What does not depend on a parameter (the cone) is computed by every rank and chooses nothing. Of the rest

    op          one signature per axis                                   (rules.options)
    hub         per axis S(d), P, B with gradients added up as B, B with gradients added up as P
    parameter   stored S(d) or B per axis; where it must be gathered: kept for backward, or gathered again

A *region* narrows the space: pins of a user, or a named strategy. It is a function from (graph, op or parameter, its
choice) to bool, never a code path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from autoddl.errors import InputError
from autoddl.graph import Graph, Kind, Op, Tensor
from autoddl.hubs import HUB
from autoddl.layout import B, Layout, Mesh, P, Split, State
from autoddl.numbers import code, layouts_of, legal_layouts, legal_numbers, numbers
from autoddl.rules import Option, dual, options

__all__ = ["Choice", "Region", "Variable", "decided", "everything", "variables"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts at the ports of a variable: read, written, of the gradients that its backward yields (per input) and
    needs (per output). `inner`: axes over which the op's own kernel reduces."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    inner: tuple[int, ...] = ()
    regather: bool = False

    def __str__(self) -> str:
        reads = ", ".join(map(str, self.inputs))
        writes = ", ".join(map(str, self.outputs)) + (" regathered" if self.regather else "")
        return f"{reads} -> {writes}" if reads else f"stored {writes}"


Region = Callable[[Graph, Op | Tensor, Choice], bool]


@dataclass(frozen=True, slots=True)
class Variable:
    """`item` is the op (hubs included) or the parameter."""

    item: Op | Tensor
    choices: tuple[Choice, ...]

    @property
    def name(self) -> str:
        return self.item.fqn if isinstance(self.item, Tensor) else self.item.name


def everything(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
    """The whole space."""
    return True


@lru_cache(maxsize=10_000)
def _of_hub(shape: tuple[int, ...], mesh: Mesh, partial: bool, gradients: bool) -> tuple[Choice, ...]:
    """States as (layout, gradient) per axis; without gradients the second is idle."""
    states: list[tuple[State, State]] = [(Split(d), Split(d)) for d in range(len(shape)) if shape[d] > 1]
    states += [(P, B)] if partial else []
    states += [(B, B), (B, P)] if gradients else [(B, B)]
    every = np.array(list(product([(code(s), code(g)) for s, g in states], repeat=len(mesh.axes))), dtype=np.int64)
    legal = legal_numbers(shape, mesh)
    fine = legal[numbers(every[:, :, 0])] & legal[numbers(every[:, :, 1])]
    pairs = zip(layouts_of(every[fine, :, 0]), layouts_of(every[fine, :, 1]), strict=True)
    return tuple([Choice((layout,), (layout,), (back,), (back,)) for layout, back in pairs])


@lru_cache(maxsize=10_000)
def _of_parameter(shape: tuple[int, ...], mesh: Mesh, tied: bool) -> tuple[Choice, ...]:
    """Stored layouts; those that split something also in the form that is gathered again for backward. What a tied
    parameter's hub gathered is kept."""
    found = []
    for layout in legal_layouts(shape, mesh, partial=False):
        forms = (False, True) if any(state != B for state in layout) and not tied else (False,)
        found += [Choice((), (layout,), (), (layout,), regather=again) for again in forms]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Made:
    """Choices made so far, so that ops that are alike share one tuple (and their tables, by its identity)."""

    graph: Graph
    mesh: Mesh
    region: Region
    of_options: dict[int, tuple[tuple[Option, ...], tuple[Choice, ...]]]
    narrowed: dict[tuple[int, tuple[bool, ...]], tuple[Choice, ...]]

    def of_op(self, op: Op) -> tuple[Choice, ...]:
        """Options of an op with the gradients that follow; `options` hands out one tuple per kind of call."""
        every = options(op, self.graph, self.mesh)
        if id(every) not in self.of_options:
            choices = tuple(Choice(o.inputs, o.outputs, o.gradients, tuple(map(dual, o.outputs)), o.inner)
                            for o in every)
            self.of_options[id(every)] = every, choices
        return self.of_options[id(every)][1]

    def variable(self, item: Op | Tensor, choices: tuple[Choice, ...]) -> Variable:
        """The variable with what the region leaves of its choices."""
        if self.region is everything:
            return Variable(item, choices)
        mask = tuple(self.region(self.graph, item, choice) for choice in choices)
        if not any(mask):
            name = item.fqn if isinstance(item, Tensor) else (
                f"{item.name} ({item.target}, {item.module or item.source})")
            raise InputError(f"the pins leave no layout for {name}; without them it has {len(choices)} choices, like "
                             f"'{choices[0]}'")
        kept = tuple(choice for choice, allowed in zip(choices, mask, strict=True) if allowed)
        return Variable(item, self.narrowed.setdefault((id(choices), mask), kept))


def decided(graph: Graph) -> tuple[Op | Tensor, ...]:
    """What a plan decides about: the parameters that something reads, then the ops that depend on one, in order."""
    dependent, used = graph.dependent(), {t for op in graph.ops for t in op.inputs}
    parameters = (tensor for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.PARAMETER and t in used)
    return (*parameters, *(op for op in graph.ops if dependent.intersection(op.inputs)))


def variables(graph: Graph, mesh: Mesh, region: Region = everything) -> tuple[Variable, ...]:
    """Every decision on `mesh` within `region`: used parameters first, then ops in order. `graph` is the planned one.

    Raises InputError, naming the op or parameter, if the region leaves it no choice.
    """
    differentiable = graph.differentiable()
    tied = {graph.tensors[op.inputs[0]].name for op in graph.ops if op.target == HUB}
    made = _Made(graph, mesh, region, {}, {})
    found = []
    for item in decided(graph):
        if isinstance(item, Tensor):
            choices = _of_parameter(item.shape, mesh, item.name in tied)
        elif item.target == HUB:
            source = graph.tensors[item.inputs[0]]
            choices = _of_hub(source.shape, mesh, source.floating and source.kind is not Kind.PARAMETER,
                              item.inputs[0] in differentiable)
        else:
            choices = made.of_op(item)
        found.append(made.variable(item, choices))
    return tuple(found)
