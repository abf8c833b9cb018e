"""Prices ops, conversions and updates of a graph on a mesh of a cluster, in seconds; `byte_rows` has the bytes.

    seconds(plan) = sum over ops       forward + backward kernels of the local pieces, and what the kernel reduces
                  + sum over edges     conversion forward + conversion of the gradient back
                  + sum over parameters  the optimizer's update of the stored piece             (`optimizers`)
    bytes(plan)   = sum over parameters  (value + gradient + optimizer) as stored, gathered copies that are kept
                  + sum over edges and ops  what backward needs of activations
                  + max over ops and edges  operands, gradients and buffers of the moment

Every edge u -> v of a tensor costs  route(out(u) -> in(v)) + route(gradient(v) -> wanted(u)),  a table over the options
of both ends. Ops and edges that are alike (equal target, arguments, shapes and gradients) share their tables. The
collectives of parameters are coalesced into buckets, so a parameter's share of one is priced by bandwidth. It is the
price of a full bucket times the part that the parameter fills.

With m microbatches everything happens m times, but some conversions of parameters. The weight is kept in a layout W,
which lies between the stored layout O and the layout of use. Gradients add up in a layout G, which lies between the one
in which backward yields them and O (`core.state_layouts`):

    seconds of a parameter = route(O -> W) + m (1 + saved) route(W -> used) + m route(yielded -> G) + route(G -> O)

`saved` is 1 if backward reads the weight. With one microbatch the gradient takes route(yielded -> O). Of a
gradient that is sent in one half of its way alone, that half decides how often the whole is taken.

From the second microbatch on each gradient is added to the sum of the earlier ones: two are read and one is written.

    seconds of adding up = (m - 1) elementwise(3 * bytes of the sum)                (`core.state_layouts.added_layout`)

So every second is counted so often as its part of the step comes (`Counts`). A stage of a pipeline counts seconds as a
path of the schedule does where the other stages are known. It adds what its messages take (`Ports`).

The ops that backward runs again (`operators.recomputed`) run their forward kernels twice and convert what these read
twice; backward reads every parameter of them.

On a device whose programs are `compiled` a chain of elementwise ops is one kernel (`fusion`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from autoddl.core.codecs import CODECS, CODED, codecs_of, part_in_flight
from autoddl.core.conversion import COLLECTIVES, Step, group_size, step_sizes
from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.layout import Layout, Mesh, Split, local_shape
from autoddl.core.plan import BUCKET_BYTES
from autoddl.core.recompute import Block, select_blocks
from autoddl.core.sparse import PASSES
from autoddl.cost_models import (
    Algorithm,
    Cluster,
    Device,
    Group,
    Kernel,
    collective,
    compute_seconds,
    copy_seconds,
    elementwise_seconds,
    kernel_seconds,
    least_seconds,
    moved_by,
)
from autoddl.operators.fusion import ALONE, Chained, chains
from autoddl.operators.recomputed import RecomputedPart, recomputed_parts
from autoddl.operators.ring import SHIFT, offers_ring
from autoddl.operators.rules.nn import inner_collectives
from autoddl.operators.work import KernelWork, weight_kernels, work
from autoddl.pricing.choices import Choice
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.ring_seconds import exposed_seconds
from autoddl.pricing.routes import Routes, routes

__all__ = ["Counts", "Kernels", "Ports", "Pricing", "add_seconds", "cast_seconds", "cone_cost", "end_seconds",
           "floor_passes", "floor_seconds", "floor_sums", "inner_seconds", "inner_sent", "kernel_of", "op_seconds",
           "pass_seconds", "routes_of", "steps_of", "update_seconds"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Shapes = tuple[tuple[int, ...], ...]
Passes = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Counts:
    """How often the seconds of every part of a step count.

        forward     of a microbatch
        backward    of a microbatch
        gather      of the weights that are kept, with their casts
        reduce      of the sums of gradients that are reduced behind the last backward
        update      of the optimizer
    """

    forward: float
    backward: float
    gather: float = 1.0
    reduce: float = 1.0
    update: float = 1.0

    @property
    def least(self) -> float:
        """The least count of any kernel."""
        return min(self.forward, self.backward)


class Ports(Protocol):
    """Seconds that messages between stages take, by the layout that this stage gives or takes a tensor in."""

    def seconds(self, op: str, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the messages of an op that sends or receives; 0 where they are not known."""
        ...


