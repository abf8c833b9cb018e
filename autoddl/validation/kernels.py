"""Seconds of the kernels of a part, as a training program runs them.

    chain       elementwise operators that a compiler or a hand-written kernel fuses move their first inputs and last
                output. The softmax of attention by two products and its dropout are a kernel each (Megatron-LM,
                fused_kernels/scaled_upper_triang_masked_softmax.h), and so is the backward of a dropout.
    eager       a norm or rotation that is no kernel of the library is a row of kernels on single-precision copies
    precision   linear layers in a narrower dtype cast what they read first
    attention   as much slower as the program's kernels are than the device's best
    gradients   that meet at a tensor with several readers are added up. Those of a sum are its own. Those of gate and
                up are written into one by the kernel of the gated activation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import HUB
from autoddl.core.layout import Mesh, local_shape
from autoddl.cost_models import elementwise_seconds, kernel_seconds
from autoddl.cost_models.machine import Device
from autoddl.operators.fusion import ALONE
from autoddl.operators.ring import ATTENTION
from autoddl.operators.work import KernelWork, base, work
from autoddl.pricing.price import Pricing, inner_seconds, kernel_of
from autoddl.pricing.space import Choice
from autoddl.validation.part import Part, PartChoice, PartSpec
from autoddl.validation.saved_bytes import is_core, local_numel

__all__ = ["has_no_backward", "op_kernels"]

_EAGER_NORM = 9.0
"""Bytes that RMSNorm moves as written in eager mode, over those of one kernel: to float32, square, mean, scale, back
and weight move 36 per element instead of 4 (torchtitan, models: norms)."""
_EAGER_ROTATION = 5.0
"""The like for a rotation, a complex product of float32: to float32, product and back move 20 instead of 4 (torchtitan,
models: apply_rotary_emb)."""
_REPEATED = {"memory": 1.0, "matmul": 0.5, "convolution": 0.5, "attention": 0.0}
"""Kind of kernel -> share that recomputation by operators repeats (torchtitan, activation_checkpoint)."""


@dataclass(frozen=True, slots=True)
class _OpKernels:
    """How the kernels of one operator are priced."""

    pricing: Pricing
    dtype: str
    """Dtype of the output."""
    cast: str
    """Narrower dtype of a product of weights; else empty."""
    attention_slowdown: float
    """Factor on fused attention."""

    def seconds(self, kernel: KernelWork, moved: float) -> float:
        """Seconds of one kernel that is bound by memory with `moved` of its bytes, or of a product with its cast."""
        device = self.pricing.cluster.device
        if kernel.kind.startswith("attention"):
            return kernel_seconds(device, kernel_of(kernel, self.dtype)) * self.attention_slowdown
        if self.cast and kernel.kind == "matmul":
            batch, m, _, k = kernel.shape
            cast = kernel_of(KernelWork(0.0, 3.0 * batch * m * k), self.dtype)
            return kernel_seconds(device, kernel_of(kernel, self.cast)) + kernel_seconds(device, cast)
        if kernel.kind == "memory":
            kernel = replace(kernel, nbytes=kernel.nbytes * moved)
        return kernel_seconds(device, kernel_of(kernel, self.dtype))


def op_kernels(spec: PartSpec, found: PartChoice, op: Op, choice: Choice) -> Iterator[Part]:
    """Yields the kernels of one operator of a part, forward and backward, and what the host starts for it."""
    pricing, graph, core = found.pricing, found.pricing.graph, is_core(op)
    forward, backward = _works(pricing, op, choice, found.differentiable)
    cast = spec.precision if _reads_weight(graph, op) else ""
    kernels = _OpKernels(pricing, graph.tensors[op.outputs[0]].dtype, cast, spec.attention_slowdown)
    moved = _moved(spec, found, op)
    for kernel in forward:
        seconds = kernels.seconds(kernel, moved)
        yield Part(forward=seconds, core=seconds * core, repeated=seconds * _REPEATED[kernel.kind])
    for kernel in backward:
        seconds = kernels.seconds(kernel, 1.0 if base(op) == "autoddl.dropout" else moved)
        yield Part(weight=seconds) if kernel.weight else Part(backward=seconds)
    if spec.unpads and base(op) == "aten.scaled_dot_product_attention":
        yield _unpad_kernels(graph, pricing.mesh, pricing.cluster.device, op, choice)
    reduced = sum(inner_seconds(pricing, op, choice).values()) if choice.inner else 0.0
    yield Part(operators=1, backward_operators=len(backward) or 1, sent_forward=reduced)


def _works(pricing: Pricing, op: Op, choice: Choice, differentiable: frozenset[int]
           ) -> tuple[tuple[KernelWork, ...], tuple[KernelWork, ...]]:
    """Kernels of forward and backward; those of a hub's backward add gradients up."""
    graph, mesh = pricing.graph, pricing.mesh
    inputs, outputs = (tuple(local_shape(graph.tensors[t].shape, c, mesh) for t, c in zip(ts, cs, strict=True))
                       for ts, cs in ((op.inputs, choice.inputs), (op.outputs, choice.outputs)))
    forward, backward = work(op, graph, inputs, outputs, differentiable)
    if op.target == ATTENTION and dict(op.args).get("is_causal"):
        forward, backward = (tuple(map(_balanced, kernels)) for kernels in (forward, backward))
    source = graph.tensors[op.inputs[0]] if op.target == HUB else None
    if source is not None and source.kind is not Kind.PARAMETER:
        adds = len(graph.consumers()[op.outputs[0]]) - 1
        backward = (KernelWork(0.0, 3.0 * adds * local_numel(source, choice.outputs[0], mesh) * source.itemsize),)
    return forward, () if has_no_backward(graph, op) else backward


