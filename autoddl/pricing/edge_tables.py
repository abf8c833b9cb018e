"""The table of an edge: what every pair of a class of its writer and a class of its reader costs.

    seconds    there[i, j] * forward[i] + back[j, i] * backward[i]       conversions of the value and of the gradient
    retained   writer's bytes if its backward reads its own output, + the copy if the reader's backward does
    transient  (both ends' bytes, where they differ) + the gradient's

Bytes are sums of one number of the row and one of the column, but for the few cells where the layouts are the same and
nothing is converted. Tables that say the same share their cells: readers of one tensor are often alike. Cells are made
when they are asked for, some rows at a time: of a large table a search never wants all three numbers of all of them.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from autoddl.core.cost_table import Classes, Rows, Table
from autoddl.core.graph import Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.pricing.choice_classes import Port, Ports
from autoddl.pricing.price import Pricing, routes_of
from autoddl.pricing.routes import Routes
from autoddl.pricing.space import Variable

__all__ = ["Use", "counted", "edge_table"]

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Use:
    """What an edge carries, from output `port` to input `slot`. `keep` says whether the reader's backward needs the
    value, and the writer's its own output; `flows` whether a gradient comes back; `back` whether a parameter is needed
    in backward."""

    tensor: Tensor
    port: int
    slot: int
    keep: tuple[bool, bool]
    flows: bool
    back: bool


@dataclass(frozen=True, eq=False)
class _Ends:
    """An edge's classes as positions in the routes: `here` writes and `there` reads the value, `yields` and `wanted`
    the gradient. `again` are the rows of a parameter that is gathered again."""

    routes: Routes
    here: Classes
    there: Classes
    yields: Classes
    wanted: Classes
    again: Bools
    parameter: bool

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.here), len(self.there)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal arrays are one (`Ports.positions`)."""
        return (id(self.routes), id(self.here), id(self.there), id(self.yields), id(self.wanted),
                self.again.tobytes(), self.parameter)

    @cached_property
    def order(self) -> Classes:
        """Columns by their layout."""
        return np.argsort(self.there, kind="stable")

    @cached_property
    def sent(self) -> Bools:
        """Whether a gradient that is not gathered again is sent by a collective."""
        found: Bools = self.routes.sends(self.yields, self.wanted).T & ~self.again[:, None]
        return found

    def same(self, rows: Rows) -> tuple[Classes, Classes]:
        """The cells of these rows (numbered from 0) where the writer's layout is the reader's."""
        here, there = self.here[rows], self.there
        first, last = (np.searchsorted(there, here, side, sorter=self.order) for side in ("left", "right"))
        row = np.repeat(np.arange(len(here)), last - first)
        return row, self.order[np.arange(len(row)) - (np.cumsum(last - first) - last)[row]]


def edge_table(pricing: Pricing, ports: Ports, source: Variable, target: Variable, use: Use) -> Table:
    """Pairwise costs."""
    table, parameter = routes_of(pricing, use.tensor), isinstance(source.item, Tensor)
    writes, reads = ports.writes(source.choices, use.port), ports.reads(target.choices, use.slot)
    ends = _ends(ports, table, writes, reads, parameter)
    alone = not (parameter or (isinstance(source.item, Op) and source.item.target == HUB)) and not use.keep[1]
    held = use.keep[0] or (parameter and pricing.microbatches > 1)
    sums = parameter and use.flows and pricing.microbatches > 1
    seconds = ports.cells(("seconds", *ends.key, use.flows, use.back), ends.shape,
                          partial(_seconds, pricing, ports, ends, use.flows, use.back))
    retained = ports.cells(("retained", *ends.key, held, alone, use.keep[1], sums), ends.shape,
                           partial(_retained, ends, held, alone, use.keep[1], sums))
    transient = ports.cells(("transient", *ends.key, use.flows), ends.shape, partial(_transient, ends, use.flows),
                            float(ends.routes.nbytes[ends.yields].min()) * use.flows)
    return Table.over(seconds, retained, transient, (writes.classes, reads.classes))


def _ends(ports: Ports, table: Routes, writes: Port, reads: Port, parameter: bool) -> _Ends:
    here, wanted = (ports.positions(writes, k, table) for k in (0, 1))
    there, yields = (ports.positions(reads, k, table) for k in (0, 1))
    again = writes.columns[2] & parameter
    return _Ends(table, here, there, yields, wanted, again, parameter)


def _seconds(pricing: Pricing, ports: Ports, ends: _Ends, flows: bool, back: bool, rows: Rows) -> Array:
    """Conversions there, and of the gradient back."""
    forward, backward = pricing.times(ends.parameter, ends.again[rows], back)
    found = _gathered(ends.routes.seconds, ends.here[rows], ends.there, forward)
    if flows:
        found += _gathered(ports.turned(ends.routes), ends.wanted[rows], ends.yields, backward)
    return counted(found, pricing.hidden) if ends.parameter else found


def _gathered(seconds: Array, rows: Classes, columns: Classes, times: npt.NDArray[np.int64]) -> Array:
    """`seconds` at rows and columns, `times` so often a row."""
    found: Array = seconds[rows].take(columns, axis=1, mode="clip")
    if (times == times[0]).all():
        if times[0] != 1:
            found *= float(times[0])
    else:
        found *= times[:, None].astype(np.float64)
    return found


def _retained(ends: _Ends, held: bool, alone: bool, own: bool, sums: bool, rows: Rows) -> Array:
    """The copy that is `held`, made even of an equal layout where the writer does not keep its own output and stands
    `alone`; the writer's `own`; and, with `sums`, gradients that add up over microbatches before they are sent."""
    before, after = ends.routes.nbytes[ends.here[rows]] * own, ends.routes.nbytes[ends.there] * held
    again, found = ends.again[rows], np.add(before[:, None], after)
    if not alone:
        row, column = ends.same(rows)
        found[row, column] = before[row]
    found[again] = before[again, None]
    if sums:
        found += ends.routes.nbytes[ends.yields] * ends.sent[rows]
    return found


def _transient(ends: _Ends, flows: bool, rows: Rows) -> Array:
    """What is converted, before and after, and the gradient that the reader yields."""
    yields = ends.routes.nbytes[ends.yields] * flows
    found = np.add(ends.routes.nbytes[ends.here[rows]][:, None], ends.routes.nbytes[ends.there] + yields)
    row, column = ends.same(rows)
    found[row, column] = yields[column]
    return found


def counted(seconds: Array, hidden: float) -> Array:
    """The part of seconds that is not hidden; what is not possible stays so."""
    return np.where(np.isfinite(seconds), seconds, 0.0) * (1 - hidden) + np.where(np.isfinite(seconds), 0.0, np.inf) \
        if hidden else seconds