@dataclass(frozen=True, slots=True)
class Pricing:
    """Everything besides the choices that a price depends on."""

    graph: Graph
    """The planned graph, with hubs, of one microbatch."""
    mesh: Mesh
    """The mesh whose axes the layouts are on."""
    cluster: Cluster
    """The devices and links that the mesh covers."""
    optimizer: str = "adamw"
    """Name of the optimizer, or its bytes of state, as text (`optimizers`)."""
    microbatches: int = 1
    """The number of microbatches of a step."""
    hidden: float = 0.0
    """Part of the seconds of conversions of parameters, the loss and new buffers that is not counted (`overlapped`)."""
    recompute: tuple[str, ...] = ()
    """Names of the blocks that backward computes again."""
    in_flight: int = 1
    """The number of microbatches whose activations are there at once."""
    counts: Counts | None = None
    """How often seconds count; None: as often as they come in a step."""
    waiting: int = 0
    """The number of microbatches whose gradients of weights wait; it changes the memory line alone."""
    ports: Ports | None = None
    """What messages to other stages take; None: they are not counted."""
    codecs: tuple[str, ...] = ()
    """Messages that may be coded, as text (`core.codecs`); a step is where that is faster."""
    sparse: float = 0.0
    """The part of a gradient's values that a sparse sum may send (`core.sparse`); 0: there is none."""
    chained: Mapping[str, Chained] = field(init=False, compare=False)
    """By name, the ops that are fused with others: those that run again are so in kernels by hand alone."""
    blocks: tuple[Block, ...] = field(init=False, compare=False)
    """The blocks of the names `recompute`."""
    parts: tuple[RecomputedPart, ...] = field(init=False, compare=False)
    """What runs again of these blocks."""
    again: frozenset[str] = field(init=False, compare=False)
    """Names of the ops that run again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", select_blocks(self.graph, self.recompute))
        object.__setattr__(self, "parts", recomputed_parts(self.graph, self.recompute))
        object.__setattr__(self, "again", frozenset(self.graph.ops[i].name for part in self.parts for i in part.ops))
        device = self.cluster.device
        fused = chains(self.graph, device.by_hand) if device.compiled else {}
        apart = frozenset[str]() if device.by_hand else self.again
        object.__setattr__(self, "chained", {name: one for name, one in fused.items() if name not in apart})

    @property
    def times(self) -> Counts:
        """How often seconds count."""
        return self.counts or Counts(self.microbatches, self.microbatches)

    @property
    def adds(self) -> float:
        """How often a gradient is added to the sum of earlier ones.

        The first of m microbatches has none to add to. So each backward has (m - 1) / m of an addition in the mean.
        """
        return self.times.backward * (self.microbatches - 1) / self.microbatches

    def names(self, axes: tuple[int, ...]) -> str:
        """The names of some axes as text, like `net+node`."""
        return "+".join(self.mesh.names[a] for a in axes)

    def group(self, axes: tuple[int, ...]) -> Group:
        """The group of ranks along some axes of the mesh, as the cost model takes it."""
        return _group(self.mesh, axes)

    def step_seconds(self, step: Step, full: int, touched: int, itemsize: int = 4) -> float:
        """Seconds of one step of a conversion: a collective on a buffer of `full` bytes, or a local step.

        `touched` are the bytes that a local step copies, `itemsize` those of an element.
        """
        if step.kind not in COLLECTIVES:
            return copy_seconds(self.cluster.device, float(touched))
        kind, nbytes = step.sends(group_size(step, self.mesh), full, itemsize)
        seconds = collective(self.cluster, kind, self.group(step.axes), float(nbytes)).seconds
        return seconds + sum(self.coding(step, full, itemsize))

    def coding(self, step: Step, full: int, itemsize: int) -> tuple[float, float]:
        """Seconds in which a step's values are coded before they are sent, and decoded after; 0 where they are not.

        An all-gather codes the rank's own piece, others their whole buffer; all decode a whole one.
        """
        if not step.codec:
            return 0.0, 0.0
        before, after = PASSES if step.is_sparse else CODECS[step.codec].passes
        values = 4.0 * full / itemsize
        own = values / group_size(step, self.mesh) if step.kind == "all-gather" else values
        return elementwise_seconds(self.cluster.device, before * own), elementwise_seconds(self.cluster.device,
                                                                                            after * values)

    def bucket_seconds(self, step: Step, full: int, touched: int, itemsize: int = 4) -> float:
        """Seconds of one step of a parameter's conversion, whose buffer is a part of a bucket. A slice is a view."""
        if step.kind in COLLECTIVES and full < BUCKET_BYTES:
            return self.step_seconds(step, BUCKET_BYTES, touched, itemsize) * full / BUCKET_BYTES
        return self.step_seconds(step, full, touched * (step.kind != "slice"), itemsize)

    def sent_bytes(self, kind: str, axes: tuple[int, ...], nbytes: int, bucketed: bool = False) -> tuple[float, bool]:
        """Bytes that a rank sends in a collective on a full buffer of `nbytes`, which is a part of a bucket or not.

        Also, whether they go to switches that reduce."""
        group, priced = self.group(axes), max(nbytes, BUCKET_BYTES) if bucketed else nbytes
        algorithm = collective(self.cluster, kind, group, float(priced)).algorithm
        return moved_by(algorithm, kind, group.size, nbytes), algorithm is Algorithm.SWITCH_TREE

    def as_sent(self, step: Step, full: int, itemsize: int, codecs: tuple[str, ...], bucketed: bool) -> Step:
        """The step as it is sent: as the one of `codecs` that is fastest, or as it is if none is faster."""
        if not codecs or step.kind not in CODED:
            return step
        seconds = self.bucket_seconds if bucketed else self.step_seconds
        return min((step, *map(step.coded, codecs)), key=lambda one: seconds(one, full, 0, itemsize))


