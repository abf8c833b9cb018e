"""Prices the kernels of an op on the local pieces: forward, backward, and what a kernel sends by itself.

Ops that are alike, with equal target, arguments, whole shapes and gradients, are priced once (`Kernels`). Shards alone
do not say what runs: a ring of attention has as many steps as the whole sequence has shards. The ops that backward runs
again run their forward kernels twice (`operators.recomputed`). On a device whose programs are `compiled`
a chain of elementwise ops is one kernel (`operators.fusion`). On one whose products are `narrow`, products with
weights run in that dtype, and cast what they read (`operators.narrow_products`).
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.layout import local_shape
from autoddl.cost_models import Device, Kernel, collective, copy_seconds, elementwise_seconds, kernel_seconds
from autoddl.operators.expert_sizes import EXPERTS
from autoddl.operators.fusion import ALONE, Chained
from autoddl.operators.narrow_products import PADDED, Cast, cast_bytes
from autoddl.operators.ring import SHIFT, exposed_seconds
from autoddl.operators.rules.nn import inner_collectives
from autoddl.operators.work import KernelWork, work
from autoddl.pricing.choices import Choice
from autoddl.pricing.price import Counts, Pricing

__all__ = ["Kernels", "computed_dtype", "inner_seconds", "inner_sent", "kernel_of", "op_seconds", "pass_seconds"]

Shapes = tuple[tuple[int, ...], ...]
Passes = tuple[tuple[float, ...], tuple[float, ...]]

_EACH = Counts(1.0, 1.0)
"""Counts every forward and every backward once."""


def op_seconds(pricing: Pricing, op: Op, choice: Choice, differentiable: frozenset[int]) -> float:
    """Seconds of forward and backward of the local op; forward counts twice where it is recomputed."""
    forward, backward = pass_seconds(pricing, op, choice, differentiable)
    return sum((*forward, *backward, *forward * (op.name in pricing.again)))


def pass_seconds(pricing: Pricing, op: Op, choice: Choice, differentiable: frozenset[int]) -> Passes:
    """Seconds of each forward and of each backward kernel of the local op; a hub and a view are free."""
    graph, mesh = pricing.graph, pricing.mesh
    inputs, outputs = (tuple(local_shape(graph.tensors[t].shape, c, mesh) for t, c in zip(ts, cs, strict=True))
                       for ts, cs in ((op.inputs, choice.inputs), (op.outputs, choice.outputs)))
    return Kernels.of(pricing, op, differentiable).seconds(inputs, outputs, bool(choice.inner))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of an op, as a key: equal ops are priced once for shards of equal shapes."""

    device: Device
    """The device that runs them."""
    target: str
    """Name of the operator."""
    slots: tuple[str, ...]
    """Names of the op's inputs."""
    args: tuple[tuple[str, Any], ...]
    """The op's other arguments, by name."""
    tensors: tuple[tuple[str, int, bool, bool, tuple[int, ...]], ...]
    """By input, then by output: dtype, bytes of an element, whether it is a parameter, whether it has a gradient, and
    its shape before it is sharded."""
    chained: Chained
    """How the op is fused with others."""
    cast: Cast | None
    """What a narrow product casts; None for any other op."""
    op: Op = field(compare=False)
    """One of the equal ops, with its `graph`."""
    graph: Graph = field(compare=False)
    """The graph of `op`."""
    differentiable: frozenset[int] = field(compare=False)
    """Positions of the tensors of `graph` that have a gradient."""
    _hash: int = field(init=False, repr=False, compare=False)
    """The hash, computed once: looking up seconds asks for it with every set of shapes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.device, self.target, self.slots, self.args, self.tensors,
                                                self.chained, self.cast)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, pricing: Pricing, op: Op, differentiable: frozenset[int]) -> "Kernels":
        """The kernels of one op; `differentiable` has the positions of the tensors with a gradient."""
        tensors = tuple((t.dtype, t.itemsize, t.kind is Kind.PARAMETER, i in differentiable, t.shape) for i, t in
                        ((i, pricing.graph.tensors[i]) for i in (*op.inputs, *op.outputs)))
        return cls(pricing.cluster.device, op.target, op.slots, op.args, tensors, pricing.chained.get(op.name, ALONE),
                   pricing.narrow.get(op.name), op, pricing.graph, differentiable)

    def seconds(self, inputs: Shapes, outputs: Shapes, inner: bool = False) -> Passes:
        """Seconds of each forward and of each backward kernel, on shards of these shapes.

        `inner` says that the kernel communicates by itself, which takes seconds of its own (`inner_seconds`)."""
        return _on_pieces(self, inputs, outputs, inner)


@lru_cache(maxsize=1 << 16)
def _on_pieces(kernels: Kernels, inputs: Shapes, outputs: Shapes, inner: bool) -> Passes:
    device, cast = kernels.device, kernels.cast
    dtype = computed_dtype(kernels.graph, kernels.op) if cast is None else device.narrow
    ways = work(kernels.op, kernels.graph, inputs, outputs, kernels.differentiable, inner)
    forward, backward = (tuple(_seconds(device, w, dtype, kernels.chained) for w in way) for way in ways)
    if cast is None:
        return forward, backward
    share, read = ways[0][0].flops / cast.flops, sum(prod(inputs[k]) for k in cast.places)
    padded = copy_seconds(device, PADDED * share * cast.padded) if cast.padded else 0.0
    return (_and_cast(device, forward, cast_bytes(device, read, share * cast.read, cast.normed), padded),
            _and_cast(device, backward, cast_bytes(device, prod(outputs[0]), share * cast.written), padded))


def _and_cast(device: Device, kernels: tuple[float, ...], nbytes: float, padded: float) -> tuple[float, ...]:
    """The kernels of a narrow product, the first with the cast of what it reads beside weights, and its padding."""
    if not kernels:
        return kernels
    return (kernels[0] + (elementwise_seconds(device, nbytes) if nbytes else 0.0) + padded, *kernels[1:])


def computed_dtype(graph: Graph, op: Op) -> str:
    """The dtype in which an op computes: experts in that of their weights, complex numbers by their parts."""
    weights = op.slot("up") if op.target == EXPERTS else None
    dtype = graph.tensors[op.outputs[0] if weights is None else op.inputs[weights]].dtype
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def _seconds(device: Device, work_: KernelWork, dtype: str, chained: Chained) -> float:
    """Seconds of a kernel as often as it runs, or of its part of a fused one."""
    if chained == ALONE or work_.kind != "memory":
        return kernel_seconds(device, kernel_of(work_, dtype)) * work_.times
    moved = replace(work_, nbytes=work_.nbytes * (1 - chained.inside))
    return max(0.0, kernel_seconds(device, kernel_of(moved, dtype)) - device.launch * chained.joins)


def kernel_of(work_: KernelWork, dtype: str) -> Kernel:
    """The work of one run of a kernel in the form that the cost model prices; `dtype` is that of its op."""
    return Kernel(work_.kind, work_.shape, work_.flops, work_.nbytes, work_.dtype or dtype, work_.name)


def inner_seconds(pricing: Pricing, op: Op, choice: Choice, counts: Counts = _EACH) -> dict[str, float]:
    """Seconds, by axes, that the op's own kernel spends communicating, forward again where it is recomputed.

    Of shifts these are the seconds in which it waits for them."""
    found, shifts = dict[str, float](), dict[tuple[str, tuple[int, ...]], list[float]]()
    again = counts.backward if op.name in pricing.again else 0.0
    times = {"forward": counts.forward + again, "backward": counts.backward}
    inner = inner_collectives(op, pricing.graph, choice.inputs, choice.inner, pricing.mesh)
    for direction, kind, axes, nbytes in inner:
        name = pricing.names(axes)
        seconds = collective(pricing.cluster, kind, pricing.group(axes), float(nbytes)).seconds
        if kind == SHIFT:
            shifts.setdefault((direction, axes), []).append(seconds)
        else:
            found[name] = found.get(name, 0.0) + seconds * times[direction]
    both = pass_seconds(pricing, op, choice, pricing.graph.differentiable()) if shifts else ((), ())
    for (direction, axes), each in shifts.items():
        ranks, name = pricing.group(axes).size, pricing.names(axes)
        waited = exposed_seconds(direction, ranks, sum(both[direction == "backward"]) / ranks, each)
        found[name] = found.get(name, 0.0) + waited * times[direction]
    return found


def inner_sent(pricing: Pricing, op: Op, choice: Choice) -> list[tuple[str, float, bool]]:
    """Lists what the op's own kernel sends in a microbatch: axes, bytes, and whether to switches that reduce."""
    found = []
    for direction, kind, axes, nbytes in inner_collectives(op, pricing.graph, choice.inputs, choice.inner,
                                                           pricing.mesh):
        times = 1 + (direction == "forward" and op.name in pricing.again)
        sent, in_switches = pricing.sent_bytes(kind, axes, nbytes)
        found.append((pricing.names(axes), times * sent, in_switches))
    return found
