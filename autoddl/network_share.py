"""Communication's share of a data parallel step, per protocol of the network and number of ranks.

    F, B    = max(seconds of the kernels, HOST * operators)          forward, backward, of the batch of one rank
    U       = UPDATE bytes per parameter / elementwise bandwidth     clipping and the optimizer
    C       = all-reduce of the gradients                            of the same ranks, by the protocol
    step    = F + B + U + C,  share = C / step                       the gradients are sent after backward, as one
            = the end of the time line,  share = exposed / step      with overlap: in buckets, beside what is left of B

The batch is that of all ranks together (strong scaling), and a rank computes its part at once. Beyond the ranks asked,
the others of the cluster do the same. Kernels are priced as plans are. The model is captured once, with a batch that is
a prime: a size that the prime divides is one of the batch, and is replaced by that of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoddl.capture import capture
from autoddl.cost_models import Cluster, Group, Level, collective, elementwise_seconds, parse
from autoddl.cost_models.links import expanded, protocol_of
from autoddl.cost_models.timeline import Task, simulate
from autoddl.errors import InputError
from autoddl.graph import Graph, Kind
from autoddl.hubs import HUB, planned
from autoddl.layout import Layout, Mesh
from autoddl.plan import BUCKET_BYTES
from autoddl.price import Pricing, pass_seconds
from autoddl.sample import Sample, as_sample, sample_for
from autoddl.space import Choice

__all__ = ["HOST", "UPDATE", "Computed", "Share", "computed", "over", "shares", "traced"]

HOST = 100e-6
"""Seconds of the host per operator of the graph and pass, with its part of autograd and of Python: that of `validate`,
assumed, of the order that published runs of small microbatches show."""
UPDATE = 40
"""Bytes that clipping and a mixed-precision Adam move per parameter, that of `validate`."""
PRIMES = (1009, 1013, 1019, 1021, 1031)


@dataclass(frozen=True, slots=True)
class Computed:
    """What one rank computes in a step: seconds of F and U, and per operator of B, in order, its seconds and the
    parameters whose gradients are complete after it; bytes of these."""

    forward: float
    backward: tuple[tuple[float, tuple[int, ...]], ...]
    update: float
    gradients: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.forward + sum(seconds for seconds, _ in self.backward) + self.update


@dataclass(frozen=True, slots=True)
class Share:
    """One cell of the table: seconds of computing, of communicating, of it what nothing hides, and of the step."""

    protocol: str
    ranks: int
    batch: int
    compute: float
    communication: float
    exposed: float
    step: float

    @property
    def share(self) -> float:
        """Of the step, in which the rank only communicates."""
        return self.exposed / self.step


@dataclass(frozen=True, slots=True)
class Traced:
    """A planned graph whose batch is the prime `stand_in`, and the batch that was asked for."""

    graph: Graph
    stand_in: int
    batch: int

    def of(self, batch: int) -> Graph:
        """The graph with this batch."""
        tensors = tuple(replace(t, shape=tuple(size // self.stand_in * batch if size % self.stand_in == 0 else size
                                               for size in t.shape)) for t in self.graph.tensors)
        return replace(self.graph, tensors=tensors)


def traced(model: nn.Module, sample: object = None) -> Traced:
    """Capture `model` with a prime batch; dim 0 of every input is the batch."""
    example = sample_for(model) if sample is None else as_sample(sample)
    leaves, tree = pytree.tree_flatten((example.args, dict(example.kwargs)))
    batches = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(batches) != 1:
        found = ", ".join(map(str, sorted(batches))) or "none"
        raise InputError(f"dim 0 of every input is the batch, but the inputs have sizes {found} there; give a sample "
                         "whose tensors are equally long")
    fixed = {size for t in (*model.parameters(), *model.buffers()) for size in t.shape}
    fixed |= {size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape[1:]}
    prime = next(p for p in PRIMES if not any(size and size % p == 0 for size in fixed))
    grown = [leaf.new_empty((prime, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.dim() else leaf
             for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(grown, tree)
    return Traced(planned(capture(model, Sample(args, kwargs)).graph), prime, batches.pop())


def computed(graph: Graph, cluster: Cluster, gradient: int = 0, host: float = HOST) -> Computed:
    """What one rank does with `graph` alone; `gradient` is bytes of an element sent, 0 for those of the parameter."""
    mesh = Mesh.parse("alone=1")
    pricing, whole, flows = Pricing(graph, mesh, cluster), Layout.broadcast(mesh), graph.differentiable()
    dependent = graph.dependent()
    forward, backward, calls, calls_back = 0.0, list[tuple[float, tuple[int, ...]]](), 0, 0
    last: dict[int, int] = {}
    for op in graph.ops:
        choice = Choice((whole,) * len(op.inputs), (whole,) * len(op.outputs), (), ())
        there, back = ((), ()) if op.target == HUB else pass_seconds(pricing, op, choice, flows)
        forward, calls = forward + sum(there), calls + (op.target != HUB)
        if dependent.intersection(op.inputs):
            calls_back += len(back) or 1
            for t in op.inputs:
                last.setdefault(t, len(backward))  # backward goes from the last op to the first
            backward.append((sum(back), ()))
    ready: dict[int, list[int]] = {}
    parameters = [t for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.PARAMETER and t in last]
    for t in parameters:
        ready.setdefault(last[t], []).append(t)
    seconds = sum(one for one, _ in backward)
    slower = max(1.0, host * calls_back / seconds) if seconds else 1.0
    reverse = tuple((backward[i][0] * slower, tuple(ready.get(i, ()))) for i in reversed(range(len(backward))))
    sizes = tuple(float(prod(tensor.shape) * (gradient or tensor.itemsize)) if tensor.kind is Kind.PARAMETER else 0.0
                  for tensor in graph.tensors)
    held = sum(graph.tensors[t].numel for t in parameters)
    return Computed(max(forward, host * calls), reverse, elementwise_seconds(cluster.device, UPDATE * held), sizes)


def over(cluster: Cluster, protocol: str, link: str = "") -> Cluster:
    """`cluster` with this protocol on its network, and with this link of the package's where one is named."""
    def changed(index: int, level: Level) -> Level:
        inside = not protocol_of(level.protocol).network if level.protocol else index == 0
        if inside:
            return level
        if not link:
            return replace(level, protocol=protocol, efficiency=level.efficiency if level.protocol == protocol else None)
        facts = expanded({"link": link, "protocol": protocol})
        return replace(level, protocol=protocol, bandwidth=parse(facts["bandwidth"], "bytes/s"),
                       latency=parse(facts["latency"], "seconds"), efficiency=facts.get("efficiency"))

    if not protocol_of(protocol).network:
        raise InputError(f"{protocol!r} is the protocol of links inside a host; name one of a network")
    levels = tuple(changed(i, level) for i, level in enumerate(cluster.levels))
    if levels == cluster.levels and len(levels) < 2:
        raise InputError(f"cluster {cluster.name} has no network, only {cluster.levels[0].name!r}; add a level")
    return replace(cluster, levels=levels)


