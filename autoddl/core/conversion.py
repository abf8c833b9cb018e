"""Conversions: the steps that take a tensor from one layout to another.

A *step* changes the state of one mesh axis, or of several at once:

    S(d) -> B     all-gather          P -> B     all-reduce         S(i) -> S(j)  all-to-all
    P -> S(d)     reduce-scatter      B -> S(d)  slice (local)      B, S(d) -> P  fill (local: zeros elsewhere)

Several axes that make the same change may do it as one collective over the ranks of all of them. A step from or to S(d)
is legal only if no later axis outside the step splits d. A later axis is an inner split: cutting or joining outside of
it would interleave its pieces.

The *payload* of a step is its full buffer in bytes. An all-gather ends with it, a reduce-scatter or an all-reduce
starts with it, an all-to-all sends it. It is padded: every rank's piece counts as much as the largest. In a ring each
rank sends (n-1)/n of the payload, in an all-reduce twice that.

The steps between two layouts are a shortest path in the graph of legal layouts: see `pricing.routes`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autoddl.core.codecs import CODECS, CODED, coded_bytes, coded_kind
from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout, Mesh, P, Split, State, extents, local_shape, parse_state
from autoddl.core.sparse import ENTRY_BYTES, SPARSE, SparseRule, entries, is_sparse

__all__ = ["COLLECTIVES", "Step", "group_size", "is_conversion", "payload", "ring_bytes", "slice_steps", "step_sizes"]

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


@dataclass(frozen=True, slots=True)
class Step:
    """One change of state on some mesh axes. Text, with the mesh's names: `net+node: P->S(0)`, `net: P->S(0) as int8`.

    `axes` are indices into the mesh, rising. With a `codec` (`core.codecs`) its values are sent coded; an all-reduce
    may send the largest alone (`core.sparse`). Raises InputError where nothing would change, and for a codec that is
    not known or cannot code the step.
    """

    axes: tuple[int, ...]
    source: State
    target: State
    codec: str = ""

    def __post_init__(self) -> None:
        if self.source == self.target or not self.axes:
            raise InputError(f"a step changes the state of at least one axis, not {self.source}->{self.target}")
        if is_sparse(self.codec) and self.kind == "all-reduce":
            SparseRule.of(self.codec)
        elif self.codec and (self.codec not in CODECS or self.kind not in CODED):
            raise InputError(f"{self.source}->{self.target} cannot be sent as {self.codec!r}: {', '.join(CODED)} can, "
                             f"as {', '.join(CODECS)}")

    @property
    def kind(self) -> str:
        """The name of the collective; `slice` or `fill` where nothing is sent."""
        if self.target == P:
            return "fill"
        if self.source == P:
            return "all-reduce" if self.target == B else "reduce-scatter"
        if self.source == B:
            return "slice"
        return "all-gather" if self.target == B else "all-to-all"

    def text(self, mesh: Mesh) -> str:
        """The step as a plan file writes it."""
        sent = f" as {self.codec}" if self.codec else ""
        return f"{'+'.join(mesh.names[a] for a in self.axes)}: {self.source}->{self.target}{sent}"

    def coded(self, codec: str) -> "Step":
        """The step with its values sent as `codec`; by themselves if that is empty."""
        return Step(self.axes, self.source, self.target, codec)

    def sends(self, ranks: int, nbytes: int, itemsize: int) -> tuple[str, int]:
        """The collective that this step is, and the bytes of its full buffer, which are `nbytes` where not coded."""
        if not self.codec:
            return self.kind, nbytes
        if self.is_sparse:
            return SPARSE, ENTRY_BYTES * entries(SparseRule.of(self.codec).share, nbytes // itemsize, ranks)
        return coded_kind(self.kind), coded_bytes(self.codec, ranks, nbytes, itemsize)

    @property
    def is_sparse(self) -> bool:
        """Whether the step sums the largest values alone (`core.sparse`)."""
        return is_sparse(self.codec)

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> "Step":
        """The step that `text` says; InputError where it is not one, or names an axis that the mesh lacks."""
        return _parsed(text, mesh)

    def after(self, layout: Layout) -> Layout:
        """The layout that this step makes of `layout`."""
        return layout.replace(self.axes, self.target)

    def is_legal(self, layout: Layout) -> bool:
        """Whether `layout` has the source state on these axes, and the step cuts across no inner split."""
        if any(layout[a] != self.source for a in self.axes):
            return False
        moved = {s for s in (self.source, self.target) if isinstance(s, Split)}
        return not any(layout[a] in moved and a not in self.axes and a > self.axes[0] for a in range(len(layout)))


def group_size(step: Step, mesh: Mesh) -> int:
    """Number of ranks in one collective of the step."""
    size = 1
    for axis in step.axes:
        size *= mesh.sizes[axis]
    return size


def _widest(shape: tuple[int, ...], layout: Layout, mesh: Mesh, at: tuple[int, ...], axes: tuple[int, ...]
            ) -> tuple[int, ...]:
    """Local shape of the group member with the largest piece: the one at 0 along the group's axes."""
    first = tuple(0 if a in axes else c for a, c in enumerate(at))
    return tuple(size for _, size in extents(shape, layout, mesh, first))


