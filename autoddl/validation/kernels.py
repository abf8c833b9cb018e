"""Seconds of the kernels of a part, as a training program runs them.

    chain       elementwise ops that a compiler or a hand-written kernel fuses move their first inputs and last output;
                the softmax of attention by two products and its dropout are a kernel each (Megatron-LM,
                fused_kernels/scaled_upper_triang_masked_softmax.h), and so is the backward of a dropout
    eager       a norm or rotation that is no kernel of the library is a row of kernels on single-precision copies
    precision   linear layers in a narrower dtype cast what they read first
    attention   as much slower as the program's kernels are than the device's best
    gradients   that meet at a tensor with several readers are added up; those of a sum are its own, and those of gate
                and up are written into one by the kernel of the gated activation

F is forward, B backward to the inputs, W to the weights.
"""

from dataclasses import dataclass, replace

from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import HUB
from autoddl.core.layout import local_shape
from autoddl.cost_models import elementwise_seconds, kernel_seconds
from autoddl.operators.fusion import inside
from autoddl.operators.work import Work, base, work
from autoddl.pricing.price import Pricing, inner_seconds, kernel_of
from autoddl.pricing.space import Choice
from autoddl.validation.layers import Shape
from autoddl.validation.saved_bytes import is_core, local_numel

__all__ = ["Asked", "add_op", "passes_on"]

_EAGER = 9.0
"""Bytes of RMSNorm as written in eager mode beside one kernel: to float32, square, mean, scale, back, weight: 36 of 4
per element. Rotations, a complex product of float32, move 20 of 4 ..."""
_ROTATION = 5.0
"""... to float32, product, back (torchtitan, models: norms and apply_rotary_emb)."""
_REPEATED = {"memory": 1.0, "matmul": 0.5, "convolution": 0.5, "attention": 0.0}
"""Kind of kernel -> share that recomputation by operators repeats (torchtitan, activation_checkpoint)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A part of a model on a mesh, as text like `ep=8,cp=2,tp=4`; `precision` is the dtype of linear layers;
    `slower` is how many times longer fused attention takes than with the best kernels of the device;
    `experts` names those of cp and tp that cut experts apart, too; `unpads` as in `Software`; `biased`: experts have
    biases and clamp their gates by kernels of their own."""

    what: str
    shape: Shape
    mesh: str
    sequence: bool
    precision: str
    fuses: bool
    slower: float = 1.0
    experts: str = ""
    unpads: bool = False
    biased: bool = False


def add_op(total: dict[str, float], asked: Asked, pricing: Pricing, op: Op, choice: Choice,
           differentiable: frozenset[int]) -> None:
    """Kernels of one op, and the bytes of its outputs that stay."""
    graph, mesh, core = pricing.graph, pricing.mesh, is_core(op)
    inputs, outputs = (tuple(local_shape(graph.tensors[t].shape, c, mesh) for t, c in zip(ts, cs, strict=True))
                       for ts, cs in ((op.inputs, choice.inputs), (op.outputs, choice.outputs)))
    forward, backward = work(op, graph, inputs, outputs, differentiable)
    if op.target == HUB and graph.tensors[op.inputs[0]].kind is not Kind.PARAMETER:
        adds = len(graph.consumers()[op.outputs[0]]) - 1
        backward = (Work(0.0, 3.0 * adds * local_numel(graph.tensors[op.inputs[0]], choice.outputs[0], mesh)
                         * graph.tensors[op.inputs[0]].itemsize),)
    if passes_on(graph, op):
        backward = ()
    moved = 1.0 if core else 1.0 - inside(graph, op) if asked.fuses else _eager(graph, op)
    back = 1.0 if base(op) == "autoddl.dropout" else moved
    low = asked.precision if base(op) in ("aten.linear", "aten.matmul") and _of_weight(graph, op) else ""
    for kernel in forward:
        seconds = _seconds(pricing, asked, op, kernel, low, moved)
        total["forward"] += seconds
        total["core"] += seconds * core
        total["repeated"] += seconds * _REPEATED[kernel.kind]
    for kernel in backward:
        total["weight" if kernel.weight else "backward"] += _seconds(pricing, asked, op, kernel, low, back)
    if asked.unpads and base(op) == "aten.scaled_dot_product_attention":
        q, k, v = (local_numel(graph.tensors[t], c, mesh) * graph.tensors[t].itemsize
                   for t, c in zip(op.inputs[:3], choice.inputs[:3], strict=True))
        # looked up: read, written; put back: zeros, read, written; gradients the other way round
        total["forward"] += elementwise_seconds(pricing.cluster.device, 2 * (q + k + v) + 3 * q)
        total["backward"] += elementwise_seconds(pricing.cluster.device, 3 * (q + k + v) + 2 * q)
    total["calls"] += 1
    total["backward_calls"] += len(backward) or 1
    reduced = sum(inner_seconds(pricing, op, choice).values()) if choice.inner else 0.0
    total["sent_forward"] += reduced


def passes_on(graph: Graph, op: Op) -> bool:
    """Whether backward launches nothing: a sum of equal shapes hands on its gradient, halves are written in place."""
    shape = graph.tensors[op.outputs[0]].shape
    return base(op) == "aten.unbind" or (base(op) == "aten.add" and all(graph.tensors[t].shape == shape
                                                                        for t in op.inputs))


def _of_weight(graph: Graph, op: Op) -> bool:
    return any(graph.tensors[t].kind is Kind.PARAMETER for t in op.inputs) and op.module != "head"


def _eager(graph: Graph, op: Op) -> float:
    """How many times the bytes of one kernel an op moves where nothing is fused."""
    if base(op) == "aten.rms_norm":
        return _EAGER
    turned = base(op) == "aten.mul" and any(graph.tensors[t].kind is Kind.BUFFER for t in op.inputs)
    return _ROTATION if turned else 1.0


def _seconds(pricing: Pricing, asked: Asked, op: Op, kernel: Work, low: str, moved: float) -> float:
    """Seconds of one kernel, in a narrower dtype with the cast of what it reads; `moved` of its bytes."""
    device, dtype = pricing.cluster.device, pricing.graph.tensors[op.outputs[0]].dtype
    if kernel.kind.startswith("attention"):
        return kernel_seconds(device, kernel_of(kernel, dtype)) * asked.slower
    if low and kernel.kind == "matmul":
        batch, m, _, k = kernel.shape
        cast = kernel_of(Work(0.0, 3.0 * batch * m * k), dtype)
        return kernel_seconds(device, kernel_of(kernel, low)) + kernel_seconds(device, cast)
    if kernel.kind == "memory":
        kernel = replace(kernel, nbytes=kernel.nbytes * moved)
    return kernel_seconds(device, kernel_of(kernel, dtype))
