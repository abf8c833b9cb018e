"""Computes the work of one rank in a data parallel step, and when its gradients are complete.

    F, B    = max(seconds of the kernels, HOST * operators)          forward, backward, of the batch of one rank
    U       = UPDATE bytes per parameter, read and written           clipping and the optimizer

Kernels are priced as in plans. The model is captured once, with a prime number as its batch. A size that the prime
divides belongs to the batch, and is replaced by that of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample, as_sample, sample_for
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.layout import Layout, Mesh
from autoddl.cost_models import Cluster, elementwise_seconds
from autoddl.cost_models.software import HOST, UPDATE
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice

__all__ = ["Traced", "Work", "traced", "work_of"]

PRIMES = (1009, 1013, 1019, 1021, 1031, 1033)


@dataclass(frozen=True, slots=True)
class Traced:
    """A planned graph whose batch is the prime `stand_in`, and the batch that was asked for."""

    graph: Graph
    stand_in: int
    batch: int

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(tensor.numel for tensor in self.graph.tensors if tensor.kind is Kind.PARAMETER)

    def of(self, batch: int) -> Graph:
        """The graph with this batch."""
        def size(old: int) -> int:
            return old if old % self.stand_in else old // self.stand_in * batch

        return replace(self.graph, tensors=tuple(replace(t, shape=tuple(map(size, t.shape)))
                                                 for t in self.graph.tensors))


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of forward, backward and update of one rank.

    `backward` has, by operator in the order in which they run, (seconds, bytes of the gradients complete after it).
    """

    forward: float
    backward: tuple[tuple[float, float], ...]
    update: float

    @property
    def seconds(self) -> float:
        """Seconds of a step without communication."""
        return self.forward + sum(seconds for seconds, _ in self.backward) + self.update

    @property
    def nbytes(self) -> float:
        """Bytes of all gradients."""
        return sum(nbytes for _, nbytes in self.backward)


def traced(model: nn.Module, sample: object = None) -> Traced:
    """The graph of `model`, captured with a prime batch; dim 0 of every input is the batch.

    Raises InputError where the inputs differ in dim 0.
    """
    example = sample_for(model) if sample is None else as_sample(sample)
    leaves, tree = pytree.tree_flatten((example.args, dict(example.kwargs)))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    batches = {leaf.shape[0] for leaf in inputs}
    if len(batches) != 1:
        found = ", ".join(map(str, sorted(batches))) or "none"
        raise InputError(f"dim 0 of every input is the batch, but the inputs have sizes {found} there; give a sample "
                         "whose tensors are equally long")
    prime = _prime({size for t in (*model.parameters(), *model.buffers()) for size in t.shape}
                   | {size for leaf in inputs for size in leaf.shape[1:]})
    grown = [leaf.new_zeros((prime, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.dim() else leaf
             for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(grown, tree)
    return Traced(add_hubs(capture(model, Sample(args, kwargs)).graph), prime, batches.pop())


def _prime(sizes: set[int]) -> int:
    """A prime that divides no size of the model itself. Raises InputError where there is none."""
    for prime in PRIMES:
        if not any(size and size % prime == 0 for size in sizes):
            return prime
    raise InputError(f"sizes of the model are multiples of each of {', '.join(map(str, PRIMES))}, so none can stand in "
                     "for the batch; give a model of other sizes")


def work_of(graph: Graph, cluster: Cluster, gradient: int = 0, host: float = HOST) -> Work:
    """The work of one rank with `graph`; `gradient` is bytes of an element sent, 0 for those of the parameter."""
    passes = _passes(graph, cluster)
    dependent = graph.dependent()
    there = [(sum(forward), float(op.target != HUB)) for op, (forward, _) in zip(graph.ops, passes, strict=True)]
    back = [(sum(backward), float(len(backward) or 1)) for op, (_, backward) in zip(graph.ops, passes, strict=True)
            if dependent.intersection(op.outputs)]
    forward = max(sum(seconds for seconds, _ in there), host * sum(calls for _, calls in there))
    kernels = sum(seconds for seconds, _ in back)
    slower = max(1.0, host * sum(calls for _, calls in back) / kernels) if kernels else 1.0
    done = _gradients(graph, gradient)
    values = sum(graph.tensors[t].numel for t in {t for op in graph.ops for t in op.inputs}
                 if graph.tensors[t].kind is Kind.PARAMETER)
    return Work(forward, tuple((seconds * slower, nbytes) for (seconds, _), nbytes in
                               zip(reversed(back), reversed(done), strict=True)),
                elementwise_seconds(cluster.device, UPDATE * values))


def _passes(graph: Graph, cluster: Cluster) -> list[tuple[Sequence[float], Sequence[float]]]:
    """Seconds of every op's kernels, forward and backward; a hub is free."""
    mesh = Mesh.parse("alone=1")
    pricing, whole, flows = Pricing(graph, mesh, cluster), Layout.broadcast(mesh), graph.differentiable()
    return [((), ()) if op.target == HUB else
            pass_seconds(pricing, op, Choice((whole,) * len(op.inputs), (whole,) * len(op.outputs), (), ()), flows)
            for op in graph.ops]


def _gradients(graph: Graph, gradient: int) -> list[float]:
    """Per op of backward, in the order of the graph, bytes of the parameters that it is the first to read."""
    dependent, seen, found = graph.dependent(), set[int](), list[float]()
    for op in graph.ops:
        if dependent.intersection(op.outputs):
            new = {t for t in op.inputs if graph.tensors[t].kind is Kind.PARAMETER} - seen
            seen |= new
            found.append(float(sum(graph.tensors[t].numel * (gradient or graph.tensors[t].itemsize) for t in new)))
    return found
