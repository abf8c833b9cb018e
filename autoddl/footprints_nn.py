"""What products, normalisations, attention and our own functions hold. A product saves its factors, those that are no
matrix in memory as a copy; of our own functions the temporaries are counted in `functions` and `kernels_reduced`."""

from math import prod

from autoddl.footprint import Call, Footprint
from autoddl.heap import Value, viewed
from autoddl.work import base, letters

__all__ = ["batch_norm", "convolution", "dropout", "dropped_attention", "einsum", "embedding", "flash", "linear",
           "norm", "product", "token_loss"]


def embedding(call: Call) -> Footprint:
    """The indices. Rows split: local indices (int64) and which are elsewhere (bool) are made and kept."""
    if not call.inner:
        return Footprint((1,))
    count = prod(call.inputs[1].shape)
    return Footprint(extra=9.0 * count, before=16.0 * count, during=call.nbytes, back=call.nbytes)


def norm(call: Call) -> Footprint:
    """Input and weight, the mean and the inverse deviation of every row (or group), in float32; rms_norm is written out
    on processors, where the input times the inverse deviation is kept for the weight."""
    x, out = call.inputs[0], call.outputs[0]
    if "group" in base(call.op):
        rows = float(out[0] * int(str(dict(call.op.args).get("num_groups", 1))))
    else:
        rows = prod(out) / max(1, prod(call.inputs[1].shape) if len(call.inputs) > 1 else out[-1])
    copy = () if viewed(x.shape, x.strides, (x.nbytes,)) is not None or x.strides[-1] == 1 else ((0, float(x.nbytes)),)
    return Footprint(tuple(k for k in (0, 1) if k < len(call.inputs) and not (copy and k == 0)),
                     extra=8.0 * rows + x.nbytes * (call.processor and "rms" in base(call.op) and 1 in call.needs),
                     copies=copy)


def batch_norm(call: Call) -> Footprint:
    """Input, weight, mean and inverse deviation. Where the kernel reduces by itself it is written in elementwise calls:
    forward one buffer beside the output, backward three beside the gradient (h, dy - m, h c)."""
    size = call.nbytes * call.inner
    return Footprint(tuple(k for k, s in enumerate(call.op.slots) if s in ("input", "weight")),
                     (1, 2) if len(call.outputs) > 2 else (), before=0.0, during=size, back=3 * size)


def flat(x: Value) -> bool:
    """Whether a product reads it as it lies: a batch of matrices, or their transposes."""
    lead = x.shape[:-2]
    return len(x.shape) < 2 or viewed(x.shape, x.strides, (prod(lead), *x.shape[-2:])) is not None


def linear(call: Call) -> Footprint:
    """The input for the weight, the weight for the input; an input that is no matrix in memory is copied."""
    x, saves = call.inputs[0], []
    copy = len(x.shape) > 2 and viewed(x.shape, x.strides, (prod(x.shape[:-1]), x.shape[-1])) is None
    weight = call.op.slot("weight") or 1
    if weight in call.needs and not copy:
        saves.append(0)
    if 0 in call.needs:
        saves.append(weight)
    return Footprint(tuple(saves), copies=((0, float(x.nbytes)),) if copy and weight in call.needs else (),
                     during=float(x.nbytes) * (copy and weight not in call.needs))


def product(call: Call) -> Footprint:
    names = {"aten.addmm": ("mat1", "mat2"), "aten.baddbmm": ("batch1", "batch2")}.get(base(call.op))
    factors = [call.op.slots.index(n) for n in names] if names else [0, 1][:len(call.inputs)]
    saves, copies = list[int](), list[tuple[int, float]]()
    lead = call.outputs[0][:-2]
    for k, other in zip(factors, reversed(factors), strict=True):
        x = call.inputs[k]
        if other in call.needs:
            wide = float(prod(lead) * prod(x.shape[-2:]) * x.itemsize) if len(x.shape) > 2 else float(x.nbytes)
            if flat(x) and wide == x.nbytes:
                saves.append(k)
            else:
                copies.append((k, wide))
    return Footprint(tuple(saves), copies=tuple(copies))


