"""Copies a state into buffers on the processor that are used again, so that training may go on while it is written.

The copy of a tensor is the same object in every copy of a state, while shape, dtype and layout stay. So a save costs no
memory beyond that of the first. A plan of the save holds as long as the copies are those that it was made for.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

__all__ = ["StagedPiece", "Staging"]


@dataclass(frozen=True, eq=False)
class StagedPiece:
    """The copy of this rank's piece of a DTensor; `like` is that DTensor without bytes, on the meta device."""

    like: DTensor
    copy: Tensor

    def __create_write_items__(self, fqn: str, piece: object) -> list[WriteItem]:
        """Says what torch.distributed.checkpoint plans to write of it."""
        inside = self.like.device_mesh.get_coordinate() is not None
        found: list[WriteItem] = self.like.__create_write_items__(fqn, self.like) if inside else []
        return found

    def fits(self, value: object) -> bool:
        """Whether `value` is laid out as the DTensor was."""
        like = self.like
        return isinstance(value, DTensor) and (
            value.device_mesh is like.device_mesh and value.placements == like.placements
            and value.shape == like.shape and _fits(value.to_local(), self.copy))


class Staging:
    """The buffers of one state by name. A copy of the state holds until the next is made."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor | StagedPiece] = {}

    @torch.no_grad()
    def copied(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with a copy of each value; of a DTensor it is a StagedPiece."""
        before, self._copies = self._copies, {}
        return self._nested(state, "", before)

    def _nested(self, state: Mapping[str, Any], above: str, before: Mapping[str, Tensor | StagedPiece]
                ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in state.items():
            key = f"{above}/{name}"
            if isinstance(value, Mapping):
                found[name] = self._nested(value, key, before)
            elif isinstance(value, Tensor):
                found[name] = self._copies[key] = _copied(value, before.get(key))
            else:
                found[name] = deepcopy(value)
        return found


def _copied(value: Tensor, copy: Tensor | StagedPiece | None) -> Tensor | StagedPiece:
    """The value in the buffer of `copy` if it fits, else in a new one."""
    if isinstance(value, DTensor):
        local = value.to_local()
        piece = copy if isinstance(copy, StagedPiece) and copy.fits(value) else StagedPiece(_like(value), _empty(local))
        piece.copy.copy_(local)
        return piece
    buffer = copy if isinstance(copy, Tensor) and _fits(value, copy) else _empty(value)
    return buffer.copy_(value)


def _fits(value: Tensor, copy: Tensor) -> bool:
    return value.shape == copy.shape and value.dtype == copy.dtype


def _empty(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def _like(value: DTensor) -> DTensor:
    local = torch.empty(value.to_local().shape, dtype=value.dtype, device="meta")
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=value.shape,
                              stride=value.stride())
