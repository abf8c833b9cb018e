"""Footprints of products, normalisations and our own operators.

A product saves its factors. A factor whose strides are not those of a matrix is saved as a copy. The temporaries of our
own operators follow from `kernels/custom_ops.py` and `kernels/reducing.py`.
"""

from dataclasses import replace
from math import prod

from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.storages import Value, viewed
from autoddl.operators.windows import is_transposed, padded_shape
from autoddl.operators.work import base

__all__ = ["around", "batch_norm_footprint", "convolution_footprint", "draw_footprint", "dropout_footprint",
           "embedding_bag_footprint", "embedding_footprint", "flat", "grouped_footprint", "interpolation_footprint",
           "linear_footprint", "norm_footprint", "product_footprint", "roll_footprint", "token_loss_footprint"]


def embedding_footprint(call: LocalOp) -> Footprint:
    """Keeps the indices; where rows are split, the local indices (int64) and a mask of other ranks' rows instead."""
    if not call.inner:
        return Footprint((1,))
    count = prod(call.inputs[1].shape)
    return Footprint(extra=9.0 * count, before=16.0 * count, during=call.nbytes, back=call.nbytes)


def embedding_bag_footprint(call: LocalOp) -> Footprint:
    """Keeps indices and weights, and int64: where bags begin and end, of a mean and a maximum the bag of each index.

    A maximum also keeps which row it was of. Where rows are split, indices and weights are the rank's own."""
    count, size, mode = prod(call.inputs[1].shape), call.itemsizes[0], dict(call.op.args).get("mode", 0)
    most, bags = mode == 2, call.outputs[0][0]
    extra = 8.0 * (bags * (3 - most) + count * (mode != 0) + prod(call.outputs[0]) * most)
    if not call.inner:
        return Footprint(tuple(range(1, len(call.inputs))), extra=extra)
    return Footprint(extra=extra + (9.0 + size) * count, before=16.0 * count)


def grouped_footprint(call: LocalOp) -> Footprint:
    """Keeps rows, matrices and ends; what is made of the rows here is copied into all rows."""
    rows, weight, made = call.inputs[0], call.inputs[1], {k: float(call.inputs[k].nbytes) for k in call.needs}
    return Footprint((0, 1, 2), during=call.nbytes + 8.0 * weight.shape[0],
                     back=max(0.0, 2.0 * rows.nbytes * (0 in made) - sum(made.values())))


def norm_footprint(call: LocalOp) -> Footprint:
    """Keeps input, weight, and the mean and inverse deviation of every row (or group) in float32."""
    x, out = call.inputs[0], call.outputs[0]
    if call.on_cpu and "rms" in base(call.op):
        return _root(call)
    if call.sends:
        return _synchronised(call)
    if "group" in base(call.op):
        rows = float(out[0] * int(str(dict(call.op.args).get("num_groups", 1))))
    elif "instance" in base(call.op):
        return Footprint((0,), extra=8.0 * prod(out[:2]) * (1 + 0.5 * (len(call.inputs) > 1)))
    else:
        rows = prod(out) / max(1, prod(call.inputs[1].shape) if len(call.inputs) > 1 else out[-1])
    copy = () if viewed(x.shape, x.strides, (x.nbytes,)) is not None or x.strides[-1] == 1 else ((0, float(x.nbytes)),)
    return Footprint(tuple(k for k in (0, 1) if k < len(call.inputs) and not (copy and k == 0)), extra=8.0 * rows,
                     copies=copy)


def _synchronised(call: LocalOp) -> Footprint:
    """Group norm that reduces over ranks is written as elementwise calls, as batch norm."""
    groups = float(call.outputs[0][0] * int(str(dict(call.op.args)["num_groups"])))
    return Footprint(tuple(k for k in (0, 1) if k < len(call.inputs)), extra=8.0 * groups, before=2 * call.nbytes,
                     during=call.nbytes, back=3 * call.nbytes)


