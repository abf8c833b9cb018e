"""Calls of elementwise, shape, reduction, indexing and creation operators: (target, args, keyword args).

Shapes are small, with sizes that divide evenly (4, 6, 8) and that do not (5, 7), and sizes of 1 that broadcast.
"""

from typing import Any

import torch

__all__ = ["CASES", "Case"]

Case = tuple[str, tuple[Any, ...], dict[str, Any]]
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


def c(target: str, *args: Any, **kwargs: Any) -> Case:
    return f"aten.{target}", args, kwargs


POSITIVE = "acos acosh asin atanh digamma erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt".split()  # noqa: SIM905
UNARY = """abs asinh atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish
    hardtanh isfinite isinf isnan leaky_relu log_sigmoid logical_not mish nan_to_num relu relu6 round selu sigmoid sign
    sgn signbit silu sin sinh softplus softshrink square tan tanh trunc isneginf isposinf sinc special_expit fix neg
    negative positive clone detach contiguous alias lift_fresh_copy deg2rad rad2deg zeros_like ones_like""".split()
BINARY = """hypot atan2 arctan2 maximum minimum logical_and logical_or logical_xor fmax fmin logaddexp logaddexp2
    isclose""".split()
TENSOR = """add sub subtract mul multiply copysign eq ne lt le gt ge less less_equal greater greater_equal not_equal
    rsub""".split()
QUOTIENT = "div divide true_divide fmod remainder xlogy".split()  # noqa: SIM905
BITS = "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__".split()  # noqa: SIM905


def elementwise() -> list[Case]:
    cases = [c(f"{name}.default", x + (name == "acosh")) for name in POSITIVE for x in (u(4, 6), u(5))]
    cases += [c(f"{name}.default", x) for name in UNARY for x in (f(4, 6), f(2, 5, 1))]
    cases += [c(f"{name}.default", a, b) for name in BINARY for a, b in ((f(4, 6), f(4, 6)), (f(5, 1), f(2, 5, 4)))]
    cases += [c(f"{name}.Tensor", a, b) for name in TENSOR for a, b in (
        (f(4, 6), f(4, 6)), (f(2, 4, 6), f(4, 6)), (f(4, 1), f(1, 5)), (f(4, 6), f()), (n(9, 4, 6), n(9, 6)),
        (f(4, 6), n(9, 4, 6)))]
    cases += [c(f"{name}.Tensor", a, b) for name in QUOTIENT for a, b in (
        (f(4, 6), u(4, 6)), (f(5), u(4, 5)), (f(4, 1, 2), u(1, 6, 2)))]
    cases += [c(f"{name}.Tensor", a, b) for name in BITS for a, b in (
        (m(4, 6), m(4, 6)), (n(9, 5, 1), n(9, 1, 4)), (m(), m(4, 1, 6, 6)))]
    cases += [c(f"{name}.Scalar", x, 2) for name in BITS for x in (n(9, 4, 6), n(9, 5))]
    return cases


def scalars() -> list[Case]:
    names = """add sub subtract mul multiply div divide true_divide copysign eq ne lt le gt ge less less_equal greater
        greater_equal not_equal fmod remainder rsub fill""".split()
    cases = [c(f"{name}.Scalar", x, 2) for name in names for x in (f(4, 6), n(9, 5, 3))]
    cases += [c(f"{name}.Tensor", x, y) for name in ("add", "sub", "mul", "div") for x in (f(4, 6), f(5))
              for y in (2, 0.5, 4)]
    cases += [c("add.Tensor", f(4, 6), 0), c("add.Tensor", f(4, 6), f(6), alpha=3), c("sub.Tensor", n(4, 4, 1), 1)]
    return cases


