"""Prices conversions and updates of a graph on a mesh of a cluster, in seconds; `kernel_prices` does so for ops.

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
twice; backward reads every parameter of them. The bytes of a plan are those of `byte_rows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Protocol

from autoddl.core.codecs import CODECS, CODED, codecs_of, part_in_flight
from autoddl.core.conversion import COLLECTIVES, Step, group_size, step_sizes
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.layout import Layout, Mesh, Split, local_shape
from autoddl.core.plan import BUCKET_BYTES
from autoddl.core.recompute import LIGHT, Block, select_blocks
from autoddl.core.sparse import PASSES
from autoddl.core.split_backward import weights_of
from autoddl.cost_models import (
    Algorithm,
    Cluster,
    Group,
    collective,
    compute_seconds,
    copy_seconds,
    elementwise_seconds,
    moved_by,
    ways_of,
)
from autoddl.cost_models.software import SLOWDOWN
from autoddl.operators.fusion import Chained, chains
from autoddl.operators.narrow_products import Cast, narrow_products
from autoddl.operators.recomputed import RecomputedPart, recomputed_parts
from autoddl.pricing.choices import Choice
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.routes import Routes, routes

__all__ = ["Copies", "Counts", "Ports", "Pricing", "add_seconds", "cast_seconds", "end_seconds", "left_seconds",
           "routes_of", "steps_of", "update_seconds"]


@dataclass(frozen=True, slots=True)
class Counts:
    """How often the seconds of every part of a step count.

        forward     of a microbatch
        backward    of a microbatch
        gather      of the weights that are kept, with their casts
        reduce      of the sums of gradients that are reduced behind the last backward
        update      of the optimizer
        weight      of what waits for W: kernels, reductions and sums of gradients; None: as often as backward
    """

    forward: float
    backward: float
    gather: float = 1.0
    reduce: float = 1.0
    update: float = 1.0
    weight: float | None = None

    @property
    def late(self) -> float:
        """How often what waits for W counts."""
        return self.backward if self.weight is None else self.weight

    @property
    def least(self) -> float:
        """The least count of any kernel."""
        return min(self.forward, self.backward, self.late)


class Ports(Protocol):
    """Seconds that messages between stages take, by the layout that this stage gives or takes a tensor in."""

    def seconds(self, op: str, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the messages of an op that sends or receives; 0 where they are not known."""
        ...


PIECES = ("all-gather", "reduce-scatter", "all-to-all")
"""Collectives that can be sent in pieces beside the product that makes or reads them."""


