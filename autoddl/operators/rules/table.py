"""Lists the layouts that an operator may have on a mesh: op -> dimension string -> signatures -> options.

    RULES[target](op, inputs, outputs) -> "b k, n k -> b n | 0*1"          the rule of one call
                                                                           (`dimension_strings`)
    option_rows(op, graph, mesh)       -> as numbers: one signature per axis, such that every rank gets a piece of all
                                          (no rule: everything B). An op may bring a rule of the user's own
                                          (`own_facts`)
    options(op, graph, mesh)           -> as layouts

The gradient of an option follows from its layouts alone, axis by axis:

    gradient of input k     S(d) -> S(d)    P -> B    B -> P if any tensor of the op is S or P there, else B
    wanted from above       S(d) -> S(d)    P -> B    B -> B                            (`layout_codes.duals`)
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autoddl.core.graph import Graph, Kind, Op, Tensor, Value
from autoddl.core.layout import B, Layout, Mesh, P, is_legal
from autoddl.core.layout_codes import (
    BROADCAST,
    PARTIAL,
    decode_layouts,
    distinct_rows,
    encode_states,
    legal_mask,
    state_code,
)
from autoddl.operators.own_facts import own_rule
from autoddl.operators.rules import (
    cut,
    elementwise,
    experts,
    flexible,
    images,
    index,
    loss,
    matmul,
    nn,
    recurrent,
    reduce,
    spectra,
)
from autoddl.operators.rules import shape as shape_rules
from autoddl.operators.rules.dimension_strings import Rule, Signature, signatures
from autoddl.operators.rules.infinite import drop_undefined, infinite_tensors, positions
from autoddl.operators.rules.writing import RuleOf

__all__ = ["RULES", "Option", "OptionRows", "Rule", "backward", "has_rule", "infinite_tensors", "option_rows",
           "options"]

Codes = npt.NDArray[np.int64]
Shapes = tuple[tuple[int, ...], ...]
Typed = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes with dtypes."""

RULES: dict[str, RuleOf] = {
    **shape_rules.RULES, **cut.RULES, **index.RULES, **reduce.RULES,
    **elementwise.RULES, **matmul.RULES, **nn.RULES, **loss.RULES,
    **images.RULES, **recurrent.RULES, **experts.RULES, **flexible.RULES, **spectra.RULES}


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


@dataclass(frozen=True, slots=True, eq=False)
class OptionRows:
    """The options of an op as arrays of numbers, one row per option; layouts are encoded by `core.layout_codes`."""

    signatures: tuple[Signature, ...]
    """The signatures that an axis may have."""
    picked: Codes
    """(options, axes): the index in `signatures` of the signature of each axis."""
    inner: Codes
    """(options,): bit a says that the local kernel itself reduces over axis a."""
    inputs: tuple[Codes, ...]
    """For every input (options,): its layout."""
    outputs: tuple[Codes, ...]
    """For every output (options,): its layout."""
    gradients: tuple[Codes, ...]
    """For every input (options,): the layout of its gradient."""


@dataclass(frozen=True, slots=True)
class _Question:
    """All that the answer depends on.

        truths     positions of bool tensors, which are never partial sums
        infinite   positions of inputs that may contain infinities; no other input of such an op is a partial sum
    """

    rule: Rule | None
    inputs: Shapes
    outputs: Shapes
    truths: tuple[int, ...]
    infinite: tuple[int, ...] = ()


def has_rule(op: Op) -> bool:
    """Whether an op has a rule, of the table or of the user's own; without one it runs replicated."""
    return op.target in RULES or own_rule(op) is not None


def option_rows(op: Op, graph: Graph, mesh: Mesh, infinite: Collection[int] = ()) -> OptionRows:
    """Returns every choice of one signature per axis that leaves no rank's shard of a tensor empty.

    `infinite` are the graph's tensors that may contain infinities (`infinite_tensors`). Ops that are alike share one
    object."""
    return _rows(replace(_question(op, graph), infinite=positions(op, infinite)), mesh)


def options(op: Op, graph: Graph, mesh: Mesh) -> tuple[Option, ...]:
    """Returns the options of `op` on `mesh` as layouts, in the order of `option_rows`."""
    return _options(option_rows(op, graph, mesh))