def named() -> list[Case]:
    return [
        c("pow.Tensor_Scalar", f(4, 6), 3.0), c("pow.Tensor_Scalar", f(4, 5, 2), 2), c("pow.Tensor_Tensor", u(4, 6), f(6)),
        c("pow.Tensor_Tensor", u(5, 1), f(5, 4)), c("pow.Scalar", 2.0, f(4, 6)), c("pow.Scalar", 3, f(5)),
        c("max.other", f(4, 6), f(6)), c("max.other", f(5, 1), f(1, 4)), c("min.other", n(9, 4, 6), n(9, 4, 6)),
        c("min.other", f(5), f(5)), c("round.decimals", f(4, 6), decimals=1), c("round.decimals", f(5), decimals=2),
        c("remainder.Scalar_Tensor", 3, n(9, 4, 6) + 1), c("remainder.Scalar_Tensor", 2, n(9, 5) + 1),
        c("heaviside.default", n(3, 4, 6), n(9, 6)), c("heaviside.default", n(3, 5), n(9, 5)),
        c("floor_divide.default", n(9, 4, 6), n(9, 6) + 1), c("floor_divide.default", n(9, 5), n(9, 4, 5) + 1),
        c("floor_divide.Scalar", n(9, 4, 6), 2), c("floor_divide.Scalar", n(9, 5), 3),
        c("div.Tensor_mode", f(4, 6), u(6), rounding_mode=None), c("div.Tensor_mode", n(9, 5), n(9, 5) + 1, rounding_mode="floor"),
        c("div.Tensor_mode", f(4, 6), u(6), rounding_mode="trunc"), c("div.Scalar_mode", f(4, 6), 2, rounding_mode=None),
        c("div.Scalar_mode", f(5), 2, rounding_mode="floor"),
        c("bitwise_not.default", m(4, 6)), c("bitwise_not.default", n(9, 5)),
        c("threshold.default", f(4, 6), 0.1, 0.2), c("threshold.default", f(5), 0.1, 0.2),
        c("clamp.default", f(4, 6), -0.5, 0.5), c("clamp.default", f(5), 0), c("clamp.Tensor", f(4, 6), f(6), None),
        c("clamp.Tensor", f(5, 2), None, f(5, 1)), c("clamp_min.default", f(4, 6), 0), c("clamp_min.default", f(5), 0.1),
        c("clamp_max.default", f(4, 6), 0), c("clamp_max.default", f(5), 0.1), c("clamp_min.Tensor", f(4, 6), f(6)),
        c("clamp_min.Tensor", f(5), f(5)), c("clamp_max.Tensor", f(4, 6), f(4, 1)), c("clamp_max.Tensor", f(5), f(5)),
        c("clip.default", f(4, 6), -0.5, 0.5), c("clip.default", f(5), 0), c("clip.Tensor", f(4, 6), f(6), None),
        c("clip.Tensor", f(5), None, f(5)), c("full_like.default", f(4, 6), 3), c("full_like.default", n(9, 5), 2),
        c("fill.Tensor", n(9, 4), n(9)), c("fill.Tensor", f(5, 6), f()),
        c("copy.default", n(9, 4, 6), n(9, 4, 6)), c("copy.default", n(9, 4, 5), n(9, 5)),
        c("_to_copy.default", n(9, 4, 6), dtype=torch.float64), c("_to_copy.default", f(5, 4), dtype=torch.float64),
        c("_to_copy.default", f(5, 4), dtype=torch.int64), c("to.dtype", f(4, 6), torch.float64),
        c("to.dtype", m(5), torch.int64), c("to.other", f(4, 6), f(3, 2)), c("to.other", n(3, 5), f(2)),
        c("to.device", f(4, 6), torch.device("cpu"), torch.float64), c("to.device", f(5), torch.device("cpu"), torch.int64),
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
        c("lerp.Scalar", f(5), f(4, 5), 0.3), c("lerp.Tensor", f(4, 6), f(4, 6), f(6)), c("lerp.Tensor", f(5), f(5), f(5)),
        c("addcmul.default", f(4, 6), f(6), f(4, 1), value=2), c("addcmul.default", f(5), f(5), f(5)),
        c("addcdiv.default", f(4, 6), f(6), u(4, 1)), c("addcdiv.default", f(5), f(5), u(5), value=3),
        c("broadcast_tensors.default", [f(4, 1), f(6)]), c("broadcast_tensors.default", [f(5), f(4, 5), f()]),
        c("prelu.default", f(4, 6, 2), f(6)), c("prelu.default", f(5, 4), f(1)),
    ]


