"""Calls of elementwise operators, on which their rules are tested, and how such calls are written.

Shapes are small, with sizes that divide evenly (4, 6, 8) and that do not (5, 7), and sizes of 1 that broadcast.
"""

from typing import Any

import torch

__all__ = ["CASES", "Call", "c", "f", "m", "n", "u", "words"]

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
generator = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    """Floats around 0."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def u(*shape: int) -> torch.Tensor:
    """Floats in (0.2, 0.8): where logarithms, roots and arc cosines live."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.6 + 0.2


def n(bound: int, *shape: int) -> torch.Tensor:
    """Integers below `bound`."""
    return torch.randint(0, bound, shape, generator=generator)


def m(*shape: int) -> torch.Tensor:
    """Truth values."""
    return torch.rand(shape, generator=generator) < 0.5


def c(target: str, *args: Any, **kwargs: Any) -> Call:
    """A call: target, arguments, keyword arguments."""
    return f"aten.{target}", args, kwargs


def words(text: str) -> list[str]:
    return text.split()


POSITIVE = words("acos acosh asin atanh digamma erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt")
UNARY = words("""abs asinh atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardshrink
    hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log_sigmoid logical_not mish nan_to_num relu
    relu6 round selu sigmoid sign sgn signbit silu sin sinh softplus softshrink square tan tanh trunc isneginf
    isposinf sinc special_expit fix neg negative positive clone detach contiguous alias lift_fresh_copy deg2rad
    rad2deg zeros_like ones_like""")
BINARY = words("""hypot atan2 arctan2 maximum minimum logical_and logical_or logical_xor fmax fmin logaddexp logaddexp2
    isclose""")
TENSOR = words("""add sub subtract mul multiply copysign eq ne lt le gt ge less less_equal greater greater_equal
    not_equal rsub""")
QUOTIENT = words("div divide true_divide fmod remainder xlogy")
BITS = words("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__")


def elementwise() -> list[Call]:
    cases = [c(f"{name}.default", x + (name == "acosh")) for name in POSITIVE for x in (u(4, 6), u(5))]
    cases += [c(f"{name}.default", x) for name in UNARY for x in (f(4, 6), f(2, 5, 1))]
    cases += [c(f"{name}.default", a, b) for name in BINARY for a, b in ((f(4, 6), f(4, 6)), (f(5, 1), f(2, 5, 4)))]
    cases += [c(f"{name}.Tensor", a, b) for name in TENSOR for a, b in ((f(4, 6), f(4, 6)), (n(9, 5, 1), n(9, 1, 4)))]
    cases += [c(f"{name}.Tensor", a, b) for name in ("add", "sub", "mul", "lt") for a, b in (
        (f(2, 4, 6), f(4, 6)), (f(4, 1), f(1, 5)), (f(4, 6), f()), (f(4, 6), n(9, 4, 6)))]
    cases += [c(f"{name}.Tensor", a, b) for name in QUOTIENT for a, b in (
        (f(4, 6), u(4, 6)), (f(5), u(4, 5)), (f(4, 1, 2), u(1, 6, 2)))]
    cases += [c(f"{name}.Tensor", a, b) for name in BITS for a, b in (
        (m(4, 6), m(4, 6)), (n(9, 5, 1), n(9, 1, 4)), (m(), m(4, 1, 6, 6)))]
    cases += [c(f"{name}.Scalar", x, 2) for name in BITS for x in (n(9, 4, 6), n(9, 5))]
    return cases


def scalars() -> list[Call]:
    names = words("""add sub subtract mul multiply div divide true_divide copysign eq ne lt le gt ge less less_equal
        greater greater_equal not_equal fmod remainder rsub fill""")
    cases = [c(f"{name}.Scalar", x, 2) for name in names for x in (f(4, 6), n(9, 5, 3))]
    cases += [c(f"{name}.Tensor", x, y) for name in ("add", "sub", "mul", "div") for x in (f(4, 6), f(5))
              for y in (2, 0.5, 4)]
    cases += [c("add.Tensor", f(4, 6), 0), c("add.Tensor", f(4, 6), f(6), alpha=3), c("sub.Tensor", n(4, 4, 1), 1)]
    return cases


