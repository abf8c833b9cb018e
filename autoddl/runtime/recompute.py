"""Runs ops again in backward, and gives autograd what they saved the first time.

    forward     autograd saves a note instead of what an op of the part saves, and instead of what the part brings back
                (`operators.recomputed`); the part keeps what its ops and conversions read
    backward    the first op that reads what the part brings back runs the part's ops again, and the conversions of what
                others read; every note then has its tensor, and drops it with the op that saved it

That op is the part's trigger on every rank, whatever storages a rank's pieces share, so that all send in one order.
All ops stay in the program, and so do their gradients: the second run's graph of autograd is thrown away. Ops run as
before, with the same random numbers, so the n-th tensor that an op saves is the n-th that it saved. A tensor that is
brought back for others is known by its storage.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.parameter_gather import TensorGathers

__all__ = ["SavedTensors", "Segment", "cut_out"]


class _Note:
    """Stands for a saved tensor that the second run of `segment` makes."""

    __slots__ = ("_segment", "value")

    def __init__(self, segment: "Segment") -> None:
        self._segment = segment
        self.value: Tensor | None = None

    def read(self) -> Tensor:
        """The tensor, for backward."""
        self._segment.run_again()
        assert self.value is not None, "an op saves as many tensors again as it saved"
        return self.value


class _Trigger:
    """Stands for what the trigger of `segment` saves: a tensor or a note."""

    __slots__ = ("note", "segment")

    def __init__(self, segment: "Segment", note: Any) -> None:
        self.segment, self.note = segment, note


class Segment:
    """The ops of one block that run again; `program` runs them on what they read, and `is_again` while it does."""

    def __init__(self, saved: "SavedTensors", recorder: Recorder) -> None:
        self.program: fx.GraphModule | None = None
        self._all, self._recorder = saved, recorder
        self.clear()

    def clear(self) -> None:
        """Forgets the last microbatch."""
        self._op, self._count, self.is_again, self._has_run = -1, 0, False, False
        self._reads: dict[int, tuple[Any, bool]] = {}
        self._kept: set[int] = set()
        self._own: dict[tuple[int, int], _Note] = {}
        self._others: dict[Hashable, list[tuple[_Note, Any, Any, Any]]] = {}

    def call(self, i: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, of op i, which tells autograd whose tensors it saves."""
        def run(*args: Any, **kwargs: Any) -> Any:
            self._op, self._count = i, 0
            self._all.running = self
            try:
                return function(*args, **kwargs)
            finally:
                self._op, self._all.running = -1, None
        return run

    def trigger(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, of the op whose backward runs the part again before it reads what it saved."""
        def run(*args: Any, **kwargs: Any) -> Any:
            self._all.triggers = self
            try:
                return function(*args, **kwargs)
            finally:
                self._all.triggers = None
        return run

    def keep(self, j: int) -> Callable[[Tensor], None]:
        """A call that keeps the j-th input of `program`: itself, or a note if it will be gathered again."""
        def keep(x: Tensor) -> None:
            if torch.is_grad_enabled():
                note = self._all.gathers.note(x)
                self._reads[j] = (x.detach() if note is None else note), x.requires_grad
                if note is None:
                    self._kept.add(x.untyped_storage()._cdata)
        return keep

    def bring(self, t: Hashable) -> Callable[[Tensor], None]:
        """A call with a tensor, known as `t`, which others save: they get notes, which the second run gives it."""
        def bring(x: Tensor) -> None:
            if self.is_again:
                for note, size, stride, offset in self._others.pop(t, ()):
                    note.value = x.detach().as_strided(size, stride, offset)
            elif torch.is_grad_enabled() and x.untyped_storage()._cdata not in self._kept:
                self._all.know(x, self, t)
        return bring

    def own_note(self) -> _Note:
        """A note for the next tensor that the running op saves."""
        note = self._own[self._op, self._count] = _Note(self)
        self.skip()
        return note

    def skip(self) -> None:
        """Counts a tensor of the running op that is saved in another way."""
        self._count += 1

    def other_note(self, t: Hashable, tensor: Tensor) -> _Note:
        """A note for `tensor`, saved elsewhere, which has the storage of what is known as `t`."""
        note = _Note(self)
        self._others.setdefault(t, []).append((note, tensor.size(), tensor.stride(), tensor.storage_offset()))
        return note

    def run_again(self) -> None:
        """Runs the ops again, once in every backward; all notes get their tensors."""
        if self._has_run:
            return
        assert self.program is not None
        self._has_run = True
        kept, self._reads = self._reads, {}
        inputs = [self._all.gathers.read(kept[j][0]).detach().requires_grad_(kept[j][1]) for j in range(len(kept))]
        kept.clear()
        self.is_again = True
        try:
            with torch.enable_grad(), self._recorder.computing_again(), saved_tensors_hooks(self._collect, _nothing):
                self.program.forward(*inputs)
        finally:
            self.is_again = False

    def _collect(self, tensor: Tensor) -> None:
        """Gives a saved tensor of the second run to its note; the second graph keeps nothing."""
        note = self._own.pop((self._op, self._count), None)
        self._count += 1
        if note is not None:
            note.value = tensor.detach()


def _nothing(_: None) -> Tensor:
    raise AssertionError("no one goes back through the second run")


class SavedTensors:
    """Decides what autograd saves of a program: a tensor, or a note of what is gathered or computed again.

    `running` is the part whose op runs now, `triggers` that whose trigger does.
    """

    def __init__(self, gathers: TensorGathers, recorder: Recorder) -> None:
        self.gathers, self._recorder, self._segments = gathers, recorder, list[Segment]()
        self.clear()

    def clear(self) -> None:
        """Called before and after a microbatch: forgets what the last one left."""
        self.running: Segment | None = None
        self.triggers: Segment | None = None
        self._known: dict[int, tuple[StorageWeakRef, Segment, Hashable]] = {}
        for segment in self._segments:
            segment.clear()

    def segment(self) -> Segment:
        """A part of the program that runs again."""
        self._segments.append(Segment(self, self._recorder))
        return self._segments[-1]

    def know(self, x: Tensor, segment: Segment, t: Hashable) -> None:
        """From now on `segment` brings back the storage of x, known as `t`, unless another tensor brings it already."""
        storage = x.untyped_storage()
        self._known.setdefault(storage._cdata, (StorageWeakRef(storage), segment, t))

    def notes(self) -> AbstractContextManager[Any]:
        """A context in which autograd saves notes instead of what will be gathered or computed again."""
        if self.gathers.regathers or self._segments:
            return saved_tensors_hooks(self._write, self._read)
        return nullcontext()

    def _write(self, tensor: Tensor) -> Any:
        note = self._note(tensor)
        return note if self.triggers is None else _Trigger(self.triggers, note)

    def _note(self, tensor: Tensor) -> Any:
        """A note of a tensor that is gathered or brought back, any other as it is."""
        note = self.gathers.note(tensor)
        if self.running is not None:
            if note is None:
                return self.running.own_note()
            self.running.skip()
        if note is not None:
            return note
        if (known := self._known.get(tensor.untyped_storage()._cdata)) is not None:
            return known[1].other_note(known[2], tensor)
        return tensor.detach() if tensor.grad_fn is not None else tensor

    def _read(self, note: Any) -> Tensor:
        if isinstance(note, _Trigger):
            note.segment.run_again()
            note = note.note
        return note.read() if isinstance(note, _Note) else self.gathers.read(note)


def cut_out(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node] | None = None
            ) -> fx.GraphModule:
    """Nodes of a program, in order, as a program of their own of `inputs`; it returns the `results`, if any."""
    graph = fx.Graph()
    env = {x: graph.placeholder(f"x{k}") for k, x in enumerate(inputs)}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(None if results is None else tuple(env[node] for node in results))
    return fx.GraphModule(torch.nn.Module(), graph)