@lru_cache(maxsize=10_000)
def _group(mesh: Mesh, axes: tuple[int, ...]) -> Group:
    return Group(tuple((mesh.sizes[a], mesh.strides[a]) for a in axes))


@lru_cache(maxsize=256)
def _routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, cluster: Cluster, partial: bool, bucketed: bool,
            codecs: tuple[str, ...]) -> Routes:
    """The routes of a tensor of `shape`, which depend on nothing but the arguments."""
    pricing = Pricing(Graph((), (), ()), mesh, cluster)

    def seconds(step: Step, full: int, touched: int) -> float:
        step = pricing.as_sent(step, full, itemsize, codecs, bucketed)
        return (pricing.bucket_seconds if bucketed else pricing.step_seconds)(step, full, touched, itemsize)

    return routes(shape, itemsize, mesh, seconds, partial, part_in_flight(codecs, itemsize))


def routes_of(pricing: Pricing, tensor: Tensor, messages: str) -> Routes:
    """The cheapest conversions between all legal layouts of `tensor` on this mesh and cluster.

    They are of `messages` that may be coded (`core.codecs.CLASSES`); "" for such that never are.
    """
    return _routes(tensor.shape, tensor.itemsize, pricing.mesh, pricing.cluster, tensor.dtype != "bool",
                   tensor.kind is Kind.PARAMETER, codecs_of(pricing.codecs, messages, tensor.dtype))


def steps_of(pricing: Pricing, tensor: Tensor, source: Layout, target: Layout, messages: str) -> tuple[Step, ...]:
    """The cheapest steps between two layouts, each coded where `routes_of` priced it so."""
    steps = routes_of(pricing, tensor, messages).steps(source, target)
    codecs = codecs_of(pricing.codecs, messages, tensor.dtype)
    if not codecs:
        return steps
    sizes = step_sizes(steps, tensor.shape, tensor.itemsize, source, pricing.mesh)
    return tuple(pricing.as_sent(step, full, tensor.itemsize, codecs, tensor.kind is Kind.PARAMETER)
                 for step, (full, _) in zip(steps, sizes, strict=True))


def cast_seconds(pricing: Pricing, source: Tensor, target: Tensor, elements: float) -> float:
    """Seconds in which `elements` are cast from the dtype of `source` to that of `target`; 0 where these are equal."""
    if source.dtype == target.dtype:
        return 0.0
    return elementwise_seconds(pricing.cluster.device, elements * (source.itemsize + target.itemsize))


def add_seconds(pricing: Pricing, tensor: Tensor, elements: float) -> float:
    """Seconds in which a gradient of `elements` is added to the sum of those of earlier microbatches."""
    return elementwise_seconds(pricing.cluster.device, 3.0 * elements * tensor.gradient.itemsize)


