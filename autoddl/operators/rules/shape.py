"""Rules of reshapes and permutations. All are linear, y = A x with A of zeros and ones.

    permute     "a b c -> c a b | 0"
    reshape     the shapes are cut into the smallest groups of dims with equal products; in a group (i1 ..) -> (o1 ..)
                the outermost factor g = gcd(i1, o1) splits evenly: "(g .:i1/g) . -> (g .:o1/g) . | 0"
    expand      a dim that is repeated is free: "a . -> a b | 0" (its rule is among the elementwise ones)

Rules of operators that make a tensor from nothing: every rank makes its piece.

full, zeros    "-> a b"           the sizes become local
draw           "-> a b"           likewise; a piece draws what is at its place in the whole (kernels)
new_zeros(x)   "., . -> a b"      of x only dtype and device matter
arange         "-> a"             y[i] = start + i * step: a piece begins at its own offset (kernels)
"""

from math import gcd, prod

from autoddl.core.graph import Op
from autoddl.operators.rules.writing import RuleOf, Tensors, fixed, form, get, ints, names, rule_text, wrap

__all__ = ["RESHAPES", "RULES", "regroup"]

Shape = tuple[int, ...]


def groups(left: Shape, right: Shape) -> list[tuple[list[int], list[int]]]:
    """Dims of both shapes, dims of size 1 left out, in the smallest consecutive groups with equal products."""
    a = [k for k, n in enumerate(left) if n != 1]
    b = [k for k, n in enumerate(right) if n != 1]
    found = []
    while a and b:
        i, j = 1, 1
        while (m := prod(left[k] for k in a[:i])) != (n := prod(right[k] for k in b[:j])):
            i, j = (i + 1, j) if m < n else (i, j + 1)
        found.append((a[:i], b[:j]))
        a, b = a[i:], b[j:]
    return found


def regroup(left: Shape, right: Shape) -> tuple[list[str], list[str]]:
    """Dims of the two sides of a reshape."""
    before, after = ["."] * len(left), ["."] * len(right)
    if 0 in left or 0 in right:
        return before, after
    for number, (a, b) in enumerate(groups(left, right)):
        i, o = left[a[0]], right[b[0]]
        if (g := gcd(i, o)) > 1:
            before[a[0]], after[b[0]] = _factors(f"g{number}", g, i), _factors(f"g{number}", g, o)
    return before, after


def _factors(name: str, outer: int, size: int) -> str:
    return name if outer == size else f"({name}:{outer} .:{size // outer})"


def _reshape(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    before, after = regroup(inputs[0].shape, outputs[0].shape)
    others = [["."] * len(t.shape) for t in inputs[1:]]
    return rule_text([before, *others], [after], form(inputs, outputs, ((0,),)))


def _permute(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    letters = names(len(inputs[0].shape))
    return rule_text([letters], [[letters[k] for k in _order(op, len(letters))]], form(inputs, outputs, ((0,),)))


def _order(op: Op, rank: int) -> list[int]:
    """Which input dim each output dim is."""
    order = list(range(rank))
    base = op.target.split(".")[1]
    if base == "permute":
        return list(wrap(ints(op.arg("dims")), rank))
    if base in ("movedim", "moveaxis"):
        source, target = wrap(ints(op.arg("source")), rank), wrap(ints(op.arg("destination")), rank)
        order = [k for k in order if k not in source]
        for at, k in sorted(zip(target, source, strict=True)):
            order.insert(at, k)
        return order
    if base == "numpy_T":
        return order[::-1]
    first, second = ("dim0", "dim1") if get(op, "dim0") is not None else ("axis0", "axis1")
    i, j = wrap((*ints(get(op, first, -2)), *ints(get(op, second, -1))), rank) if rank > 1 else (0, 0)
    order[i], order[j] = order[j], order[i]
    return order


def _create(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    return rule_text([["."] * len(t.shape) for t in inputs], [names(len(outputs[0].shape))])


def _whole(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    return fixed(inputs, outputs)


RESHAPES = """reshape.default view.default _unsafe_view.default flatten.using_ints unflatten.int squeeze.default
    squeeze.dim squeeze.dims unsqueeze.default view_as.default reshape_as.default ravel.default"""
PERMUTES = """permute.default transpose.int swapaxes.default swapdims.default t.default numpy_T.default mT.default
    adjoint.default movedim.int movedim.intlist moveaxis.int moveaxis.intlist"""

RULES: dict[str, RuleOf] = {
    **{f"aten.{target}": _reshape for target in RESHAPES.split()},
    **{f"aten.{target}": _permute for target in PERMUTES.split()},
    **{f"aten.{base}.default": _create for base in (
        "full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "arange", "scalar_tensor")},
    "autoddl.draw": _create,
    "aten.arange.start": _create,
    "aten.arange.start_step": _create,
    "aten.eye.default": _whole,
    "aten.eye.m": _whole,
    "aten.linspace.default": _whole,
    "aten.tril_indices.default": _whole,
    "aten.triu_indices.default": _whole,
}
