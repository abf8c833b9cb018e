"""Reduces gradients of parameters, from the layout in which backward yields them to the stored one.

This is the parameter protocol on tensors. Only the step in flight refers to the tensors that are sent. The results go
to .grad at the end of backward, or of the step where the last backward does not wait. A parameter whose gradient takes
only local steps has no bucket. Where gradients are reduced only in the last of several microbatches, they add up as
they come.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoddl.core.layout import local_shape
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.redistribute import Handle, Move, Recorder, make_moves, run_moves
from autoddl.runtime.parameters import StoredParameter
from autoddl.schedule.buckets import Bucket, ParameterEdge
from autoddl.schedule.parameter_protocol import Advance, Fill, ReduceProtocol

__all__ = ["Reducer"]


@dataclass(slots=True, eq=False)
class _Bucket:
    """The gradients of a bucket on one rank.

        members    its parameters
        moves      the steps of its reduction
        shapes     local shapes of the gradients as they come
        tensors    gradients of the members, their sums, or results of the last step; None while a step is in flight
        handle     the step in flight
        own        whether nobody else uses the tensors
        each       steps that are taken in every microbatch; those behind them are taken in the last alone
        sums       of earlier microbatches, behind the steps of each, where steps follow these
    """

    members: tuple[StoredParameter, ...]
    moves: tuple[Move, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensors: list[Tensor | None] = field(default_factory=list)
    handle: Handle | None = None
    own: bool = False
    each: int = 0
    sums: list[Tensor] | None = None

    def clear(self, keep: bool = False) -> None:
        """Forgets all, or all but the sums of earlier microbatches."""
        self.handle, self.sums = None, self.sums if keep else None
        self.tensors = self.tensors if keep else [None] * len(self.members)

    def add(self, k: int, gradient: Tensor, due: bool) -> None:
        """Adds member k's gradient of one more microbatch.

        A gradient to which others will be added is copied: autograd may hand one tensor to several readers.
        """
        before, given = self.tensors[k], gradient
        gradient = self.members[k].summed(gradient)
        if before is None:
            self.own = not (due and self.moves)
            self.tensors[k] = gradient.clone() if self.own and gradient is given else gradient
        else:
            before.add_(gradient)

    def advance(self, asked: Advance) -> None:
        """Waits for the step in flight, and starts the next if there is one."""
        if asked.waits and self.handle is not None:
            self.tensors = list(self.handle.wait())
            self.handle = None
        if asked.step is not None:
            if asked.step == self.each and self.sums is not None:
                for tensor, more in zip(self.tensors, self.sums, strict=True):
                    assert tensor is not None
                    more.add_(tensor)
                self.tensors, self.sums, self.own = [*self.sums], None, True
            move = self.moves[asked.step]
            move.inplace = self.own
            self.handle = move.start([t for t in self.tensors if t is not None])
            self.own, self.tensors = self.own or move.sends, [None] * len(self.members)

    def add_up(self) -> None:
        """Adds what this microbatch's steps came to to the sums."""
        found = [tensor for tensor in self.tensors if tensor is not None]
        if self.sums is None:
            self.sums = [tensor.clone() if not self.own else tensor for tensor in found]
        else:
            for tensor, more in zip(self.sums, found, strict=True):
                tensor.add_(more)
        self.tensors = [None] * len(self.members)

    def fill(self) -> None:
        """Makes zeros for the gradients that backward did not yield."""
        for k, (member, shape) in enumerate(zip(self.members, self.shapes, strict=True)):
            if self.tensors[k] is None:
                self.tensors[k] = member.summed(member.leaf.new_zeros(shape))


