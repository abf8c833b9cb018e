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
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from autoddl.errors import InputError
from autoddl.layout import B, Layout, Mesh, P, Split, State, extents, layouts, state

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
    """All pairs of layouts of one tensor: `seconds[i, j]` from `layouts[i]` to `layouts[j]`, and the first steps;
    `nbytes[i]` is what rank 0 holds."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    seconds: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.float64]
    _next: npt.NDArray[np.int16]
    _moves: tuple["_Move", ...]

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from `source` to `target`; none if they are equal."""
        here, there = self.index[source], self.index[target]
        found: list[Step] = []
        while here != there:
            move = self._moves[int(self._next[here, there])]
            found.append(move.step)
            here = int(move.after[here])
        return tuple(found)


def slices(mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """Local steps from `source` to `target`, which only splits axes that `source` broadcasts: outermost first."""
    found = []
    for axis in range(len(mesh.axes)):
        if source[axis] != target[axis]:
            found.append(Step((axis,), source[axis], target[axis]))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """One step from every layout: `after` is where it leads (-1 where it is not legal), at `seconds`."""

    step: Step
    after: npt.NDArray[np.int16]
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """All legal layouts of a tensor as numbers: `states[i, axis]` (dims, then B, then P), and the local `sizes[i, dim]`
    on rank 0. `number` leads from the states, read as one number, back to i."""

    states: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    digits: npt.NDArray[np.int64]

    def find(self, states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions of layouts, -1 where illegal."""
        found: npt.NDArray[np.int64] = self.number[states @ self.digits]
        return found


def _space(shape: tuple[int, ...], mesh: Mesh, every: tuple[Layout, ...]) -> _Space:
    rank, axes = len(shape), len(mesh.axes)
    codes: dict[State, int] = {B: rank, P: rank + 1}
    states = np.array([[s.dim if isinstance(s, Split) else codes[s] for s in layout] for layout in every])
    sizes = np.tile(np.array(shape, dtype=np.int64), (len(every), 1))
    for a, axis in enumerate(mesh.axes):
        for d in range(rank):
            sizes[:, d] = np.where(states[:, a] == d, -(-sizes[:, d] // axis.size), sizes[:, d])
    digits = (rank + 2) ** np.arange(axes)
    number = np.full((rank + 2) ** axes, -1, dtype=np.int64)
    number[states @ digits] = np.arange(len(every))
    return _Space(states, sizes, number, digits)


def _move(step: Step, space: _Space, itemsize: int, mesh: Mesh, seconds: Seconds) -> _Move | None:
    """`Step.is_legal`, `Step.after`, `payload` and the price, for all layouts at once."""
    rank = space.sizes.shape[1]
    codes = [s.dim if isinstance(s, Split) else rank + (s == P) for s in (step.source, step.target)]
    legal = (space.states[:, list(step.axes)] == codes[0]).all(axis=1)
    inner = [a for a in range(step.axes[0] + 1, space.states.shape[1]) if a not in step.axes]
    for code in codes:
        if code < rank and inner:
            legal &= (space.states[:, inner] != code).all(axis=1)
    moved = space.states.copy()
    moved[:, list(step.axes)] = codes[1]
    after = np.where(legal, space.find(moved), -1)
    if not (after >= 0).any():
        return None
    full = np.zeros(len(after), dtype=np.int64)
    if step.kind == "all-reduce":
        full = space.sizes.prod(axis=1) * itemsize
    elif step.kind in COLLECTIVES:
        full = np.minimum(space.sizes, space.sizes[after]).prod(axis=1) * (group_size(step, mesh) * itemsize)
    touched = space.sizes.prod(axis=1) * itemsize
    return _Move(step, after.astype(np.int16), _prices(step, after >= 0, full, touched, seconds))


def _prices(step: Step, legal: npt.NDArray[np.bool_], full: npt.NDArray[np.int64], touched: npt.NDArray[np.int64],
            seconds: Seconds) -> npt.NDArray[np.float64]:
    """`seconds` for every legal layout, asked once for equal sizes."""
    found = np.full(len(legal), np.inf)
    known: dict[tuple[int, int], float] = {}
    for i in np.flatnonzero(legal).tolist():
        key = (full.item(i), touched.item(i))
        if key not in known:
            known[key] = seconds(step, *key)
        found[i] = known[key]
    return found


def _moves(shape: tuple[int, ...], itemsize: int, mesh: Mesh, space: _Space, seconds: Seconds) -> tuple[_Move, ...]:
    """Every step, several axes at once included, that is legal in some layout."""
    states: list[State] = [*(Split(d) for d in range(len(shape)) if shape[d] > 1), B, P]
    found = []
    for count in range(1, len(mesh.axes) + 1):
        for axes in combinations(range(len(mesh.axes)), count):
            for source, target in product(states, states):
                local = target == P or (source == B and target != B)
                if source != target and not (local and count > 1):
                    found.append(_move(Step(axes, source, target), space, itemsize, mesh, seconds))
    return tuple(move for move in found if move is not None)


def routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, seconds: Seconds, partial: bool = True) -> Routes:
    """Shortest conversions between all legal layouts of a tensor, by rounds of one more step; ties go to fewer steps.

        far[i, j] = min over moves i -> k of  seconds(i -> k) + far[k, j]        until nothing gets nearer
    """
    every = layouts(shape, mesh, partial)
    space = _space(shape, mesh, every)
    moves = _moves(shape, itemsize, mesh, space, seconds)
    nbytes = space.sizes.prod(axis=1) * float(itemsize)
    far = np.full((len(every), len(every)), np.inf)
    onward = np.full(far.shape, -1, dtype=np.int16)
    np.fill_diagonal(far, 0.0)
    near = np.ones(len(every), dtype=bool)
    while near.any():
        before, nearer = far.copy(), np.zeros(len(every), dtype=bool)
        for m, move in enumerate(moves):
            rows = np.flatnonzero((move.after >= 0) & near[move.after])
            if len(rows):
                through = before[move.after[rows]] + move.seconds[rows, None]
                better = through < far[rows] * (1 - 1e-12)
                far[rows] = np.where(better, through, far[rows])
                onward[rows] = np.where(better, np.int16(m), onward[rows])
                nearer[rows] |= better.any(axis=1)
        near = nearer
    far.setflags(write=False)
    onward.setflags(write=False)
    return Routes(every, {layout: i for i, layout in enumerate(every)}, far, nbytes, onward, moves)


def is_conversion(steps: tuple[Step, ...], source: Layout, target: Layout) -> bool:
    """Whether `steps` lead legally from `source` to `target`: what a plan is checked with when it is read."""
    here = source
    for step in steps:
        if not step.is_legal(here):
            return False
        here = step.after(here)
    return here == target

