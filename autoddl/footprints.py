"""What torch's kernels and autograd hold for an op: its outputs, what is saved, what is there for a moment.

    views       no memory; a reshape of what is not laid out for it copies
    y = f(x)    saves what its derivative reads (torch's derivatives.yaml): its input, its output, its factors, a mask
    backward    one gradient per input that needs one, of the shape of the output first where the input was broadcast;
                a sum hands the output's gradient on, a chain of elementwise calls holds one buffer per call
    products    save their factors, those that are no matrix in memory as a copy

Sizes are of the local pieces. Of our own functions the temporaries are counted in `functions` and `kernels_reduced`.
"""

from collections.abc import Callable, Mapping
from math import prod

from autoddl import footprints_nn
from autoddl.footprint import Call, Footprint
from autoddl.work import base

__all__ = ["footprint_of"]


def footprint_of(call: Call) -> Footprint:
    """Of an op that is no view; without gradients nothing is kept."""
    found = _KIND.get(base(call.op), _unknown)(call)
    if call.needs:
        return found
    return Footprint(before=found.before, during=found.during)


def _pointwise(kept: str, buffers: float) -> Callable[[Call], Footprint]:
    """`kept`: input, output or none; `buffers` of the size of the output beside the gradient in backward."""
    def kind(call: Call) -> Footprint:
        return Footprint(tuple(range(len(call.inputs))) if kept == "input" else (), (0,) if kept == "output" else (),
                         back=buffers * call.nbytes, wide=True)
    return kind


def _unknown(call: Call) -> Footprint:
    """Its inputs, and one intermediate result of its derivative."""
    wide = all(prod(x.shape) <= prod(call.outputs[0]) for x in call.inputs)
    return Footprint(tuple(range(len(call.inputs))), back=call.nbytes, wide=wide)


def _add(call: Call) -> Footprint:
    """Hands the gradient on; that of what is subtracted is negated."""
    minus = base(call.op) in ("aten.sub", "aten.rsub", "aten.neg")
    first = () if base(call.op) != "aten.sub" else (0,)
    return Footprint(passes=first if minus else tuple(range(len(call.inputs))), wide=True)


def _mul(call: Call) -> Footprint:
    """Each factor is kept for the other's gradient; a number for none."""
    saves = tuple(k for k in range(len(call.inputs)) if any(n != k for n in call.needs))
    return Footprint(saves, wide=True)


def _div(call: Call) -> Footprint:
    """a / b: b for a; both for b, whose gradient takes two buffers more: -g ((a / b) / b)."""
    if len(call.inputs) == 1:
        return Footprint(wide=True)
    below = 1 in call.needs
    return Footprint((0, 1) if below else (1,), back=2 * call.nbytes * below, wide=True)


def _where(call: Call) -> Footprint:
    mask = call.op.slot("condition")
    mask = call.op.slot("mask") if mask is None else mask
    return Footprint(() if mask is None else (mask,), wide=True)


def _indexed(call: Call) -> Footprint:
    """The indices; the gradient is scattered into zeros."""
    return Footprint(tuple(range(1, len(call.inputs))))


def _gathered(call: Call) -> Footprint:
    """The indices, and what is read, for its shape."""
    return Footprint(tuple(range(len(call.inputs))))


def _scattered(call: Call) -> Footprint:
    """The indices; what is added at rows also, for its shape. The gradient goes on to what is added to."""
    name = base(call.op)
    source = name == "aten.index_add" and call.op.slot("source") in call.needs
    saves = tuple(k for k, slot in enumerate(call.op.slots) if slot.startswith("ind") or (source and slot == "source"))
    return Footprint(saves, passes=(0,) if name.endswith("_add") else ())


def _lerp(call: Call) -> Footprint:
    """Between two by a number: nothing."""
    return Footprint(wide=True) if len(call.inputs) == 2 else _unknown(call)


def _nothing(call: Call) -> Footprint:
    return Footprint()


def _sum(call: Call) -> Footprint:
    return Footprint(passes=(0,))


def _concatenated(call: Call) -> Footprint:
    """The gradients are views of the whole."""
    return Footprint(passes=tuple(range(len(call.inputs))))


def _pool(call: Call) -> Footprint:
    """The input; a maximum also where it was, int64."""
    return Footprint((0,), extra=8.0 * prod(call.outputs[0]) if "max" in base(call.op) and len(call.outputs) == 1
                     else 0.0, keeps=(1,) if len(call.outputs) > 1 else ())


def _topk(call: Call) -> Footprint:
    """The indices; backward scatters into a second buffer of zeros."""
    return Footprint(keeps=(1,) if len(call.outputs) > 1 else (), back=float(call.inputs[0].nbytes))


def _extreme(call: Call) -> Footprint:
    """Along a dim where it was; of two tensors both; of all elements these and the result, and where it was again."""
    if len(call.outputs) > 1:
        return _topk(call)
    if len(call.inputs) > 1:
        return _unknown(call)
    return Footprint((0,), (0,), back=float(prod(call.inputs[0].shape)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in text.split())


_ROWS: tuple[tuple[tuple[str, ...], Callable[[Call], Footprint]], ...] = (
    (_names("add sub rsub neg"), _add), (_names("mul"), _mul), (_names("div"), _div),
    (_names("where masked_fill"), _where), (_names("sum"), _sum),
    (_names("_to_copy clone mean cumsum copy zeros_like ones_like full_like"), _nothing),
    (_names("constant_pad_nd pad roll flip repeat arange full tril triu slice_scatter select_scatter"), _nothing),
    (_names("relu tanh sigmoid softmax _softmax log_softmax _log_softmax"), _pointwise("output", 0)),
    (_names("exp"), _pointwise("output", 0)), (_names("sqrt"), _pointwise("output", 1)),
    (_names("rsqrt"), _pointwise("output", 2)), (_names("gelu silu leaky_relu elu softplus hardswish mish "
     "hardtanh relu6 log_sigmoid threshold"), _pointwise("input", 0)),
    (_names("pow"), _pointwise("input", 2)), (_names("sin cos log abs"), _pointwise("input", 1)),
    (_names("index index_select repeat_interleave"), _indexed), (_names("gather take_along_dim"), _gathered),
    (_names("index_put scatter scatter_add index_add"), _scattered), (_names("lerp"), _lerp),
    (_names("embedding"), footprints_nn.embedding), (_names("cat stack"), _concatenated),
    (_names("layer_norm native_layer_norm group_norm native_group_norm rms_norm"), footprints_nn.norm),
    (_names("_native_batch_norm_legit_functional native_batch_norm batch_norm"), footprints_nn.batch_norm),
    (_names("max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
            "adaptive_avg_pool2d"), _pool), (_names("topk sort"), _topk), (_names("max min"), _extreme),
    (_names("linear"), footprints_nn.linear), (_names("mm bmm matmul addmm baddbmm mv dot"), footprints_nn.product),
    (_names("einsum"), footprints_nn.einsum), (_names("conv1d conv2d conv3d convolution conv_transpose1d "
     "conv_transpose2d conv_transpose3d"), footprints_nn.convolution),
    (_names("scaled_dot_product_attention"), footprints_nn.flash),
    (("autoddl.attention",), footprints_nn.dropped_attention), (("autoddl.dropout",), footprints_nn.dropout),
    (("autoddl.token_loss",), footprints_nn.token_loss), (("autoddl.token_weight",), _nothing))
_KIND: Mapping[str, Callable[[Call], Footprint]] = {name: kind for names, kind in _ROWS for name in names}