def reductions() -> list[Case]:
    whole = """sum mean prod amax amin aminmax max min argmax argmin var std var_mean std_mean median nanmedian any all
        linalg_vector_norm count_nonzero""".split()
    cases = [c(f"{name}.default", x) for name in whole for x in (f(4, 6), f(5, 3, 2))]
    dims = """max.dim min.dim argmax.default argmin.default any.dim all.dim prod.dim_int median.dim amax.default
        amin.default cumsum.default cumprod.default cummax.default cummin.default logcumsumexp.default sort.default
        argsort.default glu.default""".split()
    cases += [c(name, x, dim) for name in dims for x, dim in ((f(4, 6), -1), (f(4, 5, 2), 0))]
    several = """sum.dim_IntList mean.dim any.dims all.dims var.dim std.dim var_mean.dim std_mean.dim
        logsumexp.default count_nonzero.dim_IntList""".split()
    cases += [c(name, x, dim) for name in several for x, dim in ((f(4, 6), [-1]), (f(4, 5, 2), [0, 2]), (f(6, 7), [0]))]
    keeps = "sum.dim_IntList mean.dim var.dim std.dim amax.default logsumexp.default any.dims".split()  # noqa: SIM905
    cases += [c(name, x, dim, **({"keepdim": True})) for name in keeps for x, dim in ((f(4, 6), [-1]), (f(5, 2, 4), [0, 1]))]
    corrections = "var std var_mean std_mean".split()  # noqa: SIM905
    cases += [c(f"{name}.correction", x, dim, correction=0, keepdim=True) for name in corrections
              for x, dim in ((f(4, 6), [1]), (f(5, 4), None))]
    return cases + [
        c("sum.default", n(9, 4, 6)), c("sum.dim_IntList", m(4, 6), [1]), c("mean.dim", f(4, 6), None), c("sum.default", f()),
        c("aminmax.default", f(4, 6), dim=1, keepdim=True), c("cumsum.default", m(4, 6), -1),
        c("linalg_vector_norm.default", f(4, 6), 2, [1]), c("linalg_vector_norm.default", f(5, 4), 1, [0], True),
        c("norm.Scalar", f(4, 6)), c("norm.Scalar", f(5), 1), c("norm.ScalarOpt_dim", f(4, 6), 2, [1]),
        c("norm.ScalarOpt_dim", f(5, 4), None, [0], True), c("norm.ScalarOpt_dtype", f(4, 6), 2, dtype=torch.float64),
        c("norm.ScalarOpt_dtype", f(5), 2, dtype=torch.float64),
        c("norm.ScalarOpt_dim_dtype", f(4, 6), 2, [1], False, dtype=torch.float64),
        c("norm.ScalarOpt_dim_dtype", f(5, 4), 2, [0], True, dtype=torch.float64),
        c("mode.default", n(3, 4, 6)), c("mode.default", n(3, 5, 4), 0, True),
        c("kthvalue.default", f(4, 6), 2), c("kthvalue.default", f(5, 4), 2, 0, True),
        c("topk.default", f(4, 6), 2), c("topk.default", f(5, 4), 3, 0), c("sort.stable", f(4, 6), stable=True, dim=1),
        c("sort.stable", f(5, 4), stable=True, dim=0), c("argsort.stable", f(4, 6), stable=True),
        c("argsort.stable", f(5, 4), stable=True, dim=0), c("diff.default", n(9, 4, 6), 1, -1, n(9, 4, 1)),
        c("diff.default", f(5, 4), 1, 0), c("diff.default", f(4, 6), 1, -1, f(4, 1), f(4, 2)),
    ]