def update_seconds(pricing: Pricing, tensor: Tensor, stored: Layout) -> float:
    """Seconds in which a rank updates its piece of a parameter; 0 of one that is not trained.

    Products of an update are cut among the ranks that share the parameter; each gathers the whole of the other factor.
    """
    if not tensor.trained:
        return 0.0
    optimizer, device = optimizer_of(pricing.optimizer), pricing.cluster.device
    elements = prod(local_shape(tensor.shape, stored, pricing.mesh))
    axes = tuple(a for a, state in enumerate(stored) if isinstance(state, Split))
    found = optimizer.seconds(device, tensor, elements)
    for flops, gathered in optimizer.products(tensor):
        found += compute_seconds(device, flops * elements / prod(tensor.shape), 0.0, "bfloat16")
        if axes:
            found += collective(pricing.cluster, "all-gather", pricing.group(axes), 2.0 * gathered).seconds
    return found


def inner_seconds(pricing: Pricing, op: Op, choice: Choice, counts: Counts = Counts(1.0, 1.0)) -> dict[str, float]:
    """Seconds, by axes, that the op's own kernel spends communicating, forward again where it is recomputed.

    Of shifts these are the seconds in which it waits for them."""
    found, shifts = dict[str, float](), dict[tuple[str, tuple[int, ...]], list[float]]()
    again = counts.backward if op.name in pricing.again else 0.0
    times = {"forward": counts.forward + again, "backward": counts.backward}
    inner = inner_collectives(op, pricing.graph, choice.inputs[0], choice.inner, pricing.mesh)
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
    for direction, kind, axes, nbytes in inner_collectives(op, pricing.graph, choice.inputs[0], choice.inner,
                                                           pricing.mesh):
        times = 1 + (direction == "forward" and op.name in pricing.again)
        sent, in_switches = pricing.sent_bytes(kind, axes, nbytes)
        found.append((pricing.names(axes), times * sent, in_switches))
    return found


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
    tensors: tuple[tuple[str, int, bool, bool], ...]
    """By input, then by output: dtype, bytes of an element, whether it is a parameter, whether it has a gradient."""
    chained: Chained
    """How the op is fused with others."""
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
                                                self.chained)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, pricing: Pricing, op: Op, differentiable: frozenset[int]) -> "Kernels":
        """The kernels of one op; `differentiable` has the positions of the tensors with a gradient."""
        tensors = tuple((t.dtype, t.itemsize, t.kind is Kind.PARAMETER, i in differentiable) for i, t in
                        ((i, pricing.graph.tensors[i]) for i in (*op.inputs, *op.outputs)))
        return cls(pricing.cluster.device, op.target, op.slots, op.args, tensors, pricing.chained.get(op.name, ALONE),
                   op, pricing.graph, differentiable)

    def seconds(self, inputs: Shapes, outputs: Shapes, inner: bool = False) -> Passes:
        """Seconds of each forward and of each backward kernel, on shards of these shapes.

        `inner` says that the kernel communicates by itself, which takes seconds of its own (`inner_seconds`)."""
        return _on_pieces(self, inputs, outputs, inner)


@lru_cache(maxsize=1 << 16)
def _on_pieces(kernels: Kernels, inputs: Shapes, outputs: Shapes, inner: bool) -> Passes:
    dtype = _dtype_of(kernels.graph, kernels.op)
    forward, backward = (tuple(_seconds(kernels.device, w, dtype, kernels.chained) for w in way) for way in
                         work(kernels.op, kernels.graph, inputs, outputs, kernels.differentiable, inner))
    return forward, backward


def _dtype_of(graph: Graph, op: Op) -> str:
    """The dtype in which an op computes; complex numbers are computed by their parts."""
    dtype = graph.tensors[op.outputs[0]].dtype
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def _seconds(device: Device, work_: KernelWork, dtype: str, chained: Chained) -> float:
    """Seconds of one kernel, or of its part of a fused one."""
    if chained == ALONE or work_.kind != "memory":
        return kernel_seconds(device, kernel_of(work_, dtype))
    moved = replace(work_, nbytes=work_.nbytes * (1 - chained.inside))
    return max(0.0, kernel_seconds(device, kernel_of(moved, dtype)) - device.launch * chained.joins)


