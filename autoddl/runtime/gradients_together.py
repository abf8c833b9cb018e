"""Combines gradients of several ranks after the last backward: sums of shared ones, and the norm of all.

*Sums.* Parameters that several stages of a pipeline have are tied embeddings, as a rule. Every stage has a copy of its
own, stored in its own layout, and backward yields each copy the gradient of its stage. The stages send each other these
gradients, and each adds all of them up in the order of the stages. So all copies get the same bits, and optimizers keep
them equal. Stages on the same ranks have one copy, to which the backward of each adds. With several pipes every stage
has copies. Where messages have tags, a gradient is sent behind the last backward that adds to it, while others run.

*Norm.* Each element counts once:

    norm = sqrt( sum over ranks of  sum of squares of the elements that the rank counts )

Of ranks that hold the same piece, the first counts it: the one at coordinate 0 of every axis that does not split the
parameter. Squares are summed in float64, and by one all-reduce of one number, so all ranks get the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoddl.core.layout import B
from autoddl.runtime.collectives.process_groups import Groups, peer_error
from autoddl.runtime.parameters import StoredParameter
from autoddl.runtime.program_runner import ProgramRunner
from autoddl.runtime.stage_transport import Arrival, StageTransport
from autoddl.schedule.stage_lanes import Lane

__all__ = ["SharedGradients", "clip_gradients"]


class SharedGradients:
    """The parameters of this rank that other ranks have too; `lanes` are those of their gradients, of all ranks."""

    def __init__(self, lanes: Sequence[Lane], runners: Mapping[int, ProgramRunner], transport: StageTransport) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._lanes = [one for one in lanes if one.source.has(self._rank) or one.target.has(self._rank)]
        self._own = {one.name: one.target for one in lanes if one.target.has(self._rank)}
        self._stored = {name: runners[end.stage].stored[name] for name, end in self._own.items()}
        self._readers = {name: {s for s, one in runners.items() if name in one.stored} for name in self._own}
        self._before: dict[str, Tensor | None] = {}
        self._left: dict[str, set[int]] = {}
        self._arrivals: dict[str, dict[tuple[int, int], Arrival]] = {}

    def reads(self, stage: int) -> bool:
        """Whether a stage of this rank adds to a gradient that other ranks wait for."""
        return any(stage in stages for stages in self._readers.values())

    def begin(self) -> None:
        """Called before a step: puts the gradients of earlier steps aside, which are sums already."""
        for name, one in self._stored.items():
            self._before[name] = one.parameter.grad
            one.parameter.grad = None
        self._left, self._arrivals = {name: set(stages) for name, stages in self._readers.items()}, {}

    def ended(self, stage: int) -> None:
        """Called after the last backward of a stage: what no other stage of this rank adds to goes out, if tagged."""
        for left in self._left.values():
            left.discard(stage)
        if self._transport.is_tagged:
            self._exchange({name for name, left in self._left.items() if not left} - self._arrivals.keys())

    def _exchange(self, names: Set[str]) -> None:
        """Sends the gradients of these parameters, and posts the receives."""
        self._arrivals |= {name: {} for name in names}
        for lane in (one for one in self._lanes if one.name in names):  # in one order for both ends
            if lane.source.has(self._rank):
                self._transport.send(lane, 0, _piece(self._stored[lane.name]))
            else:
                self._arrivals[lane.name][lane.source.stage, lane.source.first] = self._transport.receive(lane, 0)

    @torch.no_grad()
    def finish(self) -> None:
        """Called after the last backward of this rank: .grad becomes the sum over the stages, and what was before."""
        self._exchange(self._stored.keys() - self._arrivals.keys())
        for name, stored in self._stored.items():
            own = self._own[name]
            pieces = {(own.stage, own.first): _piece(stored)} | {
                end: arrival.wait() for end, arrival in self._arrivals[name].items()}
            first, *others = (pieces[end] for end in sorted(pieces))
            total = first.clone()
            for piece in others:
                total.add_(piece)
            stored.parameter.grad = self._before.pop(name)
            stored.deposit(total)


def _piece(stored: StoredParameter) -> Tensor:
    """This rank's piece of the gradient of its own stage; zeros where backward yielded none."""
    gradient = stored.parameter.grad
    if gradient is None:
        return torch.zeros_like(stored.leaf, requires_grad=False)
    return _local(gradient)


def _local(gradient: Tensor) -> Tensor:
    """This rank's piece of a gradient."""
    found: Tensor = getattr(gradient, "_local_tensor", gradient)
    return found


def _counts(one: StoredParameter, groups: Groups) -> bool:
    """Whether this rank counts its piece."""
    return all(state != B or at == 0 for state, at in zip(one.layout, groups.coordinate, strict=True))


@torch.no_grad()
def clip_gradients(counted: Iterable[tuple[StoredParameter, Groups]], parameters: Sequence[nn.Parameter],
                   max_norm: float) -> Tensor:
    """Scales the gradients of `parameters` to a norm of at most `max_norm`; returns the norm before, in float64.

    `counted` are the pieces on which the norm is taken, each with the mesh that it is a piece on. The scale is that of
    torch's `clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1. Raises MachineError where a peer is gone.
    """
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    squares = [_local(one.parameter.grad).double().square().sum() for one, groups in counted
               if one.parameter.grad is not None and _counts(one, groups)]
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise peer_error("adding up the norm of the gradients", error) from error
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
