"""What an operator may do on a mesh: one table, op -> dimension string -> signatures -> options.

    RULES[target](op, inputs, outputs) -> "b k, n k -> b n | 0*1"          the rule of one call (see `dims`)
    signatures_of(op, graph)           -> its signatures for one mesh axis  (no rule: everything B)
    options(op, graph, mesh)           -> one signature per axis, where every rank gets a piece of everything

The gradient of an option follows from its layouts alone, axis by axis:

    gradient of input k     S(d) -> S(d)    P -> B    B -> P if any tensor of the op is S or P there, else B
    wanted from above       S(d) -> S(d)    P -> B    B -> B                                             (`dual`)
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autoddl import (
    rules_create,
    rules_cut,
    rules_elementwise,
    rules_index,
    rules_loss,
    rules_matmul,
    rules_nn,
    rules_reduce,
    rules_shape,
)
from autoddl.dims import Rule, Signature, signatures
from autoddl.graph import Graph, Op
from autoddl.layout import B, Layout, Mesh, P, is_legal
from autoddl.numbers import BROADCAST, PARTIAL, code, layouts_of, legal_numbers, numbers
from autoddl.rules_text import RuleOf

__all__ = ["RULES", "Option", "Rule", "backward", "dual", "gradient", "has_rule", "options", "signatures_of"]

Shapes = tuple[tuple[int, ...], ...]

RULES: dict[str, RuleOf] = {
    **rules_shape.RULES, **rules_cut.RULES, **rules_create.RULES, **rules_index.RULES, **rules_reduce.RULES,
    **rules_elementwise.RULES, **rules_matmul.RULES, **rules_nn.RULES, **rules_loss.RULES}


@dataclass(frozen=True, slots=True)
class Option:
    """One signature per mesh axis, and the layouts that follow. `inner`: mesh axes over which the local kernel itself
    reduces."""

    signatures: tuple[Signature, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    inner: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True, slots=True)
class _Question:
    """All that the answer depends on; `truths` are the positions of bool tensors, which are never partial sums."""

    rule: Rule | None
    inputs: Shapes
    outputs: Shapes
    truths: tuple[int, ...]


def has_rule(target: str) -> bool:
    return target in RULES


def signatures_of(op: Op, graph: Graph) -> tuple[Signature, ...]:
    """Signatures of `op` for one mesh axis; without a rule only B everywhere."""
    return _signatures(_question(op, graph))


def options(op: Op, graph: Graph, mesh: Mesh) -> tuple[Option, ...]:
    """Every choice of one signature per axis in which each rank has a non-empty piece of every tensor."""
    return _options(_question(op, graph), mesh)


def gradient(option: Option, k: int) -> Layout:
    """Layout of d(input k) that the local backward yields."""
    return option.gradients[k]


def backward(inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Layouts of the gradients of all inputs."""
    states = [np.array([[code(state) for state in layout]]) for layout in (*inputs, *outputs)]
    return tuple(layouts_of(column)[0] for column in _backward(states)[:len(inputs)])


def _backward(states: list[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """The gradient's state for every tensor and option: S from S, B from P, P or B from B."""
    cut = np.any([column != BROADCAST for column in states], axis=0)
    return [np.where(c == PARTIAL, BROADCAST, np.where((c == BROADCAST) & cut, PARTIAL, c)) for c in states]


@lru_cache(maxsize=100_000)
def dual(layout: Layout) -> Layout:
    """Layout of the gradient that the local backward of a tensor's producer needs."""
    return Layout(tuple(B if part == P else part for part in layout))


def _question(op: Op, graph: Graph) -> _Question:
    inputs = tuple(graph.tensors[t] for t in op.inputs)
    outputs = tuple(graph.tensors[t] for t in op.outputs)
    rule = RULES[op.target](op, inputs, outputs) if op.target in RULES else None
    return _Question(Rule(rule) if isinstance(rule, str) else rule, tuple(t.shape for t in inputs),
                     tuple(t.shape for t in outputs),
                     tuple(i for i, t in enumerate((*inputs, *outputs)) if t.dtype == "bool"))


@lru_cache(maxsize=100_000)
def _signatures(question: _Question) -> tuple[Signature, ...]:
    if question.rule is None:
        return (Signature((B,) * len(question.inputs), (B,) * len(question.outputs)),)
    found = (*question.rule.extra, *signatures(question.rule.text, (*question.inputs, *question.outputs)))
    return tuple(dict.fromkeys(s for s in found if all((*s.inputs, *s.outputs)[i] != P for i in question.truths)))


@lru_cache(maxsize=100_000)
def _options(question: _Question, mesh: Mesh) -> tuple[Option, ...]:
    """Every combination of signatures as a row of numbers; the first of those with equal layouts stays."""
    shapes, every = (*question.inputs, *question.outputs), _signatures(question)
    per_axis = [[i for i, s in enumerate(every) if _fits(shapes, s, mesh, a)] for a in range(len(mesh.axes))]
    rows = np.stack(np.meshgrid(*per_axis, indexing="ij"), axis=-1).reshape(-1, len(mesh.axes))
    rows = rows[_divides(every, rows, mesh)]
    states = [np.array([code((*s.inputs, *s.outputs)[i]) for s in every])[rows] for i in range(len(shapes))]
    legal = np.ones(len(rows), dtype=bool)
    for shape, column in zip(shapes, states, strict=True):
        legal &= legal_numbers(shape, mesh)[numbers(column)]
    inner = np.array([s.inner for s in every])[rows]
    keys = np.stack([*(numbers(column) for column in states), numbers(inner.astype(np.int64))], axis=1)[legal]
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    columns = [column[legal][first] for column in states]
    count, made = len(question.inputs), [layouts_of(column) for column in columns]
    returned = list(zip(*map(layouts_of, _backward(columns)[:count]), strict=True)) if count else [()] * len(first)
    reduces = [tuple(a for a, found in enumerate(row) if found) for row in inner[legal][first].tolist()] \
        if inner.any() else [()] * len(first)
    return tuple(Option(tuple([every[i] for i in row]), layouts[:count], layouts[count:], gradients, axes)
                 for row, layouts, gradients, axes in zip(
                     rows[legal][first].tolist(), zip(*made, strict=True), returned, reduces, strict=True))


def _fits(shapes: Shapes, signature: Signature, mesh: Mesh, axis: int) -> bool:
    """Whether `signature` on this axis alone leaves no rank's piece empty."""
    part = Mesh((mesh.axes[axis],))
    return all(is_legal(shape, Layout((state,)), part)
               for shape, state in zip(shapes, (*signature.inputs, *signature.outputs), strict=True))


def _divides(every: tuple[Signature, ...], rows: npt.NDArray[np.int64], mesh: Mesh) -> npt.NDArray[np.bool_]:
    """Whether the axes that split what may only be split evenly divide it together."""
    fine = np.ones(len(rows), dtype=bool)
    for split, size in dict.fromkeys((s.split, size) for s in every for size in s.divides):
        cuts = np.array([s.split == split and size in s.divides for s in every])[rows]
        fine &= size % np.where(cuts, np.array(mesh.sizes), 1).prod(axis=1) == 0
    return fine
