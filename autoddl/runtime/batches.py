"""Cuts the global batch that a user gives into the pieces that this rank reads.

    global batch --rows of dim 0, in order--> m microbatches --the plan's layouts--> this rank's pieces of each
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoddl.capture.arguments import said_kind
from autoddl.capture.sample import Sample, as_sample, from_spec, named, rows_of
from autoddl.core import graph as graphs
from autoddl.core.errors import CaptureError, InputError, MismatchError
from autoddl.core.layout import Layout, extents
from autoddl.runtime.collectives.process_groups import Groups

__all__ = ["Batches", "LocalBatch", "SeenBatches", "check_one_batch", "digest", "digests", "sampled"]

PART = 2**24
"""Elements of a tensor that are hashed, and so copied, at a time."""

SAMPLED = 4096
"""Elements of a tensor of a batch that are compared among the ranks after the first step."""

PLAIN = (bool, int, float, str, type(None))


def digest(value: Tensor) -> str:
    """A hash of the tensor's bytes: the same on every host, and another one if elements change or move."""
    found = hashlib.blake2b(digest_size=8)
    for part in value.detach().reshape(-1).split(PART):
        found.update(part.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def digests(batch: object) -> list[str]:
    """The shapes and hashes of the tensors of a batch."""
    given = as_sample(batch)
    leaves = pytree.tree_leaves((given.args, dict(given.kwargs)))
    return [f"{list(leaf.shape)} {digest(leaf)}" for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta]


class SeenBatches:
    """A checksum of global batches, of which ranks that go through their data alike have the same.

    It is of all shapes, and of up to `SAMPLED` elements of each tensor on the processor: others would be waited for.
    """

    def __init__(self) -> None:
        self._sum = hashlib.blake2b(digest_size=8)

    def add(self, batch: object) -> None:
        """Counts a batch in."""
        given = as_sample(batch)
        for leaf in pytree.tree_leaves((given.args, dict(given.kwargs))):
            if isinstance(leaf, Tensor):
                self._sum.update(str(leaf.shape).encode())
                if leaf.device.type == "cpu":
                    self._sum.update(digest(sampled(leaf)).encode())

    def text(self) -> str:
        """The checksum of the batches so far."""
        return self._sum.hexdigest()


def sampled(value: Tensor) -> Tensor:
    """Up to `SAMPLED` elements from all over a tensor."""
    while value.numel() > SAMPLED:
        dim = max(range(value.dim()), key=lambda k: value.shape[k])
        value = value[(*[slice(None)] * dim, slice(None, None, 2))]
    return value


def check_one_batch(batch: object, more: Sequence[object], named: Mapping[str, object]) -> None:
    """Raises InputError where a step was given the arguments of forward one by one."""
    if more or named or batch is None:
        given = len(more) + len(named) + (batch is not None)
        raise InputError(f"step takes one batch, and {given} arguments were given: write model.step(batch) in place of "
                         "model.step(*batch), with a tuple like (ids, labels) or a dict of forward's keywords")


def _with_defaults(forward: Callable[..., Any], sample: Sample) -> dict[str, Any]:
    """The leaves of a call by name, with the defaults of `forward`."""
    bound = inspect.signature(forward).bind(*sample.args, **sample.kwargs)
    bound.apply_defaults()
    return named(forward, Sample(bound.args, bound.kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """This rank's pieces of one global batch: for every microbatch, the pieces by the name of the input.

    `program` names the program that they were cut for, "" the one of the plan.
    """

    parts: tuple[Mapping[str, Tensor], ...]
    program: str = ""

    def __iter__(self) -> Iterator[Tensor]:
        """Raises InputError: a piece of a batch is no tuple of whole tensors."""
        raise InputError("this is a rank's piece of a batch, which model.step and model(...) take as it is: for "
                         "tensors of it, ask the model for outputs, or load whole batches by torch's DataLoader")


class Batches:
    """Checks global batches against the plan's sample, and cuts them.

        forward         the method that is called with a batch
        inputs          the graph's inputs, of one of `microbatches`
        spec            the described sample, whose plain values are in the program
        layouts         the layout of each input that this rank reads, by name; of any other it has no piece
        groups          the mesh and this rank's place in it
        device          the device of the pieces
        microbatches    parts into which the rows of a batch are cut
        program         name of the program that reads the pieces
    """

    def __init__(self, forward: Callable[..., Any], inputs: tuple[graphs.Tensor, ...], spec: Mapping[str, Any],
                 layouts: Mapping[str, Layout], groups: Groups, device: torch.device, microbatches: int = 1,
                 program: str = "") -> None:
        self._forward, self._inputs, self._device, self._parts = forward, inputs, device, microbatches
        self._program, self._spec = program, spec
        self._names = frozenset(t.fqn for t in inputs)
        self._dtypes = {t.fqn: getattr(torch, t.dtype) for t in inputs}
        self._plain = _with_defaults(forward, from_spec(spec, "meta"))
        self._pieces = {t.fqn: extents(t.shape, layouts[t.fqn], groups.mesh, groups.coordinate) for t in inputs
                        if t.fqn in layouts}
        self._cuts = {t.fqn: [(dim, offset, size) for dim, (offset, size) in enumerate(self._pieces[t.fqn])
                              if size != t.shape[dim]] for t in inputs if t.fqn in self._pieces}

    def local(self, batch: object) -> LocalBatch:
        """This rank's pieces of the global `batch`, which has the form of the sample that the plan was made for.

        Raises MismatchError where the batch does not fit that sample.
        """
        if isinstance(batch, LocalBatch):
            if len(batch.parts) != self._parts:
                raise MismatchError(f"the local batch is of {len(batch.parts)} microbatches, the plan runs "
                                    f"{self._parts}: make it by local_batch of this model")
            return batch
        try:
            found = named(self._forward, as_sample(batch))
        except CaptureError as error:
            names = ", ".join(t.fqn for t in self._inputs)
            raise MismatchError(f"{error}; give one batch in the form of the plan's sample, of {names}") from None
        for name, value in found.items():
            if name not in self._names:
                self._check_plain(name, value)
        whole = {t.fqn: self._checked(t, found.get(t.fqn)) for t in self._inputs}
        return LocalBatch(tuple({fqn: self._cut(fqn, whole[fqn], part) for fqn in self._cuts}
                                for part in range(self._parts)), self._program)

    def reads_pieces_of(self, other: "Batches") -> bool:
        """Whether this program can read the pieces that `other` cuts of the same batch."""
        return self._parts == other._parts and self._pieces.items() <= other._pieces.items()

    def whole(self) -> Sample:
        """The planned global batch, on the meta device."""
        made = from_spec(self._spec, "meta")
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.repeat(self._parts, *(1,) * (leaf.dim() - 1)) if isinstance(leaf, Tensor) and leaf.dim()
            else leaf, (made.args, dict(made.kwargs)))
        return Sample(args, kwargs)

    def rows_read(self) -> tuple[int, int]:
        """(first, number) of the rows of a microbatch that this rank reads; (0, 0) where it reads none."""
        spans = [next(((offset, offset + size) for dim, offset, size in self._cuts[t.fqn] if dim == 0), (0, t.shape[0]))
                 for t in self._inputs if t.fqn in self._cuts and t.shape]
        first = min((start for start, _ in spans), default=0)
        return first, max((end for _, end in spans), default=0) - first

    def local_of_rows(self, batch: object, first: int, number: int) -> tuple[Mapping[str, Tensor], ...]:
        """This rank's pieces of a batch that has the `number` rows from `first` on of each microbatch alone.

        Raises MismatchError where it has another number of rows.
        """
        found = named(self._forward, as_sample(batch)) if number else {}
        parts = []
        for part in range(self._parts):
            pieces = {}
            for t in (t for t in self._inputs if t.fqn in self._cuts):
                value = found.get(t.fqn)
                if not isinstance(value, Tensor) or (t.shape and value.shape[0] != number * self._parts):
                    raise MismatchError(f"input {t.fqn} of these rows is {said_kind(value)}, and this rank reads "
                                        f"{number * self._parts} rows of a batch: give those of model.rows()")
                pieces[t.fqn] = self._cut(t.fqn, value, part, first)
            parts.append(pieces)
        return tuple(parts)

    def rows(self) -> int:
        """The rows of the planned global batch: dim 0 of its first input with dims; 0 where there is none."""
        return next((t.shape[0] * self._parts for t in self._inputs if t.shape), 0)

    def planned(self) -> str:
        """The shapes of the planned global batch, as text."""
        return _shapes((t.fqn, (t.shape[0] * self._parts, *t.shape[1:]) if t.shape else ()) for t in self._inputs)

    def shapes(self, batch: object) -> str:
        """The shapes of a batch, as text; "" for one of other inputs than the planned one, or other numbers of dims."""
        try:
            found = named(self._forward, as_sample(batch))
        except CaptureError:
            return ""
        values = [(t, found.get(t.fqn)) for t in self._inputs]
        shapes = [(t.fqn, value.shape) for t, value in values
                  if isinstance(value, Tensor) and value.dim() == len(t.shape)]
        return _shapes(shapes) if len(shapes) == len(values) else ""

    def other_rows(self, batch: object) -> int:
        """The rows of a batch that is as planned but for their number; 0 for any other batch, and for one as planned.

        Inputs that have as many rows as the planned batch have all the same number, those of another length are alike.
        """
        planned = self.rows()
        try:
            found = named(self._forward, as_sample(batch))
        except CaptureError:
            return 0
        numbers = set()
        for tensor in self._inputs:
            value = found.get(tensor.fqn)
            if not isinstance(value, Tensor) or value.shape[1:] != tensor.shape[1:] or value.dim() != len(tensor.shape):
                return 0
            if value.dim() and tensor.shape[0] * self._parts == planned:
                numbers.add(value.shape[0])
        return next(iter(numbers)) if len(numbers) == 1 and numbers != {planned} else 0

    def sample(self, batch: object) -> Sample:
        """The call of the plan's sample with the tensors of `batch`: what is no tensor is as there."""
        found, made = named(self._forward, as_sample(batch)), from_spec(self._spec, "meta")
        values = {id(leaf): found[name] for name, leaf in named(self._forward, made).items()
                  if isinstance(leaf, Tensor)}
        args, kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (made.args, dict(made.kwargs)))
        return Sample(args, kwargs)

    def _check_plain(self, name: str, value: object) -> None:
        """Raises unless a value that is no input is as in the sample, or else the default of `forward`."""
        if isinstance(value, Tensor):
            raise MismatchError(f"the batch has a tensor {name}, which the plan does not read: it was made for a "
                                "sample without it; leave it out, or plan for a sample with it")
        made, plain = self._plain.get(name), isinstance(value, PLAIN)
        if value is not made and not (plain and value == made):
            raise MismatchError(f"{name} is {value if plain else type(value)!r}, the plan was made for {made!r}: what "
                                "is no tensor is fixed by the plan; give it as there, or plan for a sample with this")

    def _checked(self, tensor: graphs.Tensor, value: object) -> Tensor:
        """`value`, if it fits: it is the global batch of the input `tensor`, which is that of one microbatch."""
        rows = [tensor.shape[0] * self._parts] if tensor.shape else []
        shape = [*rows, *tensor.shape[1:]]
        if not isinstance(value, Tensor):
            raise MismatchError(f"input {tensor.fqn} is missing from the batch; the plan was made for one of shape "
                                f"{shape}: give it, or plan for a sample without it")
        dtype, sampled = str(value.dtype).removeprefix("torch."), self._plain.get(tensor.fqn)
        known = {tensor.dtype} | ({str(sampled.dtype).removeprefix("torch.")} if isinstance(sampled, Tensor) else set())
        if list(value.shape) != shape or dtype not in known:
            parts = f", {self._parts} microbatches of {tensor.shape[0]} each" if self._parts > 1 and rows else ""
            raise MismatchError(f"input {tensor.fqn} is {dtype}{list(value.shape)}, the plan was made for "
                                f"{tensor.dtype}{shape}{parts}: {_advice(value, shape, dtype in known, tensor.dtype)}")
        return value

    def _cut(self, fqn: str, value: Tensor, part: int, first: int = 0) -> Tensor:
        """This rank's piece of microbatch `part`, of which `value` has the rows from `first` on."""
        value = rows_of(value, part, self._parts)
        for dim, offset, size in self._cuts[fqn]:
            value = value.narrow(dim, offset - first if dim == 0 else offset, size)
        pinned = self._device.type == "cuda" and value.is_pinned()
        return value.to(self._device, self._dtypes[fqn], non_blocking=pinned)


def _shapes(inputs: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Shapes by name, as text."""
    return ", ".join(f"{name}{list(shape)}" for name, shape in inputs)


def _advice(value: Tensor, shape: Sequence[int], is_known: bool, dtype: str) -> str:
    """Says what to do about a tensor of another shape or dtype than the planned one."""
    if not is_known:
        return f"cast it with .to(torch.{dtype}), or make a plan with a sample of this dtype"
    if len(value.shape) != len(shape):
        return "give it with these dims, or make a plan with a sample of the other shape"
    if list(value.shape[1:]) == list(shape[1:]):
        return ("give the global batch on every rank, not a share of it; drop or pad one of fewer rows, or make a plan "
                "with a sample of the other shape")
    dims = [d for d in range(1, len(shape)) if value.shape[d] != shape[d]]
    return (f"pad or cut dim {' and '.join(map(str, dims))} to the planned size on every rank, or give parallelize a "
            "sample of every shape that comes, samples=[...]")
