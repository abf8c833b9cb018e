"""Sends and receives what the stages of a pipeline exchange, on one rank.

A message is a box of a tensor (`schedule.stage_lanes`). Every lane and microbatch has a tag of its own, so gloo brings
each message to its receive in whatever order they come. A receive is posted before anything waits, and a send is waited
for at the end of the step, or where `release` says that it has arrived.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoddl.runtime.process_groups import peer_error
from autoddl.runtime.recorder import Recorder
from autoddl.schedule.stage_lanes import Lane
from autoddl.schedule.stage_messages import Box

__all__ = ["Arrival", "StageTransport"]


class Arrival:
    """A tensor on its way to this rank; `wait` returns this rank's piece of it."""

    def __init__(self, piece: Tensor, works: Sequence[tuple[Any, Tensor | None, Tensor]], limit: timedelta, text: str
                 ) -> None:
        self._piece, self._works, self._limit, self._text = piece, works, limit, text

    def wait(self) -> Tensor:
        """Waits for all messages. Raises MachineError where a peer is gone."""
        for work, buffer, place in self._works:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise peer_error(f"receiving {self._text}", error) from error
            if buffer is not None:
                place.copy_(buffer)
        self._works = ()
        return self._piece


class StageTransport:
    """The messages of one rank of a plan with stages.

        group       all ranks
        rank        this one
        lanes       all lanes, in the order that all ranks have
        parts       microbatches of a step
        axis        name of the mesh axis along which the stages lie, for the record
        device      of the tensors
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, lanes: Sequence[Lane], parts: int, axis: str,
                 device: torch.device, recorder: Recorder, limit: timedelta) -> None:
        self._group, self._rank, self._parts, self._axis = group, rank, parts, axis
        self._device, self._recorder, self._limit = device, recorder, limit
        self._numbers = {lane: k for k, lane in enumerate(lanes)}
        self._messages = {lane: [one for one in lane.messages() if rank in (one.sender, one.receiver)]
                          for lane in lanes}
        self._sent: dict[tuple[Lane, int], list[tuple[Any, Tensor]]] = {}
        self._kept: dict[tuple[Lane, int], Tensor] = {}

    def _tag(self, lane: Lane, part: int) -> int:
        return self._numbers[lane] * self._parts + part

    def send(self, lane: Lane, part: int, piece: Tensor) -> None:
        """Starts the messages with this rank's `piece`; what stays on this rank is kept for `receive`."""
        own = lane.source.local(lane.tensor.shape, self._rank)
        direction = "forward" if lane.way == "forward" else "backward"
        for one in self._messages[lane]:
            if one.sender != self._rank:
                continue
            part_of = _box(piece, own, one.box)
            if one.receiver == self._rank:
                self._kept[lane, part] = part_of
                continue
            part_of = part_of.contiguous()
            self._recorder.note(direction, "send", self._axis, part_of.nbytes, str(lane))
            work = self._start("send", part_of, one.receiver, self._tag(lane, part), str(lane))
            self._recorder.started(work)
            self._sent.setdefault((lane, part), []).append((work, part_of))

    def receive(self, lane: Lane, part: int) -> Arrival:
        """Posts the receives of this rank's piece."""
        own = lane.target.local(lane.tensor.shape, self._rank)
        piece = torch.empty([size for _, size in own], dtype=getattr(torch, lane.tensor.dtype), device=self._device)
        works: list[tuple[Any, Tensor | None, Tensor]] = []
        for one in self._messages[lane]:
            if one.receiver != self._rank:
                continue
            place = _box(piece, own, one.box)
            if one.sender == self._rank:
                place.copy_(self._kept.pop((lane, part)))
                continue
            buffer = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            work = self._start("recv", buffer, one.sender, self._tag(lane, part), str(lane))
            works.append((work, None if buffer is place else buffer, place))
        return Arrival(piece, works, self._limit, str(lane))

    def _start(self, what: str, tensor: Tensor, peer: int, tag: int, text: str) -> Any:
        assert self._group is not None, "one rank sends nothing"
        try:
            return getattr(self._group, what)([tensor.detach()], peer, tag)
        except RuntimeError as error:
            raise peer_error(f"{what} of {text}", error) from error

    def release(self, lanes: Mapping[tuple[Lane, int], None] | None = None) -> None:
        """Waits for the sends of these lanes and microbatches, or for all, and lets their tensors go."""
        for key in list(self._sent) if lanes is None else [key for key in lanes if key in self._sent]:
            for work, _ in self._sent.pop(key):
                try:
                    work.wait(self._limit)
                except RuntimeError as error:
                    raise peer_error(f"sending {key[0]}", error) from error

    def clear(self) -> None:
        """Forgets what a failed step left."""
        self._sent.clear()
        self._kept.clear()


def _box(piece: Tensor, own: Box, box: Box) -> Tensor:
    """The part of a rank's piece, whose place is `own`, that a box of the whole tensor covers."""
    for dim, ((start, size), (first, _)) in enumerate(zip(box, own, strict=True)):
        piece = piece.narrow(dim, start - first, size)
    return piece
