"""What attention holds: in one kernel no probabilities, in products written out these and all that makes them."""

from math import prod

from autoddl.operators.footprints.footprint import Call, Footprint
from autoddl.operators.footprints.nn import flat
from autoddl.operators.work import base

__all__ = ["dropped_attention", "flash", "plain_attention", "written_out"]


def written_out(call: Call) -> bool:
    """Whether attention is products and a softmax, not one kernel (sdp_utils_cpp.cpp): ours, what has a mask with a
    gradient, and on processors what has not four dims, or a mask of others than two or four."""
    mask = call.slot("attn_mask")
    odd = len(call.inputs[0].shape) != 4 or (mask is not None and len(mask.shape) not in (2, 4))
    return base(call.op) == "autoddl.attention" or call.op.slot("attn_mask") in call.needs or (odd and call.processor)


def flash(call: Call) -> Footprint:
    """Queries, keys, values, the output, and the logarithm of each query's sum in float32 (Dao 2022). A mask of
    truths is kept as numbers, and so is a causal one that begins elsewhere, which is made first."""
    q, k = call.inputs[0], call.inputs[1]
    rows = prod(q.shape[:-1])
    mask, given = q.shape[-2] * k.shape[-2] * float(call.inner), call.slot("attn_mask")
    if written_out(call):
        return plain_attention(call)
    numbers, saves = mask, tuple(range(len(call.inputs)))
    if given is not None and given.itemsize == 1:
        saves = saves[:3]
        numbers += prod(size for size, stride in zip(given.shape, given.strides, strict=True) if stride)
    return Footprint(saves, (0,), extra=4.0 * rows + q.itemsize * numbers, during=mask,
                     back=float(sum(x.nbytes for n, x in enumerate(call.inputs[:3]) if n not in call.needs)))


def plain_attention(call: Call) -> Footprint:
    """Products written out: scaled queries and keys, values and probabilities are kept. Forward the scores stand beside
    the masked ones; backward the gradients of probabilities and scores, without the output's, beside that of the
    values."""
    q, k, v = call.inputs[:3]
    scores = float(prod(q.shape[:-1]) * k.shape[-2] * q.itemsize)
    others = float(sum(call.inputs[n].nbytes for n in call.needs if n != 2))
    scaled, values = float(q.nbytes + k.nbytes), v.nbytes * (not flat(v))
    masked = scores * (len(call.inputs) > 3)
    return Footprint((2,) * flat(v), extra=scaled + values + scores, before=scaled + scores + masked,
                     back=max(0.0, scores - others), late=scaled + 3 * scores - others)


def dropped_attention(call: Call) -> Footprint:
    """Written out: scaled queries, probabilities, the mask of dropout and of causality, dropped probabilities are kept;
    drawing the mask takes two int64 an element beside the scores, which are there to the end, and a mask's own copies.
    Backward the gradient of the dropped probabilities stands beside that of the values."""
    q, k = call.inputs[0], call.inputs[1]
    scores = prod(q.shape[:-1]) * k.shape[-2]
    size, hidden = float(scores * q.itemsize), float(q.shape[-2] * k.shape[-2])
    masked = size * (call.inner or call.slot("attn_mask") is not None)
    others = sum(call.inputs[n].nbytes for n in call.needs if n != 2)
    return Footprint(tuple(range(1, len(call.inputs))), extra=q.nbytes + 2 * size + scores + hidden,
                     before=q.nbytes + 2 * size + masked + hidden + 16.0 * scores, back=max(0.0, size - others))
