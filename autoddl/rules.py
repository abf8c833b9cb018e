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
from itertools import product

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
from autoddl.layout import B, Layout, Mesh, P, State, is_legal
from autoddl.rules_text import RuleOf

__all__ = ["RULES", "Option", "Rule", "dual", "gradient", "has_rule", "options", "signatures_of"]

Shapes = tuple[tuple[int, ...], ...]

RULES: dict[str, RuleOf] = {
    **rules_shape.RULES, **rules_cut.RULES, **rules_create.RULES, **rules_index.RULES, **rules_reduce.RULES,
    **rules_elementwise.RULES, **rules_matmul.RULES, **rules_nn.RULES, **rules_loss.RULES}


@dataclass(frozen=True, slots=True)
class Option:
    """One signature per mesh axis, and the layouts that follow."""

    signatures: tuple[Signature, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    @property
    def inner(self) -> tuple[int, ...]:
        """Mesh axes over which the local kernel itself reduces."""
        return tuple(a for a, signature in enumerate(self.signatures) if signature.inner)


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
    tensors = (*option.inputs, *option.outputs)
    return Layout(tuple(_gradient(part, any(t[a] != B for t in tensors)) for a, part in enumerate(option.inputs[k])))


def dual(layout: Layout) -> Layout:
    """Layout of the gradient that the local backward of a tensor's producer needs."""
    return Layout(tuple(B if part == P else part for part in layout))


def _gradient(part: State, distributed: bool) -> State:
    if part == P:
        return B
    return P if part == B and distributed else part


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
    found: dict[tuple[tuple[Layout, ...], tuple[int, ...]], Option] = {}
    count, shapes = len(question.inputs), (*question.inputs, *question.outputs)
    per_axis = [[s for s in _signatures(question) if _fits(shapes, (s,), mesh, (a,))] for a in range(len(mesh.axes))]
    for chosen in product(*per_axis):
        if len(chosen) == 1 or _fits(shapes, chosen, mesh, tuple(range(len(chosen)))):
            columns = tuple(Layout(states) for states in zip(*((*s.inputs, *s.outputs) for s in chosen), strict=True))
            option = Option(chosen, columns[:count], columns[count:])
            found.setdefault((columns, option.inner), option)
    return tuple(found.values())


def _fits(shapes: Shapes, chosen: tuple[Signature, ...], mesh: Mesh, axes: tuple[int, ...]) -> bool:
    """Whether splitting by `chosen` on `axes` leaves no piece empty, and none uneven where that is not allowed."""
    cut: dict[tuple[str, int], int] = {}
    for signature, axis in zip(chosen, axes, strict=True):
        for size in signature.divides:
            cut[signature.split, size] = cut.get((signature.split, size), 1) * mesh.sizes[axis]
    part = Mesh(tuple(mesh.axes[a] for a in axes))
    return all(size % parts == 0 for (_, size), parts in cut.items()) and all(
        is_legal(shape, Layout(states), part)
        for shape, states in zip(shapes, zip(*((*s.inputs, *s.outputs) for s in chosen), strict=True), strict=True))
