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

The steps between two layouts are a shortest path in the graph of legal layouts: see `routes`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout, Mesh, P, Split, State, extents, local_shape, parse_state

__all__ = ["COLLECTIVES", "Step", "group_size", "is_conversion", "payload", "ring_bytes", "slice_steps", "step_sizes"]

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
        return cls(tuple(mesh.index(name) for name in names.split("+")), parse_state(source), parse_state(target))

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


@lru_cache(maxsize=100_000)
def step_sizes(steps: tuple[Step, ...], shape: tuple[int, ...], itemsize: int, start: Layout, mesh: Mesh,
          coordinate: tuple[int, ...] | None = None) -> tuple[tuple[int, int], ...]:
    """Per step, one after the other from layout `start`: its `payload`, and bytes of the piece that it starts with."""
    here, found = start, list[tuple[int, int]]()
    for step in steps:
        touched = prod(local_shape(shape, here, mesh, coordinate)) * itemsize
        found.append((payload(step, shape, itemsize, here, mesh, coordinate), touched))
        here = step.after(here)
    return tuple(found)


def ring_bytes(kind: str, ranks: int, nbytes: float) -> float:
    """Bytes a rank sends in a ring collective with a full buffer of `nbytes`: (n-1)/n of it, an all-reduce twice."""
    if kind not in COLLECTIVES:
        raise InputError(f"{kind!r} sends nothing that is known; collectives are {', '.join(COLLECTIVES)}")
    return (2.0 if kind == "all-reduce" else 1.0) * (ranks - 1) / ranks * nbytes


def slice_steps(mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """Local steps from `source` to `target`, which only splits axes that `source` broadcasts: outermost first."""
    found = []
    for axis in range(len(mesh.axes)):
        if source[axis] != target[axis]:
            found.append(Step((axis,), source[axis], target[axis]))
    return tuple(found)


def is_conversion(steps: tuple[Step, ...], source: Layout, target: Layout) -> bool:
    """Whether `steps` lead legally from `source` to `target`; `load_plan` checks every conversion with it."""
    here = source
    for step in steps:
        if not step.is_legal(here):
            return False
        here = step.after(here)
    return here == target

