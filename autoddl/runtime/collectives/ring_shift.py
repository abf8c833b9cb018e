"""Sends a tensor to the next member of a group while the rank computes, and receives what the one before sends.

Messages that are on their way together have numbers of their own. Their tags lie above those of collectives that are
made of messages (`transport`), which may run in the same group.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from autoddl.operators.ring import SHIFT
from autoddl.runtime.collectives.message_collectives import message_device
from autoddl.runtime.collectives.process_groups import Groups, peer_error
from autoddl.runtime.collectives.recorder import Recorder

__all__ = ["start_shift"]

ABOVE = 2**30
"""The least tag of a shift."""


def start_shift(groups: Groups, recorder: Recorder, name: str, given: Tensor, axes: tuple[int, ...], number: int
                ) -> Callable[[], Tensor]:
    """Starts a shift of the contiguous tensor `given` over mesh axes, as op `name` asks for it.

    Returns a function that waits for it and returns what came. Raises MachineError where a peer is gone.
    """
    names, group = "+".join(groups.mesh.names[a] for a in axes), groups.of(axes)
    if group is None:
        return lambda: given
    device, given = given.device, given.to(message_device(given.device, group))
    got, place, ranks = torch.empty_like(given), group.rank(), group.size()
    recorder.note(recorder.direction, SHIFT, names, given.nbytes, name)
    calls = [dist.P2POp(dist.irecv, got, group=group, tag=ABOVE + number, group_peer=(place - 1) % ranks),
             dist.P2POp(dist.isend, given, group=group, tag=ABOVE + number, group_peer=(place + 1) % ranks)]
    try:
        works = dist.batch_isend_irecv(calls)
    except RuntimeError as error:
        raise peer_error(f"a shift over {names} of {name}", error) from error
    mark = recorder.started(works[0])

    def wait() -> Tensor:
        if mark is not None:
            mark.wait()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise peer_error(f"a shift over {names} of {name}", error) from error
        if mark is not None:
            mark.resume()
        calls.clear()
        works.clear()
        return got.to(device)

    return wait
