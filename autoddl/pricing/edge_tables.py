"""Prices an edge in seconds, for every pair of a class of its writer's choices and a class of its reader's.

    seconds    m (route(out -> in) + route(gradient -> wanted)), of a parameter by way of W and G (`price`), with its
               casts and the additions of its gradients

Equal tables share their cells, because readers of one tensor are often alike. Cells are computed when they are asked
for, some rows at a time: a search never reads all numbers of all large tables.

A tensor that can as well be converted behind a view of one input is not converted in front of it. Both plans send the
same and take the same time. Only in the second are the bytes at a moment a sum (`lifetimes`), so the first is
forbidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import isnan

import numpy as np
import numpy.typing as npt

from autoddl.core.cost_table import Cells, Classes, Rows
from autoddl.core.graph import Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout_codes import BASE
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.choice_classes import Ports
from autoddl.pricing.choices import numbered
from autoddl.pricing.price import Pricing, add_seconds, cast_seconds, routes_of
from autoddl.pricing.routes import Routes
from autoddl.pricing.space import Variable
from autoddl.pricing.sparse_routes import sparse_seconds

__all__ = ["Ends", "Use", "counted", "edge_ends", "edge_seconds", "seconds_twice", "sends"]

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ALIKE = 1e-12
"""Relative seconds by which sums of the same conversions differ: they round."""


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a tensor by one op: an edge as far as its price depends on it."""

    tensor: Tensor
    """The tensor that the edge carries."""
    port: int
    """The output of the writer."""
    slot: int
    """The input of the reader."""
    flows: bool
    """Whether a gradient comes back."""
    back: bool
    """Whether it carries a parameter that backward needs."""
    again: float = 0.0
    """What counts of the seconds in which backward converts it again; 0 where it does not."""
    intermediate: bool = False
    """Whether an op computes the tensor, so that a slice of it is a copy (`operators.work.intermediates`)."""
    beside: float = 0.0
    """Seconds of what is computed beside its messages (`pricing.beside`)."""
    behind: float = 0.0
    """Those of the messages behind the reader where that is a view; NaN where they differ from reader to reader."""