def reshapes() -> list[Case]:
    pairs = [((4, 6, 8), (4, 6, 2, 4)), ((4, 6, 2, 4), (4, 6, 8)), ((4, 6, 8), (24, 8)), ((4, 6), (24,)), ((24, 8), (4, 6, 8)),
             ((12, 5), (4, 15)), ((6, 2), (4, 3)), ((5, 7), (35,)), ((5, 7), (5, 1, 7)), ((1, 5, 1), (5,)), ((4, 2, 2, 5, 6),
             (4, 4, 5, 6)), ((2, 3, 4, 5), (6, 20)), ((4, 1, 6), (2, 2, 6)), ((), (1,)), ((8, 6), (4, 2, 3, 2)), ((8,), (2, 4))]
    cases = [c(f"{name}.default", f(*a), list(b)) for name in ("reshape", "view", "_unsafe_view") for a, b in pairs]
    return cases + [
        c("reshape.default", n(9, 4, 6), [-1]), c("reshape.default", f(4, 6, 8), [4, -1, 2, 4]),
        c("flatten.using_ints", f(4, 6, 5), 1), c("flatten.using_ints", f(4, 6, 5), 0, 1), c("ravel.default", f(4, 6)),
        c("ravel.default", f(5)), c("unflatten.int", f(4, 6), 1, [2, 3]), c("unflatten.int", f(8, 5), 0, [-1, 2]),
        c("squeeze.default", f(4, 1, 5)), c("squeeze.default", f(2, 1, 3, 1)), c("squeeze.dim", f(4, 5, 1), -1),
        c("squeeze.dim", f(2, 3), 0), c("squeeze.dims", f(4, 1, 5, 1), [1, 3]), c("squeeze.dims", f(2, 3), [0]),
        c("unsqueeze.default", f(4, 5), 1), c("unsqueeze.default", f(5), -1), c("view_as.default", f(4, 6), f(24)),
        c("view_as.default", f(5, 4), f(5, 2, 2)), c("reshape_as.default", f(4, 6), f(2, 12)),
        c("reshape_as.default", f(5, 4), f(20)), c("expand.default", f(4, 1), [4, 6]), c("expand.default", f(1, 5), [4, -1]),
        c("expand.default", f(4, 2, 1, 6), [4, 2, 3, 6]), c("expand.default", f(6), [2, 4, 6]), c("expand.default", f(), [4]),
        c("broadcast_to.default", f(4, 1), [4, 6]), c("broadcast_to.default", f(5), [2, 5]),
        c("expand_as.default", f(4, 1), f(4, 6)), c("expand_as.default", f(5), f(2, 5)),
        c("permute.default", f(4, 5, 6), [2, 0, 1]), c("permute.default", f(2, 3, 4, 5), [0, -2, 1, 3]),
        *(c(f"{name}", f(*s), i, j) for name in ("transpose.int", "swapaxes.default", "swapdims.default")
          for s, i, j in (((4, 6, 5), 1, 2), ((4, 5), -1, -2))),
        c("t.default", f(4, 5)), c("t.default", f(6)), c("numpy_T.default", f(4, 5)), c("numpy_T.default", f(6, 4)),
        c("mT.default", f(2, 4, 5)), c("mT.default", f(4, 6)), c("adjoint.default", f(2, 4, 5)), c("adjoint.default", f(4, 6)),
        *(c(f"{name}.int", f(*s), i, j) for name in ("movedim", "moveaxis") for s, i, j in (((4, 6, 5), 0, 2), ((4, 5), 1, 0))),
        *(c(f"{name}.intlist", f(*s), i, j) for name in ("movedim", "moveaxis")
          for s, i, j in (((4, 6, 5), [0, 1], [2, 0]), ((4, 5, 2, 3), [3, 0], [1, -1]))),
    ]