@lru_cache(maxsize=10_000)
def _parsed(text: str, mesh: Mesh) -> Step:
    names, _, change = text.partition(": ")
    change, _, codec = change.partition(" as ")
    source, arrow, target = change.partition("->")
    if not arrow:
        raise InputError(f"{text!r} is no step; a step looks like 'net+node: P->S(0)'")
    return Step(tuple(mesh.index(name) for name in names.split("+")), parse_state(source), parse_state(target), codec)


def is_copy(step: Step) -> bool:
    """Whether the step makes a new tensor on rank 0: all do but the fill of a whole tensor, which stays as it is."""
    return step.kind != "fill" or isinstance(step.source, Split)


def payload(step: Step, shape: tuple[int, ...], itemsize: int, layout: Layout, mesh: Mesh,
            coordinate: tuple[int, ...] | None = None) -> int:
    """Bytes of the full buffer of `step` on a tensor of global `shape` in `layout`; 0 for local steps.

    `coordinate` is that of the rank; by default rank 0, which has the largest pieces.
    """
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
    """(payload, bytes that a local step copies) of each of `steps`, run in turn from layout `start`.

    A slice copies the piece that it ends with, another local step the one that it starts with.
    """
    here, found = start, list[tuple[int, int]]()
    for step in steps:
        after = step.after(here)
        touched = prod(local_shape(shape, after if step.kind == "slice" else here, mesh, coordinate)) * itemsize
        found.append((payload(step, shape, itemsize, here, mesh, coordinate), touched))
        here = after
    return tuple(found)


def ring_bytes(kind: str, ranks: int, nbytes: float) -> float:
    """Bytes that a rank sends in a ring with a full buffer of `nbytes`: (n-1)/n of it, twice that in an all-reduce.

    A sparse all-reduce sends as much of its entries. Raises InputError for a kind that is none of these.
    """
    if kind not in (*COLLECTIVES, SPARSE):
        raise InputError(f"{kind!r} is no collective of a ring; those are {', '.join(COLLECTIVES)}")
    return (2.0 if kind in ("all-reduce", SPARSE) else 1.0) * (ranks - 1) / ranks * nbytes


def slice_steps(mesh: Mesh, source: Layout, target: Layout) -> tuple[Step, ...]:
    """The slices from `source` to `target`, outermost axis first; only axes that `source` broadcasts may differ."""
    return tuple(Step((axis,), source[axis], target[axis])
                 for axis in range(len(mesh.axes)) if source[axis] != target[axis])


def is_conversion(steps: tuple[Step, ...], source: Layout, target: Layout) -> bool:
    """Whether `steps` lead legally from `source` to `target`. `load_plan` checks a plan with it."""
    here = source
    for step in steps:
        if not step.is_legal(here):
            return False
        here = step.after(here)
    return here == target
