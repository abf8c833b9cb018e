"""Brings outputs of a model's forward, such as logits, from the program to the user: whole, or split as they are.

    as its op writes it --axes with P: all-reduce--> split --axes with S, innermost first: all-gather--> whole

A split output is a DTensor: `.to_local()` is the part of this rank, `.full_tensor()` the whole.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoddl.capture.returned import LOSS, Returned
from autoddl.core.conversion import Step
from autoddl.core.errors import InputError
from autoddl.core.graph import RECEIVE, Graph, Kind
from autoddl.core.layout import B, Layout, P
from autoddl.core.plan import Plan
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.collectives.redistribute import Move, make_moves, run_moves
from autoddl.runtime.parameters import placements
from autoddl.schedule.traffic import option_of

__all__ = ["Asking", "OutputRoute", "asked_outputs", "computed_outputs", "joined", "output_route"]


Asking = str | int | Sequence[str | int] | None
"""Outputs that a call may ask for: names, places in a tuple, "all", or None for the loss alone."""


def computed_outputs(graph: Graph, names: Sequence[str], tensors: Sequence[int]) -> dict[str, int]:
    """The outputs that the program of a planned graph can return, by name: what its ops make, and its inputs."""
    made = {t for op in graph.ops if op.target != RECEIVE for t in op.outputs}
    return {name: t for name, t in zip(names, tensors, strict=True)
            if t in made or (t >= 0 and graph.tensors[t].kind is Kind.INPUT)}


def asked_outputs(asked: Asking, computed: Collection[str], returned: Returned) -> dict[str | int, str]:
    """The outputs that a call asks for, and their names: None is the loss alone, "all" are those that are computed.

    Parts of a tuple may be asked for by their place, as 1. Raises InputError for an output that the model does not
    return, or that this program does not compute.
    """
    names = returned.names
    if isinstance(asked, Tensor):
        raise InputError("the batch is one argument: give it as a tuple, like model((ids, labels))")
    if asked is None or asked == "all":
        return {name: name for name in names[:1 if asked is None else None] if name in computed or name == LOSS}
    found = {one: _named(one, returned) for one in ((asked,) if isinstance(asked, str | int) else asked)}
    for one, name in found.items():
        if name not in names:
            raise InputError(f"forward returns no {one!r}, it returns {', '.join(map(repr, names))}: ask for some of "
                             "these; parts of a tuple have their place as a name, and may be asked for by 1 or '1'")
        if name not in computed and name != LOSS:
            raise InputError(f"the training program does not compute the output {name!r}, which the loss does not "
                             "need: call eval() of the model first, which plans a program of all outputs")
    return found


def _named(one: str | int, returned: Returned) -> str:
    """The name of an output that may be asked for by its place."""
    at_loss = not isinstance(one, str) and one in range(len(returned.places)) and returned.places[one] == 0
    return LOSS if at_loss else str(one)


@dataclass(frozen=True, slots=True)
class OutputRoute:
    """The way of one output: what adds it up, the layout in which it is split then, and what makes it whole."""

    shape: tuple[int, ...]
    settle: tuple[Move, ...]
    layout: Layout
    gather: tuple[Move, ...]

    def whole(self, piece: Tensor) -> Tensor:
        """The whole output."""
        return run_moves(self.gather, run_moves(self.settle, piece))

    def split(self, piece: Tensor, groups: Groups) -> Tensor:
        """The output as a DTensor; as it is where one rank runs."""
        found = run_moves(self.settle, piece)
        if groups.mesh.size == 1:
            return found
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(found, groups.device_mesh(found.device.type), placements(self.layout),
                                  run_check=False, shape=torch.Size(self.shape), stride=stride)


def output_route(t: int, graph: Graph, plan: Plan, groups: Groups, recorder: Recorder) -> OutputRoute:
    """The way of tensor `t` of the planned graph. Every rank calls it, since it may connect them."""
    source, shape = _written(t, graph, plan), graph.tensors[t].shape
    layout = Layout(tuple(B if state == P else state for state in source))
    for axis, state in enumerate(source):
        if state != B:
            groups.connect(axis)
    summed = [Step((axis,), P, B) for axis, state in enumerate(source) if state == P]
    whole = [Step((axis,), state, B) for axis, state in reversed(list(enumerate(layout))) if state != B]
    label = graph.tensors[t].name
    return OutputRoute(shape, make_moves(summed, [shape], [source], groups, recorder, label=label), layout,
                       make_moves(whole, [shape], [layout], groups, recorder, label=label))


def _written(t: int, graph: Graph, plan: Plan) -> Layout:
    """The layout in which tensor `t` is in the program."""
    at = graph.producers().get(t)
    if at is None:
        return plan.inputs.get(graph.tensors[t].fqn, Layout.broadcast(plan.mesh))
    op = graph.ops[at]
    option = option_of(op, graph, plan.mesh, plan.index().decisions.get(op.name))
    return option.outputs[op.outputs.index(t)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The output of all microbatches: their rows one after the other, and the mean of a scalar."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts[0].dim() else torch.stack(list(parts)).mean()