def kernel_of(work_: KernelWork, dtype: str) -> Kernel:
    """The work of a kernel in the form that the cost model prices."""
    return Kernel(work_.kind, work_.shape, work_.flops, work_.nbytes, dtype, work_.name)


def floor_seconds(graph: Graph, cluster: Cluster) -> float:
    """Seconds that no plan is below: all work split evenly over all devices, with no communication."""
    return sum(floor_passes(graph, cluster, graph.differentiable()))


def floor_passes(graph: Graph, cluster: Cluster, differentiable: frozenset[int], weights: frozenset[int] = frozenset()
                 ) -> tuple[float, float, float]:
    """`floor_seconds` of forward, of backward, and of what waits for W if `weights` tell what depends on parameters.

    `differentiable` are the tensors with a gradient.
    """
    return floor_sums(graph, cluster, differentiable, weights, (len(graph.ops),))[0]


def floor_sums(graph: Graph, cluster: Cluster, differentiable: frozenset[int], weights: frozenset[int],
               ends: Sequence[int]) -> list[tuple[float, float, float]]:
    """`floor_passes` of the ops before each of some positions, which rise. Fused ops take nothing."""
    sums, fused = [[0.0, 0.0, 0.0]], chains(graph, cluster.device.by_hand) if cluster.device.compiled else {}
    for op in graph.ops:
        found = list(sums[-1])
        shapes = [tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)]
        forward, backward = work(op, graph, shapes[0], shapes[1], differentiable) if op.name not in fused else ((), ())
        dtype = _dtype_of(graph, op)
        late = weight_kernels(op, differentiable, weights, len(backward)) if weights else (False,) * len(backward)
        ways = [0] * len(forward) + [1 + waits for waits in late]
        for way, kernel in zip(ways, (*forward, *backward), strict=True):
            found[way] += _least(cluster, kernel_of(kernel, dtype), offers_ring(op, graph))
        sums.append(found)
    return [(sums[end][0], sums[end][1], sums[end][2]) for end in ends]


def _least(cluster: Cluster, kernel: Kernel, rings: bool) -> float:
    """The least seconds of a kernel's part; most blocks of a causal ring have the curve of full attention."""
    found = least_seconds(cluster.device, kernel, cluster.size)
    if not rings or not kernel.kind.startswith("attention") or not kernel.shape[-1]:
        return found
    block = replace(kernel, shape=(*kernel.shape[:-1], 0), name=kernel.name.replace("causal", "full"))
    return min(found, least_seconds(cluster.device, block, cluster.size))


def end_seconds(pricing: Pricing, t: int, choice: Choice, port: int, flows: bool) -> float:
    """Seconds of the conversion from an op to the program's end, and of the gradient back where it `flows`, as they
    count.

    The loss, and the new value of a buffer, are needed whole by every rank.
    """
    tensor, whole = pricing.graph.tensors[t], Layout.broadcast(pricing.mesh)
    table = routes_of(pricing, tensor, "")
    back = table.seconds[table.index[whole], table.index[choice.wanted[port]]] if flows else 0.0
    there, times = table.seconds[table.index[choice.outputs[port]], table.index[whole]], pricing.times
    return float(there * times.forward + back * times.backward)


def cone_cost(pricing: Pricing) -> tuple[float, float]:
    """(seconds, bytes) that every rank has under any choice.

    Seconds are those of the forward of the cone's ops, in one microbatch. Bytes are those of buffers, constants and
    idle parameters, and of the inputs of the whole batch.
    """
    graph = pricing.graph
    dependent, used = graph.dependent(), {t for op in graph.ops for t in op.inputs}
    whole = Layout.broadcast(pricing.mesh)
    cone = [(op, Choice((whole,) * len(op.inputs), (whole,) * len(op.outputs), (), ())) for op in graph.ops
            if not dependent.intersection(op.outputs)]
    seconds = sum(op_seconds(pricing, op, choice, frozenset()) for op, choice in cone)
    held = sum(t.nbytes * (pricing.microbatches if t.kind is Kind.INPUT else 1) for t in graph.tensors
               if t.kind in (Kind.BUFFER, Kind.CONSTANT, Kind.INPUT))
    idle = sum(t.nbytes for i, t in enumerate(graph.tensors) if t.kind is Kind.PARAMETER and i not in used)
    return seconds, float(held + idle)
