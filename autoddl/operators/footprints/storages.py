"""Counts the storages of one rank by reference, without allocating them.

    held = sum of the bytes of every storage that something refers to

A `Value` is a tensor as torch sees it: a storage, a shape and strides in elements. Several values may share one
storage, which is freed with the last of them.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

__all__ = ["Heap", "Shape", "Value", "contiguous", "is_contiguous", "token_major", "viewed"]

Shape = tuple[int, ...]


class Value(NamedTuple):
    """A tensor: the number of its storage, its shape, its strides in elements, and its itemsize in bytes."""

    storage: int
    shape: Shape
    strides: Shape
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@lru_cache(maxsize=10_000)
def contiguous(shape: Shape) -> Shape:
    """Returns the strides of a row-major tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def token_major(shape: Shape) -> Shape:
    """Returns the strides of (batch, heads, queries, size) where the heads of one query are adjacent in memory."""
    _, heads, queries, size = shape
    return (heads * queries * size, size, heads * size, 1)


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether the strides are those of a row-major tensor; dims of size 1 may have any."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def viewed(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Returns the strides of a view in shape `new`, None if the elements must be copied: torch's `computeStride`."""
    if is_contiguous(shape, strides):
        return contiguous(new)
    found, at = [0] * len(new), len(new) - 1
    numel, span, base = 1, 1, strides[-1] if strides else 1
    for dim in range(len(shape) - 1, -1, -1):
        numel *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == numel * base):
            continue
        while at >= 0 and (span < numel or new[at] == 1):
            found[at] = span * base
            span *= new[at]
            at -= 1
        if span != numel:
            return None
        if dim:
            base, numel, span = strides[dim - 1], 1, 1
    return tuple(found) if at < 0 else None


@dataclass(slots=True)
class Heap:
    """The storages of one rank while a step is replayed; all sizes in bytes."""

    sizes: list[float] = field(default_factory=list)
    """Size of every storage."""
    users: list[int] = field(default_factory=list)
    """Number of references to every storage; 0 once it is freed."""
    kinds: list[str] = field(default_factory=list)
    """What every storage contains: parameters, gradients, optimizer, activations, transient and so on."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Bytes held now, by kind."""
    most: dict[str, float] = field(default_factory=dict)
    """Bytes held at the peak, by kind."""
    line: list[tuple[int, float]] = field(default_factory=list)
    """(place in the step, bytes held), moment by moment."""
    watched: bool = False
    """Whether `kinds_line` is kept."""
    kinds_line: list[dict[str, float]] = field(default_factory=list)
    """Bytes held by kind, for every moment of `line`."""
    held: float = 0.0
    """Bytes held now."""
    peak: float = 0.0
    """The most bytes held so far."""
    here: int = 0
    """The present place in the step, which `moment` writes into `line`."""
    of_pass: dict[str, float] | None = None
    """Bytes held by kind at the peak of the present pass; None where passes are not told apart."""
    pass_peak: float = 0.0
    """The most bytes held in the present pass."""

    def new(self, nbytes: float, kind: str) -> int:
        """Adds a storage with one reference and returns its number."""
        self.sizes.append(nbytes)
        self.users.append(1)
        self.kinds.append(kind)
        self.held += nbytes
        self.parts[kind] += nbytes
        return len(self.sizes) - 1

    def grow(self, storage: int, nbytes: float) -> None:
        """Makes the storage `nbytes` larger."""
        self.sizes[storage] += nbytes
        self.held += nbytes
        self.parts[self.kinds[storage]] += nbytes

    def keep(self, storage: int) -> int:
        self.users[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        self.users[storage] -= 1
        if not self.users[storage]:
            self.held -= self.sizes[storage]
            self.parts[self.kinds[storage]] -= self.sizes[storage]

    def name(self, storage: int, kind: str) -> None:
        """Counts the storage as `kind` from now on."""
        self.parts[self.kinds[storage]] -= self.sizes[storage]
        self.parts[kind] += self.sizes[storage]
        self.kinds[storage] = kind

    def value(self, shape: Shape, itemsize: int, kind: str) -> Value:
        """Returns a row-major tensor in a new storage."""
        return Value(self.new(prod(shape) * itemsize, kind), shape, contiguous(shape), itemsize)

    def moment(self, extra: float = 0.0) -> None:
        """Adds the bytes held now to `line`, with `extra` bytes that exist at this moment alone."""
        held = self.held + extra
        self.line.append((self.here, held))
        if self.watched:
            self.kinds_line.append(self._with(extra))
        if held > self.peak:
            self.peak, self.most = held, self._with(extra)
        if self.of_pass is not None and held > self.pass_peak:
            self.pass_peak, self.of_pass = held, self._with(extra)

    def _with(self, extra: float) -> dict[str, float]:
        """Bytes held now by kind, and some transient ones more."""
        return {**self.parts, "transient": self.parts["transient"] + extra}

    def begin_pass(self) -> None:
        """Forgets the peak of the pass before: `of_pass` is that of the next."""
        self.pass_peak, self.of_pass = 0.0, {}
