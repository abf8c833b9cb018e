"""Rewrites a float32 program into bf16-mixed: casts where `torch.autocast` makes them, parameters used in bfloat16.

    LOWER      products, convolutions, attention      every floating input is cast to bfloat16
    HIGHER     norms, softmax, losses, powers, sums   every floating input is cast to float32
    WIDEST     what takes inputs of one dtype only    floating inputs are cast to the widest of them
    others     computed in the dtypes of their inputs, as PyTorch promotes them

A parameter is used in bfloat16, so it is cast before it is gathered. It stays in float32 if only operators of HIGHER
and batch norms read it. It also does if an operator of the user's own reads it, or a score of FlexAttention: these are
given their inputs as they are. A batch norm takes float32 parameters with bfloat16 values. A buffer's new value is cast
to the buffer's dtype. The least number of float32, by which a module masks scores, becomes bfloat16's where these are.
Where the module disables autocast, operators compute in the dtypes of their inputs, and parameters stay in float32.

The lists are those of `torch.autocast` for CUDA (torch.amp, "CUDA Ops that can autocast"), in names of aten.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from autoddl.capture.fx_tools import replace
from autoddl.capture.rewrites.autocast_region import Region, region_of
from autoddl.capture.rewrites.own_backward import OwnBackward
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError
from autoddl.operators.kernels import custom_ops

__all__ = ["HIGHER", "LOWER", "OWN_DTYPES", "Caster", "autocast", "base_name"]

LOWER = frozenset((
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum", "chain_matmul",
    "linalg_multi_dot", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "conv_tbc", "prelu", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "linalg_vecdot", "attention",
    "flex_attention"))
"""Operators that compute in bfloat16."""

HIGHER = frozenset((
    "layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "instance_norm", "rms_norm", "softmax",
    "_softmax", "softmin", "log_softmax", "_log_softmax", "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log",
    "log10", "log1p", "log2", "logsumexp", "pow", "reciprocal", "rsqrt", "sinh", "softplus", "sum", "prod", "cumsum",
    "cumprod", "tan", "dist", "pdist", "cdist", "_cdist_forward", "norm", "linalg_vector_norm", "renorm",
    "cosine_similarity", "cosine_embedding_loss", "cross_entropy_loss", "token_loss", "token_weight", "nll_loss",
    "nll_loss2d", "nll_loss_nd", "l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div",
    "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss", "multilabel_margin_loss",
    "triplet_margin_loss", "binary_cross_entropy_with_logits", "frobenius_norm", "nuclear_norm", "linalg_matrix_norm",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"))
"""Operators that compute in float32."""

WIDEST = frozenset(("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "tensordot", "vdot",
                    "cat", "stack", "copy", "where", "lerp"))
"""Operators that compute in the widest dtype of their inputs, like all that write by an index."""

OWN_DTYPES = frozenset(("batch_norm", "native_batch_norm", "_native_batch_norm_legit_functional",
                        "_native_batch_norm_legit_no_training"))
"""Operators that take values of bfloat16 beside parameters of float32."""

HALF = (torch.bfloat16, torch.float16)


def autocast(program: GraphModule, parameters: Iterable[str], updated: Sequence[str]) -> None:
    """Casts a float32 program to bf16-mixed in place.

    `parameters` are placeholders; `updated` are those of the buffers whose new values are the program's last outputs.
    """
    made, holes = Caster(program), {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name in parameters:
        node = holes[name]
        if node.meta["val"].dtype is torch.float32 and not _keeps(node):
            node.meta = {**node.meta, "val": made.typed(node.meta["val"], torch.bfloat16)}
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            if region_of(node) is not Region.OFF:
                made.cast_inputs(node)
            made.renew(node)
    last = next(node for node in program.graph.nodes if node.op == "output")
    results = list(last.args[0])
    for k, hole in enumerate(reversed(updated), 1):
        results[-k] = made.cast(results[-k], holes[hole].meta["val"].dtype, last)
    last.args = (tuple(results),)
    drop_casts(program)
    program.graph.eliminate_dead_code()
    program.recompile()


def drop_casts(program: GraphModule) -> None:
    """Drops every cast of a value to the dtype that it has."""
    for node in list(program.graph.nodes):
        if base_name(node) == "_to_copy" and node.args[0].meta["val"].dtype is node.meta["val"].dtype:
            replace(node, node.args[0])


def base_name(node: Node) -> str:
    """`linear` of aten.linear.default, `attention` of our own function; "" for what is no call."""
    if node.op != "call_function":
        return ""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else \
        str(getattr(target, "__name__", target))


def _keeps(parameter: Node) -> bool:
    """Whether the parameter is used in float32: all that read it take it so, or one that autocast does not know."""
    users = parameter.users
    return any(region_of(user) is Region.OFF or _is_own(user) or parameter in _read_as_they_are(user)
               for user in users) or (
        bool(users) and all(base_name(user) in HIGHER | OWN_DTYPES for user in users))


def _is_own(node: Node) -> bool:
    """Whether a call is of an operator of the user's own, which autocast gives its inputs as they are."""
    target = node.target
    return isinstance(target, OwnBackward) or (isinstance(target, torch._ops.OpOverload) and
                                               target.namespace not in ("aten", "prims", "autoddl"))


