"""Runs the collectives that a kernel asks for while it computes: sums and maxima, and exchanges of rows.

The kernel waits for them. Their messages are recorded under the name of its op.
"""

import torch
from torch import Tensor

from autoddl.core.errors import MachineError
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.recorder import Recorder

__all__ = ["exchange_inside", "reduce_inside"]


def reduce_inside(groups: Groups, recorder: Recorder, name: str, tensor: Tensor, how: str, axes: tuple[int, ...]
                  ) -> Tensor:
    """Runs an all-reduce inside the kernel of op `name`; returns the sum or maximum.

    Raises MachineError where it fails.
    """
    names = "+".join(groups.mesh.names[a] for a in axes)
    if groups.of(axes) is None:
        return tensor
    buffer = tensor.contiguous()
    nbytes = buffer.numel() * buffer.element_size()
    recorder.note(recorder.direction, "all-reduce", names, nbytes, name,
                  groups.algorithm("all-reduce", axes, nbytes) if recorder.timed else "")
    try:
        groups.start("all-reduce", axes, buffer, buffer, asynchronous=False, how=how)
    except RuntimeError as error:
        raise MachineError(f"all-reduce over {names} inside a kernel failed: {error}") from error
    recorder.started(None)
    return buffer


def exchange_inside(groups: Groups, recorder: Recorder, name: str, rows: Tensor, sent: tuple[int, ...],
                    received: tuple[int, ...], axes: tuple[int, ...], nbytes: int) -> Tensor:
    """Runs an all-to-all inside the kernel of op `name`, of so many rows to and from each member of the group.

    The load is what this rank receives of others' rows over what it sends of its own, and the record says it. Raises
    MachineError where it fails.
    """
    names, group = "+".join(groups.mesh.names[a] for a in axes), groups.of(axes)
    if group is None:
        return rows
    own, others = (sum(sent), sum(received)) if nbytes == rows.nbytes else (sum(received), sum(sent))
    recorder.note(recorder.direction, EXCHANGE, names, nbytes, f"{name}, load {others / own:.2f}")
    found = rows.new_empty(sum(received), *rows.shape[1:])
    try:
        torch.distributed.all_to_all_single(found, rows, list(received), list(sent), group=group)
    except RuntimeError as error:
        raise MachineError(f"all-to-all over {names} inside a kernel failed: {error}") from error
    recorder.started(None)
    return found