def _balanced(kernel: KernelWork) -> KernelWork:
    """Causal attention of a part of the queries, of which each rank has as much work: Megatron-LM gives it head and
    tail of the sequence."""
    *sizes, causal = kernel.shape
    name = kernel.name.replace("full", "causal")
    return kernel if causal else replace(kernel, flops=kernel.flops / 2, shape=(*sizes, 1), name=name)


def has_no_backward(graph: Graph, op: Op) -> bool:
    """Whether backward launches nothing: a sum of equal shapes hands on its gradient, halves are written in place."""
    shape = graph.tensors[op.outputs[0]].shape
    return base(op) == "aten.unbind" or (base(op) == "aten.add" and all(graph.tensors[t].shape == shape
                                                                        for t in op.inputs))


def _reads_weight(graph: Graph, op: Op) -> bool:
    """Whether an op is a product with a weight."""
    return base(op) in ("aten.linear", "aten.matmul") and any(graph.tensors[t].kind is Kind.PARAMETER
                                                              for t in op.inputs)


def _moved(spec: PartSpec, found: PartChoice, op: Op) -> float:
    """The bytes that an op moves over those of one kernel of its own."""
    if is_core(op):
        return 1.0
    return 1.0 - found.fused.get(op.name, ALONE).inside if spec.fuses else _eager(found.pricing.graph, op)


def _eager(graph: Graph, op: Op) -> float:
    """The bytes that an op moves where nothing is fused, over those of one kernel."""
    if base(op) == "aten.rms_norm":
        return _EAGER_NORM
    rotates = base(op) == "aten.mul" and any(graph.tensors[t].kind is Kind.BUFFER for t in op.inputs)
    return _EAGER_ROTATION if rotates else 1.0


def _unpad_kernels(graph: Graph, mesh: Mesh, device: Device, op: Op, choice: Choice) -> Part:
    """Copies around fused attention. Queries, keys and values are looked up: read, written. The output is put back:
    zeros, read, written. Gradients go the other way round."""
    q, k, v = (local_numel(graph.tensors[t], c, mesh) * graph.tensors[t].itemsize
               for t, c in zip(op.inputs[:3], choice.inputs[:3], strict=True))
    return Part(forward=elementwise_seconds(device, 2 * (q + k + v) + 3 * q),
                backward=elementwise_seconds(device, 3 * (q + k + v) + 2 * q))