@dataclass(frozen=True, eq=False)
class Ends:
    """The layouts at both ends of an edge, as positions in its routes; writers are rows and readers are columns."""

    routes: Routes
    """Conversions of the value."""
    back: Routes
    """Conversions of the gradient."""
    here: Classes
    """By row, the layout in which the value is written."""
    there: Classes
    """By column, the layout in which the value is read."""
    yields: Classes
    """By column, the layout in which the reader's backward yields the gradient."""
    wanted: Classes
    """By row, the layout in which the writer's backward needs the gradient."""
    depths: Classes
    """By row, the depths of a parameter and whether its sums are sparse, as a number (`Choices.depths`); else 0."""
    tensor: Tensor | None
    """The parameter that the edge carries; None for other tensors."""
    classes: tuple[Classes, Classes]
    """The row of every option of the writer, and the column of every option of the reader."""
    intermediate: bool = False
    """Whether an op computes the tensor: then local steps copy too."""
    unkept: int = 0
    """So many rows, the last, are those of a hub whose tensor the reader may not keep as it is."""

    @property
    def parameter(self) -> bool:
        """Whether the edge carries a parameter."""
        return self.tensor is not None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.here), len(self.there)

    @property
    def kept_here(self) -> Bools:
        """Whether the reader may keep the tensor as it is, by row."""
        return np.arange(len(self.here)) < len(self.here) - self.unkept

    @cached_property
    def twice(self) -> "Ends":
        """The ends with every row again, for the writer's second half of choices (`Choices.twice`)."""
        count, (rows, columns) = len(self.here), self.classes
        return Ends(self.routes, self.back, np.tile(self.here, 2), self.there, self.yields, np.tile(self.wanted, 2),
                    np.tile(self.depths, 2), self.tensor, (np.concatenate([rows, rows + count]), columns),
                    self.intermediate, count)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for ends with equal tables: equal arrays are one object (`Ports.positions`)."""
        dtypes = (self.tensor.dtype, self.tensor.master, self.tensor.reduced) if self.tensor is not None else None
        return (id(self.routes), id(self.back), id(self.here), id(self.there), id(self.yields), id(self.wanted),
                self.depths.tobytes(), dtypes)

    def only(self, cell: tuple[int, ...]) -> "Ends":
        """The ends of a table that has the one cell (row, column) alone."""
        i, j = cell
        one = np.zeros(1, dtype=np.intp)
        return Ends(self.routes, self.back, self.here[i:i + 1], self.there[j:j + 1], self.yields[j:j + 1],
                    self.wanted[i:i + 1], self.depths[i:i + 1], self.tensor, (one, one), self.intermediate,
                    int(not self.kept_here[i]))

    def kept(self, rows: Rows) -> Classes:
        """The position of W for some rows and every column, -1 where no such layout is legal."""
        return _between(self.routes, self.here[rows], self.there, _masked(self.depths[rows], self.routes, 2))

    def gathers(self, rows: Rows) -> tuple[Bools, Bools]:
        """Whether O -> W has a collective, and whether W -> used has one, for some rows and every column."""
        kept = np.maximum(self.kept(rows), 0)
        return sends(self.routes, self.here[rows][:, None], kept), sends(self.routes, kept, self.there[None])

    def summed(self, rows: Rows) -> Classes:
        """The position of G for some rows and every column, -1 where no such layout is legal."""
        return _between(self.back, self.wanted[rows], self.yields, _masked(self.depths[rows], self.back, 1))

    def reduces(self, rows: Rows) -> tuple[Bools, Bools]:
        """Whether yielded -> G has a collective, and whether G -> O has one, for some rows and every column."""
        summed = np.maximum(self.summed(rows), 0)
        return sends(self.back, self.yields[None], summed), sends(self.back, summed, self.wanted[rows][:, None])

    def sum_bytes(self, rows: Rows) -> Array:
        """Bytes of the sum of the gradients of several microbatches, for some rows and every column.

        The sum is in layout G where gradients are reduced in each microbatch and again at the end. Where they are
        reduced only at the end it is as backward yields it; else it is as the parameter is stored.
        """
        summed, nbytes = np.maximum(self.summed(rows), 0), self.back.nbytes
        each, last = self.reduces(rows)
        return np.where(last, np.where(each, nbytes[summed], nbytes[self.yields]), nbytes[self.here[rows]][:, None])


def seconds_twice(seconds: Cells, ends: Ends) -> Cells:
    """The seconds of an edge over twice its rows; in the second half nothing is read as it is."""
    count = len(ends.here)

    def rows(which: Rows) -> Array:
        every = np.arange(2 * count)[which]
        found = np.array(seconds.rows(every % count))
        found[(every >= count)[:, None] & (ends.here[every % count][:, None] == ends.there)] = np.inf
        return found

    return Cells((2 * count, len(ends.there)), rows, seconds.least)


def sends(routes: Routes, start: Classes, end: Classes) -> Bools:
    """Whether the route between two layouts has a collective, cell by cell."""
    start, end = np.broadcast_arrays(start, end)
    (rows, row), (columns, column) = (np.unique(given, return_inverse=True) for given in (start, end))
    return routes.sends(rows, columns)[row.reshape(start.shape), column.reshape(start.shape)]


def _masked(depths: Classes, routes: Routes, least: int) -> Classes:
    """By row, the bits of a layout's code that belong to axes of at least a depth."""
    axes = np.arange(len(routes.layouts[0]))
    found: Classes = (depths[:, None] // 3 ** axes % 3 >= least) @ ((BASE - 1) * BASE ** axes)
    return found


def _between(routes: Routes, rows: Classes, columns: Classes, mask: Classes) -> Classes:
    """The position of the layout that is the row's on the axes of its mask, and the column's on the others."""
    outer, inner = routes.codes[rows], routes.codes[columns]
    found: Classes = routes.place[(outer & mask)[:, None] | (inner & ~mask[:, None])]
    return found


def edge_ends(pricing: Pricing, ports: Ports, source: Variable, target: Variable, use: Use) -> Ends:
    """The two ends of an edge.

    Where no gradient flows, those of the value stand for its layouts: a boolean tensor has no PartialSum to look up.
    """
    parameter = isinstance(source.item, Tensor)
    table = routes_of(pricing, use.tensor, "weights" if parameter else "activations", use.beside * (not parameter))
    writes, reads = ports.writes(source.choices, use.port), ports.reads(target.choices, use.slot)
    here, there = ports.positions(writes, 0, table), ports.positions(reads, 0, table)
    wanted, yields = (ports.positions(writes, 1, table), ports.positions(reads, 1, table)) if use.flows \
        else (here, there)
    back = routes_of(pricing, use.tensor.gradient, "gradients") if parameter else table
    return Ends(table, back, here, there, yields, wanted, writes.columns[2] * parameter,
                use.tensor if parameter else None, (writes.classes, reads.classes), use.intermediate)


def edge_seconds(pricing: Pricing, ports: Ports, target: Variable, use: Use, ends: Ends) -> Cells:
    """Seconds of every (row, column), infinite where a conversion in front of a view is as well made behind it."""
    plain = ports.cells(("seconds", *ends.key, use.flows, use.back, use.again), ends.shape,
                        partial(_seconds, pricing, ports, ends, use))
    behind = _behind(pricing, ports, target, use, ends)
    if behind is None:
        return plain
    return Cells(ends.shape, partial(_without, plain, ends, behind))


@dataclass(frozen=True, slots=True, eq=False)
class _Behind:
    """The output of a view, as far as a conversion behind the view depends on it."""

    routes: Routes
    """Conversions of the view's output."""
    option: Classes
    """By layout of the view's input, the one option that reads it; -1 where none or several do."""
    output: Classes
    """By option, the layout of the output."""
    wanted: Classes
    """By option, the layout in which backward needs the output's gradient."""
    yields: Classes
    """By option, the layout in which backward yields the input's gradient."""
    flows: bool
    """Whether a gradient comes back."""


def _behind(pricing: Pricing, ports: Ports, target: Variable, use: Use, ends: Ends) -> _Behind | None:
    """The output of the view that reads; None unless the reader is a view with one input and one output."""
    op = target.item
    assert isinstance(op, Op)
    if ends.parameter or op.target == HUB or base(op) not in VIEWS or len(op.inputs) != 1 or len(op.outputs) != 1:
        return None
    if isnan(use.behind):
        return None
    routes = routes_of(pricing, pricing.graph.tensors[op.outputs[0]], "activations", use.behind)
    given = numbered(target.choices)
    inside, outside = ends.routes.place, routes.place
    reads, output = inside[given.inputs[0]], outside[given.outputs[0]]
    option, many = np.full(len(ends.routes.layouts), -1), np.bincount(reads, minlength=len(ends.routes.layouts))
    option[reads] = np.arange(len(reads))
    option[many != 1] = -1
    if not use.flows:
        return _Behind(routes, option, output, output, reads, False)
    return _Behind(routes, option, output, outside[given.wanted[0]], inside[given.gradients[0]], True)


def _without(plain: Cells, ends: Ends, view: _Behind, rows: Rows) -> Array:
    """The `plain` seconds of some rows, infinite where the tensor can as well be converted behind the view."""
    found = np.array(plain.rows(rows))
    stays, goes = view.option[ends.here[rows]], view.option[ends.there]
    movable = (stays >= 0)[:, None] & (goes >= 0) & (ends.here[rows][:, None] != ends.there)
    a, b = np.maximum(stays, 0), np.maximum(goes, 0)
    front = ends.routes.seconds[np.ix_(ends.here[rows], ends.there)]
    back = view.routes.seconds[np.ix_(view.output[a], view.output[b])]
    if view.flows:
        front = front + ends.routes.seconds[np.ix_(view.yields[b], ends.wanted[rows])].T
        back = back + view.routes.seconds[np.ix_(view.wanted[b], view.wanted[a])].T
        back = back + ends.routes.seconds[view.yields[a], ends.wanted[rows]][:, None]
    found[movable & (back <= front * (1 + ALIKE))] = np.inf
    return found


def _seconds(pricing: Pricing, ports: Ports, ends: Ends, use: Use, rows: Rows) -> Array:
    """Conversions there, and of the gradient back."""
    flows, times = use.flows, pricing.times
    if ends.tensor is None:
        found = _times(_gathered(ends.routes.seconds, ends.here[rows], ends.there),
                       times.forward + use.again * times.backward)
        if flows:
            found += _times(_gathered(ports.turned(ends.routes), ends.wanted[rows], ends.yields), times.backward)
        return found
    found = _by_way_of(ends.routes.seconds, ends.here[rows][:, None], ends.kept(rows), ends.there[None],
                       times.gather, times.forward + use.back * times.backward)
    if flows:
        found += _reduced(pricing, ports, ends, rows)
    found = counted(found, pricing.hidden) + _casts(pricing, ends, rows, use.back, flows)
    return found + _added_up(pricing, ends, rows) if flows and pricing.microbatches > 1 else found


def _reduced(pricing: Pricing, ports: Ports, ends: Ends, rows: Rows) -> Array:
    """Conversions of a parameter's gradient; those of rows with sparse sums end with one, after the last backward."""
    times, wanted, yields = pricing.times, ends.wanted[rows], ends.yields
    once: float | Array = times.reduce
    if pricing.microbatches == 1:
        summed = yields[None]
        found = _times(_gathered(ports.turned(ends.back), wanted, yields), once)
    else:
        summed = ends.summed(rows)
        each, last = ends.reduces(rows)
        once = np.where(each | ~last, times.late, times.reduce)
        found = _by_way_of(ends.back.seconds, yields[None], summed, wanted[:, None], once,
                           np.where(last, times.reduce, times.late))
    sparse = ends.depths[rows] // 3 ** len(ends.back.layouts[0]) > 0
    if not sparse.any() or ends.tensor is None:
        return found
    ends_sparse = sparse_seconds(pricing, ends.tensor.gradient)[summed, wanted[:, None]]
    other = _times(ends_sparse, times.reduce)
    if pricing.microbatches > 1:
        other = np.where(summed < 0, np.inf, other + _times(ends.back.seconds[yields[None], summed], once))
    return np.where(sparse[:, None], other, found)


def _times(seconds: Array, count: float | Array) -> Array:
    """`count` times the seconds; infinite ones, which forbid, stay infinite."""
    if np.all(count):
        return seconds * count
    return np.where(np.isfinite(seconds), seconds, 0.0) * count + np.where(np.isfinite(seconds), 0.0, np.inf)


def _by_way_of(seconds: Array, start: Classes, middle: Classes, end: Classes, first: float | Array,
               second: float | Array) -> Array:
    """`first` times the route to the middle, `second` times that behind it; infinite where there is no middle."""
    found: Array = _times(seconds[start, middle], first) + np.where(middle == end, 0.0,
                                                                    _times(seconds[middle, end], second))
    return np.where(middle < 0, np.inf, found)


def _casts(pricing: Pricing, ends: Ends, rows: Rows, back: bool, flows: bool) -> Array:
    """Seconds of a parameter's casts: of the stored piece to the dtype of use, of each gradient to that of sums.

    The cast stands before the first gather: once where that is O -> W, else before each gather of the step. What is
    only sliced is sliced before it is cast.
    """
    tensor = ends.tensor
    assert tensor is not None
    found = np.zeros((len(ends.here[rows]), len(ends.there)))
    if tensor.master:
        first, then = ends.gathers(rows)
        stored = ends.routes.nbytes[ends.here[rows]][:, None]
        pieces = np.where(first | then, stored, np.minimum(stored, ends.routes.nbytes[ends.there]))
        each = pricing.times.forward + back * pricing.times.backward
        times = np.where(then & ~first, each, pricing.times.gather)
        found += times * _each(partial(cast_seconds, pricing, tensor.stored, tensor), pieces / tensor.itemsize)
    if flows and tensor.reduced:
        elements = ends.routes.nbytes[ends.yields] / tensor.itemsize
        found += pricing.times.backward * _each(partial(cast_seconds, pricing, tensor, tensor.gradient), elements)
    return found


def _added_up(pricing: Pricing, ends: Ends, rows: Rows) -> Array:
    """Seconds of adding a parameter's gradients of several microbatches up."""
    tensor = ends.tensor
    assert tensor is not None
    elements = ends.sum_bytes(rows) / tensor.gradient.itemsize
    return pricing.adds * _each(partial(add_seconds, pricing, tensor), elements)


def _each(seconds: Callable[[float], float], elements: Array) -> Array:
    """`seconds` of every number of elements, asked once for those that are equal."""
    sizes, which = np.unique(elements, return_inverse=True)
    found: Array = np.array([seconds(size) for size in sizes.tolist()])[which].reshape(elements.shape)
    return found


def _gathered(seconds: Array, rows: Classes, columns: Classes) -> Array:
    """`seconds` at rows and columns."""
    found: Array = seconds[rows].take(columns, axis=1, mode="clip")
    return found


def counted(seconds: Array, hidden: float) -> Array:
    """The part 1 - `hidden` of the seconds; infinite ones, which forbid, stay infinite."""
    return np.where(np.isfinite(seconds), seconds, 0.0) * (1 - hidden) + np.where(np.isfinite(seconds), 0.0, np.inf) \
        if hidden else seconds