def backward(inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Returns the layouts of the gradients of all inputs, by the table above."""
    states = [np.array([[state_code(state) for state in layout]]) for layout in (*inputs, *outputs)]
    return tuple(decode_layouts(encode_states(column), column.shape[1])[0]
                 for column in _backward(states)[:len(inputs)])


def _backward(states: list[Codes]) -> list[Codes]:
    """The gradient's state for every tensor and option: S from S, B from P, P or B from B."""
    cut = np.any([column != BROADCAST for column in states], axis=0)
    return [np.where(c == PARTIAL, BROADCAST, np.where((c == BROADCAST) & cut, PARTIAL, c)) for c in states]


def _question(op: Op, graph: Graph) -> _Question:
    inputs, outputs = (tuple([(graph.tensors[t].shape, graph.tensors[t].dtype) for t in ts])
                       for ts in (op.inputs, op.outputs))
    return _nameless(op.target, op.slots, op.args, inputs, outputs)


@lru_cache(maxsize=100_000)
def _nameless(target: str, slots: tuple[str, ...], args: tuple[tuple[str, Value], ...], reads: Typed, writes: Typed
              ) -> _Question:
    """Answers for all ops that are called alike: a rule sees no names."""
    inputs, outputs = (tuple(Tensor("", shape, dtype, Kind.RESULT) for shape, dtype in typed)
                       for typed in (reads, writes))
    op = Op("", target, tuple(range(len(inputs))), slots, tuple(range(len(inputs), len(inputs) + len(outputs))), args)
    rule = RULES[target](op, inputs, outputs) if target in RULES else own_rule(op)
    return _Question(Rule(rule) if isinstance(rule, str) else rule, tuple(t.shape for t in inputs),
                     tuple(t.shape for t in outputs),
                     tuple(i for i, t in enumerate((*inputs, *outputs)) if t.dtype == "bool"))


@lru_cache(maxsize=100_000)
def _signatures(question: _Question) -> tuple[Signature, ...]:
    if question.rule is None:
        return (Signature((B,) * len(question.inputs), (B,) * len(question.outputs)),)
    found = (*question.rule.extra, *signatures(question.rule.text, (*question.inputs, *question.outputs)))
    whole = (s for s in found if all((*s.inputs, *s.outputs)[i] != P for i in question.truths))
    return tuple(dict.fromkeys(drop_undefined(whole, question.infinite)))


@lru_cache(maxsize=100_000)
def _rows(question: _Question, mesh: Mesh) -> OptionRows:
    """Every combination of signatures; the first of those with equal layouts stays."""
    shapes, every = (*question.inputs, *question.outputs), _signatures(question)
    per_axis = [[i for i, s in enumerate(every) if _fits(shapes, s, mesh, a)] for a in range(len(mesh.axes))]
    picked = np.stack(np.meshgrid(*per_axis, indexing="ij"), axis=-1).reshape(-1, len(mesh.axes))
    picked = picked[_divides(every, picked, mesh) & _agrees(every, picked)]
    codes = [np.array([state_code((*s.inputs, *s.outputs)[i]) for s in every]) for i in range(len(shapes))]
    legal = np.ones(len(picked), dtype=bool)
    for shape, column in zip(shapes, codes, strict=True):
        legal &= legal_mask(shape, mesh)[encode_states(column[picked])]
    picked = picked[legal]
    inner = np.array([s.inner for s in every])[picked] @ (1 << np.arange(len(mesh.axes)))
    layouts, count = [encode_states(column[picked]) for column in codes], len(question.inputs)
    first = distinct_rows([*layouts, inner])[0]
    layouts = [column[first] for column in layouts]
    back = [encode_states(states) for states in _backward([column[picked[first]] for column in codes])[:count]]
    return OptionRows(every, picked[first], inner[first], tuple(layouts[:count]), tuple(layouts[count:]), tuple(back))


@lru_cache(maxsize=10_000)
def _options(found: OptionRows) -> tuple[Option, ...]:
    count, axes = found.picked.shape
    inputs, outputs, gradients = (
        zip(*(decode_layouts(column, axes) for column in columns), strict=True) if columns else [()] * count
        for columns in (found.inputs, found.outputs, found.gradients))
    inner = (tuple(a for a in range(axes) if bits >> a & 1) for bits in found.inner.tolist())
    return tuple(Option(tuple(found.signatures[i] for i in row), *layouts) for row, *layouts in zip(
        found.picked.tolist(), inputs, outputs, gradients, inner, strict=True))


def _agrees(every: tuple[Signature, ...], picked: Codes) -> npt.NDArray[np.bool_]:
    """Whether no name is split by some axes inside the kernel and by others without, or inside in another way."""
    fine = np.ones(len(picked), dtype=bool)
    for inside in (s for s in every if s.inner):
        here, other = (np.array([s.split == inside.split and (s == inside) == same for s in every])[picked].any(axis=1)
                       for same in (True, False))
        fine &= ~(here & other)
    return fine


def _fits(shapes: Shapes, signature: Signature, mesh: Mesh, axis: int) -> bool:
    """Whether `signature` on this axis alone leaves no rank's piece empty."""
    part = Mesh((mesh.axes[axis],))
    return all(is_legal(shape, Layout((state,)), part)
               for shape, state in zip(shapes, (*signature.inputs, *signature.outputs), strict=True))


def _divides(every: tuple[Signature, ...], picked: Codes, mesh: Mesh) -> npt.NDArray[np.bool_]:
    """Whether the axes that split what may only be split evenly divide it together."""
    fine = np.ones(len(picked), dtype=bool)
    for split, size in dict.fromkeys((s.split, size) for s in every for size in s.divides):
        cuts = np.array([s.split == split and size in s.divides for s in every])[picked]
        fine &= size % np.where(cuts, np.array(mesh.sizes), 1).prod(axis=1) == 0
    return fine