def _read_as_they_are(node: Node) -> tuple[Any, ...]:
    """The tensors of which FlexAttention reads elements: autocast casts its queries, keys and values alone."""
    return tuple(node.args[3]) if node.target is custom_ops.flex_attention else ()  # type: ignore[arg-type]


def _floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.float32, *HALF)


def _reads(node: Node, dtype: torch.dtype) -> bool:
    """Whether an input of the call has this dtype."""
    return any(_floating(arg) and arg.meta["val"].dtype is dtype for arg in node.all_input_nodes)


@dataclass
class Caster:
    """The casts made so far, and the values that operators yield on inputs of given shapes and dtypes.

    Where `writes`, operators may write in place, so a cast serves only one reader, unless it is of a placeholder.
    """

    program: GraphModule
    writes: bool = False
    casts: dict[tuple[Node, torch.dtype], Node] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def typed(value: FakeTensor, dtype: torch.dtype) -> Tensor:
        with value.fake_mode:
            return value.to(dtype)

    def cast(self, node: Node, dtype: torch.dtype, before: Node) -> Node:
        """`node` in `dtype`, cast in front of its first reader that asks."""
        if node.meta["val"].dtype is dtype:
            return node
        if (node, dtype) not in self.casts or (self.writes and node.op != "placeholder"):
            with self.program.graph.inserting_before(before):
                made = self.program.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
            made.meta = {**before.meta, "val": self.typed(node.meta["val"], dtype)}
            self.casts[node, dtype] = made
        return self.casts[node, dtype]

    def cast_inputs(self, node: Node) -> None:
        """Casts the inputs of one call as its list says."""
        name = base_name(node)
        wanted = torch.bfloat16 if name in LOWER else torch.float32 if name in HIGHER else None
        if wanted is not None:
            self._all(node, wanted)
        elif (name in WIDEST or "scatter" in name or name.startswith("index_")) and _reads(node, torch.float32):
            self._all(node, torch.float32)

    def renew(self, node: Node) -> None:
        """Says what a call yields on its inputs as they are now.

        Raises CaptureError for a product of several dtypes, which no device computes.
        """
        dtypes = {str(x.meta["val"].dtype).removeprefix("torch.") for x in node.all_input_nodes
                  if _floating(x) and x not in _read_as_they_are(node)}
        if len(dtypes) > 1 and base_name(node) in LOWER:
            raise CaptureError(f"{base_name(node)} at {line_of(node.meta.get('stack_trace'))} reads values of several "
                               f"dtypes, {' and '.join(sorted(dtypes))}, where autocast casts none: write x.float()")
        if _reads(node, torch.bfloat16):
            node.args = pytree.tree_map_only(float, _within, node.args)
        node.meta = {**node.meta, "val": self._value(node)}

    def _all(self, node: Node, dtype: torch.dtype) -> None:
        """Casts every floating input of the call to `dtype`, but for those that it reads as they are."""
        kept = _read_as_they_are(node)

        def one(arg: Node) -> Node:
            return self.cast(arg, dtype, node) if _floating(arg) and arg not in kept else arg

        node.args = torch.fx.map_arg(node.args, one)
        node.kwargs = torch.fx.map_arg(node.kwargs, one)

    def _value(self, node: Node) -> Any:
        """The fake values that the call yields, computed once for inputs that are alike."""
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        leaves, shape = pytree.tree_flatten((args, kwargs))
        key = repr((str(node.target), shape, [_sign(leaf) for leaf in leaves]))
        if key not in self.known:
            fakes = [leaf for leaf in (*leaves, *pytree.tree_leaves(node.meta.get("val")))
                     if isinstance(leaf, FakeTensor)]
            with fakes[0].fake_mode:
                self.known[key] = _called(node, args, kwargs)
        return self.known[key]


def _within(number: float) -> float:
    """The number, or bfloat16's own extreme for one of float32 that is beyond it, as `finfo(x.dtype).min` is."""
    largest = torch.finfo(torch.bfloat16).max
    return max(-largest, min(largest, number)) if abs(number) <= torch.finfo(torch.float32).max else number


def _called(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The values that the call yields. Raises CaptureError where an own operator does not take these dtypes."""
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        if not _is_own(node):
            raise
        dtypes = [str(x.dtype).removeprefix("torch.") for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        reason = (str(error).splitlines() or ["no message"])[0]
        raise CaptureError(f"{base_name(node)} at {line_of(node.meta.get('stack_trace'))} fails on "
                           f"{', '.join(dtypes)}, which autocast gives it as they are ({reason}): cast them in "
                           "front of it") from error


def _sign(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


assert custom_ops.attention.__name__ in LOWER and custom_ops.token_loss.__name__ in HIGHER
