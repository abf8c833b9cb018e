"""Gathers parameters that are stored in pieces and read whole: the parameter protocol on tensors.

A bucket is gathered ahead of its first use. A regathered bucket keeps nothing between forward and backward: autograd
saves a note in place of each of its tensors (`recompute`). A tensor is recognised by its storage, to which there is a
weak reference, so that its address cannot be reused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoddl.core.conversion import Step
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.redistribute import Handle, Move, Recorder, make_moves
from autoddl.runtime.parameters import StoredParameter
from autoddl.schedule.buckets import Bucket, ParameterEdge
from autoddl.schedule.parameter_protocol import GatherProtocol

__all__ = ["Sink", "TensorGathers", "use_parameter"]

Sink = Callable[[Tensor], None]


class _Use(torch.autograd.Function):
    """Passes the value of a parameter to its consumer; the gradient goes to `sink`, not to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor, sink: Sink) -> Tensor:
        ctx.sink = sink
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.sink(gradients[0])
        return None, None, None


def use_parameter(leaf: Tensor, value: Tensor, sink: Sink | None) -> Tensor:
    """The `value` that was made of `leaf`; under autograd, its gradient goes to `sink`."""
    if sink is None or not torch.is_grad_enabled():
        return value
    return _Use.apply(leaf, value, sink)  # type: ignore[no-any-return, no-untyped-call]


class _Bucket:
    """The tensors of a bucket.

        handle     a gather in flight
        values     gathered values that stay for later microbatches
        again      members that were regathered for backward
        weights    values in the layout W, where the bucket takes some steps once; they stay until the end of the step
    """

    def __init__(self, bucket: Bucket, edges: Mapping[str, ParameterEdge], stored: Mapping[str, StoredParameter],
                 sinks: Mapping[str, Sink | None], groups: Groups, recorder: Recorder) -> None:
        members = [edges[fqn] for fqn in bucket.members]
        label = f"{bucket.members[0]} and {len(members) - 1} more"

        def moves(steps: tuple[Step, ...], direction: str) -> tuple[Move, ...]:
            starts = [one.gather_start(bucket, steps) for one in members]
            return make_moves(steps, [one.tensor.shape for one in members], starts, groups, recorder, direction, label)

        self._once, self._has_weights = moves(bucket.once, "forward"), bool(bucket.once)
        self._forward, self._backward = (moves(bucket.steps, direction) for direction in ("forward", "backward"))
        self.weights: list[Tensor] | None = None
        self.members = [stored[fqn] for fqn in bucket.members]
        self.sinks = [sinks[fqn] for fqn in bucket.members]
        self.regather = bucket.regather
        self.clear()

    def clear(self, keep: bool = False, ahead: bool = False) -> None:
        """Forgets all, or all but the values that stay for later microbatches, or a gather that was started ahead."""
        self.handle: Handle | None = self.handle if ahead else None
        self.weights = self.weights if keep else None
        self.values: list[Tensor] | None = self.values if keep else None
        self.again: list[Tensor | None] = []

    def start(self, forward: bool) -> None:
        """Starts the gather, in forward or backward."""
        path = self._forward if forward else self._backward
        with torch.no_grad():
            tensors = self._start_values()
            for move in path[:-1]:
                tensors = move.run(tensors)
            self.handle = path[-1].start(tensors) if path else Handle(None, lambda: tensors, None, "")

    def _start_values(self) -> list[Tensor]:
        """The members in the layout in which every gather begins; what is gathered once is, at the first start."""
        if self.weights is not None:
            return self.weights
        tensors = [member.as_used(member.leaf.detach()) for member in self.members]
        for move in self._once:
            tensors = move.run(tensors)
        self.weights = tensors if self._has_weights else None
        return tensors

    def wait(self) -> list[Tensor]:
        """Waits for the gather; returns the members."""
        assert self.handle is not None, "a bucket is waited for once, after its start"
        with torch.no_grad():
            found = self.handle.wait()
        self.handle = None
        return found


class _Place(NamedTuple):
    """Member `member` of bucket `bucket`; with `zeros`, a tensor of zeros that stands for it in a partial sum."""

    bucket: int
    member: int
    zeros: bool


