"""Footprints of losses that compare two tensors, the first of n bytes. Most call one kernel, others several:

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

from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.work import base

__all__ = ["LOSSES"]

NONE, MEAN = 0, 1
"""Reductions; 2 is a sum."""


def _reduction(call: LocalOp) -> int:
    return int(str(dict(call.op.args).get("reduction", MEAN)))


def _size(call: LocalOp) -> float:
    return float(call.inputs[0].nbytes)


def _one_kernel(buffers: int, target: int) -> Callable[[LocalOp], Footprint]:
    """Makes the footprint function of a loss of one kernel: `buffers` with the gradients, `target` for the target's.

    A loss whose shards hold weighted means multiplies its number, which takes memory of its own."""
    def kind(call: LocalOp) -> Footprint:
        size, count = _size(call), buffers + target * (1 in call.needs)
        if _reduction(call) == NONE:
            return Footprint((0, 1), back=count * size, output_shaped=True)
        shrunk = size if base(call.op) not in _WHOLE else 0.0
        return Footprint((0, 1), during=shrunk * call.inner, slack=shrunk * (not call.inner), back=count * size)
    return kind


_WHOLE = ("aten.huber_loss", "aten.binary_cross_entropy_with_logits")
"""Losses whose kernel writes the loss of every element first, and then takes the mean."""


def _l1(call: LocalOp) -> Footprint:
    """The gradient is the signs times the spread gradient of the mean; the target's is its negative."""
    size, reduction = _size(call), _reduction(call)
    return Footprint(extra=size, during=size * (reduction != NONE), output_shaped=reduction == NONE,
                     back=size * (2 + (reduction == MEAN) - len(call.needs)))


def _kl_div(call: LocalOp) -> Footprint:
    """The gradient of the logarithms a is the loss's, spread, negated and multiplied by b."""
    size, logs = _size(call), bool(dict(call.op.args).get("log_target"))
    if logs or 1 in call.needs:
        return Footprint((0, 1), extra=size, during=2 * size, back=3 * size)
    return Footprint((1,), before=3 * size, back=size)


def _poisson(call: LocalOp) -> Footprint:
    size, first = _size(call), 0 in call.needs
    saves = (*((1,) if first else ()), *((0,) if 1 in call.needs else ()))
    if not dict(call.op.args).get("log_input", True):
        return Footprint((0, 1), extra=size, during=2 * size, back=2 * size)
    return Footprint(saves, extra=size * first, during=size * (2 + (not first)),
                     back=size * (3 - len(call.needs) if first else 1))


def _cosine(call: LocalOp) -> Footprint:
    """Backward has the gradients of the unit tensors, and for one tensor at a time its quotients by the length."""
    size, count = _size(call), len(call.needs)
    return Footprint(call.needs, extra=size * count, during=size * (3 - count), back=size * (4 - count))


def _labels(call: LocalOp) -> Footprint:
    """Cross entropy whose labels are probabilities, or whose result has the loss of every token."""
    size = _size(call)
    whole = call.inputs[1].shape == call.inputs[0].shape
    return Footprint((1,), extra=size, during=size * whole, back=size)


LOSSES: Mapping[str, Callable[[LocalOp], Footprint]] = {
    "aten.mse_loss": _one_kernel(0, 0), "aten.smooth_l1_loss": _one_kernel(0, 0), "aten.huber_loss": _one_kernel(0, 0),
    "aten.soft_margin_loss": _one_kernel(0, 0), "aten.binary_cross_entropy": _one_kernel(0, 1),
    "aten.binary_cross_entropy_with_logits": _one_kernel(1, 0), "aten.l1_loss": _l1, "aten.kl_div": _kl_div,
    "aten.poisson_nll_loss": _poisson, "aten.cosine_similarity": _cosine, "aten.cross_entropy_loss": _labels}