def _root(call: LocalOp) -> Footprint:
    """On a CPU rms_norm runs as elementwise calls, y = (x r) w with r = (mean(x x) + eps)^(-1/2).

    x r is kept for the gradient of w. In backward the gradient through x r exists with that of x x, which takes the
    three buffers of a square."""
    x, weight = call.inputs[0], len(call.inputs) > 1
    size, rows = float(x.nbytes), x.nbytes / max(1, prod(call.inputs[1].shape) if weight else x.shape[-1])
    unit = size * (1 in call.needs)
    if 0 not in call.needs:
        return Footprint((1,), extra=unit, back=size)
    return Footprint(tuple(range(len(call.inputs))), extra=rows + unit, during=size * weight - unit, late=4 * size)


def batch_norm_footprint(call: LocalOp) -> Footprint:
    """Keeps input, weight, mean and inverse deviation.

    A kernel that reduces over ranks is written as elementwise calls. It takes one buffer in forward, and three in
    backward (h, dy - m, h c)."""
    size = call.nbytes * call.inner
    return Footprint(tuple(k for k, s in enumerate(call.op.slots) if s in ("input", "weight")),
                     (1, 2) if len(call.outputs) > 2 else (), before=0.0, during=size, back=3 * size)


def flat(x: Value) -> bool:
    """Whether a product reads `x` without a copy: its strides are those of a batch of matrices, or of transposes."""
    lead = x.shape[:-2]
    return len(x.shape) < 2 or viewed(x.shape, x.strides, (prod(lead), *x.shape[-2:])) is not None


def linear_footprint(call: LocalOp) -> Footprint:
    """Keeps the input for the weight's gradient and the weight for the input's; copies an input that is no matrix."""
    x, saves = call.inputs[0], []
    copy = len(x.shape) > 2 and viewed(x.shape, x.strides, (prod(x.shape[:-1]), x.shape[-1])) is None
    weight = call.op.slot("weight") or 1
    if weight in call.needs and not copy:
        saves.append(0)
    if 0 in call.needs:
        saves.append(weight)
    return Footprint(tuple(saves), copies=((0, float(x.nbytes)),) if copy and weight in call.needs else (),
                     during=float(x.nbytes) * (copy and weight not in call.needs))


def product_footprint(call: LocalOp) -> Footprint:
    """Keeps the factors, as copies where they are no matrices. An addend of the output's shape gets its gradient."""
    names = {"aten.addmm": ("mat1", "mat2"), "aten.baddbmm": ("batch1", "batch2")}.get(base(call.op))
    factors = [call.op.slots.index(n) for n in names] if names else [0, 1][:len(call.inputs)]
    saves, copies = list[int](), list[tuple[int, float]]()
    lead = call.outputs[0][:-2]
    if len(call.inputs[factors[0]].shape) == 2 < len(call.inputs[factors[1]].shape) and factors[0] in call.needs:
        return _folded(call)
    for k, other in zip(factors, reversed(factors), strict=True):
        x = call.inputs[k]
        if other in call.needs:
            wide = float(prod(lead) * prod(x.shape[-2:]) * x.itemsize) if len(x.shape) > 2 else float(x.nbytes)
            if flat(x) and wide == x.nbytes:
                saves.append(k)
            else:
                copies.append((k, wide))
    alone = bool(names) and call.inputs[0].shape == call.outputs[0] and dict(call.op.args).get("beta", 1) == 1
    return Footprint(tuple(saves), copies=tuple(copies), passes=(0,) * alone)


def _folded(call: LocalOp) -> Footprint:
    """A trained matrix times a batch of matrices is one product of the transposes (LinearAlgebra.cpp, should_fold).

    The batch is copied, and so are the product and its gradient."""
    size, grads = float(call.inputs[1].nbytes), sum(call.inputs[k].nbytes for k in call.needs)
    return Footprint((0,) * (1 in call.needs), copies=((1, size),), during=call.nbytes,
                     back=max(0.0, call.nbytes - grads), late=size + call.nbytes)


def convolution_footprint(call: LocalOp) -> Footprint:
    """Keeps input and weight, whichever needs a gradient; where places are split, the input with its halo."""
    weight = call.op.slot("weight") or 1
    if not call.sends:
        return Footprint((0, weight))
    found = replace(around(call), saves=(weight,))
    return _cut(call, found) if is_transposed(call.op) else found