def cuts() -> list[Case]:
    joins = [([f(4, 3), f(4, 5)], 1), ([f(2, 6), f(3, 6), f(1, 6)], 0), ([n(9, 4, 1), n(9, 4, 5)], -1)]
    return [
        *(c(f"{name}.default", *a) for name in ("cat", "concat", "concatenate") for a in joins),
        c("stack.default", [f(4, 6), f(4, 6)]), c("stack.default", [f(5), f(5), f(5)], -1),
        *(c(f"{name}.Tensor", *a) for name in ("split", "unsafe_split") for a in ((f(4, 6, 9), 3, 2), (f(5, 4), 2, -1))),
        c("split.sizes", f(4, 6), [2, 4], 1), c("split.sizes", f(5, 4), [2, 3]), c("tensor_split.indices", f(4, 6), [1, 3], 1),
        c("split_with_sizes.default", f(4, 6), [2, 4], 1), c("split_with_sizes.default", f(5, 4), [2, 3]),
        *(c(f"{name}.default", *a) for name in ("chunk", "unsafe_chunk") for a in ((f(4, 6), 2, 1), (f(5, 4), 2, 0))),
        c("tensor_split.sections", f(4, 6), 4, 1), c("tensor_split.sections", f(5, 4), 2), c("tensor_split.indices", f(5, 4), [2]),
        c("narrow.default", f(4, 6), 1, 2, 3), c("narrow.default", f(5, 4), 0, 0, 5), c("unbind.int", f(4, 3), 1),
        c("unbind.int", f(2, 5)), c("slice.Tensor", f(4, 6), 1, 0, 3), c("slice.Tensor", f(4, 7), 1, 1, 9223372036854775807),
        c("slice.Tensor", f(4, 6), 0, 0, 9223372036854775807), c("slice.Tensor", f(4, 5), -1, -9, 5), c("slice.Tensor", f(5)),
        c("slice.Tensor", f(8, 5), 0, 1, 8, 3), c("select.int", f(4, 6, 5), 1, 0), c("select.int", f(5, 4), -1, -1),
        c("select_scatter.default", f(4, 6), f(4), 1, 0), c("select_scatter.default", f(5, 4), f(4), 0, -1),
        c("slice_scatter.default", f(4, 6), f(4, 5), 1, 1, 9223372036854775807),
        c("slice_scatter.default", f(5, 4), f(2, 4), 0, 1, 3), c("flip.default", f(4, 6), [1]), c("flip.default", f(5, 4, 2), [0, -1]),
        c("roll.default", f(4, 6), [1], [1]), c("roll.default", f(5, 4), [2]), c("roll.default", f(5, 4, 2), [1, 2], [0, 2]),
        *(c(f"{name}.default", *a) for name in ("repeat", "tile") for a in (
            (f(4, 1), [1, 6]), (f(5), [4, 1]), (f(2, 3), [2, 4]), (f(4, 6), [1, 1]))),
        c("repeat_interleave.self_int", f(4, 6), 2, 0), c("repeat_interleave.self_int", f(5), 3),
        c("repeat_interleave.self_int", f(4, 6), 2), c("repeat_interleave.self_int", f(6, 5), 2, 0, output_size=12),
        *(c(name, x, *a) for name in ("pad.default", "constant_pad_nd.default") for x, a in (
            (f(4, 6), ([0, 1],)), (f(5, 4), ([1, 1, 0, 2],)))),
        c("pad.default", n(9, 4, 6), [0, 1], "constant", -100.0), c("pad.default", f(4, 6), [1, -1], "constant", 2.0),
        c("pad.default", f(2, 4, 6), [1, 2], "reflect"), c("unfold.default", f(4, 6), 1, 2, 2), c("unfold.default", f(5, 4), 0, 3, 1),
        *(c(f"{name}.default", *a) for name in ("tril", "triu") for a in (
            (f(6, 6),), (f(4, 7), -1), (f(2, 5, 4), 1), (f(8, 6), 2))),
        c("diagonal.default", f(4, 5)), c("diagonal.default", f(2, 4, 5), 1, -2, -1), c("diagonal.default", f(4, 2, 4), 0, 0, 2),
    ]