def einsum(call: Call) -> Footprint:
    """Each factor for the others' gradients: of two as matrices, in a copy where it does not lie so."""
    dims, out = letters(str(call.op.arg("equation")), [len(x.shape) for x in call.inputs])
    saves = [k for k in range(len(call.inputs)) if any(n != k for n in call.needs)]
    copied = [k for k in saves if len(dims) == 2 and not _lies(call.inputs[k], dims[k], dims[1 - k], out)]
    return Footprint(tuple(k for k in saves if k not in copied),
                     copies=tuple((k, float(call.inputs[k].nbytes)) for k in copied))


def _lies(x: Value, mine: list[str], other: list[str], out: list[str]) -> bool:
    """Whether a factor with these names is a batch of matrices in memory; one of a product that sums nothing stays."""
    summed = sorted(set(mine).intersection(other).difference(out))
    groups = [[a for a in out if a in mine and a in other], [a for a in out if a in mine and a not in other], summed]
    order = [mine.index(a) for group in groups for a in group]
    sizes = tuple(prod(x.shape[mine.index(a)] for a in group) for group in groups)
    return not summed or viewed(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order), sizes) is not None


def convolution(call: Call) -> Footprint:
    weight = call.op.slot("weight") or 1
    return Footprint(tuple(k for k, other in ((0, weight), (weight, 0)) if other in call.needs))


def flash(call: Call) -> Footprint:
    """Queries, keys, values, the output, and the logarithm of each query's sum in float32 (Dao 2022). A mask of
    truths is kept as numbers, and so is a causal one that begins elsewhere, which is made first."""
    q, k = call.inputs[0], call.inputs[1]
    rows = prod(q.shape[:-1])
    if call.op.slot("attn_mask") in call.needs:
        return plain_attention(call)
    mask, given = q.shape[-2] * k.shape[-2] * float(call.inner), call.slot("attn_mask")
    numbers = mask
    if given is not None and given.itemsize == 1:
        numbers += prod(size for size, stride in zip(given.shape, given.strides, strict=True) if stride)
    return Footprint(tuple(range(len(call.inputs))), (0,), extra=4.0 * rows + q.itemsize * numbers, during=mask)


def plain_attention(call: Call) -> Footprint:
    """A mask with a gradient is for the products written out (sdp_utils_cpp.cpp): scaled queries and keys, values and
    probabilities are kept; backward the gradients of these and of the scores stand side by side."""
    q, k, v = call.inputs[:3]
    scores = float(prod(q.shape[:-1]) * k.shape[-2] * q.itemsize)
    return Footprint((2,) * flat(v), extra=q.nbytes + k.nbytes + v.nbytes * (not flat(v)) + scores,
                     before=float(scores), back=max(0.0, 2 * scores - q.nbytes - k.nbytes))


def dropped_attention(call: Call) -> Footprint:
    """Written out: scaled queries, probabilities, the mask of dropout and of causality, dropped probabilities are kept;
    drawing the mask takes two int64 an element."""
    q, k = call.inputs[0], call.inputs[1]
    scores = prod(q.shape[:-1]) * k.shape[-2]
    size, hidden = float(scores * q.itemsize), float(q.shape[-2] * k.shape[-2])
    return Footprint(tuple(range(1, len(call.inputs))), extra=q.nbytes + 2 * size + scores + hidden,
                     before=max(0.0, 16.0 * scores - size), during=0.0, back=2 * size)


def dropout(call: Call) -> Footprint:
    """The mask, a byte an element; drawing it takes two int64 an element, applying it one buffer each way."""
    count = prod(call.outputs[0])
    return Footprint(extra=float(count), before=15.0 * count, during=call.nbytes, back=call.nbytes, wide=True)


def token_loss(call: Call) -> Footprint:
    """Logarithms of the probabilities; backward the gradient with respect to them beside that of the logits. Where the
    vocabulary is split the logits themselves, shifted and raised in two buffers."""
    size = float(call.inputs[0].nbytes)
    if call.inner:
        return Footprint((0,), before=2 * size)
    return Footprint((1,), extra=size, back=size)
