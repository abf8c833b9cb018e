"""Adds up the gradients of parameters that several stages of a pipeline have: tied embeddings, as a rule.

Every stage has a copy of its own, stored in its own layout, and backward yields each copy the gradient of its stage.
After the last backward the stages send each other these gradients, and each adds all of them up in the order of the
stages. So all copies get the same bits, and optimizers keep them equal.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoddl.runtime.parameters import StoredParameter
from autoddl.runtime.program_runner import ProgramRunner
from autoddl.runtime.stage_transport import Arrival, StageTransport
from autoddl.schedule.stage_lanes import Lane

__all__ = ["SharedGradients"]


class SharedGradients:
    """The parameters of this rank that other stages have too; `lanes` are those of their gradients, of all ranks."""

    def __init__(self, lanes: Sequence[Lane], runners: Mapping[int, ProgramRunner], transport: StageTransport) -> None:
        self._transport, self._runners = transport, runners
        self._lanes = [one for one in lanes if {one.source.stage, one.target.stage} & runners.keys()]
        self._stored = {(one.target.stage, one.name): runners[one.target.stage].stored[one.name]
                        for one in lanes if one.target.stage in runners}
        self._before: dict[tuple[int, str], Tensor | None] = {}

    def begin(self) -> None:
        """Called before a step: puts the gradients of earlier steps aside, which are sums already."""
        for key, one in self._stored.items():
            self._before[key] = one.parameter.grad
            one.parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Called after the last backward of this rank: .grad becomes the sum over the stages, and what was before."""
        arrivals: dict[tuple[int, str], dict[int, Arrival]] = {key: {} for key in self._stored}
        for lane in self._lanes:  # in one order for both ends
            if lane.source.stage in self._runners:
                self._transport.send(lane, 0, _piece(self._stored[lane.source.stage, lane.name]))
            else:
                arrivals[lane.target.stage, lane.name][lane.source.stage] = self._transport.receive(lane, 0)
        for key, stored in self._stored.items():
            pieces = {key[0]: _piece(stored)} | {s: arrival.wait() for s, arrival in arrivals[key].items()}
            first, *others = (pieces[s] for s in sorted(pieces))
            total = first.clone()
            for piece in others:
                total.add_(piece)
            stored.parameter.grad = self._before.pop(key)
            stored.deposit(total)


def _piece(stored: StoredParameter) -> Tensor:
    """This rank's piece of the gradient of its own stage; zeros where backward yielded none."""
    gradient = stored.parameter.grad
    if gradient is None:
        return torch.zeros_like(stored.leaf, requires_grad=False)
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient
