"""Brings the tensors of a planned model together on rank 0, one at a time: no rank holds more than one of them.

    every rank: its pieces of tensor k --the ranks that store it--> its first owner --if it is another--> rank 0
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoddl.runtime.collectives.message_collectives import message_device
from autoddl.runtime.collectives.process_groups import peer_error
from autoddl.runtime.collectives.told_values import gather_values
from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["StateTensor", "state_tensors", "whole_tensors"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter or a buffer that is saved: its names (several where it is tied), and the first rank that has it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def state_tensors(parallel: ParallelModel) -> tuple[StateTensor, ...]:
    """The parameters and saved buffers of the whole model, each once, on every rank. Every rank calls it."""
    mine = [[names, list(value.shape), str(value.dtype).removeprefix("torch.")]
            for names, value in _own(parallel).items()]
    ready = dist.is_available() and dist.is_initialized()
    found: dict[tuple[str, ...], StateTensor] = {}
    for rank, theirs in enumerate(gather_values(mine) if ready else [mine]):
        for names, shape, dtype in theirs:
            one = StateTensor(tuple(names), tuple(shape), getattr(torch, dtype), rank)
            found.setdefault(one.names, one)
    return tuple(found.values())


def whole_tensors(parallel: ParallelModel) -> Iterator[tuple[StateTensor, Tensor | None]]:
    """Yields every tensor of the model with its value, whole on rank 0, None on the others. Every rank goes through it.

    Raises MachineError where a peer is gone.
    """
    own, rank = _own(parallel), dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    for one in state_tensors(parallel):
        try:
            yield one, _brought(one, own.get(one.names), rank, parallel.device)
        except RuntimeError as error:
            raise peer_error(f"bringing {one.names[0]} to rank 0", error) from error


def _brought(one: StateTensor, mine: Tensor | None, rank: int, device: torch.device) -> Tensor | None:
    """The whole tensor on rank 0."""
    with _silent():
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
    if one.owner != 0 and rank == one.owner:
        assert value is not None
        dist.send(value.contiguous().to(message_device(device, dist.group.WORLD)), 0)
    if one.owner != 0 and rank == 0:
        value = torch.empty(one.shape, dtype=one.dtype, device=message_device(device, dist.group.WORLD))
        dist.recv(value, one.owner)
        value = value.to(device)
    return value.detach() if rank == 0 and value is not None else None


@contextmanager
def _silent() -> Iterator[None]:
    """Silences torch's warning that pieces on several axes are gathered axis by axis: pieces do not differ by it."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _own(parallel: ParallelModel) -> dict[tuple[str, ...], Tensor]:
    """The tensors of this rank that are saved, by all their names."""
    names: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, value in parallel.module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    return {tuple(every): values[key] for key, every in names.items()}
