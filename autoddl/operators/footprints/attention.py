"""Footprints of attention: one kernel keeps no probabilities; written out as products it keeps them, and more."""

from math import prod

from autoddl.operators.flexible import SCORES
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.nn import flat
from autoddl.operators.ring import trades_halves
from autoddl.operators.work import base

__all__ = ["dropped_attention", "flash", "flexible", "plain_attention", "written_out"]

FULL = 4
"""Bytes of a value of float32, in which half precision is computed where it is written out."""


def _halves(call: LocalOp) -> Footprint:
    """Footprint of causal attention whose queries are two chunks, over all keys (`operators.ring`).

    It keeps the traded queries, keys, values, the traded output, and each query's log-sum-exp. Meanwhile there is the
    output of a chunk so far, with that of a block. Backward adds the gradients of blocks up, in float32 at least. The
    largest block has all keys but those of a chunk, on the first rank."""
    q, k, v = call.inputs[:3]
    size, wide, rows, half = q.itemsize, max(4, q.itemsize), prod(q.shape[:-1]), q.itemsize < 4
    out, pair, sums = rows * v.shape[-1], prod(k.shape) + prod(v.shape), float(rows * wide)
    scores = float(rows / 2 * k.shape[-2] * wide) * _writes_blocks(call)
    merging = 0.5 * out * (size + wide + wide * half) + 2 * sums + 3 * scores
    totals, gradients = (pair + prod(q.shape)) * wide, (pair + prod(q.shape)) * size
    block = q.nbytes + pair * size * (1 - q.shape[-2] / 2 / k.shape[-2]) + 3.5 * scores
    return Footprint((1, 2), (), extra=sums + out * size, copies=((0, float(q.nbytes)),),
                     before=q.nbytes + sums + out * size + max(2.0 * out * size, merging),
                     back=max(float(totals * half), totals - gradients + out * size + block))


def ring(call: LocalOp) -> Footprint:
    """Footprint of ring attention (`operators.ring`), whose blocks run in one kernel each, or written out.

    It keeps queries, keys, values, the output, and each query's log-sum-exp. Of a causal ring these are the halves that
    were traded. Meanwhile there are the keys and values that are here and those that come, and the sums so far.
    """
    q, k, v = call.inputs[:3]
    size, wide, rows = q.itemsize, max(4, q.itemsize), prod(q.shape[:-1])
    out, pair, causal = rows * v.shape[-1], prod(k.shape) + prod(v.shape), bool(dict(call.op.args).get("is_causal"))
    sums, own = float(rows * wide), [x.nbytes for x in (q, k, v)]
    merging = out * (size + wide + wide * (size < wide)) + 6 * sums
    scores = float(rows * k.shape[-2] * wide) * _writes_blocks(call)
    forward = 2.0 * pair * size + merging + 3 * scores
    back = pair * (2.5 * size + 2.0 * wide) + prod(q.shape) * wide + 3.5 * scores
    if not causal:
        return Footprint(tuple(range(len(call.inputs))), (0,), extra=sums, before=forward, back=back)
    traded = 2.0 * sum(own) + out * size
    return Footprint((), (), extra=sums + out * size, copies=tuple(enumerate(map(float, own))),
                     before=max(forward, 1.0 * sum(own)) + sum(own), back=max(back + out * size, traded))


def written_out(call: LocalOp) -> bool:
    """Whether attention runs as products and a softmax instead of one kernel (sdp_utils_cpp.cpp).

    Our own attention does, and attention whose mask needs a gradient. On a CPU so does attention on tensors that do not
    have four dims, or with a mask that has neither two nor four. On a GPU so does attention in float64, and in float32
    with fewer heads of keys than of queries. There flash and cuDNN take half precision alone, and the kernel for
    float32 takes as many heads of keys (sdp_utils.cpp)."""
    mask, (q, k, *_) = call.slot("attn_mask"), call.inputs
    if base(call.op) == "autoddl.attention" or call.op.slot("attn_mask") in call.needs:
        return True
    if call.on_cpu:
        return len(q.shape) != 4 or (mask is not None and len(mask.shape) not in (2, 4))
    return q.itemsize == 8 or (q.itemsize == 4 and q.shape[-3:-2] != k.shape[-3:-2])


