"""Brings the parameters of a running plan to the program, and their gradients back.

    stored --gather buckets / local steps--> used by the program        (`parameter_gather`)
    gradient --gradient buckets / local steps--> .grad, stored layout   (`gradient_reducer`)

Where the program reads the leaf itself, a hook takes the gradient. If that gradient needs no step at all, autograd adds
it up in the leaf, and `finish` hands it on.

A step is `clear`, then for every microbatch `begin_forward`, forward, `begin_backward`, backward, `finish`. Other
microbatches may come between the two passes. A stage of a pipeline calls `gathers.ahead` before the first, and
`reducer.finish` at the end, where the last `finish` does not wait. Parameters that are kept are converted in the first
forward only, and their gradients in the last backward only.
"""

from collections.abc import Mapping

from torch import Tensor

from autoddl.core.graph import Graph
from autoddl.core.plan import Plan
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.redistribute import Move, Recorder, make_moves, run_moves
from autoddl.runtime.gradient_reducer import Reducer
from autoddl.runtime.lowering import ParameterAccess
from autoddl.runtime.parameter_gather import Sink, TensorGathers, use_parameter
from autoddl.runtime.parameters import StoredParameter
from autoddl.schedule.buckets import ParameterEdge, gather_buckets, gradient_buckets, parameter_edges

__all__ = ["Store"]


class Store:
    """The parameters of a running plan; `parameters` tells lowering how the program gets them."""

    def __init__(self, plan: Plan, graph: Graph, stored: Mapping[str, StoredParameter], groups: Groups,
                 recorder: Recorder) -> None:
        edges = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
        gathered = gather_buckets(plan, graph)
        self.reducer = Reducer(gradient_buckets(plan, graph), edges, stored, groups, recorder)
        taken = {fqn: (b, k) for b, bucket in enumerate(gathered) for k, fqn in enumerate(bucket.members)}
        paths = {fqn: _path(edge, groups, recorder) for fqn, edge in edges.items() if fqn not in taken}
        direct = [fqn for fqn, path in paths.items() if not path and not edges[fqn].tensor.master]
        sinks = {fqn: self.reducer.sink(edge, stored[fqn], fqn in direct) for fqn, edge in edges.items()}
        self.gathers = TensorGathers(gathered, edges, stored, sinks, groups, recorder)
        self._locals = {fqn: _Local(path, stored[fqn], sinks[fqn])
                        for fqn, path in paths.items() if fqn not in direct}
        for fqn in direct:
            _hook(stored[fqn].leaf, sinks[fqn])
        self.parameters = ParameterAccess(self.gathers.take, taken, self._locals)
        self._plain = [p for p in stored.values() if sinks.get(p.tensor.fqn) is None and p.leaf is not p.parameter]

    def clear(self) -> None:
        """Forgets everything that a failed step left."""
        self.gathers.clear()
        self.reducer.clear()
        for local in self._locals.values():
            local.value = None
        for parameter in self._plain:
            parameter.leaf.grad = None

    def begin_forward(self, last: bool) -> None:
        """Called before a forward, the `last` of a step or not."""
        self.gathers.begin(last)
        for local in self._locals.values():
            local.last = last

    def begin_backward(self, last: bool) -> None:
        """Called before a backward, the `last` of a step or not."""
        self.reducer.begin(last)

    def finish(self, last: bool = True, waits: bool = True) -> None:
        """Called at the end of a backward, the `last` of a step or not.

        Every gradient that is complete by then goes to .grad of the parameter that the optimizer has. Where the last
        does not wait, what is being reduced goes there in `reducer.finish`.
        """
        if waits or not last:
            self.reducer.finish()
        else:
            self.reducer.start_rest()
        if last:
            for parameter in self._plain:
                if parameter.leaf.grad is not None:
                    parameter.deposit(parameter.leaf.grad)
                    parameter.leaf.grad = None
            self.gathers.clear()


def _path(edge: ParameterEdge, groups: Groups, recorder: Recorder) -> tuple[Move, ...]:
    """The local steps from the stored to the used layout."""
    return make_moves(edge.forward, [edge.tensor.shape], [edge.conversion.source], groups, recorder,
                      label=edge.tensor.fqn)


class _Local:
    """A parameter that is read after a cast or local steps, which are made in the first microbatch."""

    def __init__(self, path: tuple[Move, ...], stored: StoredParameter, sink: Sink | None) -> None:
        self._path, self._stored, self._sink = path, stored, sink
        self.value: Tensor | None = None
        self.last = True

    def __call__(self, leaf: Tensor) -> Tensor:
        value = self._stored.as_used(run_moves(self._path, leaf.detach())) if self.value is None else self.value
        self.value = None if self.last else value
        return use_parameter(leaf, value, self._sink)


def _hook(leaf: Tensor, sink: Sink | None) -> None:
    """Hands the gradient of `leaf` to `sink` as soon as autograd has added it up."""
    if sink is None or not leaf.requires_grad:
        return

    def hand_on(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        sink(gradient)

    leaf.register_post_accumulate_grad_hook(hand_on)
