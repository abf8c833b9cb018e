"""Sends and receives what the stages of a pipeline exchange, on one rank.

A message is a box of a tensor (`schedule.stage_lanes`). Every lane and microbatch has a tag of its own, so gloo brings
each message to its receive in whatever order they are posted. NCCL knows no tags and runs what two ranks exchange in
the order in which they post it. There (`is_tagged`) receives stay where the lists of actions have them, which is one
order for both ranks. NCCL also makes the communicator of two ranks with their first message, for which both have to
come. Ranks that wait for each other in a ring would wait for ever. So all pairs meet once before the first step, in one
order on all ranks (`meet`). A send is waited for where the schedule says that it has arrived, or at the end of the
step: until then its tensor stays. Messages of a lane with a codec are coded, each by itself.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autoddl.runtime.collectives.coding import decode, encode, error_share
from autoddl.runtime.collectives.message_collectives import message_device
from autoddl.runtime.collectives.process_groups import peer_error
from autoddl.runtime.collectives.recorder import Mark, Recorder
from autoddl.schedule.stage_lanes import Lane
from autoddl.schedule.stage_messages import Box

__all__ = ["Arrival", "StageTransport", "meet"]


class _Flight(NamedTuple):
    """A message in flight: its work, its buffer, where that goes if it is no part of the piece, its mark and codec."""

    work: Any
    buffer: Tensor
    place: Tensor | None
    mark: Mark | None
    codec: str

    def wait(self, limit: timedelta, text: str) -> None:
        """Waits for the message. Raises MachineError where the peer is gone."""
        if self.mark is not None:
            self.mark.wait()
        try:
            self.work.wait(limit)
        except RuntimeError as error:
            raise peer_error(text, error) from error
        if self.mark is not None:
            self.mark.resume()
        if self.place is not None and self.codec:
            coded = self.buffer.to(self.place.device)
            self.place.copy_(decode(self.codec, coded, self.place.numel()).view(self.place.shape))
        elif self.place is not None:
            self.place.copy_(self.buffer)


class Arrival:
    """A tensor on its way to this rank."""

    def __init__(self, piece: Tensor, flights: Sequence[_Flight], limit: timedelta, text: str) -> None:
        self._piece, self._flights, self._limit, self._text = piece, flights, limit, text

    def wait(self) -> Tensor:
        """This rank's piece, once all of its messages are there. Raises MachineError where a peer is gone."""
        for flight in self._flights:
            flight.wait(self._limit, self._text)
        self._flights = ()
        return self._piece