class _Regathered(NamedTuple):
    """What autograd saves in place of a tensor: where it comes from, and how it lies in its storage."""

    place: _Place
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class TensorGathers:
    """The gather buckets of a program, in the order of first use; `regathers`: whether any is gathered again."""

    def __init__(self, buckets: Sequence[Bucket], edges: Mapping[str, ParameterEdge],
                 stored: Mapping[str, StoredParameter], sinks: Mapping[str, Sink | None], groups: Groups,
                 recorder: Recorder) -> None:
        self._buckets = [_Bucket(bucket, edges, stored, sinks, groups, recorder) for bucket in buckets]
        self._protocol = GatherProtocol(buckets)
        self.regathers = any(bucket.regather for bucket in buckets)
        self.clear()

    def clear(self) -> None:
        """Forgets everything that the last step left."""
        self.begin(last=True, keep=False)

    def begin(self, last: bool, keep: bool = True) -> None:
        """Called before a microbatch, the `last` of a step or not."""
        self._slots: dict[int, tuple[StorageWeakRef, _Place]] = {}
        self._protocol.begin(last, keep)
        for b, bucket in enumerate(self._buckets):
            bucket.clear(keep, self._protocol.is_ahead(b))

    def ahead(self) -> None:
        """Called before the first microbatch of a stage: starts what is gathered once a step."""
        for b in self._protocol.ahead():
            self._buckets[b].start(forward=True)

    def take(self, b: int) -> tuple[Tensor, ...]:
        """The tensors of bucket b, for the program."""
        asked, bucket = self._protocol.take(b), self._buckets[b]
        for other in asked.starts:
            self._buckets[other].start(forward=True)
        tensors = bucket.wait() if asked.waits else bucket.values
        assert tensors is not None, "a bucket stays for later microbatches or is waited for"
        bucket.values = tensors if asked.keeps else None
        if bucket.regather and torch.is_grad_enabled():
            for k, tensor in enumerate(tensors):
                storage = tensor.untyped_storage()
                self._slots[storage._cdata] = StorageWeakRef(storage), _Place(b, k, False)
        return tuple(use_parameter(member.leaf, x, sink)
                     for member, x, sink in zip(bucket.members, tensors, bucket.sinks, strict=True))

    def note(self, tensor: Tensor) -> _Regathered | None:
        """A note in place of a tensor that will be gathered again, None for any other."""
        slot = self._slots.get(tensor.untyped_storage()._cdata)
        if slot is None:
            return None
        self._protocol.note(slot[1].bucket, slot[1].member)
        return _Regathered(slot[1], tensor.size(), tensor.stride(), tensor.storage_offset())

    def follow(self, x: Tensor, zeros: Tensor) -> None:
        """Makes backward gather x again wherever it reads `zeros`, if x is a member of a bucket.

        As a partial sum, x is itself on the first rank and `zeros` on the others. All ranks take part in a gather, so
        those with zeros gather as well, at the same place, and read zeros.
        """
        slot = self._slots.get(x.untyped_storage()._cdata)
        storage = zeros.untyped_storage()
        if slot is not None and storage._cdata not in self._slots:
            self._slots[storage._cdata] = StorageWeakRef(storage), slot[1]._replace(zeros=True)

    def read(self, note: _Regathered | Tensor) -> Tensor:
        """The tensor of a note, or a tensor as it is; every note is read once."""
        if isinstance(note, Tensor):
            return note
        tensor = self._regathered(note.place.bucket, note.place.member)
        return tensor.new_zeros(note.size) if note.place.zeros else \
            tensor.as_strided(note.size, note.stride, note.offset)

    def _regathered(self, b: int, k: int) -> Tensor:
        """Member k of bucket b, gathered for backward; the last note that is read frees it."""
        asked, bucket = self._protocol.read(b), self._buckets[b]
        for other in asked.starts:
            self._buckets[other].start(forward=False)
        if asked.waits:
            bucket.again = list(bucket.wait())
        tensor = bucket.again[k]
        assert tensor is not None, "more notes read than written"
        if self._protocol.release(b, k):
            bucket.again[k] = None
        return tensor
