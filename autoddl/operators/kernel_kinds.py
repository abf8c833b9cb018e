"""Which measured curve an op's kernels follow: the table op -> kind of work on memory.

Products, convolutions and attention have kinds of their own (`work`). What the others take differs by how much they
compute an element, whether they walk in rows, and whether they jump:

    add            two inputs, one output; backward is the adding up of gradients
    multiply       two inputs, one output; backward the same twice
    copy           one input, one output: casts, joins, negations, masks, relu
    exponential    copies that compute a transcendental function of each element
    reduce         many elements to one: sums, means, gradients of what was broadcast
    normalise      rows that are read for their statistics and again to be scaled
    batch normalise    the same of channels
    gather         rows of a table by index; backward adds them up where they came from
    index          elements by index, in whatever dims; backward likewise; both of blocks where rows are long (`work`)
    pool           windows of images
    loss           logarithm of a softmax, and one element of each row

Classes and not operators, so that a curve holds for operators that nobody timed.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["kind_of"]

_OPS = {
    "add": "add sub rsub where lerp addcmul addcdiv masked_fill",
    "multiply": "mul div maximum minimum fmod remainder einsum",
    "exponential": "gelu silu tanh sigmoid exp exp2 expm1 log log2 log1p pow sqrt rsqrt sin cos erf softplus mish "
                   "elu selu hardswish logsigmoid",
    "reduce": "sum mean amax amin max min argmax argmin any all prod var std norm linalg_vector_norm cumsum topk sort",
    "normalise": "layer_norm native_layer_norm rms_norm group_norm softmax _softmax log_softmax _log_softmax "
                 "_safe_softmax logsumexp",
    "batch normalise": "_native_batch_norm_legit_functional native_batch_norm batch_norm _native_batch_norm_legit",
    "gather": "embedding index_select index_add",
    "index": "index index_put gather scatter scatter_add take_along_dim",
    "pool": "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d",
    "loss": "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d",
}
_KIND: Mapping[str, str] = MappingProxyType(
    {f"aten.{name}": kind for kind, names in _OPS.items() for name in names.split()} | {"autoddl.token_loss": "loss"})


def kind_of(name: str) -> str:
    """The kind of memory work of the operator `name`, like `aten.gelu`; a copy where nothing else is known."""
    return _KIND.get(name, "copy")