class StageTransport:
    """The messages of one rank of a plan with stages.

        group       all ranks
        rank        this one
        lanes       all lanes, in the order that all ranks have
        parts       microbatches of a step
        axis        name of the mesh axis along which the stages lie, for the record
        device      of the tensors
        recorder    notes every message, at both of its ends
        limit       how long a message may take
        is_tagged   whether messages find their receives by tags
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, lanes: Sequence[Lane], parts: int, axis: str,
                 device: torch.device, recorder: Recorder, limit: timedelta) -> None:
        self._group, self.rank, self._parts, self._axis = group, rank, parts, axis
        self._device, self._sent_from = device, message_device(device, group)
        self._recorder, self._limit = recorder, limit
        self.is_tagged = group is None or dist.get_backend(group) == "gloo"
        self._numbers = {lane: k for k, lane in enumerate(lanes)}
        self._messages = {lane: [one for one in lane.messages() if rank in (one.sender, one.receiver)]
                          for lane in lanes}
        if group is not None and not self.is_tagged:
            meet(group, rank, {(one.sender, one.receiver) for lane in lanes for one in lane.messages()},
                 self._sent_from, limit)
        self.clear()

    def clear(self) -> None:
        """Forgets what a failed step left."""
        self._sent: dict[tuple[Lane, int], list[_Flight]] = {}
        self._kept: dict[tuple[Lane, int], Tensor] = {}

    def send(self, lane: Lane, part: int, piece: Tensor) -> None:
        """Starts the messages with this rank's `piece`; what stays on this rank is kept for `receive`."""
        own = lane.source.local(lane.tensor.shape, self.rank)
        for one in self._messages[lane]:
            if one.sender == self.rank:
                cut = _box(piece.detach(), own, one.box)
                if one.receiver == self.rank:
                    self._kept[lane, part] = cut
                else:
                    sent = self._coded(lane.codec, cut.reshape(1, -1)) if lane.codec else cut.contiguous()
                    flight = self._start("send", sent.to(self._sent_from), None, one.receiver, lane, part)
                    self._sent.setdefault((lane, part), []).append(flight)

    def _coded(self, codec: str, row: Tensor) -> Tensor:
        """The bytes of a message."""
        sent = encode(codec, row)
        if self._recorder.checks:
            self._recorder.coded_share = max(self._recorder.coded_share, error_share(codec, row, sent))
        return sent

    def receive(self, lane: Lane, part: int) -> Arrival:
        """Posts the receives of this rank's piece."""
        own = lane.target.local(lane.tensor.shape, self.rank)
        piece = torch.empty([size for _, size in own], dtype=getattr(torch, lane.tensor.dtype), device=self._device)
        flights = []
        for one in self._messages[lane]:
            if one.receiver == self.rank:
                place = _box(piece, own, one.box)
                if one.sender == self.rank:
                    place.copy_(self._kept.pop((lane, part)))
                elif lane.codec:
                    size = one.nbytes(lane.tensor.itemsize, lane.codec)
                    buffer = torch.empty(1, size, dtype=torch.uint8, device=self._sent_from)
                    flights.append(self._start("receive", buffer, place, one.sender, lane, part))
                elif place.is_contiguous() and self._sent_from == self._device:
                    flights.append(self._start("receive", place, None, one.sender, lane, part))
                else:
                    buffer = torch.empty(place.shape, dtype=place.dtype, device=self._sent_from)
                    flights.append(self._start("receive", buffer, place, one.sender, lane, part))
        return Arrival(piece, flights, self._limit, f"receiving {lane}")

    def _start(self, kind: str, buffer: Tensor, place: Tensor | None, peer: int, lane: Lane, part: int) -> _Flight:
        """Starts a message to or from rank `peer`, under the tag of the lane and the microbatch."""
        assert self._group is not None, "one rank sends nothing"
        direction = "forward" if lane.way == "forward" else "backward"
        self._recorder.note(direction, kind, self._axis, buffer.nbytes, str(lane))
        call, tag = self._group.send if kind == "send" else self._group.recv, self._numbers[lane] * self._parts + part
        try:
            work = call([buffer], peer, tag)
        except RuntimeError as error:
            raise peer_error(f"{kind} of {lane}", error) from error
        return _Flight(work, buffer, place, self._recorder.started(work), lane.codec)

    def release(self, keys: Iterable[tuple[Lane, int]] | None = None) -> None:
        """Waits for the sends of these lanes and microbatches, by default for all, and lets their tensors go."""
        for key in list(self._sent) if keys is None else keys:
            for flight in self._sent.pop(key, ()):
                flight.wait(self._limit, f"sending {key[0]}")


def _box(piece: Tensor, own: Box, box: Box) -> Tensor:
    """The part of a rank's piece, whose place is `own`, that a box of the whole tensor covers."""
    for dim, ((start, size), (first, _)) in enumerate(zip(box, own, strict=True)):
        piece = piece.narrow(dim, start - first, size)
    return piece


def meet(group: dist.ProcessGroup, rank: int, pairs: Iterable[tuple[int, int]], device: torch.device, limit: timedelta
         ) -> tuple[int, ...]:
    """Exchanges a byte between all pairs of ranks, pair by pair in one order; returns the peers of this rank.

    A rank waits for a pair before it begins the next, so the least pair that has not met never waits for another.
    Raises MachineError where a peer is gone.
    """
    ordered, byte = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}), torch.zeros(
        1, dtype=torch.uint8, device=device)
    peers = [(low, high) for low, high in ordered if rank in (low, high)]
    for low, high in peers:
        try:
            work = group.send([byte], high, 0) if rank == low else group.recv([byte], low, 0)
            work.wait(limit)
        except RuntimeError as error:
            raise peer_error(f"connecting ranks {low} and {high}", error) from error
    return tuple(low + high - rank for low, high in peers)