def shares(one: Traced, cluster: Cluster, networks: Sequence[tuple[str, str]], ranks: Sequence[int], *,
           overlap: bool = True, gradient: int = 0, host: float = HOST) -> tuple[Share, ...]:
    """The table: for every (protocol, link) and number of ranks its share."""
    places = [(name, over(cluster, name, link)) for name, link in networks]
    work = {n: computed(one.of(_part(one, cluster, n)), cluster, gradient, host) for n in ranks}
    step = _beside if overlap else _after
    return tuple(step(partial(Share, name, n, one.batch), work[n], place, n) for name, place in places for n in ranks)


def _part(one: Traced, cluster: Cluster, ranks: int) -> int:
    if not 2 <= ranks <= cluster.size or one.batch % ranks:
        raise InputError(f"{ranks} ranks: cluster {cluster.name} has {cluster.size}, and a batch of {one.batch} is cut "
                         "evenly; ask for a number from 2 on that divides the batch")
    return one.batch // ranks


def _reduced(cluster: Cluster, ranks: int, nbytes: float) -> float:
    return collective(cluster, "all-reduce", Group(((ranks, 1),)), nbytes).seconds


def _after(made: "partial[Share]", work: Computed, cluster: Cluster, ranks: int) -> Share:
    """One all-reduce after backward."""
    seconds = _reduced(cluster, ranks, sum(work.gradients))
    return made(work.seconds, seconds, seconds, work.seconds + seconds)


def _beside(made: "partial[Share]", work: Computed, cluster: Cluster, ranks: int) -> Share:
    """Buckets are sent as they fill, one after the other."""
    tasks, filled, sent = [Task("forward", work.forward)], 0.0, list[int]()

    def send(nbytes: float, after: int) -> None:
        sent.append(len(tasks))
        tasks.append(Task("gradients", _reduced(cluster, ranks, nbytes), stream="network", needs=(after,)))

    computes = 0
    for seconds, ready in work.backward:
        computes = len(tasks)
        tasks.append(Task("backward", seconds))
        filled += sum(work.gradients[t] for t in ready)
        if filled >= BUCKET_BYTES:
            send(filled, computes)
            filled = 0.0
    if filled:
        send(filled, computes)
    communication = sum(tasks[k].seconds for k in sent)
    tasks.append(Task("update", work.update, needs=tuple(sent)))
    line = simulate(tasks)
    return made(work.seconds, communication, line.exposed(0), line.makespan)
