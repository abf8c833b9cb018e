"""Rules of elementwise operators: y[i] = f(x1[i], x2[i], ...), inputs broadcast to the output.

Every dim splits; an input of size 1 along a dim is whole there. What is linear passes partial sums:

    -x, x*c, x/c, x as another float     0          a*b                        0*1
    a + b, a - b                         0 + 1      a / b                      0
    where(m, a, b)                       1 + 2      x with 0 where m           0
    lerp(a, b, w)                        0 + 1      a + c*b1*b2                0 + 1*2
    complex(a, b)                        0 + 1      conj(a)                    0
"""

from collections.abc import Callable

from autoddl.core.graph import Op
from autoddl.operators.rules.dimension_strings import Rule
from autoddl.operators.rules.writing import RuleOf, Tensors, aligned, fixed, form, get, names, rule_text

__all__ = ["RULES", "pointwise"]

Products = tuple[tuple[int, ...], ...]

NONLINEAR = {
    "default": """abs acos acosh asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1
        floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p
        log2 log_sigmoid logical_not logit mish nan_to_num bitwise_not reciprocal relu relu6 round rsqrt selu sigmoid
        sign sgn signbit silu sin sinh softplus softshrink sqrt square tan tanh threshold trunc isneginf isposinf sinc
        special_expit angle fix hypot atan2 arctan2 maximum minimum logical_and logical_or logical_xor fmax fmin
        logaddexp logaddexp2 isclose heaviside floor_divide clamp clamp_min clamp_max clip full_like zeros_like
        ones_like""",
    "Tensor": """clamp clamp_min clamp_max clip copysign eq ne lt le gt ge less less_equal greater greater_equal
        not_equal fmod remainder bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ rsub fill xlogy""",
    "Scalar": """copysign eq ne lt le gt ge less less_equal greater greater_equal not_equal fmod remainder bitwise_and
        bitwise_or bitwise_xor __and__ __or__ __xor__ rsub fill floor_divide""",
    "Tensor_Scalar": "pow", "Tensor_Tensor": "pow", "other": "max min",
    "decimals": "round", "Scalar_Tensor": "remainder"}
LINEAR = """neg.default negative.default positive.default clone.default detach.default contiguous.default alias.default
    _to_copy.default lift_fresh.default lift_fresh_copy.default deg2rad.default rad2deg.default expand.default
    _conj.default conj.default conj_physical.default resolve_conj.default resolve_neg.default real.default imag.default
    broadcast_to.default expand_as.default mul.Scalar div.Scalar true_divide.Scalar multiply.Scalar divide.Scalar"""


def pointwise(products: Products | Callable[[Op, Tensors], Products] = ()) -> RuleOf:
    """Every input broadcasts to the output; `products` is the linear form, or a function that gives it."""
    def rule(op: Op, inputs: Tensors, outputs: Tensors) -> str:
        shape = outputs[0].shape
        letters = names(len(shape))
        terms = products(op, inputs) if callable(products) else products
        return rule_text((aligned(t.shape, shape, letters) for t in inputs), [letters] * len(outputs),
                    form(inputs, outputs, terms))
    return rule


def _sum(op: Op, inputs: Tensors) -> Products:
    """a + b; x + c is linear only for c = 0."""
    if len(inputs) == 2:
        return ((0,), (1,))
    return ((0,),) if get(op, "other") == 0 else ()


def _product(op: Op, inputs: Tensors) -> Products:
    return ((0, 1),) if len(inputs) == 2 else ((0,),)


def _quotient(op: Op, inputs: Tensors) -> Products:
    """a / b is linear in a, unless it is rounded."""
    return ((0,),) if get(op, "rounding_mode") is None and op.slots[0] == "self" else ()


def _where(op: Op, inputs: Tensors) -> Products:
    """Linear in what it chooses between, if a number among that is 0."""
    numbers = [get(op, name) for name in ("self", "other") if op.slot(name) is None]
    return tuple((i,) for i, slot in enumerate(op.slots) if slot != "condition") if all(n == 0 for n in numbers) else ()


def _masked_fill(op: Op, inputs: Tensors) -> Products:
    if len(inputs) == 3:
        return ((0,), (2,))
    return ((0,),) if get(op, "value") == 0 else ()


def _others_free(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Linear in the first input; of the others only the dtype or the device matters."""
    letters = names(len(outputs[0].shape))
    return rule_text([letters, *(["."] * len(t.shape) for t in inputs[1:])], [letters], form(inputs, outputs, ((0,),)))


def _copy(op: Op, inputs: Tensors, outputs: Tensors) -> str | Rule:
    """copy(self, source): the values of source in the shape of self."""
    return pointwise(((1,),))(op, inputs, outputs)


def _prelu(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """prelu(x, w): one w for all, or one for each channel (dim 1)."""
    letters = names(len(outputs[0].shape))
    if len(letters) < 2 or inputs[1].numel == 1:
        return rule_text([letters, ["."] * len(inputs[1].shape)], [letters])
    return rule_text([letters, [letters[1]]], [letters]) if len(inputs[1].shape) == 1 else fixed(inputs, outputs)


def _table() -> dict[str, RuleOf]:
    nonlinear = {f"aten.{base}.{overload}": pointwise() for overload, bases in NONLINEAR.items()
                 for base in bases.split()}
    nonlinear["aten.pow.Scalar"] = pointwise()
    return {**nonlinear, **{f"aten.{target}": pointwise(((0,),)) for target in LINEAR.split()}}


RULES: dict[str, RuleOf] = {
    **_table(),
    **{f"aten.{base}.Tensor": pointwise(_sum) for base in ("add", "sub", "subtract")},
    **{f"aten.{base}.Scalar": pointwise(_sum) for base in ("add", "sub", "subtract")},
    **{f"aten.{base}.Tensor": pointwise(_product) for base in ("mul", "multiply")},
    **{f"aten.{target}": pointwise(_quotient) for target in (
        "div.Tensor", "div.Tensor_mode", "div.Scalar_mode", "divide.Tensor", "true_divide.Tensor")},
    **{f"aten.where.{overload}": pointwise(_where) for overload in ("self", "ScalarSelf", "ScalarOther", "Scalar")},
    "aten.to.dtype": pointwise(((0,),)),
    "aten.to.dtype_layout": pointwise(((0,),)),
    "aten.to.device": pointwise(((0,),)),
    "aten.to.other": _others_free,
    "aten.masked_fill.Scalar": pointwise(_masked_fill),
    "aten.masked_fill.Tensor": pointwise(_masked_fill),
    "aten.complex.default": pointwise(((0,), (1,))),
    "aten.polar.default": pointwise(),
    "aten.lerp.Scalar": pointwise(((0,), (1,))),
    "aten.lerp.Tensor": pointwise(((0,), (1,))),
    "aten.addcmul.default": pointwise(((0,), (1, 2))),
    "aten.addcdiv.default": pointwise(((0,), (1,))),
    "aten.broadcast_tensors.default": lambda op, i, o: pointwise(tuple((k,) for k in range(len(i))))(op, i, o),
    "aten.type_as.default": _others_free,
    "aten.copy.default": _copy,
    "aten.prelu.default": _prelu,
    "autoddl.variate": pointwise(),
}
