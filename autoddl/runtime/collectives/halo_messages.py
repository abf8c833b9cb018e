"""Sends values to those members of a group that need any, and receives what they send: halos of pieces of images.

Messages have a tag of their own, above those of collectives that are made of messages (`transport`). NCCL makes the
communicator of a group in its first call, in which all members must take part. So a rank that sends and receives
nothing takes part in a sum before the first halo of its group.
"""

import torch.distributed as dist
from torch import Tensor

from autoddl.operators.windows import HALO
from autoddl.runtime.collectives.message_collectives import message_device
from autoddl.runtime.collectives.process_groups import Groups, peer_error
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.collectives.ring_shift import ABOVE

__all__ = ["swap_inside"]

TAG = ABOVE + 2**20
"""The tag of halos."""


def swap_inside(groups: Groups, recorder: Recorder, name: str, values: Tensor, sent: tuple[int, ...],
                received: tuple[int, ...], axes: tuple[int, ...], nbytes: int) -> Tensor:
    """Sends the next `sent[i]` of the contiguous `values` to member i; returns the `received[i]` of each, in order.

    Raises MachineError where a peer is gone.
    """
    names, group = "+".join(groups.mesh.names[a] for a in axes), groups.of(axes)
    if group is None:
        return values
    recorder.note(recorder.direction, HALO, names, nbytes, name)
    device, values = values.device, values.to(message_device(values.device, group))
    found = values.new_empty(sum(received))
    calls = [dist.P2POp(call, part, group=group, tag=TAG, group_peer=peer)
             for call, parts in ((dist.irecv, found.split(received)), (dist.isend, values.split(sent)))
             for peer, part in enumerate(parts) if part.numel()]
    try:
        if values.is_cuda:
            groups.open(axes, values)
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
    except RuntimeError as error:
        raise peer_error(f"a halo over {names} of {name}", error) from error
    recorder.started(None)
    return found.to(device)
