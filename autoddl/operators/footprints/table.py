"""Lists the memory that torch's kernels and autograd hold for each op: outputs, saved tensors, temporaries.

    views       no memory; a reshape of what is not laid out for it copies
    y = f(x)    saves what its derivative reads (torch's derivatives.yaml): its input, its output, its factors, a mask
    backward    one gradient per input that needs one, of the shape of the output first where the input was broadcast;
                a sum hands the output's gradient on, a chain of elementwise calls holds one buffer per call
    products    save their factors, those that are no matrix in memory as a copy

Sizes are of one rank's shards.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

from autoddl.core.graph import Graph, Op
from autoddl.operators.footprints import attention, nn
from autoddl.operators.footprints.einsum import einsum_footprint
from autoddl.operators.footprints.elementwise import ELEMENTWISE
from autoddl.operators.footprints.experts import experts_footprint
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.loss import LOSSES
from autoddl.operators.footprints.recurrent import recurrent_footprint
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.own_facts import own_saves
from autoddl.operators.work import VIEWS, base

__all__ = ["footprint_of", "has_footprint", "whole_footprint"]


def footprint_of(call: LocalOp) -> Footprint:
    """Returns the footprint of an op that is not a view; without gradients it keeps nothing.

    An op that the table does not know is assumed to keep its inputs and one intermediate result."""
    found = _KIND.get(base(call.op), _unknown)(call)
    if call.needs:
        return found
    return Footprint(before=found.before, during=found.during, slack=found.slack)


def whole_footprint(op: Op, graph: Graph, differentiable: frozenset[int], on_cpu: bool = False) -> Footprint:
    """Returns the footprint of an op of `graph` that is not a view, on whole tensors.

    `differentiable` are the tensors that receive a gradient."""
    tensors = graph.tensors
    values = tuple([Value(-1, tensors[t].shape, contiguous(tensors[t].shape), tensors[t].itemsize) for t in op.inputs])
    needs = tuple([k for k, t in enumerate(op.inputs) if t in differentiable])
    return footprint_of(LocalOp(op, values, tuple([tensors[t].shape for t in op.outputs]),
                                tuple([tensors[t].itemsize for t in op.outputs]),
                                () if differentiable.isdisjoint(op.outputs) else needs, False, on_cpu))


@lru_cache(maxsize=8)
def whole_footprints(graph: Graph, on_cpu: bool = False) -> tuple[Footprint, ...]:
    """The footprint of every op of `graph` on whole tensors, an empty one of views."""
    flows = graph.differentiable()
    return tuple(Footprint() if base(op) in VIEWS else whole_footprint(op, graph, flows, on_cpu) for op in graph.ops)


def has_footprint(name: str) -> bool:
    """Whether the footprint of an operator, named without its overload, is known."""
    return name in _KIND


def _unknown(call: LocalOp) -> Footprint:
    """Its inputs, or what it says itself (`own_facts`), and one intermediate result of its derivative."""
    broadcast = all(prod(x.shape) <= prod(call.outputs[0]) for x in call.inputs)
    if (own := own_saves(call.op)) is not None:
        return Footprint(own.inputs, own.outputs, extra=own.density * prod(call.outputs[0]), back=call.nbytes)
    return Footprint(tuple(range(len(call.inputs))), back=call.nbytes, output_shaped=broadcast)


def _indexed(call: LocalOp) -> Footprint:
    """The indices; the gradient is scattered from zeros into a second buffer."""
    return Footprint(tuple(range(1, len(call.inputs))), back=float(call.inputs[0].nbytes))


def _repeated(call: LocalOp) -> Footprint:
    """The counts, if they are a tensor; the gradient is summed."""
    return Footprint(tuple(range(1, len(call.inputs))))


def _gathered(call: LocalOp) -> Footprint:
    """The indices, and what is read, for its shape; the gradient as above."""
    return Footprint(tuple(range(len(call.inputs))), back=float(call.inputs[0].nbytes))


def _scattered(call: LocalOp) -> Footprint:
    """The indices; what is added at rows also, for its shape. The gradient goes on to what is added to."""
    name = base(call.op)
    source = name == "aten.index_add" and call.op.slot("source") in call.needs
    saves = tuple(k for k, slot in enumerate(call.op.slots) if slot.startswith("ind") or (source and slot == "source"))
    return Footprint(saves, passes=(0,) if name.endswith("_add") else ())


def _summed_up(call: LocalOp) -> Footprint:
    """A running sum; the gradient is turned round, summed up, and turned back."""
    return Footprint(back=2.0 * call.inputs[0].nbytes)


def _nothing(call: LocalOp) -> Footprint:
    return Footprint()


def _itself(call: LocalOp) -> Footprint:
    return Footprint((0,))


def _sum(call: LocalOp) -> Footprint:
    return Footprint(passes=(0,))


def _both(call: LocalOp) -> Footprint:
    return Footprint((0, 1))


def _columns(call: LocalOp) -> Footprint:
    """The gradient of the columns is copied before it is added up."""
    return Footprint(back=max(0.0, call.nbytes - call.inputs[0].nbytes))


def _folded(call: LocalOp) -> Footprint:
    """The columns are copied before they are added up."""
    return Footprint(before=float(call.inputs[0].nbytes))


def _grid(call: LocalOp) -> Footprint:
    """Backward makes the homogeneous coordinates of every place."""
    dims = call.outputs[0][-1]
    return Footprint(back=call.nbytes * (dims + 1) / dims)


def _distances(call: LocalOp) -> Footprint:
    """Both sides and the distances, whose gradient is divided by them in three buffers and added up by row."""
    rows = sum(x.nbytes / max(1, x.shape[-1]) for x in call.inputs)
    return Footprint((0, 1), (0,), back=3 * call.nbytes + rows)


def _difference(call: LocalOp) -> Footprint:
    size = float(max(x.nbytes for x in call.inputs))
    return Footprint((), (0,), extra=size, during=size)


def _scaled(call: LocalOp) -> Footprint:
    """The norms beside the inputs."""
    return Footprint((0, 1), extra=float(call.inputs[1].nbytes))


def _form(call: LocalOp) -> Footprint:
    return Footprint((0, 1, 2), during=call.nbytes)


def _concatenated(call: LocalOp) -> Footprint:
    """The gradients are views of the whole."""
    return Footprint(passes=tuple(range(len(call.inputs))))


def _pool(call: LocalOp) -> Footprint:
    """The input, for its shape; a maximum also where it was, int64. To one value a channel it is a mean, which keeps
    nothing. Where places are split, it is the input with its halo."""
    if call.sends:
        return replace(nn.around(call), extra=8.0 * prod(call.outputs[0]) * ("max" in base(call.op)))
    if base(call.op).startswith("aten.adaptive_avg_pool2d") and prod(call.outputs[0][2:]) == 1:
        return Footprint()
    return Footprint((0,), extra=8.0 * prod(call.outputs[0]) if "max" in base(call.op) and len(call.outputs) == 1
                     else 0.0, keeps=(1,) if len(call.outputs) > 1 else ())


def _topk(call: LocalOp) -> Footprint:
    """The indices; backward scatters into a second buffer of zeros."""
    return Footprint(keeps=(1,) if len(call.outputs) > 1 else (), back=float(call.inputs[0].nbytes))


def _extreme(call: LocalOp) -> Footprint:
    """A maximum along a dim keeps its indices; one of two tensors keeps both.

    A maximum over all elements keeps them and the result. Its backward makes three masks: where the maximum is, and
    where element and maximum are NaN."""
    if len(call.outputs) > 1:
        return _topk(call)
    if len(call.inputs) > 1:
        return ELEMENTWISE["aten.maximum"](call)
    return Footprint((0,), (0,), back=3.0 * prod(call.inputs[0].shape))


def _spread(kept: bool, buffers: int, masks: int = 0) -> Callable[[LocalOp], Footprint]:
    """Makes the footprint function of a reduction whose gradient is spread over the input.

    Backward takes `buffers` of the input's size and `masks` of a byte per element; `kept` says that the result is kept
    too."""
    def kind(call: LocalOp) -> Footprint:
        x = call.inputs[0]
        return Footprint((0,), (0,) if kept else (), back=float(buffers * x.nbytes + masks * prod(x.shape)))
    return kind


def _names(text: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in text.split())


_ROWS: tuple[tuple[tuple[str, ...], Callable[[LocalOp], Footprint]], ...] = (
    (_names("sum clone positive"), _sum), (_names("mean copy zeros_like ones_like full_like"), _nothing),
    (_names("constant_pad_nd pad flip repeat arange full tril triu slice_scatter select_scatter pixel_shuffle "
            "pixel_unshuffle channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d "
            "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
            "_upsample_bilinear2d_aa _upsample_bicubic2d_aa meshgrid"), _nothing),
    (_names("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"),
     nn.interpolation_footprint), (_names("roll"), nn.roll_footprint),
    (_names("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
            "glu"), _itself), (_names("cumsum"), _summed_up), (_names("var std var_mean std_mean"), _spread(False, 1)),
    (_names("amax amin"), _spread(True, 0, 1)), (_names("logsumexp"), _spread(True, 2)),
    (_names("norm linalg_vector_norm"), _spread(True, 1)), (_names("prod"), _spread(True, 5)),
    (_names("index index_select"), _indexed), (_names("repeat_interleave max_unpool2d max_unpool3d"), _repeated),
    (_names("gather take_along_dim"), _gathered),
    (_names("index_put scatter scatter_add index_add"), _scattered),
    (_names("embedding"), nn.embedding_footprint), (_names("cat stack"), _concatenated),
    (_names("layer_norm native_layer_norm group_norm native_group_norm instance_norm rms_norm"),
     nn.norm_footprint),
    (_names("_native_batch_norm_legit_functional native_batch_norm batch_norm"), nn.batch_norm_footprint),
    (_names("max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
            "adaptive_avg_pool2d max_pool1d_with_indices max_pool3d_with_indices adaptive_max_pool1d "
            "adaptive_max_pool2d adaptive_max_pool3d"), _pool),
    (_names("topk sort"), _topk), (_names("max min"), _extreme),
    (_names("linear"), nn.linear_footprint), (_names("mm bmm matmul addmm baddbmm mv dot"), nn.product_footprint),
    (("autoddl.grouped_mm",), nn.grouped_footprint), (_names("einsum"), einsum_footprint),
    (_names("conv1d conv2d conv3d convolution conv_transpose1d "
     "conv_transpose2d conv_transpose3d"), nn.convolution_footprint),
    (_names("scaled_dot_product_attention"), attention.flash),
    (_names("im2col"), _columns), (_names("col2im"), _folded), (_names("affine_grid_generator"), _grid),
    (_names("grid_sampler"), _both), (_names("cdist"), _distances), (_names("pairwise_distance"), _difference),
    (_names("_weight_norm"), _scaled), (_names("bilinear"), _form),
    (_names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"), recurrent_footprint),
    (("autoddl.embedding_bag",), nn.embedding_bag_footprint),
    (("autoddl.flex_attention",), attention.flexible),
    (("autoddl.attention",), attention.dropped_attention), (("autoddl.dropout",), nn.dropout_footprint),
    (("autoddl.draw",), nn.draw_footprint),
    (("autoddl.token_loss",), nn.token_loss_footprint), (("autoddl.experts",), experts_footprint),
    (("autoddl.checked",), _sum),
    (("autoddl.token_weight", "autoddl.receive", "autoddl.send"), _nothing))
_KIND: Mapping[str, Callable[[LocalOp], Footprint]] = {
    **ELEMENTWISE, **LOSSES, **{name: kind for names, kind in _ROWS for name in names}}