def _writes_blocks(call: LocalOp) -> bool:
    """Whether the blocks of a ring are written out as products (`kernels.attention_blocks`)."""
    q, v, mask = call.inputs[0], call.inputs[2], call.op.slot("attn_mask")
    if mask in call.needs or q.shape[-1] != v.shape[-1]:
        return True
    return not call.on_cpu and (q.itemsize != 2 or mask is not None)


def flash(call: LocalOp) -> Footprint:
    """Footprint of attention in one kernel (Dao 2022).

    It keeps queries, keys, values, the output, and each query's log-sum-exp in float32. A boolean mask is kept as
    numbers. So is a causal mask that starts at a later query, which must be made first, but in kernels by hand."""
    q, k = call.inputs[0], call.inputs[1]
    rows = prod(q.shape[:-1])
    mask, given = q.shape[-2] * k.shape[-2] * float(call.inner and not call.by_hand), call.slot("attn_mask")
    if call.sends:
        return _halves(call) if _has_all_keys(call) else ring(call)
    if written_out(call):
        return plain_attention(call)
    numbers, saves = mask, tuple(range(len(call.inputs)))
    if given is not None and given.itemsize == 1:
        saves = saves[:3]
        numbers += prod(size for size, stride in zip(given.shape, given.strides, strict=True) if stride)
    return Footprint(saves, (0,), extra=4.0 * rows + q.itemsize * numbers, during=mask,
                     back=float(sum(x.nbytes for n, x in enumerate(call.inputs[:3]) if n not in call.needs)))


def flexible(call: LocalOp) -> Footprint:
    """Footprint of FlexAttention (`kernels.flexible`), which runs in blocks of queries.

    It keeps what it reads, its output and each query's log-sum-exp. Of half precision it computes with copies in
    float32, and keeps that output. Backward has the gradients in float32, and six matrices of a block's scores."""
    q, k, v = call.inputs[:3]
    wide, half = max(4, q.itemsize), q.itemsize < 4
    out, joined, block = prod(q.shape[:-1]) * v.shape[-1], prod(q.shape) + prod(k.shape) + prod(v.shape), _scores(call)
    before, back = float(joined * wide) * half + 3 * block, joined * wide * (1.0 + half) + 2.0 * out * wide + 6 * block
    if call.sends:
        return _flexible_split(call, before, back)
    kept = float((prod(q.shape[:-1]) + out * half) * wide)
    return Footprint(tuple(range(len(call.inputs))), () if half else (0,), extra=kept, before=before, back=back)


def _flexible_split(call: LocalOp, before: float, back: float) -> Footprint:
    """The footprint where the sequence is split (`operators.ring`), beside what blocks take.

    Where halves are traded, it keeps the traded ones: of queries alone where all keys are here. A ring keeps its output
    in the dtype of the queries. Keys and values that are here, that come and that are sent exist together."""
    q, k, v = call.inputs[:3]
    wide, rows, seen = max(4, q.itemsize), prod(q.shape[:-1]), float(q.shape[0] * q.shape[-2] * k.shape[-2])
    out, pair, sums = rows * v.shape[-1], (prod(k.shape) + prod(v.shape)) * q.itemsize, float(rows * wide)
    read, traded = tuple(range(3, len(call.inputs))), float(out * q.itemsize)
    if _has_all_keys(call):
        return Footprint((1, 2, *read), (), extra=sums + out * wide, copies=((0, float(q.nbytes)),),
                         before=before + q.nbytes + out * (wide + q.itemsize) + sums + seen, back=back + traded)
    merging, passing = sums + 2.0 * out * wide, pair + (prod(k.shape) + prod(v.shape)) * wide
    if not trades_halves(call.op):
        return Footprint((0, 1, 2, *read), (0,), extra=sums, before=before + merging + 2.0 * pair + seen,
                         back=back + pair + passing)
    own = [float(x.nbytes) for x in (q, k, v)]
    return Footprint(read, (), extra=sums + traded, copies=tuple(enumerate(own)),
                     before=before + sum(own) + merging + 2.0 * pair + seen, back=back + traded + pair + passing)


