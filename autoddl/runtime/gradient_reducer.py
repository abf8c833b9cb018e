"""Gradients of parameters: from the layout in which backward yields them to the stored one, in buckets.

A bucket starts when its last gradient is there, but never before the bucket in front of it: every rank starts the same
collectives in the same order. A bucket of several steps takes its next one whenever a later bucket starts. What is sent
is held by the step under way alone, and few are at once (`in_flight`); all are finished at the end of backward. A
parameter whose gradient takes only local steps has no bucket.

Of several microbatches the backward of every one reduces the buckets of `each`; in the others gradients add up as they
come, and the last backward reduces their sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoddl.core.layout import local_shape
from autoddl.runtime.parameters import Held
from autoddl.runtime.process_groups import Groups
from autoddl.runtime.redistribute import Handle, Move, Recorder, moves, through
from autoddl.schedule.buckets import Bucket, ParameterEdge, frees, overdue

__all__ = ["Reducer"]


@dataclass(slots=True, eq=False)
class _Bucket:
    """`left` gradients are still missing in this backward; `at` is the next step; `shapes` are of the gradients as they
    come; `tensors` what came of them, or their sum, but for what a step under way holds; `own`: they are nobody else's.
    `frees`: waiting for the last step frees memory."""

    members: tuple[Held, ...]
    moves: tuple[Move, ...]
    shapes: tuple[tuple[int, ...], ...]
    each: bool
    frees: bool
    left: int = 0
    at: int = 0
    tensors: list[Tensor | None] = field(default_factory=list)
    handle: Handle | None = None
    own: bool = False

    @property
    def more(self) -> bool:
        """Whether steps are left to start."""
        return self.at < len(self.moves)

    def clear(self, held: bool = False) -> None:
        """Forget all, or all but what was `held` from earlier microbatches."""
        self.left, self.at, self.handle = len(self.members), 0, None
        self.tensors = self.tensors if held else [None] * len(self.members)

    def add(self, k: int, gradient: Tensor, due: bool) -> None:
        """Member k's gradient of one more microbatch. What is kept, to be added to later, is copied: autograd may hand
        one tensor to several."""
        before = self.tensors[k]
        if before is None:
            self.own = not (due and self.moves)
            self.tensors[k] = gradient.clone() if self.own else gradient
        else:
            before.add_(gradient)
        self.left -= 1

    def advance(self) -> bool:
        """Wait for the step under way and start the next; False when there is none."""
        if self.handle is not None:
            self.tensors = list(self.handle.wait())
            self.handle = None
        if not self.more:
            return False
        move = self.moves[self.at]
        move.inplace = self.own
        self.handle = move.start([t for t in self.tensors if t is not None])
        self.own, self.tensors = self.own or move.sends, [None] * len(self.members)
        self.at += 1
        return True


class Reducer:
    """Takes gradients as they come (`sink`), and deposits the reduced ones (`finish`)."""

    def __init__(self, buckets: Sequence[Bucket], edges: Mapping[str, ParameterEdge], held: Mapping[str, Held],
                 groups: Groups, recorder: Recorder) -> None:
        self._groups, self._recorder = groups, recorder
        self._buckets: list[_Bucket] = []
        self._place: dict[str, tuple[int, int]] = {}
        for b, bucket in enumerate(buckets):
            self._place.update({fqn: (b, k) for k, fqn in enumerate(bucket.members)})
            tensors = [edges[fqn].tensor for fqn in bucket.members]
            starts = [edges[fqn].conversion.gradient or edges[fqn].conversion.target for fqn in bucket.members]
            path = moves(bucket.steps, [t.shape for t in tensors], starts, groups, recorder, "backward",
                         f"the gradients of {bucket.members[0]} and {len(tensors) - 1} more")
            shapes = tuple(local_shape(t.shape, start, groups.mesh, groups.coordinate)
                           for t, start in zip(tensors, starts, strict=True))
            members = tuple(held[fqn] for fqn in bucket.members)
            self._buckets.append(_Bucket(members, path, shapes, bucket.each, frees(bucket)))
        self.clear()

    def clear(self) -> None:
        """Forget what a failed step left."""
        self.begin(last=True, held=False)

    def begin(self, last: bool, held: bool = True) -> None:
        """Before a microbatch, the `last` of a step or not; `_due` are the buckets that its backward reduces."""
        self._next, self._last = 0, last
        self._due = [bucket for bucket in self._buckets if last or bucket.each]
        for bucket in self._buckets:
            bucket.clear(held)

    def sink(self, edge: ParameterEdge, held: Held, direct: bool) -> Callable[[Tensor], None] | None:
        """Where the gradient of a parameter goes; None if there is none, or if the leaf is read as it is (`direct`) and
        gets the stored gradient from autograd."""
        if not held.tensor.trained or edge.conversion.gradient is None:
            return None
        if edge.tensor.fqn in self._place:
            b, k = self._place[edge.tensor.fqn]
            return lambda gradient: self._add(b, k, gradient)
        path = moves(edge.backward, [edge.tensor.shape], [edge.conversion.gradient], self._groups, self._recorder,
                     "backward", edge.tensor.fqn)
        return None if direct and not path else lambda gradient: held.deposit(_locally(path, gradient))

    def _add(self, b: int, k: int, gradient: Tensor) -> None:
        bucket = self._buckets[b]
        bucket.add(k, gradient, self._last or bucket.each)
        while self._next < len(self._due) and self._due[self._next].left == 0:
            self._start()

    def _start(self) -> None:
        """One step of everything under way, in order, and an end of what is overdue; then the next bucket's first."""
        earlier, new = self._due[:self._next], self._due[self._next]
        late = overdue([one for one in earlier if one.frees and (one.more or one.handle is not None)], new.frees)
        with torch.no_grad():
            for one in earlier:
                if one.more or one in late:
                    one.advance()
            new.advance()
        self._next += 1

    def finish(self) -> None:
        """Start what is left of the due ones, wait, deposit. A gradient that backward did not yield counts as zero."""
        while self._next < len(self._due):
            bucket = self._due[self._next]
            for k, (member, shape) in enumerate(zip(bucket.members, bucket.shapes, strict=True)):
                if bucket.tensors[k] is None:
                    bucket.tensors[k] = member.leaf.new_zeros(shape)
            self._start()
        with torch.no_grad():
            while sum(bucket.advance() for bucket in self._due):
                pass
            for bucket in self._due:
                for member, gradient in zip(bucket.members, bucket.tensors, strict=True):
                    assert gradient is not None
                    member.deposit(gradient)
                bucket.clear()


def _locally(path: tuple[Move, ...], gradient: Tensor) -> Tensor:
    """The stored piece of a gradient, in memory of its own: what autograd handed over may be larger, or another's."""
    with torch.no_grad():
        return through(path, gradient).clone()