class Reducer:
    """Takes gradients as they come (`sink`), and deposits the reduced ones (`finish`)."""

    def __init__(self, buckets: Sequence[Bucket], edges: Mapping[str, ParameterEdge],
                 stored: Mapping[str, StoredParameter], groups: Groups, recorder: Recorder) -> None:
        self._groups, self._recorder = groups, recorder
        self._buckets: list[_Bucket] = []
        self._protocol = ReduceProtocol(buckets)
        self._place: dict[str, tuple[int, int]] = {}
        for b, bucket in enumerate(buckets):
            self._place.update({fqn: (b, k) for k, fqn in enumerate(bucket.members)})
            tensors = [edges[fqn].tensor for fqn in bucket.members]
            starts = [edges[fqn].gradient_start(bucket, bucket.steps) for fqn in bucket.members]
            path = make_moves((*bucket.steps, *bucket.once), [t.shape for t in tensors], starts, groups, recorder,
                              "backward", f"the gradients of {bucket.members[0]} and {len(tensors) - 1} more")
            shapes = tuple(local_shape(t.shape, start, groups.mesh, groups.coordinate)
                           for t, start in zip(tensors, starts, strict=True))
            members = tuple(stored[fqn] for fqn in bucket.members)
            self._buckets.append(_Bucket(members, path, shapes, each=len(bucket.steps) if bucket.once else 0))
        self.clear()

    def sparse_sums(self) -> list[tuple[tuple[StoredParameter, ...], Move]]:
        """The members of every bucket with a sparse sum, and the step that is it."""
        return [(bucket.members, move) for bucket in self._buckets for move in bucket.moves if move.sparse is not None]

    def clear(self) -> None:
        """Forgets everything that a failed step left."""
        self.begin(last=True, keep=False)

    def begin(self, last: bool, keep: bool = True) -> None:
        """Called before a microbatch, the `last` of a step or not."""
        self._protocol.begin(last)
        for bucket in self._buckets:
            bucket.clear(keep)

    def sink(self, edge: ParameterEdge, stored: StoredParameter, direct: bool) -> Callable[[Tensor], None] | None:
        """The function that takes the gradient of a parameter.

        None if there is no gradient, or if autograd adds the stored gradient up in the leaf. It does where the program
        reads the leaf `direct` and the gradient takes no step.
        """
        if not stored.tensor.trained or edge.conversion.gradient is None:
            return None
        if edge.tensor.fqn in self._place:
            b, k = self._place[edge.tensor.fqn]
            return lambda gradient: self._add(b, k, gradient)
        path = make_moves(edge.backward, [edge.tensor.shape], [edge.conversion.gradient], self._groups, self._recorder,
                          "backward", edge.tensor.fqn)
        return None if direct and not path else lambda gradient: stored.deposit(_locally(path, stored, gradient))

    def _add(self, b: int, k: int, gradient: Tensor) -> None:
        self._buckets[b].add(k, gradient, self._protocol.is_due(b))
        self._do(self._protocol.arrive(b))

    def _do(self, asked: Iterable[Advance | Fill]) -> None:
        with torch.no_grad():
            for one in asked:
                bucket = self._buckets[one.bucket]
                if isinstance(one, Advance):
                    bucket.advance(one)
                else:
                    bucket.fill()

    def start_rest(self) -> None:
        """Starts the rest of the buckets that are due; `finish` waits for them later."""
        self._do(self._protocol.rest())

    def finish(self) -> None:
        """Starts the rest of the buckets that are due, waits, and deposits the results in .grad.

        A gradient that backward did not yield counts as zero.
        """
        self._do(self._protocol.finish())
        with torch.no_grad():
            for bucket in (self._buckets[b] for b in self._protocol.due):
                if bucket.each and not self._protocol.is_last:
                    bucket.add_up()
                    continue
                for member, gradient in zip(bucket.members, bucket.tensors, strict=True):
                    assert gradient is not None
                    member.deposit(gradient)
                bucket.clear()


def _locally(path: tuple[Move, ...], stored: StoredParameter, gradient: Tensor) -> Tensor:
    """The stored piece of a gradient, contiguous, in memory of its own: autograd's tensor may be larger, or shared."""
    with torch.no_grad():
        piece = run_moves(path, stored.summed(gradient))
        storage = piece.untyped_storage()
        shared = storage.data_ptr() == gradient.untyped_storage().data_ptr() or storage.nbytes() > piece.nbytes
        return piece.clone(memory_format=torch.contiguous_format) if shared else piece.contiguous()
