"""Runs the steps of a conversion as collectives on real tensors, and conversions as autograd functions.

A `Move` is one step on a list of tensors of one dtype, done as one collective over the buffers of all of them. Its
payload is that of `core.conversion`, and a `Recorder` notes the buffer:

    all-gather      the buffer that it ends with         reduce-scatter  the buffer that it starts with
    all-reduce      the buffer                           all-to-all      the buffer that it sends

A step with a codec sends bytes instead (`core.codecs`). An all-gather is one of coded pieces, a reduce-scatter an
all-to-all of them, and each rank adds up what it decoded. Where exponents of a lossless row find no room, every row of
that rank says so. So all ranks of the group know it, and wait for a second collective, which brings the exponents.
A sparse step (`core.sparse`) has a residual, which stays with the move.

Along an axis whose group has one rank, nothing is sent and nothing changes. The plan gives the forward steps of a
conversion and the steps of its gradient separately: neither follows from the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoddl.core.codecs import CODECS, coded_kind
from autoddl.core.conversion import COLLECTIVES, Step
from autoddl.core.layout import Layout, Split
from autoddl.core.sparse import SparseRule
from autoddl.runtime.collectives.coding import decode, decode_sum, encode, error_share
from autoddl.runtime.collectives.lossless_rows import exponents_of, lacks_exponents
from autoddl.runtime.collectives.packing import Packing, packing_of
from autoddl.runtime.collectives.process_groups import Groups, peer_error
from autoddl.runtime.collectives.recorder import ExecutedCollective, Mark, Recorder
from autoddl.runtime.collectives.sparse_sum import SparseSent, SparseSum

AS_BYTES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that gloo does not know."""

__all__ = ["ExecutedCollective", "Handle", "Move", "Recorder", "Route", "make_moves", "run_moves", "start_moves"]

Shape = tuple[int, ...]


class Handle:
    """A step in flight; `wait` returns its tensors."""

    __slots__ = ("_finish", "_keep", "_mark", "_text", "_work")

    def __init__(self, work: Any, finish: Callable[[], list[Tensor]], keep: object, text: str,
                 mark: Mark | None = None) -> None:
        self._work, self._finish, self._keep, self._text, self._mark = work, finish, keep, text, mark

    def wait(self) -> list[Tensor]:
        """Waits for the step; returns its tensors. Raises MachineError where a peer is gone."""
        if self._work is not None:
            if self._mark is not None:
                self._mark.wait()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise peer_error(self._text, error) from error
            if self._mark is not None:
                self._mark.resume()
            self._work = None
        found = self._finish()
        self._keep = None
        return found