class Copies(Protocol):
    """Seconds in which copies of a stage exchange the gradients of a parameter, by the layout that they store it in."""

    def seconds(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the exchange, once a step."""
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
    """The number of microbatches whose gradients of weights wait; their bytes are counted, no seconds."""
    ports: Ports | None = None
    """What messages to other stages take; None: they are not counted."""
    codecs: tuple[str, ...] = ()
    """Messages that may be coded, as text (`core.codecs`); a step is where that is faster."""
    sparse: str = ""
    """How gradients may add up sparse, as text (`core.sparse`); "": nowhere."""
    copies: Copies | None = None
    """What copies of this stage exchange; None: it is not counted."""
    later: int = 0
    """How many more microbatches wait at another time (`core.pipeline.Flight`); rows do not count them."""
    chained: Mapping[str, Chained] = field(init=False, compare=False)
    """By name, the ops that are fused with others: those that run again are so in kernels by hand alone."""
    narrow: Mapping[str, Cast] = field(init=False, compare=False)
    """By name, the products that run in a narrower dtype, and what they cast."""
    blocks: tuple[Block, ...] = field(init=False, compare=False)
    """The blocks of the names `recompute`."""
    parts: tuple[RecomputedPart, ...] = field(init=False, compare=False)
    """What runs again of these blocks."""
    weights: frozenset[int] = field(init=False, compare=False)
    """Tensors whose gradients are computed in W, where W counts by itself; else none."""
    again: frozenset[str] = field(init=False, compare=False)
    """Names of the ops whose kernels run again: not those at `light` inside kernels by hand, which read no more."""
    repeated: frozenset[str] = field(init=False, compare=False)
    """Names of the ops that run again, in kernels of their own or not."""
    copied: frozenset[tuple[str, int]] = field(init=False, compare=False)
    """Inputs (name, number) of others whose conversion runs again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", select_blocks(self.graph, self.recompute))
        object.__setattr__(self, "parts", recomputed_parts(self.graph, self.recompute))
        splits = self.times.late != self.times.backward
        object.__setattr__(self, "weights", weights_of(self.graph) if splits else frozenset())
        object.__setattr__(self, "copied", frozenset((self.graph.ops[i].name, k)
                                                     for part in self.parts for i, k in part.copies))
        device = self.cluster.device
        for name, parts in (("repeated", self.parts), ("again", [part for part in self.parts if not (
                device.by_hand and part.level == LIGHT)])):
            object.__setattr__(self, name, frozenset(self.graph.ops[i].name for part in parts for i in part.ops))
        object.__setattr__(self, "narrow", narrow_products(self.graph) if device.narrow else {})
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
        return self.times.late * (self.microbatches - 1) / self.microbatches

    def converts_again(self, op: str, k: int) -> bool:
        """Whether backward runs the conversion of input k of an op again."""
        return op in self.repeated or (op, k) in self.copied

    def share_again(self, op: str, k: int, beside: float) -> float:
        """What part of its seconds the conversion of input k of an op takes when backward runs it again, 0 if not.

        Programs by hand gather the copy beside the product that yields the input's gradient (Megatron-LM,
        tensor_parallel/layers.py). What runs at once slows both by SLOWDOWN. A message `beside` a computation of some
        seconds is priced so anyway.
        """
        if (op, k) in self.copied and self.cluster.device.by_hand and not beside:
            return SLOWDOWN - 1
        return float(self.converts_again(op, k))

    def names(self, axes: tuple[int, ...]) -> str:
        """The names of some axes as text, like `net+node`."""
        return "+".join(self.mesh.names[a] for a in axes)

    def group(self, axes: tuple[int, ...]) -> Group:
        """The group of ranks along some axes of the mesh, as the cost model takes it."""
        return _group(self.mesh, axes)

    def step_seconds(self, step: Step, full: int, touched: int, itemsize: int = 4, beside: float = 0.0) -> float:
        """Seconds of one step of a conversion: a collective on a buffer of `full` bytes, or a local step.

        `touched` are the bytes that a local step copies, `itemsize` those of an element. A message is sent `beside` a
        computation of so many seconds.
        """
        if step.kind not in COLLECTIVES:
            return copy_seconds(self.cluster.device, float(touched))
        kind, nbytes = step.sends(group_size(step, self.mesh), full, itemsize)
        seconds = collective(self.cluster, kind, self.group(step.axes), float(nbytes)).seconds
        return left_seconds(step.kind, seconds, beside) + sum(self.coding(step, full, itemsize))

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
        return (moved_by(algorithm, kind, group.size, nbytes, ways_of(self.cluster, group)),
                algorithm is Algorithm.SWITCH_TREE)

    def as_sent(self, step: Step, full: int, itemsize: int, codecs: tuple[str, ...], bucketed: bool) -> Step:
        """The step as it is sent: as the one of `codecs` that is fastest, or as it is if none is faster."""
        if not codecs or step.kind not in CODED:
            return step
        seconds = self.bucket_seconds if bucketed else self.step_seconds
        return min((step, *map(step.coded, codecs)), key=lambda one: seconds(one, full, 0, itemsize))


@lru_cache(maxsize=10_000)
def _group(mesh: Mesh, axes: tuple[int, ...]) -> Group:
    return Group(tuple((mesh.sizes[a], mesh.strides[a]) for a in axes))


def left_seconds(kind: str, seconds: float, beside: float) -> float:
    """Seconds that a message takes beside a computation of so many (`pricing.beside`), if it can be sent in pieces."""
    return seconds - (2 - SLOWDOWN) * min(seconds, beside) if kind in PIECES else seconds


def _priced(shape: tuple[int, ...], itemsize: int, mesh: Mesh, cluster: Cluster, partial: bool, bucketed: bool,
            codecs: tuple[str, ...], beside: float) -> Routes:
    """The routes of a tensor of `shape`, which depend on nothing but the arguments."""
    pricing = Pricing(Graph((), (), ()), mesh, cluster)

    def seconds(step: Step, full: int, touched: int) -> float:
        step = pricing.as_sent(step, full, itemsize, codecs, bucketed)
        if bucketed:
            return pricing.bucket_seconds(step, full, touched, itemsize)
        return pricing.step_seconds(step, full, touched, itemsize, beside)

    return routes(shape, itemsize, mesh, seconds, partial, part_in_flight(codecs, itemsize))


_routes, _small_routes = lru_cache(maxsize=256)(_priced), lru_cache(maxsize=4096)(_priced)
"""Routes that were asked for before: of any mesh, and of one of at most two axes, where each takes tens of kilobytes.

A convolutional network has hundreds of shapes, all of which are asked for once per table and once per drawn plan."""


def routes_of(pricing: Pricing, tensor: Tensor, messages: str, beside: float = 0.0) -> Routes:
    """The cheapest conversions between all legal layouts of `tensor` on this mesh and cluster.

    They are of `messages` that may be coded (`core.codecs.CLASSES`); "" for such that never are. They are sent `beside`
    a computation of so many seconds.
    """
    known = _small_routes if len(pricing.mesh.axes) <= 2 else _routes
    return known(tensor.shape, tensor.itemsize, pricing.mesh, pricing.cluster, tensor.dtype != "bool",
                 tensor.kind is Kind.PARAMETER, codecs_of(pricing.codecs, messages, tensor.dtype), beside)


def steps_of(pricing: Pricing, tensor: Tensor, source: Layout, target: Layout, messages: str, beside: float = 0.0
             ) -> tuple[Step, ...]:
    """The cheapest steps between two layouts, each coded where `routes_of` priced it so; see there."""
    steps = routes_of(pricing, tensor, messages, beside).steps(source, target)
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


