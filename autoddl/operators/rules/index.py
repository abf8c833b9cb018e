"""Rules of operators that read or write at given positions. A dim in which positions are looked up is whole; the dims
of the positions split freely, and reading is linear in what is read.

    index_select(x, 1, i)        "a ., i -> a i | 0"
    x[:, i, j]                   "a . ., i k, i k -> a i k | 0"        positions apart: their dims come first
    gather(x, 1, i)              "a ., a i -> a i | 0"
    scatter_add(x, 1, i, s)      "a ., a i, a i -> a . | 0 + 2", and: positions in pieces, x by one rank, y partial
"""

from typing import TypeVar

from autoddl.core.graph import Op
from autoddl.core.layout import P, Split
from autoddl.operators.rules.dimension_strings import Rule, Signature
from autoddl.operators.rules.writing import RuleOf, Tensors, aligned, dims_of, fixed, form, get, names, rule_text

__all__ = ["RULES"]

T = TypeVar("T")


def _looked_up(op: Op, inputs: Tensors) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the dims that indices=[None, i, ...] looks up, and the positions of the indices among the inputs.

    None for masks: the size of their result depends on values."""
    pairs = [(int(slot.split(".")[1]), k) for k, slot in enumerate(op.slots) if slot.startswith("indices.")]
    if not pairs or any(inputs[k].dtype in ("bool", "uint8") for _, k in pairs):
        return None
    return tuple(d for d, _ in pairs), tuple(k for _, k in pairs)


def _placed(dims: tuple[int, ...], rest: list[T], found: list[T]) -> list[T]:
    """Dims of x[..] (names or sizes): the positions' where the looked-up dims were, in front if those are apart."""
    at = dims[0] if dims == tuple(range(dims[0], dims[-1] + 1)) else 0
    return [*rest[:at], *found, *rest[at:]]


