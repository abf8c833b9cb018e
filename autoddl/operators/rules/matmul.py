"""Rules of products: matrix multiplications, einsum, convolutions.

For Y[m, n] = sum_k A[m, k] B[k, n] and one mesh axis, "m k, k n -> m n | 0*1" stands for

    S(m) B -> S(m)    B S(n) -> S(n)    S(k) S(k) -> P    P B -> P    B P -> P    B B -> B

A product of groups, ". k, g k n, . -> . n", sums over the groups g, each of which has rows of its own.

A bias adds the product "+ 2": B or S(n) beside the first three, P where the output is P. Groups of a convolution are a
batch dim inside the channels: "b (g c) x, (g o) c k -> b (g o) x".
"""

from autoddl.core.graph import Op
from autoddl.operators.rules.dimension_strings import Rule
from autoddl.operators.rules.places import halo_signatures, place_dims
from autoddl.operators.rules.writing import RuleOf, Tensors, aligned, fixed, names, rule_text
from autoddl.operators.windows import is_transposed

__all__ = ["RULES"]


def _linear(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    lead = names(len(inputs[0].shape) - 1, "b")
    out = ["n"] if len(inputs[1].shape) == 2 else []
    operands = [[*lead, "k"], [*out, "k"]]
    if len(inputs) == 2:
        return rule_text(operands, [[*lead, *out]], " | 0*1")
    bias = aligned(inputs[2].shape, outputs[0].shape, [*lead, *out])
    return rule_text([*operands, bias], [[*lead, *out]], " | 0*1 + 2")


def _matmul(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """mm, bmm, mv, dot and matmul: matrices in the last two dims, the dims before them broadcast."""
    a, b, out = inputs[0].shape, inputs[1].shape, outputs[0].shape
    rows, columns = ["m"] * (len(a) > 1), ["n"] * (len(b) > 1)
    batch = out[: len(out) - len(rows) - len(columns)]
    lead = names(len(batch), "b")
    operands = [[*aligned(a[:-2], batch, lead), *rows, "k"], [*aligned(b[:-2], batch, lead), "k", *columns]]
    return rule_text(operands, [[*lead, *rows, *columns]], " | 0*1")


def _added_matmul(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """addmm and baddbmm: beta * self + alpha * a @ b, where self broadcasts."""
    shape = outputs[0].shape
    lead = names(len(shape) - 2, "b")
    out = [*lead, "m", "n"]
    return rule_text([aligned(inputs[0].shape, shape, out), [*lead, "m", "k"], [*lead, "k", "n"]], [out], " | 0 + 1*2")


def _einsum(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """The equation itself; one with `...` or without `->` is not split, nor a dim that broadcasts."""
    left, arrow, right = str(op.arg("equation")).replace(" ", "").partition("->")
    if not arrow or "." in left:
        return fixed(inputs, outputs)
    words = left.split(",")
    sizes: dict[str, set[int]] = {}
    for word, tensor in zip(words, inputs, strict=True):
        for letter, size in zip(word, tensor.shape, strict=True):
            sizes.setdefault(letter, set()).add(size)
    dims = [["." if len(sizes[letter]) > 1 else letter for letter in word] for word in (*words, right)]
    return rule_text(dims[:-1], dims[-1:], f" | {'*'.join(map(str, range(len(inputs))))}")


def _bilinear(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """y_o = x^T W_o z + bias_o."""
    lead = names(len(inputs[0].shape) - 1, "b")
    operands, bias = [[*lead, "i"], [*lead, "j"], ["o", "i", "j"]], [["o"]] * (len(inputs) - 3)
    return rule_text([*operands, *bias], [[*lead, "o"]], " | 0*1*2 + 3" if bias else " | 0*1*2")


def _convolution(op: Op, inputs: Tensors, outputs: Tensors) -> Rule:
    """Input b (g c) x.. and weight (g o) c k.. make b (g o) x..; the weight is (g c) o k.. where transposed.

    Places are split as `places` says."""
    groups = int(str(op.arg("groups")))
    spatial = ["."] * (len(inputs[1].shape) - 2)
    batch = names(len(inputs[0].shape) - 1 - len(spatial), "b")
    c, o = (f"(g:{groups} c)", f"(g:{groups} o)") if groups > 1 else ("c", "o")
    weight = [c, "o"] if is_transposed(op) else [o, "c"]
    read, written = place_dims(op, inputs, outputs, len(spatial))
    operands, out = [[*batch, c, *read], [*weight, *spatial]], [*batch, o, *written]
    bias, form = ([[o]], " | 0*1 + 2") if len(inputs) > 2 else ([], " | 0*1")
    return Rule(rule_text([*operands, *bias], [out], form), halo_signatures(op, inputs, outputs))


def _grouped(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Which rows are of which group is said of all rows, so these stay whole."""
    return rule_text([[".", "k"], ["g", "k", "n"], ["."]], [[".", "n"]], " | 0*1")


RULES: dict[str, RuleOf] = {
    "aten.linear.default": _linear,
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.mv.default": _matmul,
    "aten.dot.default": _matmul,
    "aten.matmul.default": _matmul,
    "aten.addmm.default": _added_matmul,
    "aten.baddbmm.default": _added_matmul,
    "aten.einsum.default": _einsum,
    "autoddl.grouped_mm": _grouped,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.conv1d.padding": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.conv_transpose1d.default": _convolution,
    "aten.conv_transpose2d.input": _convolution,
    "aten.conv_transpose3d.input": _convolution,
    "aten.bilinear.default": _bilinear,
    "aten.convolution.default": _convolution,
}
