"""Rules of operators that cut and join: y = A x with A of zeros and ones, so all are linear.

    cat, split, roll    "a ., a . -> a . | 0 + 1"     the dim along which they work is whole; of a roll it may be a
                                                      place, which is split with halos (`places`)
    stack, select       "a b -> a . b | 0"            a dim comes or goes
    repeat              ". -> (r .) | 0"              the number of copies is free
    tril, triu, diagonal
"""

from autoddl.core.graph import Op
from autoddl.operators.rules.dimension_strings import Rule
from autoddl.operators.rules.places import halo_signatures
from autoddl.operators.rules.reduce import along, along_dims
from autoddl.operators.rules.writing import RuleOf, Tensors, dims_of, fixed, form, get, ints, names, rule_text, wrap

__all__ = ["RULES"]


def _slice(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """A slice of a whole dim changes nothing; other sliced dims differ in size, and are whole."""
    return along_dims((), inputs, outputs, form(inputs, outputs, ((0,),)))


def _roll(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    whole = along(linear=True, key="dims")(op, inputs, outputs)
    assert isinstance(whole, str)
    return Rule(whole, halo_signatures(op, inputs, outputs))


def _drop(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """select, unbind: the outputs lack `dim`."""
    rank = len(inputs[0].shape)
    letters = names(rank)
    (dim,) = dims_of(op, rank, empty=(0,))
    letters[dim] = "."
    return rule_text([letters], [letters[:dim] + letters[dim + 1:]] * len(outputs), form(inputs, outputs, ((0,),)))


def _stack(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """The output has a new dim."""
    letters = names(len(inputs[0].shape))
    (dim,) = wrap(ints(get(op, "dim", 0)), len(letters) + 1)
    after = [*letters[:dim], ".", *letters[dim:]]
    return rule_text([letters] * len(inputs), [after], form(inputs, outputs, ((k,) for k in range(len(inputs)))))


def _repeat(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Copies one after the other: the number of copies is the outer factor of the output's dim, and free."""
    shape, out = inputs[0].shape, outputs[0].shape
    padded = (1,) * (len(out) - len(shape)) + shape
    letters, free = names(len(out)), names(len(out), "r")
    after, before = [], []
    for k, (n, m) in enumerate(zip(padded, out, strict=True)):
        before.append(letters[k] if n == m else ".")
        after.append(letters[k] if n == m else free[k] if n == 1 else f"({free[k]}:{m // max(n, 1)} .:{n})")
    if 0 in shape or 0 in out:
        return fixed(inputs, outputs)
    return rule_text([before[len(out) - len(shape):]], [after], form(inputs, outputs, ((0,),)))


def _repeat_interleave(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Each element `repeats` times: "a -> (a .:repeats)". """
    shape, out, repeats = inputs[0].shape, outputs[0].shape, get(op, "repeats")
    dim = dims_of(op, len(shape))
    if len(shape) != len(out) or not isinstance(repeats, int) or (len(shape) > 1 and not dim):
        return fixed(inputs, outputs)
    before, after = names(len(shape)), names(len(shape))
    for k in dim or (0,):
        after[k] = f"({before[k]}:{shape[k]} .:{repeats})"
    return rule_text([before], [after], form(inputs, outputs, ((0,),)))


def _pad(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Padded dims are whole; padding with another constant than 0 is not linear."""
    pad, rank = ints(op.arg("pad")), len(inputs[0].shape)
    dims = tuple(rank - 1 - k // 2 for k, n in enumerate(pad) if n != 0)
    linear = get(op, "mode", "constant") != "constant" or get(op, "value") in (None, 0)
    return along_dims(dims, inputs, outputs, form(inputs, outputs, ((0,),)) if linear else "")


def _unfold(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    letters = names(len(inputs[0].shape))
    for k in dims_of(op, len(letters), "dimension"):
        letters[k] = "."
    return rule_text([letters], [[*letters, "."]], form(inputs, outputs, ((0,),)))


def _triangle(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """tril, triu: a piece is cut by the diagonal moved by its offsets (kernels)."""
    letters = names(len(inputs[0].shape))
    return rule_text([letters], [letters], form(inputs, outputs, ((0,),)))


def _diagonal(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    letters = names(len(inputs[0].shape))
    gone = wrap((*ints(op.arg("dim1")), *ints(op.arg("dim2"))), len(letters))
    before = ["." if k in gone else n for k, n in enumerate(letters)]
    after = [n for k, n in enumerate(letters) if k not in gone]
    return rule_text([before], [[*after, "."]], form(inputs, outputs, ((0,),)))


CUTS = """cat.default concat.default concatenate.default split.Tensor split.sizes split_with_sizes.default chunk.default
    unsafe_split.Tensor unsafe_chunk.default tensor_split.sections tensor_split.indices narrow.default
    slice_scatter.default"""

RULES: dict[str, RuleOf] = {
    **{f"aten.{target}": along(linear=True) for target in CUTS.split()},
    "aten.flip.default": along(linear=True, key="dims"),
    "aten.roll.default": _roll,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _drop,
    "aten.unbind.int": _drop,
    "aten.stack.default": _stack,
    "aten.repeat.default": _repeat,
    "aten.tile.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
    "aten.unfold.default": _unfold,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.diagonal.default": _diagonal,
}