def _index(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """x[i, j]: the positions broadcast against each other."""
    where, rank = _looked_up(op, inputs), len(inputs[0].shape)
    if where is None or len(where[0]) > rank:
        return fixed(inputs, outputs, form(inputs, outputs, ((0,),)))
    dims, slots = where
    line = ["." if k in dims else n for k, n in enumerate(names(rank))]
    count = len(outputs[0].shape) - (rank - len(dims))
    found = names(count, "i")
    after = _placed(dims, [n for k, n in enumerate(line) if k not in dims], found)
    sizes = tuple(outputs[0].shape[after.index(name)] for name in found)
    positions = [aligned(inputs[k].shape, sizes, found) for k in slots]
    return rule_text([line, *positions], [after], form(inputs, outputs, ((0,),)))


def _index_put(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """x with values written at positions: linear in x and the values together."""
    where, rank = _looked_up(op, inputs), len(inputs[0].shape)
    value = op.slot("values")
    tail = form(inputs, outputs, ((0,), (value,))) if value is not None else ""
    if where is None or value is None:
        return fixed(inputs, outputs)
    dims, slots = where
    line = ["." if k in dims else n for k, n in enumerate(names(rank))]
    wide = max(len(inputs[k].shape) for k in slots)
    rest = [k for k in range(rank) if k not in dims]
    target = _placed(dims, [line[k] for k in rest], ["."] * wide)
    sizes = _placed(dims, [inputs[0].shape[k] for k in rest], [0] * wide)
    shape = inputs[value].shape
    values = aligned(shape, tuple(sizes), target) if len(shape) <= len(target) else ["."] * len(shape)
    lines = [["."] * len(t.shape) for t in inputs]
    lines[0], lines[value] = line, values
    return rule_text(lines, [line], tail)


def _index_select(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """index_select(x, dim, i)."""
    letters = names(len(inputs[0].shape))
    if not letters or len(inputs[1].shape) != 1:
        return fixed(inputs, outputs)
    (dim,) = dims_of(op, len(letters))
    before, after = list(letters), list(letters)
    before[dim], after[dim] = ".", "i"
    return rule_text([before, ["i"]], [after], form(inputs, outputs, ((0,),)))


def _gather(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """gather(x, dim, i): a dim in which x is longer than i is whole."""
    rank, dim = len(inputs[0].shape), dims_of(op, len(inputs[0].shape))
    if not dim or any(len(t.shape) != rank for t in (*inputs, *outputs)):
        return fixed(inputs, outputs)
    same = [len({t.shape[k] for t in (*inputs, *outputs)}) == 1 for k in range(rank)]
    line = ["." if k in dim or not same[k] else n for k, n in enumerate(names(rank))]
    found = ["i" if k in dim else n for k, n in enumerate(line)]
    return rule_text([line, found], [found], form(inputs, outputs, ((0,),)))


def _scatter(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """scatter(x, dim, i, s): linear in x and s; writing a number other than 0 is not linear."""
    rank, dim = len(inputs[0].shape), dims_of(op, len(inputs[0].shape))
    if any(len(t.shape) != rank for t in inputs):
        return fixed(inputs, outputs)
    line = ["." if k in dim or len({t.shape[k] for t in inputs}) > 1 else n for k, n in enumerate(names(rank))]
    source = op.slot("src")
    terms = ((0,), (source,)) if source is not None else ((0,),) if get(op, "value") == 0 else ()
    if op.target == "aten.scatter_reduce.two":
        terms = ()
    return rule_text([line] * len(inputs), [line], form(inputs, outputs, terms))


def _scatter_add(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Sums: each rank may add its part of the positions, if one rank alone holds x."""
    plain = _scatter(op, inputs, outputs)
    dim = dims_of(op, len(inputs[0].shape))
    if not dim or not plain.endswith("0 + 2") or inputs[1].shape != inputs[2].shape:
        return Rule(plain)
    piece = Split(dim[0])
    more = (Signature((P, piece, piece), (P,)),) if inputs[1].shape[dim[0]] > 1 else ()
    return Rule(plain, more)


def _index_write(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """index_add(x, dim, i, s), index_copy: positions are one line, the other dims pass through."""
    rank, dim = len(inputs[0].shape), dims_of(op, len(inputs[0].shape))
    if not dim or len(inputs[1].shape) != 1 or len(inputs[2].shape) != rank:
        return Rule(fixed(inputs, outputs))
    line = ["." if k in dim else n for k, n in enumerate(names(rank))]
    tail = form(inputs, outputs, ((0,), (2,)))
    adds = op.target == "aten.index_add.default" and tail and inputs[1].shape[0] > 1
    more = (Signature((P, Split(0), Split(dim[0])), (P,)),) if adds else ()
    return Rule(rule_text([line, ["."], line], [line], tail), more)


def _select_scatter(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """x with s written at one place of `dim`."""
    letters = names(len(inputs[0].shape))
    dim = dims_of(op, len(letters))
    line = ["." if k in dim else n for k, n in enumerate(letters)]
    written = [n for k, n in enumerate(line) if k not in dim]
    return rule_text([line, written], [line], form(inputs, outputs, ((0,), (1,))))


def _one_hot(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """The classes are free: a rank writes its own (kernels); their number must not depend on the values."""
    letters = names(len(inputs[0].shape))
    if get(op, "num_classes", -1) == -1:
        return fixed(inputs, outputs)
    return rule_text([letters], [[*letters, "c"]])


def _bucketize(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Each value finds its place in a line of boundaries, or in that of its row."""
    letters = names(len(outputs[0].shape))
    value = op.slot("self")
    if value is not None and len(letters) > 1 and all(len(t.shape) == len(letters) for t in inputs):
        rows = [*letters[:-1], "."]
        return rule_text([letters if k == value else rows for k in range(len(inputs))], [letters])
    if value is None or any(len(t.shape) != 1 for k, t in enumerate(inputs) if k != value):
        return fixed(inputs, outputs)
    return rule_text([letters if k == value else ["."] for k in range(len(inputs))], [letters])


RULES: dict[str, RuleOf] = {
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.take_along_dim.default": _gather,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_reduce.two": _scatter,
    "aten.scatter_add.default": _scatter_add,
    "aten.index_add.default": _index_write,
    "aten.index_copy.default": _index_write,
    "aten.select_scatter.default": _select_scatter,
    "aten.one_hot.default": _one_hot,
    "aten.bucketize.Tensor": _bucketize,
    "aten.searchsorted.Tensor": _bucketize,
}
