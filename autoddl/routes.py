"""The cheapest steps between all legal layouts of a tensor: shortest paths in the graph of layouts, by seconds.

    far[i, j] = min over moves i -> k of  seconds(i -> k) + far[k, j]                       (`nearest`)

A move is a step on some axes from one state to another, at all layouts in which it is legal. Layouts are numbers, sum
over axes of state * base ** axis, to which a move adds the same wherever it is. Ties go to fewer steps. Pricing and
running both read the steps from here, so what is priced is what runs.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from autoddl.conversion import COLLECTIVES, Step, group_size
from autoddl.layout import B, Layout, Mesh, P, Split, State
from autoddl.nearest import Moves, Nearest, first_moves, nearest
from autoddl.numbers import legal_layouts

__all__ = ["Routes", "Seconds", "routes"]

Seconds = Callable[[Step, int, int], float]
"""(step, payload bytes, local bytes touched) -> seconds."""


Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """One step from every layout where it is legal: `here`, by number, to `there`, at `seconds`."""

    step: Step
    here: Ints
    there: Ints
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routes:
    """All pairs of layouts of one tensor: `seconds[i, j]` from `layouts[i]` to `layouts[j]`, and the steps between
    them; `nbytes[i]` is what rank 0 holds."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    nbytes: npt.NDArray[np.float64]
    _paths: Nearest
    _moves: tuple[_Move, ...]

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        return self._paths.far

    @cached_property
    def _next(self) -> Moves:
        """The first move of every pair."""
        return first_moves(self._paths)

    @cached_property
    def _after(self) -> npt.NDArray[np.int16]:
        """Where each move leads from each layout."""
        after = np.full((max(1, len(self._moves)), len(self.layouts)), -1, dtype=np.int16)
        for m, move in enumerate(self._moves):
            after[m, move.here] = move.there
        return after

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from `source` to `target`; none if they are equal."""
        here, there = self.index[source], self.index[target]
        found: list[Step] = []
        while here != there:
            move = int(self._next[here, there])
            found.append(self._moves[move].step)
            here = int(self._after[move, here])
        return tuple(found)

    def sends(self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Whether the steps from `layouts[rows[i]]` to `layouts[columns[j]]` have a collective among them."""
        (rows, row), (columns, column) = (np.unique(given, return_inverse=True) for given in (rows, columns))
        here, there = np.broadcast_arrays(rows[:, None], columns[None, :])
        found = np.zeros(here.shape, dtype=bool)
        sending = np.array([move.step.kind in COLLECTIVES for move in self._moves] or [False])
        while (under := here != there).any():
            move = np.where(under, self._next[here, there], 0)
            found |= under & sending[move]
            here = np.where(under, self._after[move, here], here)
        return found[np.ix_(row, column)]


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """All legal layouts of a tensor: `has[state, axis]` (dims, then B, then P) says in which an axis has a state, and
    `sizes[i, dim]` and `nbytes[i]` what rank 0 holds. `number[i]` is layout i as a number, from which `place` leads
    back, -1 where there is none."""

    mesh: Mesh
    itemsize: int
    has: Bools
    sizes: Ints
    nbytes: Ints
    number: Ints
    place: Ints


