"""From one layout to another: a short list of collectives.

A *step* changes the state of one or several mesh axes at once, from one state to another:

    S(d) -> B     all-gather          P -> B     all-reduce         S(i) -> S(j)  all-to-all
    P -> S(d)     reduce-scatter      B -> S(d)  slice (local)      B, S(d) -> P  fill (local: zeros elsewhere)

Several axes that make the same change may do it as one collective over the ranks of all of them. A step from or to S(d)
is legal only if no later axis outside the step splits d: a later axis is an inner split, and cutting or joining outside
of it would interleave its pieces.

`payload` is the full buffer of a step in bytes: what a gather ends with, what a reduce-scatter or all-reduce starts
with, what an all-to-all sends, padded so that every rank's piece is as large as the largest. A ring sends (n-1)/n of it
per rank, an all-reduce twice that.

The steps between two layouts are a shortest path in the graph of legal layouts, by seconds; `Routes` holds all pairs.
Pricing and running both read the steps from there, so what is priced is what runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from autoddl.errors import InputError
from autoddl.layout import B, Layout, Mesh, P, Split, State, extents, layouts, local_shape, state

__all__ = ["COLLECTIVES", "Routes", "Step", "group_size", "is_conversion", "payload", "routes", "sent", "slices"]

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclass(frozen=True, slots=True)
class Step:
    """Text, with the mesh's names: `net+node: P->S(0)`."""

    axes: tuple[int, ...]
    source: State
    target: State

    def __post_init__(self) -> None:
        if self.source == self.target or not self.axes:
            raise InputError(f"a step changes the state of at least one axis, not {self.source}->{self.target}")

    @property
    def kind(self) -> str:
        """The collective, or `slice` or `fill` where nothing is sent."""
        if self.target == P:
            return "fill"
        if self.source == P:
            return "all-reduce" if self.target == B else "reduce-scatter"
        if self.source == B:
            return "slice"
        return "all-gather" if self.target == B else "all-to-all"

    def text(self, mesh: Mesh) -> str:
        return f"{'+'.join(mesh.names[a] for a in self.axes)}: {self.source}->{self.target}"

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> "Step":
        names, _, change = text.partition(": ")
        source, arrow, target = change.partition("->")
        if not arrow:
            raise InputError(f"{text!r} is no step; a step looks like 'net+node: P->S(0)'")
        return cls(tuple(mesh.index(name) for name in names.split("+")), state(source), state(target))

    def after(self, layout: Layout) -> Layout:
        return layout.replace(self.axes, self.target)

    def is_legal(self, layout: Layout) -> bool:
        """Whether `layout` has the source state there, and no inner split outside the step is cut across."""
        if any(layout[a] != self.source for a in self.axes):
            return False
        moved = {s for s in (self.source, self.target) if isinstance(s, Split)}
        return not any(layout[a] in moved and a not in self.axes and a > self.axes[0] for a in range(len(layout)))


def group_size(step: Step, mesh: Mesh) -> int:
    """Ranks that take part in one collective of the step."""
    size = 1
    for axis in step.axes:
        size *= mesh.sizes[axis]
    return size


def _widest(shape: tuple[int, ...], layout: Layout, mesh: Mesh, at: tuple[int, ...], axes: tuple[int, ...]
            ) -> tuple[int, ...]:
    """Local sizes of the group member with the largest piece: the one at 0 along the group's axes."""
    first = tuple(0 if a in axes else c for a, c in enumerate(at))
    return tuple(size for _, size in extents(shape, layout, mesh, first))


def payload(step: Step, shape: tuple[int, ...], itemsize: int, layout: Layout, mesh: Mesh,
            coordinate: tuple[int, ...] | None = None) -> int:
    """Bytes of the full buffer of `step` on a tensor of `shape` in `layout`, on the rank at `coordinate` (rank 0)."""
    at = coordinate or (0,) * len(mesh.axes)
    before = _widest(shape, layout, mesh, at, step.axes)
    after = _widest(shape, step.after(layout), mesh, at, step.axes)
    count = 1
    if step.kind == "all-reduce":
        for size in before:
            count *= size
    elif step.kind in COLLECTIVES:
        count = group_size(step, mesh)
        for small in map(min, before, after):
            count *= small
    else:
        return 0
    return count * itemsize