def named() -> list[Call]:
    return [
        c("pow.Tensor_Scalar", f(4, 6), 3.0), c("pow.Tensor_Scalar", f(4, 5, 2), 2),
        c("pow.Tensor_Tensor", u(4, 6), f(6)),
        c("pow.Tensor_Tensor", u(5, 1), f(5, 4)), c("pow.Scalar", 2.0, f(4, 6)), c("pow.Scalar", 3, f(5)),
        c("max.other", f(4, 6), f(6)), c("max.other", f(5, 1), f(1, 4)), c("min.other", n(9, 4, 6), n(9, 4, 6)),
        c("min.other", f(5), f(5)), c("round.decimals", f(4, 6), decimals=1), c("round.decimals", f(5), decimals=2),
        c("remainder.Scalar_Tensor", 3, n(9, 4, 6) + 1), c("remainder.Scalar_Tensor", 2, n(9, 5) + 1),
        c("heaviside.default", n(3, 4, 6), n(9, 6)), c("heaviside.default", n(3, 5), n(9, 5)),
        c("floor_divide.default", n(9, 4, 6), n(9, 6) + 1), c("floor_divide.default", n(9, 5), n(9, 4, 5) + 1),
        c("floor_divide.Scalar", n(9, 4, 6), 2), c("floor_divide.Scalar", n(9, 5), 3),
        c("div.Tensor_mode", f(4, 6), u(6), rounding_mode=None),
        c("div.Tensor_mode", n(9, 5), n(9, 5) + 1, rounding_mode="floor"),
        c("div.Tensor_mode", f(4, 6), u(6), rounding_mode="trunc"),
        c("div.Scalar_mode", f(4, 6), 2, rounding_mode=None),
        c("div.Scalar_mode", f(5), 2, rounding_mode="floor"),
        c("bitwise_not.default", m(4, 6)), c("bitwise_not.default", n(9, 5)),
        c("threshold.default", f(4, 6), 0.1, 0.2), c("threshold.default", f(5), 0.1, 0.2),
        c("clamp.default", f(4, 6), -0.5, 0.5), c("clamp.default", f(5), 0), c("clamp.Tensor", f(4, 6), f(6), None),
        c("clamp.Tensor", f(5, 2), None, f(5, 1)), c("clamp_min.default", f(4, 6), 0),
        c("clamp_min.default", f(5), 0.1),
        c("clamp_max.default", f(4, 6), 0), c("clamp_max.default", f(5), 0.1), c("clamp_min.Tensor", f(4, 6), f(6)),
        c("clamp_min.Tensor", f(5), f(5)), c("clamp_max.Tensor", f(4, 6), f(4, 1)), c("clamp_max.Tensor", f(5), f(5)),
        c("clip.default", f(4, 6), -0.5, 0.5), c("clip.default", f(5), 0), c("clip.Tensor", f(4, 6), f(6), None),
        c("clip.Tensor", f(5), None, f(5)), c("full_like.default", f(4, 6), 3), c("full_like.default", n(9, 5), 2),
        c("fill.Tensor", n(9, 4), n(9)), c("fill.Tensor", f(5, 6), f()),
        c("copy.default", n(9, 4, 6), n(9, 4, 6)), c("copy.default", n(9, 4, 5), n(9, 5)),
        c("_to_copy.default", n(9, 4, 6), dtype=torch.float64), c("_to_copy.default", f(5, 4), dtype=torch.float64),
        c("_to_copy.default", f(5, 4), dtype=torch.int64), c("to.dtype", f(4, 6), torch.float64),
        c("to.dtype", m(5), torch.int64), c("to.other", f(4, 6), f(3, 2)), c("to.other", n(3, 5), f(2)),
        c("to.device", f(4, 6), torch.device("cpu"), torch.float64),
        c("to.device", f(5), torch.device("cpu"), torch.int64),
        c("to.dtype_layout", f(4, 6), dtype=torch.float64), c("to.dtype_layout", m(5), dtype=torch.int64),
        c("lift_fresh.default", f(4, 6)), c("lift_fresh.default", n(3, 5)),
        c("type_as.default", f(4, 6), f(3, 2)), c("type_as.default", n(3, 5), f(2)),
        c("where.self", m(4, 6), f(4, 6), f(6)), c("where.self", m(4, 1, 6, 6), f(1, 5, 6, 6), f()),
        c("where.self", m(6, 6), n(9, 6, 6), n(9, 6, 6)), c("where.ScalarOther", m(4, 1, 6), f(1, 5, 6), -9.0),
        c("where.ScalarOther", m(4, 6), f(4, 6), 0), c("where.ScalarSelf", m(4, 6), 0.0, f(6)),
        c("where.ScalarSelf", m(5), 1.0, f(4, 5)), c("where.Scalar", m(4, 6), 1.0, 0.0), c("where.Scalar", m(5), 0, 0),
        c("masked_fill.Scalar", f(4, 6), m(6), 0), c("masked_fill.Scalar", f(5, 4), m(5, 1), -9.0),
        c("masked_fill.Scalar", n(9, 4, 6), m(4, 6), 0), c("masked_fill.Tensor", f(4, 6), m(6), f()),
        c("masked_fill.Tensor", f(5, 4), m(5, 1), f()), c("lerp.Scalar", f(4, 6), f(6), 0.3),
        c("lerp.Scalar", f(5), f(4, 5), 0.3), c("lerp.Tensor", f(4, 6), f(4, 6), f(6)),
        c("lerp.Tensor", f(5), f(5), f(5)),
        c("addcmul.default", f(4, 6), f(6), f(4, 1), value=2), c("addcmul.default", f(5), f(5), f(5)),
        c("addcdiv.default", f(4, 6), f(6), u(4, 1)), c("addcdiv.default", f(5), f(5), u(5), value=3),
        c("broadcast_tensors.default", [f(4, 1), f(6)]), c("broadcast_tensors.default", [f(5), f(4, 5), f()]),
        c("prelu.default", f(4, 6, 2), f(6)), c("prelu.default", f(5, 4), f(1)),
    ]


CASES: list[Call] = [*elementwise(), *scalars(), *named()]
