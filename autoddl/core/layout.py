"""Meshes and layouts: where the pieces of a tensor are.

A *mesh* is an ordered tuple of named axes. Ranks are numbered with the last axis fastest. A mesh needs no devices.
A *layout* gives each axis one state:

    S(d)   split       the ranks of the axis hold consecutive chunks of dim d (torch.chunk: ceil(n/p), the last smaller)
    B      broadcast   every rank of the axis holds the same
    P      partial sum the tensors of the axis' ranks add up to it

When two axes split the same dim the earlier is the outer split: it cuts first, the later cuts what it left.
A layout is *legal* for a shape if every rank holds at least one element along each split dim.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from autoddl.core.errors import InputError

__all__ = ["Axis", "B", "Broadcast", "Layout", "Mesh", "P", "PartialSum", "Split", "State", "extents", "is_legal",
           "local_shape", "parse_state"]

Extent = tuple[int, int]
"""(offset, size) of a rank's piece along one dim."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """S(dim): the ranks of the axis hold consecutive chunks of dim `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, order=True)
class Broadcast:
    """B: every rank of the axis holds the same values."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True, order=True)
class PartialSum:
    """P: the tensors of the axis' ranks add up to the value."""

    def __str__(self) -> str:
        return "P"


State = Split | Broadcast | PartialSum
B = Broadcast()
P = PartialSum()


def parse_state(text: str) -> State:
    """The state that `S(1)`, `B` or `P` names. Raises InputError for any other text."""
    if text == "B":
        return B
    if text == "P":
        return P
    if match := re.fullmatch(r"S\((\d+)\)", text):
        return Split(int(match[1]))
    raise InputError(f"{text!r} is no layout state; write S(dim), B or P")


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis with its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outermost first. Text: `net=4,node=2`. The hash is computed once, because it is needed very often.

    Raises InputError without axes, where two have one name, and for a size below 1.
    """

    axes: tuple[Axis, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.axes))
        names = [axis.name for axis in self.axes]
        if not names:
            raise InputError("a mesh needs at least one axis, like 'dp=4'")
        if len(set(names)) < len(names):
            raise InputError(f"mesh '{self}' names an axis twice; every axis needs its own name")
        for axis in self.axes:
            if axis.size < 1:
                raise InputError(f"mesh axis {axis.name}={axis.size}: a size is at least 1")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Mesh"], tuple[tuple[Axis, ...]]]:
        return Mesh, (self.axes,)

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """The mesh that `text` says; InputError where it is none."""
        axes = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_][\w.-]*)\s*=\s*(\d+)\s*", part)
            if match is None:
                raise InputError(f"{text!r} is no mesh: a mesh looks like 'dp=4,tp=2'")
            axes.append(Axis(match[1], int(match[2])))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        total = 1
        for axis in self.axes:
            total *= axis.size
        return total

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance in rank number between neighbours along each axis."""
        strides, stride = [], 1
        for axis in reversed(self.axes):
            strides.append(stride)
            stride *= axis.size
        return tuple(reversed(strides))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` along each axis."""
        return tuple(rank // stride % size for stride, size in zip(self.strides, self.sizes, strict=True))

    def index(self, name: str) -> int:
        """Position of the axis called `name`; InputError where there is none."""
        if name not in self.names:
            raise InputError(f"mesh '{self}' has no axis {name!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def members(self, axes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Coordinates of the ranks in the group over `axes` that the rank at `coordinate` belongs to, row-major."""
        found = []
        for index in product(*(range(self.sizes[a]) for a in sorted(axes))):
            place = dict(zip(sorted(axes), index, strict=True))
            found.append(tuple(place.get(a, c) for a, c in enumerate(coordinate)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Layout:
    """One state per mesh axis. Text: `S(0) B`. The hash is computed once, because it is needed millions of times."""

    states: tuple[State, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.states))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Layout"], tuple[tuple[State, ...]]]:
        return Layout, (self.states,)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout that `text` says; InputError where a state is none."""
        return cls(tuple(parse_state(part) for part in text.split()))

    @classmethod
    def broadcast(cls, mesh: Mesh) -> "Layout":
        """B on every axis of `mesh`."""
        return cls((B,) * len(mesh.axes))

    def __str__(self) -> str:
        return " ".join(str(s) for s in self.states)

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def __getitem__(self, axis: int) -> State:
        return self.states[axis]

    def __len__(self) -> int:
        return len(self.states)

    def replace(self, axes: tuple[int, ...], new: State) -> "Layout":
        """This layout with the state `new` on `axes`."""
        return Layout(tuple(new if a in axes else old for a, old in enumerate(self.states)))


def _chunk(extent: Extent, parts: int, index: int) -> Extent:
    """The piece of `extent` that torch.chunk gives to part `index`: ceil(n/p) elements, the last ones fewer."""
    offset, size = extent
    width = -(-size // parts)
    begin = min(index * width, size)
    return offset + begin, min(width, size - begin)


def extents(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[Extent, ...]:
    """(offset, size) along each dim of the piece that the rank at `coordinate` holds of a tensor of global `shape`."""
    pieces: list[Extent] = [(0, size) for size in shape]
    for axis, part, index in zip(mesh.axes, layout, coordinate, strict=True):
        if isinstance(part, Split):
            pieces[part.dim] = _chunk(pieces[part.dim], axis.size, index)
    return tuple(pieces)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...] | None = None
                ) -> tuple[int, ...]:
    """Shape of the piece that the rank at `coordinate` holds; by default rank 0, which holds the largest."""
    return _local_shape(shape, layout, mesh, coordinate or (0,) * len(mesh.axes))


@lru_cache(maxsize=1_000_000)
def _local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for _, size in extents(shape, layout, mesh, at))


@lru_cache(maxsize=100_000)
def _divides(size: int, parts: tuple[int, ...]) -> bool:
    """Whether no piece is empty when `size` elements are cut by each of `parts` in turn."""
    sizes = {size}
    for count in parts:
        sizes = {_chunk((0, n), count, index)[1] for n in sizes for index in range(count)}
        if 0 in sizes:
            return False
    return True


def is_legal(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether every split dim exists and no rank's piece is empty. An axis of one rank must be B."""
    cuts: dict[int, list[int]] = {}
    for axis, part in zip(mesh.axes, layout, strict=True):
        if axis.size == 1 and part != B:
            return False
        if isinstance(part, Split):
            cuts.setdefault(part.dim, []).append(axis.size)
    return all(dim < len(shape) and _divides(shape[dim], tuple(parts)) for dim, parts in cuts.items())
