"""What losses that compare two tensors hold, n bytes the first of them. Most are calls of one kernel, others several:

    mse, smooth l1, bce, soft margin    both inputs; one number, in memory of n bytes: torch writes all losses where the
                                        number will be, and shrinks it (Loss.cpp, resize_({}))
    bce with logits                     both inputs; a buffer for the gradient
    l1        |a - b|                   the difference
    kl_div    b log b - b a             b; forward three buffers, those that are multiplied and their difference
    poisson   exp a - b a               exp a, and the factors; forward two buffers beside
    cosine    sum (a / |a|) (b / |b|)   both unit tensors, beside the inputs
    labels    - sum log p_t t           the logarithms of the probabilities

A mean spreads the gradient of its number over a buffer of n bytes, a sum over none.
"""

from collections.abc import Callable, Mapping

from autoddl.operators.footprints.footprint import Call, Footprint
from autoddl.operators.work import base

__all__ = ["LOSSES"]

NONE, MEAN = 0, 1
"""Reductions; 2 is a sum."""


def _reduction(call: Call) -> int:
    return int(str(dict(call.op.args).get("reduction", MEAN)))


def _size(call: Call) -> float:
    return float(call.inputs[0].nbytes)


def _one_kernel(buffers: int, target: int) -> Callable[[Call], Footprint]:
    """`buffers` beside the gradients, `target` of them only for the target's. A loss whose pieces are means of their
    share multiplies its number, which goes to memory of its own."""
    def kind(call: Call) -> Footprint:
        size, count = _size(call), buffers + target * (1 in call.needs)
        if _reduction(call) == NONE:
            return Footprint((0, 1), back=count * size, wide=True)
        shrunk = size if base(call.op) not in _WHOLE else 0.0
        return Footprint((0, 1), during=shrunk * call.inner, slack=shrunk * (not call.inner), back=count * size)
    return kind


_WHOLE = ("aten.huber_loss", "aten.binary_cross_entropy_with_logits")
"""These make all losses first, and then their mean."""


def _l1(call: Call) -> Footprint:
    """Signs, times what the mean spreads, are the gradient; that of the target is its negative."""
    size, reduction = _size(call), _reduction(call)
    return Footprint(extra=size, during=size * (reduction != NONE), wide=reduction == NONE,
                     back=size * (2 + (reduction == MEAN) - len(call.needs)))


def _kl_div(call: Call) -> Footprint:
    """Of the logarithms a: the loss is spread, negated and multiplied by b."""
    size, logs = _size(call), bool(dict(call.op.args).get("log_target"))
    if logs or 1 in call.needs:
        return Footprint((0, 1), extra=size, during=2 * size, back=3 * size)
    return Footprint((1,), before=3 * size, back=size)


def _poisson(call: Call) -> Footprint:
    size, first = _size(call), 0 in call.needs
    saves = (*((1,) if first else ()), *((0,) if 1 in call.needs else ()))
    if not dict(call.op.args).get("log_input", True):
        return Footprint((0, 1), extra=size, during=2 * size, back=2 * size)
    return Footprint(saves, extra=size * first, during=size * (2 + (not first)),
                     back=size * (3 - len(call.needs) if first else 1))


def _cosine(call: Call) -> Footprint:
    """Backward the gradients of the unit tensors, and of one at a time the quotients by its length."""
    size, count = _size(call), len(call.needs)
    return Footprint(call.needs, extra=size * count, during=size * (3 - count), back=size * (4 - count))


def _labels(call: Call) -> Footprint:
    """Cross entropy with probabilities for labels, or of every token by itself."""
    size = _size(call)
    whole = call.inputs[1].shape == call.inputs[0].shape
    return Footprint((1,), extra=size, during=size * whole, back=size)


LOSSES: Mapping[str, Callable[[Call], Footprint]] = {
    "aten.mse_loss": _one_kernel(0, 0), "aten.smooth_l1_loss": _one_kernel(0, 0), "aten.huber_loss": _one_kernel(0, 0),
    "aten.soft_margin_loss": _one_kernel(0, 0), "aten.binary_cross_entropy": _one_kernel(0, 1),
    "aten.binary_cross_entropy_with_logits": _one_kernel(1, 0), "aten.l1_loss": _l1, "aten.kl_div": _kl_div,
    "aten.poisson_nll_loss": _poisson, "aten.cosine_similarity": _cosine, "aten.cross_entropy_loss": _labels}
