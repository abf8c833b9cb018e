"""Finds the cheapest steps between all legal layouts of a tensor: shortest paths in the graph of layouts, by seconds.

    far[i, j] = min over moves i -> k of  seconds(i -> k) + far[k, j]                       (`nearest`)

A move is a step on some axes from one state to another, at all layouts in which it is legal. Layouts are numbers, sum
over axes of state * base ** axis, to which a move adds the same wherever it is. Ties go to fewer steps. Pricing and
running both read the steps from here, so what is priced is what runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product

import numpy as np
import numpy.typing as npt

from autoddl.core.conversion import COLLECTIVES, Step, group_size, is_copy
from autoddl.core.layout import B, Layout, Mesh, P, Split, State
from autoddl.core.layout_codes import (
    BASE,
    BROADCAST,
    PARTIAL,
    distinct_rows,
    encode_layout,
    encode_states,
    legal_layouts,
    legal_states,
    local_shapes,
    state_code,
)
from autoddl.pricing.shortest_paths import Moves, Nearest, first_moves, nearest

__all__ = ["Routes", "Seconds", "routes"]

Seconds = Callable[[Step, int, int], float]
"""(step, payload bytes, local bytes touched) -> seconds."""


Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """One step from every layout in which it is legal: positions `here`, to positions `there`."""

    step: Step
    here: Ints
    there: Ints


@dataclass(frozen=True, eq=False)
class Routes:
    """The cheapest conversions between all pairs of layouts of one tensor.

    `seconds[i, j]` leads from `layouts[i]` to `layouts[j]`; `nbytes[i]` is the size of rank 0's shard in `layouts[i]`.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    nbytes: npt.NDArray[np.float64]
    part: float
    """The least part of a piece's bytes that is there while its values are sent (`core.codecs.part_in_flight`)."""
    _paths: Nearest
    _moves: tuple[_Move, ...]

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """Seconds of the cheapest conversion, as [source, target]."""
        return self._paths.far

    @cached_property
    def codes(self) -> Ints:
        """The code of every layout."""
        return np.array([encode_layout(layout) for layout in self.layouts], dtype=np.int64)

    @cached_property
    def place(self) -> Ints:
        """The position of the layout of each code, -1 where there is none."""
        found = np.full(BASE ** len(self.layouts[0]), -1, dtype=np.int64)
        found[self.codes] = np.arange(len(self.layouts))
        return found

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
        return self._have(rows, columns, [move.step.kind in COLLECTIVES for move in self._moves])

    def copies(self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Whether those steps make a new tensor on rank 0, which keeps what it fills with zeros elsewhere."""
        return self._have(rows, columns, [is_copy(move.step) for move in self._moves])

    def _have(self, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp], which: Sequence[bool]
              ) -> npt.NDArray[np.bool_]:
        """Whether those steps have a move of `which` among them."""
        (rows, row), (columns, column) = (np.unique(given, return_inverse=True) for given in (rows, columns))
        here, there = np.broadcast_arrays(rows[:, None], columns[None, :])
        found = np.zeros(here.shape, dtype=bool)
        wanted = np.array(which or [False])
        while (under := here != there).any():
            move = np.where(under, self._next[here, there], 0)
            found |= under & wanted[move]
            here = np.where(under, self._after[move, here], here)
        return found[np.ix_(row, column)]


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """All legal layouts of a tensor on a mesh, as arrays."""

    mesh: Mesh
    """The mesh whose axes the layouts are on."""
    itemsize: int
    """Bytes of an element."""
    has: Bools
    """[state, axis, layout]: whether the axis has the state, given by its code."""
    sizes: Ints
    """[layout, dim]: the size of rank 0's shard."""
    nbytes: Ints
    """[layout]: the bytes of rank 0's shard."""
    number: Ints
    """[layout]: its code."""
    place: Ints
    """[code]: the position of the layout, -1 where it is not legal."""


def _space(shape: tuple[int, ...], itemsize: int, mesh: Mesh, every: Ints) -> _Space:
    """The space of layouts that are given by their states."""
    sizes, number = local_shapes(shape, every, mesh), encode_states(every)
    place = np.full(BASE ** len(mesh.axes), -1, dtype=np.int64)
    place[number] = np.arange(len(every))
    has = np.arange(BASE)[:, None, None] == every.T
    return _Space(mesh, itemsize, has, sizes, sizes.prod(axis=1) * itemsize, number, place)


def _move(steps: list[Step], space: _Space) -> tuple[Ints, Ints, Ints]:
    """Computes `Step.is_legal` and `Step.after` for all layouts at once, of steps on one set of axes.

    Returns columns, step by step: the number of the step, the layout that it leaves, the one that it leads to.
    """
    axes = steps[0].axes
    inner = [a for a in range(axes[0] + 1, len(space.mesh.axes)) if a not in axes]
    source, target = (np.array([state_code(state) for state in ends])
                      for ends in ([s.source for s in steps], [s.target for s in steps]))
    free: Bools = np.logical_not(space.has[:, inner].any(axis=1))
    free[[BROADCAST, PARTIAL]] = True
    leaves: Bools = space.has[:, axes].all(axis=1) & free
    number, here = np.nonzero(leaves[source] & free[target])
    there = space.place[space.number[here] + (target - source)[number] * sum(BASE ** a for a in axes)]
    return number[there >= 0], here[there >= 0], there[there >= 0]


def _moves(shape: tuple[int, ...], space: _Space) -> tuple[list[Step], Ints, Ints, Ints]:
    """Every step that is legal in some layout, also on several axes at once, with the columns of `_move`."""
    states: list[State] = [*(Split(d) for d in range(len(shape)) if shape[d] > 1), B, P]
    steps, rows = list[Step](), list[tuple[Ints, Ints, Ints]]()
    for count in range(1, len(space.mesh.axes) + 1):
        for axes in combinations(range(len(space.mesh.axes)), count):
            on = [Step(axes, source, target) for source, target in product(states, states)
                  if source != target and not (count > 1 and (target == P or source == B))]
            number, here, there = _move(on, space)
            rows.append((number + len(steps), here, there))
            steps += on
    number, here, there = (np.concatenate(column) for column in zip(*rows, strict=True))
    legal = np.bincount(number, minlength=len(steps)) > 0
    return [steps[k] for k in np.flatnonzero(legal).tolist()], (np.cumsum(legal) - 1)[number], here, there


def _payloads(steps: list[Step], space: _Space, number: Ints, here: Ints, there: Ints) -> Ints:
    """By row, the `payload` of a collective, or the bytes that a local step touches."""
    cut = [kind in COLLECTIVES and kind != "all-reduce" for kind in (step.kind for step in steps)]
    ranks = np.array([group_size(step, space.mesh) if c else 0 for step, c in zip(steps, cut, strict=True)])[number]
    small = np.minimum(space.sizes[here], space.sizes[there]).prod(axis=1) * space.itemsize
    slices = np.array([step.kind == "slice" for step in steps])[number]
    local = np.where(slices, space.nbytes[there], space.nbytes[here])
    return np.where(ranks > 0, small * ranks, local)


def _prices(steps: list[Step], number: Ints, payloads: Ints, seconds: Seconds) -> npt.NDArray[np.float64]:
    """The seconds of every row, asked once for equal steps.

    Equal are collectives of one kind on the same axes with the same bytes, and local steps of one kind and size.
    """
    asked: dict[tuple[str, tuple[int, ...]], int] = {}
    sends = [kind in COLLECTIVES for kind in (step.kind for step in steps)]
    alike = np.array([asked.setdefault((step.kind, step.axes if away else ()), len(asked))
                      for step, away in zip(steps, sends, strict=True)])
    first, which = distinct_rows([alike[number], payloads])
    found = [seconds(steps[k], size, 0) if sends[k] else seconds(steps[k], 0, size)
             for k, size in zip(number[first].tolist(), payloads[first].tolist(), strict=True)]
    return np.array(found)[which]


def routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, seconds: Seconds, partial: bool = True,
           part: float = 1.0) -> Routes:
    """The cheapest conversions between all legal layouts of a tensor of `shape` on `mesh`.

    `seconds` prices one step; `partial` says whether the tensor may be a PartialSum, `part` is that of `Routes`.
    """
    every, layouts = legal_states(shape, mesh, partial), legal_layouts(shape, mesh, partial)
    space = _space(shape, itemsize, mesh, every)
    steps, number, here, there = _moves(shape, space)
    price = _prices(steps, number, _payloads(steps, space, number, here, there), seconds) if steps else np.zeros(0)
    paths = nearest(len(every), number, here, there, price)
    paths.far.setflags(write=False)
    ends = np.searchsorted(number, np.arange(len(steps) + 1)).tolist()
    moves = tuple(_Move(step, here[a:b], there[a:b]) for step, (a, b) in zip(steps, pairwise(ends), strict=True))
    index = {layout: i for i, layout in enumerate(layouts)}
    return Routes(layouts, index, space.nbytes.astype(np.float64), part, paths, moves)
