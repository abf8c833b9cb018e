"""The cheapest steps between all legal layouts of a tensor: shortest paths in the graph of layouts, by seconds.

    far[i, j] = min over moves i -> k of  seconds(i -> k) + far[k, j]        until nothing gets nearer

Ties go to fewer steps. Pricing and running both read the steps from here, so what is priced is what runs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from autoddl.conversion import COLLECTIVES, Step, group_size
from autoddl.layout import B, Layout, Mesh, P, Split, State, layouts

__all__ = ["Routes", "Seconds", "routes"]

Seconds = Callable[[Step, int, int], float]
"""(step, payload bytes, local bytes touched) -> seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """One step from every layout: `after` is where it leads (-1 where it is not legal), at `seconds`."""

    step: Step
    after: npt.NDArray[np.int16]
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Outgoing:
    """The moves out of one layout, by number, rising: where they lead and what they take."""

    moves: npt.NDArray[np.int16]
    after: npt.NDArray[np.intp]
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Routes:
    """All pairs of layouts of one tensor: `seconds[i, j]` from `layouts[i]` to `layouts[j]`, and the first steps;
    `nbytes[i]` is what rank 0 holds."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    seconds: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.float64]
    _next: npt.NDArray[np.int16]
    _moves: tuple[_Move, ...]

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from `source` to `target`; none if they are equal."""
        here, there = self.index[source], self.index[target]
        found: list[Step] = []
        while here != there:
            move = self._moves[int(self._next[here, there])]
            found.append(move.step)
            here = int(move.after[here])
        return tuple(found)


    def sends(self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Whether the steps from `layouts[rows[i]]` to `layouts[columns[j]]` have a collective among them."""
        here, there = np.broadcast_arrays(rows[:, None], columns[None, :])
        found = np.zeros(here.shape, dtype=bool)
        after = np.array([move.after for move in self._moves] or np.zeros((1, 1)), dtype=np.intp)
        sending = np.array([move.step.kind in COLLECTIVES for move in self._moves] or [False])
        while (under := here != there).any():
            move = np.where(under, self._next[here, there], 0)
            found |= under & sending[move]
            here = np.where(under, after[move, here], here)
        return found


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


def _move(step: Step, space: _Space, itemsize: int, mesh: Mesh, seconds: Seconds, known: dict[Hashable, float]
          ) -> _Move | None:
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
    return _Move(step, after.astype(np.int16), _prices(step, after >= 0, full, touched, seconds, known))


def _prices(step: Step, legal: npt.NDArray[np.bool_], full: npt.NDArray[np.int64], touched: npt.NDArray[np.int64],
            seconds: Seconds, known: dict[Hashable, float]) -> npt.NDArray[np.float64]:
    """`seconds` for every legal layout, asked once for what is equal: a collective's kind, axes and size; a local
    step's kind and size."""
    found = np.full(len(legal), np.inf)
    sends = step.kind in COLLECTIVES
    sizes, of = np.unique((full if sends else touched)[legal], return_inverse=True)
    prices = []
    for size in sizes.tolist():
        key = step.kind, step.axes if sends else (), size
        if key not in known:
            known[key] = seconds(step, size if sends else 0, 0 if sends else size)
        prices.append(known[key])
    found[legal] = np.array(prices)[of]
    return found


def _moves(shape: tuple[int, ...], itemsize: int, mesh: Mesh, space: _Space, seconds: Seconds) -> tuple[_Move, ...]:
    """Every step, several axes at once included, that is legal in some layout."""
    states: list[State] = [*(Split(d) for d in range(len(shape)) if shape[d] > 1), B, P]
    found, known = [], dict[Hashable, float]()
    for count in range(1, len(mesh.axes) + 1):
        for axes in combinations(range(len(mesh.axes)), count):
            for source, target in product(states, states):
                local = target == P or (source == B and target != B)
                if source != target and not (local and count > 1):
                    found.append(_move(Step(axes, source, target), space, itemsize, mesh, seconds, known))
    return tuple(move for move in found if move is not None)


LESS = 1 - 1e-12
"""What is nearer by less than this is as near."""


def _single(count: int, moves: Sequence[_Move]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]:
    """`far`, and the first move, by one move at most."""
    far = np.full((count, count), np.inf)
    onward = np.full(far.shape, -1, dtype=np.int16)
    np.fill_diagonal(far, 0.0)
    for m, move in enumerate(moves):
        rows = np.flatnonzero(move.after >= 0)
        there = move.after[rows]
        better = move.seconds[rows] < far[rows, there] * LESS
        far[rows[better], there[better]] = move.seconds[rows[better]]
        onward[rows[better], there[better]] = m
    return far, onward


def _outgoing(count: int, moves: Sequence[_Move]) -> list[_Outgoing]:
    """The moves out of every layout."""
    after = np.array([move.after for move in moves]).reshape(len(moves), count)
    seconds = np.array([move.seconds for move in moves]).reshape(len(moves), count)
    legal = [np.flatnonzero(after[:, i] >= 0) for i in range(count)]
    return [_Outgoing(m.astype(np.int16), after[m, i].astype(np.intp), seconds[m, i]) for i, m in enumerate(legal)]


def _further(far: npt.NDArray[np.float64], onward: npt.NDArray[np.int16], outgoing: Sequence[_Outgoing],
             near: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """One more move, where it leads to a layout that got `near`er before; and what got nearer now. Of moves that are
    as good the first is taken."""
    before, nearer = far.copy(), np.zeros(len(far), dtype=bool)
    for i, out in enumerate(outgoing):
        which = np.flatnonzero(near[out.after])
        if not len(which):
            continue
        through = before[out.after[which]]
        through += out.seconds[which, None]
        least = through.min(axis=0)
        hit = np.flatnonzero(least < before[i] * LESS)
        if len(hit):
            first = (through[:, hit] <= least[hit] / LESS).argmax(axis=0)
            far[i, hit] = through[first, hit]
            onward[i, hit] = out.moves[which[first]]
            nearer[i] = True
    return nearer


def routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, seconds: Seconds, partial: bool = True) -> Routes:
    """Shortest conversions between all legal layouts of a tensor, by rounds of one more step."""
    every = layouts(shape, mesh, partial)
    space = _space(shape, mesh, every)
    moves = _moves(shape, itemsize, mesh, space, seconds)
    nbytes = space.sizes.prod(axis=1) * float(itemsize)
    far, onward = _single(len(every), moves)
    near, outgoing = np.ones(len(every), dtype=bool), _outgoing(len(every), moves)
    while near.any():
        near = _further(far, onward, outgoing, near)
    far.setflags(write=False)
    onward.setflags(write=False)
    return Routes(every, {layout: i for i, layout in enumerate(every)}, far, nbytes, onward, moves)