class Move:
    """A step on tensors of global `shapes` in `layouts`.

    `inplace` lets an all-reduce overwrite its input. With `copies` a slice is a copy, so that the rest can be freed.
    """

    __slots__ = ("_algorithm", "_copies", "_group", "_label", "_n", "_pieces", "_recorder", "_start", "_start_coded",
                 "_step", "_swaps", "_text", "inplace", "kind", "record", "sparse")

    def __init__(self, step: Step, shapes: Sequence[Shape], layouts: Sequence[Layout], groups: Groups,
                 recorder: Recorder | None = None, direction: str = "forward", label: str = "",
                 copies: bool = False) -> None:
        mesh, self._copies = groups.mesh, copies
        self._step, self._group, self.kind, self.inplace = step, groups.of(step.axes), step.kind, False
        self._n = self._group.size() if self._group is not None else 1
        self._start = partial(groups.start, step.kind, step.axes)
        self._algorithm = partial(groups.algorithm, coded_kind(step.kind) if step.codec else step.kind, step.axes)
        self._start_coded = partial(groups.start, coded_kind(step.kind), step.axes)
        self._recorder, self._label = recorder, label
        self._pieces = [packing_of(step, shape, layout, mesh, groups.coordinate)
                        for shape, layout in zip(shapes, layouts, strict=True)]
        axes = "+".join(mesh.names[a] for a in step.axes)
        self.sparse = self._sparse_sum() if step.is_sparse else None
        self._swaps = partial(groups.start_swaps, step.axes)
        self.record = (direction, step.sends(self._n, 0, 4)[0], axes)
        self._text = f"{direction} {step.kind} over {axes}{' of ' * bool(label)}{label}"

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes of the step."""
        return self._step.axes

    @property
    def sends(self) -> bool:
        """Whether the step communicates."""
        return self._group is not None and self.kind in COLLECTIVES

    @property
    def is_view(self) -> bool:
        """Whether the first rank gets its tensor itself or a view of it; others get zeros if this makes a sum."""
        return not self._copies if self.kind == "slice" else self.kind == "fill" and not isinstance(self._step.source,
                                                                                                  Split)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the step and waits for it; returns the tensors afterwards."""
        return self.start(tensors, asynchronous=False).wait() if self.sends else self._local(tensors)

    def start(self, tensors: Sequence[Tensor], asynchronous: bool = True) -> Handle:
        """Starts the step; a local step runs when the handle is waited for."""
        if not self.sends:
            return Handle(None, lambda: self._local(tensors), None, self._text)
        truth = tensors[0].dtype == torch.bool
        given = [t.view(torch.uint8) for t in tensors] if truth else list(tensors)
        if self.sparse is not None:
            work, finish, keep = self._sum(self.sparse, given, asynchronous)
        elif self._step.codec:
            work, finish, keep = self._coded(given, asynchronous)
        else:
            work, finish, keep = (self._reduce if self.kind == "all-reduce" else self._exchange)(given, asynchronous)
        mark = self._recorder.started(work) if self._recorder is not None else None
        if truth:
            return Handle(work, lambda: [t.view(torch.bool) for t in finish()], keep, self._text, mark)
        return Handle(work, finish, keep, self._text, mark)

    def _local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._n == 1:
            return list(tensors)
        if self.kind == "slice":
            found = [piece.slice(x) for piece, x in zip(self._pieces, tensors, strict=True)]
            return [x.clone(memory_format=torch.contiguous_format) for x in found] if self._copies else found
        return [self._fill(piece, x) for piece, x in zip(self._pieces, tensors, strict=True)]

    @staticmethod
    def _fill(piece: Packing, x: Tensor) -> Tensor:
        if piece.join is not None:
            return piece.fill(x)
        return x if piece.mine == 0 else torch.zeros_like(x)

    def _note(self, buffer: Tensor) -> None:
        if self._recorder is not None:
            nbytes = buffer.numel() * buffer.element_size()
            self._recorder.note(*self.record, nbytes, self._label,
                                self._algorithm(nbytes) if self._recorder.timed else "")

    def _hand_over(self, got: Tensor, given: Tensor, asynchronous: bool) -> Any:
        """Starts the collective; an error of the backend becomes a MachineError.

        gloo has no types of two bytes but floats: the others are sent as bytes.
        """
        if got.dtype in AS_BYTES and self.kind not in ("all-reduce", "reduce-scatter"):
            got, given = got.view(torch.uint8), given.view(torch.uint8)
        try:
            return self._start(got, given, asynchronous)
        except RuntimeError as error:
            raise peer_error(self._text, error) from error

    def _reduce(self, tensors: list[Tensor], asynchronous: bool) -> tuple[Any, Callable[[], list[Tensor]], object]:
        if len(tensors) > 1:
            buffer = torch.cat([t.reshape(-1) for t in tensors])
        else:
            buffer = tensors[0].contiguous() if self.inplace else \
                tensors[0].clone(memory_format=torch.contiguous_format)
        self._note(buffer)
        work = self._hand_over(buffer, buffer, asynchronous)
        if len(tensors) == 1:
            return work, lambda: [buffer], buffer
        parts = [t.shape for t in tensors]
        return work, lambda: [part.view(shape) for part, shape in zip(
            buffer.split([shape.numel() for shape in parts]), parts, strict=True)], buffer

    def _sparse_sum(self) -> SparseSum | None:
        """The state of a sparse sum of these pieces; None where the rank is alone."""
        if self._group is None:
            return None
        elements = sum(prod(piece.result) for piece in self._pieces)
        return SparseSum(SparseRule.of(self._step.codec), self._n, self._group.rank(), torch.zeros(elements))

    def _sum(self, sparse: SparseSum, tensors: list[Tensor], asynchronous: bool
             ) -> tuple[Any, Callable[[], list[Tensor]], object]:
        """Adds the tensors up sparse."""
        found, mark = list[tuple[Tensor, SparseSent]](), None
        sparse.to(tensors[0].device)
        if self._recorder is not None:
            nbytes = self._step.sends(self._n, sparse.residual.nbytes, 4)[1]
            self._recorder.note(*self.record, nbytes, self._label)
            mark = self._recorder.marks[-1] if self._recorder.timed else None
        try:
            work = self._swaps(lambda swap: found.append(sparse.add(tensors, swap, self.record[2])), asynchronous)
        except RuntimeError as error:
            raise peer_error(self._text, error) from error

        def finish() -> list[Tensor]:
            (total, sent), = found
            if self._recorder is not None:
                self._recorder.sparse.append(sent)
            if mark is not None:
                mark.words = sent.words
            return [part.view(x.shape) for part, x in zip(total.split([x.numel() for x in tensors]), tensors,
                                                          strict=True)]

        return work, finish, tensors

    def _exchange(self, tensors: list[Tensor], asynchronous: bool) -> tuple[Any, Callable[[], list[Tensor]], object]:
        rows = [piece.pack(x) for piece, x in zip(self._pieces, tensors, strict=True)]
        send = rows[0].contiguous() if len(rows) == 1 else torch.cat([r.flatten(1) for r in rows], 1)
        n, total = self._n, sum(piece.numel for piece in self._pieces)
        got = send.new_empty((1 if self.kind == "reduce-scatter" else n) * total)
        self._note(got if self.kind == "all-gather" else send)
        work = self._hand_over(got, send, asynchronous)
        return work, lambda: self._joined(got.view(1 if self.kind == "reduce-scatter" else n, total)), (send, got)

    def _coded(self, tensors: list[Tensor], asynchronous: bool) -> tuple[Any, Callable[[], list[Tensor]], object]:
        """Exchanges the tensors' pieces as bytes; what came is decoded when it is waited for."""
        rows = [piece.pack(x) for piece, x in zip(self._pieces, tensors, strict=True)]
        joined = rows[0].flatten(1) if len(rows) == 1 else torch.cat([r.flatten(1) for r in rows], 1)
        codec, elements, dtype, own = self._step.codec, joined.shape[1], joined.dtype, None
        sent = encode(codec, joined)
        if self._recorder is not None and self._recorder.checks:
            self._recorder.coded_share = max(self._recorder.coded_share, error_share(codec, joined, sent))
        if CODECS[codec].lossless and lacks_exponents(sent, sent):
            own = exponents_of(joined)
        got = sent.new_empty(self._n, sent.shape[1])
        self._note(got)
        work, count = self._hand_over_coded(got, sent, asynchronous), len(joined)

        def finish() -> list[Tensor]:
            every = None
            if CODECS[codec].lossless and lacks_exponents(got):
                every = got.new_empty(self._n, elements)
                if self._recorder is not None:
                    self._recorder.besides.append(ExecutedCollective(*self.record, every.numel()))
                self._hand_over_coded(every, got.new_zeros(count, elements) if own is None else own, False)
            found = (decode_sum if self.kind == "reduce-scatter" else decode)(codec, got, elements, dtype, every)
            return self._joined(found.to(dtype))

        return work, finish, (sent, got)

    def _hand_over_coded(self, got: Tensor, sent: Tensor, asynchronous: bool) -> Any:
        """Starts the collective of bytes; an error of the backend becomes a MachineError."""
        try:
            return self._start_coded(got.view(-1), sent.view(-1), asynchronous)
        except RuntimeError as error:
            raise peer_error(self._text, error) from error

    def _joined(self, rows: Tensor) -> list[Tensor]:
        if len(self._pieces) == 1:
            parts = [rows]
        else:
            parts = list(rows.split([piece.numel for piece in self._pieces], 1))
        return [piece.unpack(part.view(len(part), *piece.block))
                for piece, part in zip(self._pieces, parts, strict=True)]