def indexing() -> list[Case]:
    return [
        c("index.Tensor", n(9, 4, 6), [n(4, 4, 1, 1, 1), n(6, 1, 1, 6, 1)]), c("index.Tensor", f(4, 5), [n(4, 4, 1), n(5, 1, 7)]),
        c("index.Tensor", f(4, 8, 3), [n(4, 8)]), c("index.Tensor", f(4, 6, 5), [None, n(6, 8)]), c("index.Tensor", f(4, 6), [n(4)]),
        c("index.Tensor", f(4, 6, 5), [n(4, 8), None, n(5, 8)]), c("index.Tensor", f(4, 6, 5), [None, n(6, 3, 2), n(5, 2)]),
        c("index.Tensor", f(4, 6), [m(4, 6)]), c("index.Tensor", f(2, 3, 4, 5), [None, n(3, 6), None, n(5, 6)]),
        c("index_put.default", f(4, 6), [torch.arange(3)], f(3, 6)), c("index_put.default", f(4, 6, 5), [None, torch.arange(4)], f(4, 5)),
        c("index_put.default", f(4, 6), [torch.arange(3)], f()), c("index_put.default", f(4, 6), [n(4, 8)], f(8, 6), True),
        c("index_put.default", f(4, 6, 5), [torch.arange(3), None, torch.arange(3)], f(3, 6)),
        c("index_select.default", f(4, 6), 1, n(6, 5)), c("index_select.default", f(5, 4), 0, n(5, 8)),
        c("gather.default", f(4, 6), 1, n(6, 4, 2)), c("gather.default", f(5, 4), 0, n(5, 7, 4)), c("gather.default", f(4, 6), 1, n(6, 3, 4)),
        c("gather.default", n(9, 1, 6), 1, n(6, 1, 6)), c("take_along_dim.default", f(4, 6), n(6, 4, 2), 1),
        c("take_along_dim.default", f(4, 6), n(4, 5, 6), 0), c("take_along_dim.default", f(4, 6), n(24, 5)),
        c("scatter.src", f(4, 6), 1, torch.arange(3).repeat(4, 1), f(4, 3)), c("scatter.src", n(9, 4, 6), 0, torch.zeros(1, 5).long(), n(9, 2, 6)),
        c("scatter.value", f(4, 6), 1, n(6, 4, 2), 0), c("scatter.value", f(5, 4), 0, n(5, 2, 4), 1.5),
        c("scatter_add.default", f(4, 6), 1, n(6, 4, 8), f(4, 8)), c("scatter_add.default", f(5, 4), 0, n(5, 7, 4), f(7, 4)),
        c("scatter_add.default", n(9, 5, 4), 0, n(5, 3, 2), n(9, 7, 4)),
        c("scatter_reduce.two", f(4, 6), 1, n(6, 4, 8), f(4, 8), "amax"), c("scatter_reduce.two", f(5, 4), 0, n(5, 7, 4), f(7, 4), "sum"),
        c("index_add.default", f(4, 6), 1, n(6, 8), f(4, 8)), c("index_add.default", f(5, 4), 0, n(5, 7), f(7, 4), alpha=2),
        c("index_copy.default", f(4, 6), 1, torch.arange(3), f(4, 3)), c("index_copy.default", f(5, 4), 0, torch.arange(2), f(2, 4)),
        c("one_hot.default", n(5, 4, 6), 5), c("one_hot.default", n(6, 5), 6), c("one_hot.default", n(4, 4)),
        c("bucketize.Tensor", f(4, 6), f(5).sort()[0]), c("bucketize.Tensor", f(5), f(4).sort()[0]),
        c("searchsorted.Tensor", f(5).sort()[0], f(4, 6)), c("searchsorted.Tensor", f(4, 6).sort()[0], f(4, 2)),
    ]


def creation() -> list[Case]:
    sizes = [[4, 6], [5], []]
    return [
        *(c(f"{name}.default", size) for name in ("zeros", "ones") for size in sizes),
        *(c("full.default", size, 2.5) for size in sizes), *(c("new_full.default", f(3), size, 2) for size in sizes),
        *(c(f"new_{name}.default", n(9, 4, 6), size) for name in ("zeros", "ones") for size in sizes),
        *(c("arange.default", end) for end in (8, 5, 6.0)), c("arange.default", 7, dtype=torch.float64),
        c("arange.start", 2, 10), c("arange.start", 0.5, 5.5), c("arange.start_step", 10, 0, -2), c("arange.start_step", 0.0, 1.0, 0.125),
        c("scalar_tensor.default", 2.0), c("scalar_tensor.default", 3), c("eye.default", 4), c("eye.default", 5), c("eye.m", 4, 6),
        c("eye.m", 5, 4), c("linspace.default", 0, 1, 5), c("linspace.default", 0.0, 2.0, 8), c("tril_indices.default", 4, 4),
        c("tril_indices.default", 3, 5), c("triu_indices.default", 4, 4), c("triu_indices.default", 3, 5),
    ]


CASES: list[Case] = [*elementwise(), *scalars(), *named(), *reductions(), *reshapes(), *cuts(), *indexing(), *creation()]
