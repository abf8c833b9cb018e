"""Calls of reductions, shape, indexing and creation operators, and (in `CASES`) the elementwise ones."""

import op_cases_elementwise
import torch
from op_cases_elementwise import Call, c, f, m, n, words

__all__ = ["CASES"]


def reductions() -> list[Call]:
    whole = words("""sum mean prod amax amin aminmax max min argmax argmin var std var_mean std_mean median nanmedian
        any all linalg_vector_norm count_nonzero""")
    cases = [c(f"{name}.default", x) for name in whole for x in (f(4, 6), f(5, 3, 2))]
    dims = words("""max.dim min.dim argmax.default argmin.default any.dim all.dim prod.dim_int median.dim amax.default
        amin.default cumsum.default cumprod.default cummax.default cummin.default logcumsumexp.default sort.default
        argsort.default glu.default""")
    cases += [c(name, x, dim) for name in dims for x, dim in ((f(4, 6), -1), (f(4, 5, 2), 0))]
    several = words("""sum.dim_IntList mean.dim any.dims all.dims var.dim std.dim var_mean.dim std_mean.dim
        logsumexp.default count_nonzero.dim_IntList""")
    cases += [c(name, x, dim) for name in several for x, dim in ((f(4, 6), [-1]), (f(4, 5, 2), [0, 2]), (f(6, 7), [0]))]
    keeps = words("sum.dim_IntList mean.dim var.dim std.dim amax.default logsumexp.default any.dims")
    cases += [c(name, x, dim, **({"keepdim": True})) for name in keeps for x, dim in ((f(4, 6), [-1]), (f(5, 2, 4), [0,
    1]))]
    corrections = words("var std var_mean std_mean")
    cases += [c(f"{name}.correction", x, dim, correction=0, keepdim=True) for name in corrections
              for x, dim in ((f(4, 6), [1]), (f(5, 4), None))]
    return [
        *cases,
        c("sum.default", n(9, 4, 6)), c("sum.dim_IntList", m(4, 6), [1]), c("mean.dim", f(4, 6), None),
        c("sum.default", f()),
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


def reshapes() -> list[Call]:
    pairs = [((4, 6, 8), (4, 6, 2, 4)), ((4, 6, 2, 4), (4, 6, 8)), ((4, 6, 8), (24, 8)), ((4, 6), (24,)),
    ((24, 8), (4, 6, 8)),
             ((12, 5), (4, 15)), ((6, 2), (4, 3)), ((5, 7), (35,)), ((5, 7), (5, 1, 7)), ((1, 5, 1), (5,)),
             ((4, 2, 2, 5, 6),
             (4, 4, 5, 6)), ((2, 3, 4, 5), (6, 20)), ((4, 1, 6), (2, 2, 6)), ((), (1,)), ((8, 6), (4, 2, 3, 2)),
             ((8,), (2, 4))]
    cases = [c("reshape.default", f(*a), list(b)) for a, b in pairs]
    cases += [c(f"{name}.default", f(*a), list(b)) for name in ("view", "_unsafe_view") for a, b in pairs[:3]]
    return [
        *cases,
        c("reshape.default", n(9, 4, 6), [-1]), c("reshape.default", f(4, 6, 8), [4, -1, 2, 4]),
        c("flatten.using_ints", f(4, 6, 5), 1), c("flatten.using_ints", f(4, 6, 5), 0, 1), c("ravel.default", f(4, 6)),
        c("ravel.default", f(5)), c("unflatten.int", f(4, 6), 1, [2, 3]), c("unflatten.int", f(8, 5), 0, [-1, 2]),
        c("squeeze.default", f(4, 1, 5)), c("squeeze.default", f(2, 1, 3, 1)), c("squeeze.dim", f(4, 5, 1), -1),
        c("squeeze.dim", f(2, 3), 0), c("squeeze.dims", f(4, 1, 5, 1), [1, 3]), c("squeeze.dims", f(2, 3), [0]),
        c("unsqueeze.default", f(4, 5), 1), c("unsqueeze.default", f(5), -1), c("view_as.default", f(4, 6), f(24)),
        c("view_as.default", f(5, 4), f(5, 2, 2)), c("reshape_as.default", f(4, 6), f(2, 12)),
        c("reshape_as.default", f(5, 4), f(20)), c("expand.default", f(4, 1), [4, 6]),
        c("expand.default", f(1, 5), [4, -1]),
        c("expand.default", f(4, 2, 1, 6), [4, 2, 3, 6]), c("expand.default", f(6), [2, 4, 6]),
        c("expand.default", f(), [4]),
        c("broadcast_to.default", f(4, 1), [4, 6]), c("broadcast_to.default", f(5), [2, 5]),
        c("expand_as.default", f(4, 1), f(4, 6)), c("expand_as.default", f(5), f(2, 5)),
        c("permute.default", f(4, 5, 6), [2, 0, 1]), c("permute.default", f(2, 3, 4, 5), [0, -2, 1, 3]),
        *(c(f"{name}", f(*s), i, j) for name in ("transpose.int", "swapaxes.default", "swapdims.default")
          for s, i, j in (((4, 6, 5), 1, 2), ((4, 5), -1, -2))),
        c("t.default", f(4, 5)), c("t.default", f(6)), c("numpy_T.default", f(4, 5)), c("numpy_T.default", f(6, 4)),
        c("mT.default", f(2, 4, 5)), c("mT.default", f(4, 6)), c("adjoint.default", f(2, 4, 5)),
        c("adjoint.default", f(4, 6)),
        *(c(f"{name}.int", f(*s), i, j) for name in ("movedim", "moveaxis") for s, i, j in (((4, 6, 5), 0, 2),
        ((4, 5), 1, 0))),
        *(c(f"{name}.intlist", f(*s), i, j) for name in ("movedim", "moveaxis")
          for s, i, j in (((4, 6, 5), [0, 1], [2, 0]), ((4, 5, 2, 3), [3, 0], [1, -1]))),
    ]


def cuts() -> list[Call]:
    joins = [([f(4, 3), f(4, 5)], 1), ([f(2, 6), f(3, 6), f(1, 6)], 0), ([n(9, 4, 1), n(9, 4, 5)], -1)]
    return [
        *(c(f"{name}.default", *a) for name in ("cat", "concat", "concatenate") for a in joins),
        c("stack.default", [f(4, 6), f(4, 6)]), c("stack.default", [f(5), f(5), f(5)], -1),
        *(c(f"{name}.Tensor", *a) for name in ("split", "unsafe_split") for a in ((f(4, 6, 9), 3, 2), (f(5, 4), 2,
        -1))),
        c("split.sizes", f(4, 6), [2, 4], 1), c("split.sizes", f(5, 4), [2, 3]),
        c("tensor_split.indices", f(4, 6), [1, 3], 1),
        c("split_with_sizes.default", f(4, 6), [2, 4], 1), c("split_with_sizes.default", f(5, 4), [2, 3]),
        *(c(f"{name}.default", *a) for name in ("chunk", "unsafe_chunk") for a in ((f(4, 6), 2, 1), (f(5, 4), 2, 0))),
        c("tensor_split.sections", f(4, 6), 4, 1), c("tensor_split.sections", f(5, 4), 2),
        c("tensor_split.indices", f(5, 4), [2]),
        c("narrow.default", f(4, 6), 1, 2, 3), c("narrow.default", f(5, 4), 0, 0, 5), c("unbind.int", f(4, 3), 1),
        c("unbind.int", f(2, 5)), c("slice.Tensor", f(4, 6), 1, 0, 3),
        c("slice.Tensor", f(4, 7), 1, 1, 9223372036854775807),
        c("slice.Tensor", f(4, 6), 0, 0, 9223372036854775807), c("slice.Tensor", f(4, 5), -1, -9, 5),
        c("slice.Tensor", f(5)),
        c("slice.Tensor", f(8, 5), 0, 1, 8, 3), c("select.int", f(4, 6, 5), 1, 0), c("select.int", f(5, 4), -1, -1),
        c("select_scatter.default", f(4, 6), f(4), 1, 0), c("select_scatter.default", f(5, 4), f(4), 0, -1),
        c("slice_scatter.default", f(4, 6), f(4, 5), 1, 1, 9223372036854775807),
        c("slice_scatter.default", f(5, 4), f(2, 4), 0, 1, 3), c("flip.default", f(4, 6), [1]),
        c("flip.default", f(5, 4, 2), [0, -1]),
        c("roll.default", f(4, 6), [1], [1]), c("roll.default", f(5, 4), [2]),
        c("roll.default", f(5, 4, 2), [1, 2], [0, 2]),
        *(c(f"{name}.default", *a) for name in ("repeat", "tile") for a in (
            (f(4, 1), [1, 6]), (f(5), [4, 1]), (f(2, 3), [2, 4]), (f(4, 6), [1, 1]))),
        c("repeat_interleave.self_int", f(4, 6), 2, 0), c("repeat_interleave.self_int", f(5), 3),
        c("repeat_interleave.self_int", f(4, 6), 2), c("repeat_interleave.self_int", f(6, 5), 2, 0, output_size=12),
        *(c(name, x, *a) for name in ("pad.default", "constant_pad_nd.default") for x, a in (
            (f(4, 6), ([0, 1],)), (f(5, 4), ([1, 1, 0, 2],)))),
        c("pad.default", n(9, 4, 6), [0, 1], "constant", -100.0), c("pad.default", f(4, 6), [1, -1], "constant", 2.0),
        c("pad.default", f(2, 4, 6), [1, 2], "reflect"), c("unfold.default", f(4, 6), 1, 2, 2),
        c("unfold.default", f(5, 4), 0, 3, 1),
        *(c(f"{name}.default", *a) for name in ("tril", "triu") for a in (
            (f(6, 6),), (f(4, 7), -1), (f(2, 5, 4), 1), (f(8, 6), 2))),
        c("diagonal.default", f(4, 5)), c("diagonal.default", f(2, 4, 5), 1, -2, -1),
        c("diagonal.default", f(4, 2, 4), 0, 0, 2),
    ]


def indexing() -> list[Call]:
    return [
        c("index.Tensor", n(9, 4, 6), [n(4, 4, 1, 1, 1), n(6, 1, 1, 6, 1)]),
        c("index.Tensor", f(4, 5), [n(4, 4, 1), n(5, 1, 7)]),
        c("index.Tensor", f(4, 8, 3), [n(4, 8)]), c("index.Tensor", f(4, 6, 5), [None, n(6, 8)]),
        c("index.Tensor", f(4, 6), [n(4)]),
        c("index.Tensor", f(4, 6, 5), [n(4, 8), None, n(5, 8)]),
        c("index.Tensor", f(4, 6, 5), [None, n(6, 3, 2), n(5, 2)]),
        c("index.Tensor", f(4, 6), [m(4, 6)]), c("index.Tensor", f(2, 3, 4, 5), [None, n(3, 6), None, n(5, 6)]),
        c("index_put.default", f(4, 6), [torch.arange(3)], f(3, 6)),
        c("index_put.default", f(4, 6, 5), [None, torch.arange(4)], f(4, 5)),
        c("index_put.default", f(4, 6), [torch.arange(3)], f()),
        c("index_put.default", f(4, 6), [n(4, 8)], f(8, 6), True),
        c("index_put.default", f(4, 6, 5), [torch.arange(3), None, torch.arange(3)], f(3, 6)),
        c("index_select.default", f(4, 6), 1, n(6, 5)), c("index_select.default", f(5, 4), 0, n(5, 8)),
        c("gather.default", f(4, 6), 1, n(6, 4, 2)), c("gather.default", f(5, 4), 0, n(5, 7, 4)),
        c("gather.default", f(4, 6), 1, n(6, 3, 4)),
        c("gather.default", n(9, 1, 6), 1, n(6, 1, 6)), c("take_along_dim.default", f(4, 6), n(6, 4, 2), 1),
        c("take_along_dim.default", f(4, 6), n(4, 5, 6), 0), c("take_along_dim.default", f(4, 6), n(24, 5)),
        c("scatter.src", f(4, 6), 1, torch.arange(3).repeat(4, 1), f(4, 3)),
        c("scatter.src", n(9, 4, 6), 0, torch.zeros(1, 5).long(), n(9, 2, 6)),
        c("scatter.value", f(4, 6), 1, n(6, 4, 2), 0), c("scatter.value", f(5, 4), 0, n(5, 2, 4), 1.5),
        c("scatter_add.default", f(4, 6), 1, n(6, 4, 8), f(4, 8)),
        c("scatter_add.default", f(5, 4), 0, n(5, 7, 4), f(7, 4)),
        c("scatter_add.default", n(9, 5, 4), 0, n(5, 3, 2), n(9, 7, 4)),
        c("scatter_reduce.two", f(4, 6), 1, n(6, 4, 8), f(4, 8), "amax"),
        c("scatter_reduce.two", f(5, 4), 0, n(5, 7, 4), f(7, 4), "sum"),
        c("index_add.default", f(4, 6), 1, n(6, 8), f(4, 8)),
        c("index_add.default", f(5, 4), 0, n(5, 7), f(7, 4), alpha=2),
        c("index_copy.default", f(4, 6), 1, torch.arange(3), f(4, 3)),
        c("index_copy.default", f(5, 4), 0, torch.arange(2), f(2, 4)),
        c("one_hot.default", n(5, 4, 6), 5), c("one_hot.default", n(6, 5), 6), c("one_hot.default", n(4, 4)),
        c("bucketize.Tensor", f(4, 6), f(5).sort()[0]), c("bucketize.Tensor", f(5), f(4).sort()[0]),
        c("searchsorted.Tensor", f(5).sort()[0], f(4, 6)), c("searchsorted.Tensor", f(4, 6).sort()[0], f(4, 2)),
    ]


def creation() -> list[Call]:
    sizes = [[4, 6], [5], []]
    return [
        *(c(f"{name}.default", size) for name in ("zeros", "ones") for size in sizes),
        *(c("full.default", size, 2.5) for size in sizes), *(c("new_full.default", f(3), size, 2) for size in sizes),
        *(c(f"new_{name}.default", n(9, 4, 6), size) for name in ("zeros", "ones") for size in sizes),
        *(c("arange.default", end) for end in (8, 5, 6.0)), c("arange.default", 7, dtype=torch.float64),
        c("arange.start", 2, 10), c("arange.start", 0.5, 5.5), c("arange.start_step", 10, 0, -2),
        c("arange.start_step", 0.0, 1.0, 0.125),
        c("scalar_tensor.default", 2.0), c("scalar_tensor.default", 3), c("eye.default", 4), c("eye.default", 5),
        c("eye.m", 4, 6),
        c("eye.m", 5, 4), c("linspace.default", 0, 1, 5), c("linspace.default", 0.0, 2.0, 8),
        c("tril_indices.default", 4, 4),
        c("tril_indices.default", 3, 5), c("triu_indices.default", 4, 4), c("triu_indices.default", 3, 5),
    ]


CASES: list[Call] = [
    *op_cases_elementwise.CASES, *reductions(), *reshapes(), *cuts(), *indexing(), *creation()]