def make_moves(steps: Sequence[Step], shapes: Sequence[Shape], layouts: Sequence[Layout], groups: Groups,
               recorder: Recorder | None = None, direction: str = "forward", label: str = "",
               copies: bool = False) -> tuple[Move, ...]:
    """The moves of `steps` on tensors that start in `layouts`; moves that change nothing are left out."""
    found, here = [], list(layouts)
    for step in steps:
        if groups.of(step.axes) is not None:
            found.append(Move(step, shapes, here, groups, recorder, direction, label, copies))
        here = [step.after(layout) for layout in here]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Route:
    """The moves of one edge, forward and for the gradient; call it with the tensor."""

    forward: tuple[Move, ...]
    backward: tuple[Move, ...]

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Convert.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]
        return run_moves(self.forward, x)


def run_moves(path: tuple[Move, ...], x: Tensor) -> Tensor:
    """Runs all moves of `path` on `x`; returns the tensor afterwards."""
    for move in path:
        (x,) = move.run([x])
    return x


def start_moves(path: tuple[Move, ...], x: Tensor) -> Callable[[], Tensor]:
    """Runs moves up to the first that sends, and starts that; call the result to finish and get the tensor."""
    x = x.detach()
    for k, move in enumerate(path):
        if move.sends:
            handle = move.start([x])
            return lambda: run_moves(path[k + 1:], handle.wait()[0])
        (x,) = move.run([x])
    return lambda: x


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        found = run_moves(route.forward, x)
        return found.view_as(found) if found is x else found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return run_moves(ctx.route.backward, gradients[0]), None