def _has_all_keys(call: LocalOp) -> bool:
    """Whether ranks trade halves of queries alone: halves of both are equally long."""
    return trades_halves(call.op) and call.inputs[0].shape[-2] != call.inputs[1].shape[-2]


def _scores(call: LocalOp) -> float:
    """Bytes of the scores of a block of FlexAttention; a block lies in one half."""
    q, k = call.inputs[:2]
    rows = prod(q.shape[:-1]) // (2 if call.sends and trades_halves(call.op) else 1)
    return float(min(rows * k.shape[-2], max(SCORES, prod(q.shape[:-2]) * k.shape[-2])) * max(4, q.itemsize))


def plain_attention(call: LocalOp) -> Footprint:
    """Footprint of attention written out as products.

    It keeps the scaled queries and keys, the values and the probabilities. In forward the scores and the masked scores
    exist together. In backward the gradients of the probabilities and of the scores exist with that of the values, when
    the output's gradient is already freed. Half precision is computed in float32 (`attention_work`)."""
    q, k, v = call.inputs[:3]
    if q.itemsize < FULL and base(call.op) != "autoddl.attention":
        return _plain_in_float32(call)
    scores = float(prod(q.shape[:-1]) * k.shape[-2] * q.itemsize)
    others = float(sum(call.inputs[n].nbytes for n in call.needs if n != 2))
    scaled, values = float(q.nbytes + k.nbytes), v.nbytes * (not flat(v))
    masked = scores * (len(call.inputs) > 3)
    return Footprint((2,) * flat(v), extra=scaled + values + scores, before=scaled + scores + masked,
                     back=max(0.0, scores - others), late=scaled + 3 * scores - others)


def _plain_in_float32(call: LocalOp) -> Footprint:
    """Footprint of attention in half precision that is written out in float32.

    It keeps copies of all that it multiplies. In forward there are the copies that were scaled, and the scores, or the
    probabilities in half precision and the output in float32. Backward has the gradients of the output, the values and
    the probabilities in float32. Later there is that of the scores, and no output's."""
    q, k, v = (float(prod(x.shape) * FULL) for x in call.inputs[:3])
    rows, made = prod(call.inputs[0].shape[:-1]), float(sum(call.inputs[n].nbytes for n in call.needs))
    scores, out = float(rows * call.inputs[1].shape[-2] * FULL), float(rows * call.inputs[2].shape[-1] * FULL)
    kept = q + k + v + scores
    return Footprint((), extra=kept, before=kept + q + k + scores, during=q + k + scores / 2 + out,
                     back=max(0.0, out / 2 + v + scores - made), late=q + k + v + 3 * scores - made)


def dropped_attention(call: LocalOp) -> Footprint:
    """Footprint of our attention with dropout, which is written out as products.

    It keeps the scaled queries, the probabilities, the masks of dropout and causality, and the dropped probabilities.
    Drawing the mask takes two int64 per element while the scores, and the copies of a given mask, still exist. In
    backward the gradient of the dropped probabilities exists with that of the values."""
    q, k = call.inputs[0], call.inputs[1]
    scores = prod(q.shape[:-1]) * k.shape[-2]
    size, hidden = float(scores * q.itemsize), float(q.shape[-2] * k.shape[-2])
    masked = size * (call.inner or call.slot("attn_mask") is not None)
    others = sum(call.inputs[n].nbytes for n in call.needs if n != 2)
    return Footprint(tuple(range(1, len(call.inputs))), extra=q.nbytes + 2 * size + scores + hidden,
                     before=q.nbytes + 2 * size + masked + hidden + 16.0 * scores, back=max(0.0, size - others))