def sent(kind: str, ranks: int, nbytes: float) -> float:
    """Bytes a rank sends in a ring collective with a full buffer of `nbytes`: (n-1)/n of it, an all-reduce twice."""
    if kind not in COLLECTIVES:
        raise InputError(f"{kind!r} sends nothing that is known; collectives are {', '.join(COLLECTIVES)}")
    return (2.0 if kind == "all-reduce" else 1.0) * (ranks - 1) / ranks * nbytes


Seconds = Callable[[Step, int, int], float]
"""(step, payload bytes, local bytes touched) -> seconds."""


@dataclass(frozen=True, slots=True)
class Routes:
    """All pairs of layouts of one tensor: `seconds[i, j]` from `layouts[i]` to `layouts[j]`, and the first steps."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    seconds: npt.NDArray[np.float64]
    _next: npt.NDArray[np.int32]
    _steps: dict[tuple[int, int], Step]

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from `source` to `target`; none if they are equal."""
        here, there = self.index[source], self.index[target]
        found: list[Step] = []
        while here != there:
            onward = int(self._next[here, there])
            found.append(self._steps[here, onward])
            here = onward
        return tuple(found)


def slices(mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """Local steps from `source` to `target`, which only splits axes that `source` broadcasts: outermost first."""
    found = []
    for axis in range(len(mesh.axes)):
        if source[axis] != target[axis]:
            found.append(Step((axis,), source[axis], target[axis]))
    return tuple(found)


def _moves(layout: Layout, shape: tuple[int, ...], mesh: Mesh, known: dict[Layout, int]) -> list[tuple[Step, Layout]]:
    """Every legal step out of `layout`, several axes at once included."""
    found = []
    targets: list[State] = [*(Split(d) for d in range(len(shape)) if shape[d] > 1), B, P]
    for count in range(1, len(mesh.axes) + 1):
        for axes in combinations(range(len(mesh.axes)), count):
            source = layout[axes[0]]
            if any(layout[a] != source for a in axes[1:]):
                continue
            for target in targets:
                local = target == P or (source == B and target != B)
                if target == source or (local and count > 1):
                    continue
                step = Step(axes, source, target)
                if step.is_legal(layout) and step.after(layout) in known:
                    found.append((step, step.after(layout)))
    return found


def routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, seconds: Seconds, partial: bool = True) -> Routes:
    """Shortest conversions between all legal layouts of a tensor (Floyd-Warshall; ties go to fewer steps)."""
    states = layouts(shape, mesh, partial)
    index = {layout: i for i, layout in enumerate(states)}
    n = len(states)
    far = np.full((n, n), np.inf)
    onward = np.tile(np.arange(n, dtype=np.int32), (n, 1))
    steps: dict[tuple[int, int], Step] = {}
    np.fill_diagonal(far, 0.0)
    for layout, i in index.items():
        touched = itemsize
        for size in local_shape(shape, layout, mesh):
            touched *= size
        for step, after in _moves(layout, shape, mesh, index):
            price = seconds(step, payload(step, shape, itemsize, layout, mesh), touched)
            j = index[after]
            if price < far[i, j]:
                far[i, j], steps[i, j] = price, step
    for k in range(n):
        through = far[:, k, None] + far[None, k, :]
        better = through < far * (1 - 1e-12)
        far[better] = through[better]
        onward = np.where(better, onward[:, k, None], onward)
    far.setflags(write=False)
    onward.setflags(write=False)
    return Routes(states, index, far, onward, steps)


def is_conversion(steps: tuple[Step, ...], source: Layout, target: Layout) -> bool:
    """Whether `steps` lead legally from `source` to `target`: what a plan is checked with when it is read."""
    here = source
    for step in steps:
        if not step.is_legal(here):
            return False
        here = step.after(here)
    return here == target