def _cut(call: LocalOp, found: Footprint) -> Footprint:
    """Adds what a transposed convolution makes, of which its piece is a copy of a part, and with a bias another one."""
    windows = call.windows
    x, out = padded_shape(call.inputs[0].shape, call.outputs[0], windows), call.outputs[0]
    made = float(prod((x[d] - 1) * windows[d].parts + windows[d].reach if d in windows else size
                      for d, size in enumerate(out)) * call.itemsizes[0])
    return replace(found, during=made + call.nbytes * (call.op.slot("bias") is not None), back=found.back + made)


def interpolation_footprint(call: LocalOp) -> Footprint:
    """Keeps nothing. Where places are split, the input with its halo is drawn out along one dim after the other.

    It keeps for each place the numbers, int64, of the inputs it lies between, and their shares. Two linear inputs exist
    with what is between; of four cubic ones one exists with the sum so far. What the last dim is drawn out from does
    too, and more numbers. In backward the gradients of two linear inputs exist. Of cubic ones one does, and three of
    what the last dim is drawn out from, two and their sum, when the piece is gone."""
    if not call.sends:
        return Footprint()
    windows, x, out = call.windows, call.inputs[0], call.outputs[0]
    last, cubic = max(windows), "cubic" in call.op.target
    numbers, shares = (4, 4) if cubic else (2, 1)
    lines = float(sum((8 * numbers + x.itemsize * shares) * out[d] for d in windows))
    here = padded_shape(x.shape, out, windows)[last] / out[last]
    drawn = call.nbytes * here if len(windows) > 1 else around(call).beside
    back = call.nbytes + 3 * drawn - x.nbytes if cubic else 2 * call.nbytes
    return Footprint(extra=lines, during=(1 if cubic else 2) * call.nbytes + drawn + 24.0 * out[last], back=back)


def roll_footprint(call: LocalOp) -> Footprint:
    """Keeps nothing. Where places are split, what is sent and what comes exist, and the image before whole dims move.

    In backward the gradient of the piece, which is gone, exists beside what comes."""
    if not call.sends:
        return Footprint()
    x, stays = call.inputs[0], float(call.nbytes)
    split = {d: window for d, window in call.windows.items() if call.outputs[0][d] < window.around}
    for d, window in split.items():
        rows = call.outputs[0][d]
        stays *= max(0, rows - min(window.before, window.around - window.before)) / rows
    sent, moved = x.nbytes - stays, x.nbytes * (len(split) < len(call.windows))
    return Footprint(before=2 * sent, during=max(sent, moved), back=sent)


def around(call: LocalOp) -> Footprint:
    """Keeps the input with its halo and padding, instead of the input; messages are as large as the halo, twice.

    Its gradient is there first, then beside that of the input."""
    x = call.inputs[0]
    held = float(prod(padded_shape(x.shape, call.outputs[0], call.windows)) * x.itemsize)
    sent = 2 * max(0.0, held - x.nbytes)
    more = float(0 in call.needs)
    return Footprint(copies=((0, held),), before=sent, back=max(0.0, held - x.nbytes) * more, late=(held + sent) * more)


def dropout_footprint(call: LocalOp) -> Footprint:
    """Keeps the mask, one byte per element. Drawing it takes two int64 per element.

    Applying it takes one buffer in forward, and one in backward after the output's gradient is freed."""
    count = prod(call.outputs[0])
    return Footprint(extra=float(count), before=16.0 * count, during=call.nbytes, late=call.nbytes, output_shaped=True)


def draw_footprint(call: LocalOp) -> Footprint:
    """Keeps nothing. Drawing takes two numbers of 8 bytes per element, three where quantiles are looked up."""
    wide = str(call.op.arg("law")).endswith("normal")
    return Footprint(before=(24.0 if wide else 16.0) * prod(call.outputs[0]))


def token_loss_footprint(call: LocalOp) -> Footprint:
    """Keeps the log-probabilities; backward has their gradient and that of the logits.

    Where the vocabulary is split it keeps the logits, which are shifted and exponentiated in two buffers."""
    size = float(call.inputs[0].nbytes)
    if call.inner:
        return Footprint((0,), before=2 * size)
    return Footprint((1,), extra=size, back=size)