def _space(shape: tuple[int, ...], itemsize: int, mesh: Mesh, every: tuple[Layout, ...]) -> _Space:
    rank, axes = len(shape), len(mesh.axes)
    codes: dict[State, int] = {**{Split(d): d for d in range(rank)}, B: rank, P: rank + 1}
    states = np.array([[codes[s] for s in layout.states] for layout in every])
    sizes = np.tile(np.array(shape, dtype=np.int64), (len(every), 1))
    for a, axis in enumerate(mesh.axes):
        for d in range(rank):
            sizes[:, d] = np.where(states[:, a] == d, -(-sizes[:, d] // axis.size), sizes[:, d])
    number = states @ (rank + 2) ** np.arange(axes)
    place = np.full((rank + 2) ** axes, -1, dtype=np.int64)
    place[number] = np.arange(len(every))
    has = np.array([[states[:, a] == code for a in range(axes)] for code in range(rank + 2)])
    return _Space(mesh, itemsize, has, sizes, sizes.prod(axis=1) * itemsize, number, place)


def _move(step: Step, space: _Space, seconds: Seconds, known: dict[Hashable, float]) -> _Move | None:
    """`Step.is_legal`, `Step.after`, `payload` and the price, for all layouts at once."""
    rank, axes = space.sizes.shape[1], len(space.mesh.axes)
    source, target = (s.dim if isinstance(s, Split) else rank + (s == P) for s in (step.source, step.target))
    legal = space.has[source, step.axes[0]]
    for axis in range(step.axes[0] + 1, axes):
        if axis in step.axes:
            legal = legal & space.has[source, axis]
        else:
            for code in (source, target):
                legal = legal & ~space.has[code, axis] if code < rank else legal
    here = np.flatnonzero(legal)
    there = space.place[space.number[here] + (target - source) * sum((rank + 2) ** a for a in step.axes)]
    here, there = here[there >= 0], there[there >= 0]
    if not len(here):
        return None
    return _Move(step, here, there, _prices(step, _payloads(step, space, here, there), seconds, known))


def _payloads(step: Step, space: _Space, here: Ints, there: Ints) -> Ints:
    """`payload` of a collective, or the bytes that a local step touches."""
    if step.kind not in COLLECTIVES or step.kind == "all-reduce":
        return space.nbytes[here]
    small = np.minimum(space.sizes[here], space.sizes[there])
    found: Ints = small.prod(axis=1) * (group_size(step, space.mesh) * space.itemsize)
    return found


def _prices(step: Step, payloads: Ints, seconds: Seconds, known: dict[Hashable, float]) -> npt.NDArray[np.float64]:
    """`seconds` of every payload, asked once for what is equal: a collective's kind, axes and size; a local step's kind
    and size."""
    kind, found = step.kind, []
    sends = kind in COLLECTIVES
    axes = step.axes if sends else ()
    for size in payloads.tolist():
        key = kind, axes, size
        price = known.get(key)
        if price is None:
            known[key] = price = seconds(step, size if sends else 0, 0 if sends else size)
        found.append(price)
    return np.array(found)


def _moves(shape: tuple[int, ...], space: _Space, seconds: Seconds) -> tuple[_Move, ...]:
    """Every step, several axes at once included, that is legal in some layout."""
    states: list[State] = [*(Split(d) for d in range(len(shape)) if shape[d] > 1), B, P]
    found, known = [], dict[Hashable, float]()
    for count in range(1, len(space.mesh.axes) + 1):
        for axes in combinations(range(len(space.mesh.axes)), count):
            for source, target in product(states, states):
                local = target == P or (source == B and target != B)
                if source != target and not (local and count > 1):
                    found.append(_move(Step(axes, source, target), space, seconds, known))
    return tuple(move for move in found if move is not None)


def routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, seconds: Seconds, partial: bool = True) -> Routes:
    """Shortest conversions between all legal layouts of a tensor."""
    every = legal_layouts(shape, mesh, partial)
    space = _space(shape, itemsize, mesh, every)
    moves = _moves(shape, space, seconds)
    numbers = np.repeat(np.arange(len(moves)), np.array([len(move.here) for move in moves], dtype=np.intp))
    none: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
    here, there = (np.concatenate(none + [getattr(move, name) for move in moves]) for name in ("here", "there"))
    price = np.concatenate([np.zeros(0)] + [move.seconds for move in moves])
    paths = nearest(len(every), numbers, here, there, price)
    paths.far.setflags(write=False)
    return Routes(every, {layout: i for i, layout in enumerate(every)}, space.nbytes.astype(np.float64), paths, moves)
