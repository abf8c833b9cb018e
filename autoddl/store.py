"""The parameters of a running plan: values on their way to the program, gradients on their way back.

    stored --gather buckets / local steps--> used by the program        (gather.py)
    gradient --gradient buckets / local steps--> .grad, stored layout   (reducer.py)

A leaf that the program reads as it is gives its gradient through a hook; if its gradient needs no step at all, autograd
adds it up in the leaf and `finish` hands it on.
"""

from collections.abc import Mapping

from torch import Tensor

from autoddl.gather import Gathers, Sink, used
from autoddl.graph import Graph
from autoddl.groups import Groups
from autoddl.held import Held
from autoddl.lowering import Parameters
from autoddl.plan import Plan
from autoddl.redistribute import Move, Recorder, moves, through
from autoddl.reducer import Reducer
from autoddl.traffic import ParameterEdge, gather_buckets, gradient_buckets, parameter_edges

__all__ = ["Store"]


class Store:
    """`parameters` is what lowering needs to know of it."""

    def __init__(self, plan: Plan, graph: Graph, held: Mapping[str, Held], groups: Groups, recorder: Recorder) -> None:
        edges = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
        gathered = gather_buckets(plan, graph)
        self.reducer = Reducer(gradient_buckets(plan, graph), edges, held, groups, recorder)
        taken = {fqn: (b, k) for b, bucket in enumerate(gathered) for k, fqn in enumerate(bucket.members)}
        paths = {fqn: _path(edge, groups, recorder) for fqn, edge in edges.items() if fqn not in taken}
        direct = [fqn for fqn, path in paths.items() if not path]
        sinks = {fqn: self.reducer.sink(edge, held[fqn], fqn in direct) for fqn, edge in edges.items()}
        self.gathers = Gathers(gathered, edges, held, sinks, groups, recorder)
        local = {fqn: _Local(path, sinks[fqn]) for fqn, path in paths.items() if path}
        for fqn in direct:
            _hook(held[fqn].leaf, sinks[fqn])
        self.parameters = Parameters(self.gathers.take, taken, local)
        self._plain = [h for h in held.values() if sinks.get(h.tensor.fqn) is None and h.leaf is not h.parameter]

    def clear(self) -> None:
        """Forget what a failed step left."""
        self.gathers.clear()
        self.reducer.clear()
        for held in self._plain:
            held.leaf.grad = None

    def finish(self) -> None:
        """At the end of backward: every gradient where the optimizer looks for it."""
        self.reducer.finish()
        for held in self._plain:
            if held.leaf.grad is not None:
                held.deposit(held.leaf.grad)
                held.leaf.grad = None
        self.gathers.clear()


def _path(edge: ParameterEdge, groups: Groups, recorder: Recorder) -> tuple[Move, ...]:
    """The local steps from stored to used."""
    return moves(edge.forward, [edge.tensor.shape], [edge.conversion.source], groups, recorder, label=edge.tensor.fqn)


class _Local:
    """A parameter that is read after local steps."""

    def __init__(self, path: tuple[Move, ...], sink: Sink | None) -> None:
        self._path, self._sink = path, sink

    def __call__(self, leaf: Tensor) -> Tensor:
        return used(leaf, through(self._path, leaf.detach()), self._sink)


def _hook(leaf: Tensor, sink: Sink | None) -> None:
    """Hand the gradient of `leaf` to `sink` as soon as autograd has added it up."""
    if sink is None or not leaf.requires_grad:
        return

    def hand_on(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        sink(gradient)

    leaf.register_post_accumulate_grad_hook(hand_on)
