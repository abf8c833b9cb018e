"""Rules of reductions and scans, which work along some dims and pass the others through.

    sum, mean          "a b -> a | 0"        b is summed over: each rank sums its piece, the output is a partial sum
    amax, norm, any    "a . -> a"            a dim that is reduced is whole
    cumsum             "a . -> a . | 0"      linear along the scanned dim
    sort, topk         "a . -> a ., a ."
    cholesky           "b . . -> b . ."      of matrices, which are whole
    distances          "b m ., b n . -> b m n"          of rows, which are whole; a norm of rows likewise

mean(x) = sum(x) / n: a rank's mean of m elements counts m/n (kernels).
"""

from autoddl.core.graph import Op
from autoddl.operators.rules.writing import RuleOf, Tensors, aligned, dims_of, fixed, form, get, names, rule_text

__all__ = ["RULES", "along", "along_dims"]

SUMS = "sum.default sum.dim_IntList mean.default mean.dim"
WHOLE = """amax.default amin.default aminmax.default max.default max.dim min.default min.dim argmax.default
    argmin.default any.default any.dim any.dims all.default all.dim all.dims prod.default prod.dim_int var.default
    var.dim var.correction std.default std.dim std.correction var_mean.default var_mean.dim var_mean.correction
    std_mean.default std_mean.dim std_mean.correction linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim
    norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype logsumexp.default count_nonzero.default
    count_nonzero.dim_IntList median.default median.dim nanmedian.default mode.default kthvalue.default"""
SCANS = """cumprod.default cummax.default cummin.default logcumsumexp.default sort.default sort.stable argsort.default
    argsort.stable topk.default glu.default"""


def _reduce(summed: bool) -> RuleOf:
    """Reduced dims leave, or stay with size 1; the others keep their names. `summed` dims split, others are whole."""
    def rule(op: Op, inputs: Tensors, outputs: Tensors) -> str:
        rank = len(inputs[0].shape)
        gone = set(_reduced(op, rank))
        tail = form(inputs, outputs, ((0,),)) if summed else ""
        letters = names(rank)
        before = [n if tail or k not in gone else "." for k, n in enumerate(letters)]
        keep = bool(get(op, "keepdim", False))
        after = ["." if k in gone else n for k, n in enumerate(letters) if keep or k not in gone]
        if any(len(t.shape) != len(after) for t in outputs):
            return fixed(inputs, outputs)
        return rule_text([before], [after] * len(outputs), tail)
    return rule


def _reduced(op: Op, rank: int) -> tuple[int, ...]:
    """The reduced dims: all of them if none is named; mode, median and kthvalue name the last by default."""
    return dims_of(op, rank, empty=range(rank))


def along_dims(dims: tuple[int, ...], inputs: Tensors, outputs: Tensors, tail: str = "") -> str:
    """Returns the rule of tensors of one rank in which `dims`, and dims whose sizes differ, may not be split."""
    tensors = (*inputs, *outputs)
    rank = len(tensors[0].shape)
    if any(len(t.shape) != rank for t in tensors):
        return fixed(inputs, outputs, tail)
    line = ["." if k in dims or len({t.shape[k] for t in tensors}) > 1 else n for k, n in enumerate(names(rank))]
    return rule_text([line] * len(inputs), [line] * len(outputs), tail)


def along(linear: bool = False, key: str = "dim") -> RuleOf:
    """Makes the rule of ops that work along the dims that argument `key` names (all if it names none).

    `linear` says that they are linear in all inputs together."""
    def rule(op: Op, inputs: Tensors, outputs: Tensors) -> str:
        rank = len(inputs[0].shape)
        tail = form(inputs, outputs, ((k,) for k in range(len(inputs)))) if linear else ""
        return along_dims(dims_of(op, rank, key, range(rank)), inputs, outputs, tail)
    return rule


def _cdist(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """Distances of all rows of one batch to all of another."""
    out = outputs[0].shape
    lead = names(len(out) - 2, "b")
    sides = [[*aligned(t.shape[:-2], out[:-2], lead), row, "."] for t, row in zip(inputs, "mn", strict=True)]
    return rule_text(sides, [[*lead, "m", "n"]])


def _similarity(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """One number of two rows, that lie along a dim: the last of the distance, `dim` of the similarity."""
    rank = max(len(t.shape) for t in inputs)
    (dim,) = dims_of(op, rank, empty=(rank - 1,))
    kept = bool(get(op, "keepdim", False))
    sizes = [max(t.shape[k - rank + len(t.shape)] for t in inputs if k >= rank - len(t.shape)) for k in range(rank)]
    letters = ["." if k == dim else n for k, n in enumerate(names(rank))]
    return rule_text([aligned(t.shape, tuple(sizes), letters) for t in inputs],
                     [[n for k, n in enumerate(letters) if k != dim or kept]])


def _weight_norm(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """g v / |v|, where |v| is along all dims but one; linear in g."""
    dim = int(str(get(op, "dim", 0)))
    line = ["n" if k == dim else "." for k in range(len(inputs[0].shape))]
    return rule_text([line, line if len(inputs[1].shape) == len(line) else ["."] * len(inputs[1].shape)], [line],
                     form(inputs, outputs, ((1,),)))


def _matrices(op: Op, inputs: Tensors, outputs: Tensors) -> str:
    """One matrix for each, in the last two dims, which are whole."""
    rank = len(inputs[0].shape)
    return along_dims((rank - 2, rank - 1), inputs, outputs)


RULES: dict[str, RuleOf] = {
    **{f"aten.{target}": _reduce(summed=True) for target in SUMS.split()},
    **{f"aten.{target}": _reduce(summed=False) for target in WHOLE.split()},
    **{f"aten.{target}": along() for target in SCANS.split()},
    "aten.cumsum.default": along(linear=True),
    "aten.diff.default": along(linear=True),
    "aten.cdist.default": _cdist,
    "aten.cosine_similarity.default": _similarity,
    "aten.pairwise_distance.default": _similarity,
    "aten._weight_norm.default": _weight_norm,
    "aten.linalg_cholesky.default": _matrices,
}
