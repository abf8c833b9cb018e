"""Parameters that are stored in pieces and read whole: gathered in buckets, ahead of their first use.

    forward     taking bucket k waits for it, and has started all up to k + PREFETCH
    between     a bucket that is gathered anew keeps nothing: autograd saves a note of where its tensors were
    backward    the first note of bucket k read back waits for it, and has started PREFETCH buckets before it

Of several microbatches every one does this anew for buckets that are gathered in `each`; the others are gathered in the
first, held until the last has taken them, and left to autograd then.

Notes go by the storage that a saved tensor lies in, held by a weak reference, so that its address cannot be reused.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoddl.runtime.parameters import Held
from autoddl.runtime.process_groups import Groups
from autoddl.runtime.redistribute import Handle, Recorder, moves
from autoddl.schedule.buckets import PREFETCH, Bucket, ParameterEdge

__all__ = ["Gathers", "Sink", "used"]

Sink = Callable[[Tensor], None]


class _Use(torch.autograd.Function):
    """The value of a parameter as its consumer reads it; the gradient goes to `sink`, not to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor, sink: Sink) -> Tensor:
        ctx.sink = sink
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.sink(gradients[0])
        return None, None, None


def used(leaf: Tensor, value: Tensor, sink: Sink | None) -> Tensor:
    """`value`, made of `leaf`; under autograd its gradient goes to `sink`."""
    if sink is None or not torch.is_grad_enabled():
        return value
    return _Use.apply(leaf, value, sink)  # type: ignore[no-any-return, no-untyped-call]


class _Bucket:
    """`handle`: a gather under way; `values`: what is held for later microbatches; `again`: what was gathered for
    backward; `notes`: how many of each are unread."""

    def __init__(self, bucket: Bucket, edges: Mapping[str, ParameterEdge], held: Mapping[str, Held],
                 sinks: Mapping[str, Sink | None], groups: Groups, recorder: Recorder) -> None:
        tensors = [edges[fqn].tensor for fqn in bucket.members]
        starts = [edges[fqn].conversion.source for fqn in bucket.members]
        label = f"{bucket.members[0]} and {len(tensors) - 1} more"
        shapes = [t.shape for t in tensors]
        self._forward, self._backward = (moves(bucket.steps, shapes, starts, groups, recorder, direction, label)
                                         for direction in ("forward", "backward"))
        self.leaves = [held[fqn].leaf for fqn in bucket.members]
        self.sinks = [sinks[fqn] for fqn in bucket.members]
        self.regather, self.each = bucket.regather, bucket.each
        self.clear()

    def clear(self, held: bool = False) -> None:
        """Forget all, or all but what is `held` for later microbatches."""
        self.handle: Handle | None = None
        self.values: list[Tensor] | None = self.values if held else None
        self.again: list[Tensor | None] = []
        self.notes = [0] * len(self.leaves)

    def start(self, forward: bool) -> None:
        path = self._forward if forward else self._backward
        tensors = [leaf.detach() for leaf in self.leaves]
        with torch.no_grad():
            for move in path[:-1]:
                tensors = move.run(tensors)
            self.handle = path[-1].start(tensors) if path else Handle(None, lambda: tensors, None, "")

    def take(self, last: bool) -> list[Tensor]:
        """What was gathered; held if this is not the last microbatch to take it."""
        found = self.wait() if self.values is None else self.values
        self.values = None if self.each or last else found
        return found

    def wait(self) -> list[Tensor]:
        assert self.handle is not None, "a bucket is waited for once, after its start"
        with torch.no_grad():
            found = self.handle.wait()
        self.handle = None
        return found

    def read(self, k: int) -> Tensor:
        """Member k, gathered anew; the last note read back frees it."""
        if self.handle is not None:
            self.again = list(self.wait())
        tensor = self.again[k]
        assert tensor is not None, "more notes read than written"
        self.notes[k] -= 1
        if self.notes[k] == 0:
            self.again[k] = None
        return tensor


class Gathers:
    """The gather buckets of a program, in the order of first use."""

    def __init__(self, buckets: Sequence[Bucket], edges: Mapping[str, ParameterEdge], held: Mapping[str, Held],
                 sinks: Mapping[str, Sink | None], groups: Groups, recorder: Recorder) -> None:
        self._buckets = [_Bucket(bucket, edges, held, sinks, groups, recorder) for bucket in buckets]
        self._regathers = any(bucket.regather for bucket in self._buckets)
        self.clear()

    def clear(self) -> None:
        """Forget what the last step left."""
        self.begin(last=True, held=False)

    def begin(self, last: bool, held: bool = True) -> None:
        """Before a microbatch, the `last` of a step or not."""
        self._slots: dict[int, tuple[StorageWeakRef, _Bucket, int]] = {}
        self._next, self._back, self._last = 0, len(self._buckets), last
        for bucket in self._buckets:
            bucket.clear(held)

    def take(self, b: int) -> tuple[Tensor, ...]:
        """The tensors of bucket b, for the program."""
        while self._next < len(self._buckets) and self._next <= b + PREFETCH:
            if self._buckets[self._next].values is None:
                self._buckets[self._next].start(forward=True)
            self._next += 1
        bucket = self._buckets[b]
        tensors = bucket.take(self._last)
        if bucket.regather and torch.is_grad_enabled():
            for k, tensor in enumerate(tensors):
                storage = tensor.untyped_storage()
                self._slots[storage._cdata] = StorageWeakRef(storage), bucket, k
        return tuple(used(*row) for row in zip(bucket.leaves, tensors, bucket.sinks, strict=True))

    def notes(self) -> AbstractContextManager[Any]:
        """While it is entered, autograd saves notes instead of tensors that are gathered again."""
        return torch.autograd.graph.saved_tensors_hooks(self._write, self._read) if self._regathers else nullcontext()

    def _write(self, tensor: Tensor) -> Any:
        slot = self._slots.get(tensor.untyped_storage()._cdata)
        if slot is None:
            return tensor.detach() if tensor.grad_fn is not None else tensor
        _, bucket, k = slot
        bucket.notes[k] += 1
        return bucket, k, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _read(self, note: Any) -> Tensor:
        if isinstance(note, Tensor):
            return note
        bucket, k, size, stride, offset = note
        self._start_back(bucket)
        return bucket.read(k).as_strided(size, stride, offset)  # type: ignore[no-any-return]

    def _start_back(self, bucket: _Bucket) -> None:
        """Have `bucket` and the PREFETCH ones that backward reads next under way."""
        ahead = self._buckets.index(bucket) - PREFETCH
        while self._back > max(0, ahead):
            self._back -= 1
            if any(self._buckets[self._back].notes):
                self._buckets[self._back].start(forward=False)
