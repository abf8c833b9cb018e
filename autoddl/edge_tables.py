"""The table of an edge: what every pair of a class of its writer and a class of its reader costs.

    seconds    there[i, j] * forward[i] + back[j, i] * backward[i]       conversions of the value and of the gradient
    retained   writer's bytes if its backward reads its own output, + the copy if the reader's backward does
    transient  (both ends' bytes, where they differ) + the gradient's

Bytes are sums of one number of the row and one of the column, but for the few cells where the layouts are the same and
nothing is converted. Tables that say the same share their arrays: readers of one tensor are often alike.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoddl.graph import Op, Tensor
from autoddl.hubs import HUB
from autoddl.ports import Port, Ports
from autoddl.price import Pricing, routes_of
from autoddl.problem import Classes, Table
from autoddl.routes import Routes
from autoddl.space import Variable

__all__ = ["Use", "counted", "edge_table"]

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CELLS = 1 << 15
"""Cells that are added up at a time, so that they stay near."""


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


@dataclass(frozen=True, slots=True, eq=False)
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


def edge_table(pricing: Pricing, ports: Ports, source: Variable, target: Variable, use: Use) -> Table:
    """Pairwise costs."""
    table, parameter = routes_of(pricing, use.tensor), isinstance(source.item, Tensor)
    writes, reads = ports.writes(source.choices, use.port), ports.reads(target.choices, use.slot)
    ends = _ends(ports, table, writes, reads, parameter)
    alone = not (parameter or (isinstance(source.item, Op) and source.item.target == HUB)) and not use.keep[1]
    held = use.keep[0] or (parameter and pricing.microbatches > 1)
    sums = parameter and use.flows and pricing.microbatches > 1
    seconds = ports.array(("seconds", *ends.key, use.flows, use.back),
                          lambda: _seconds(pricing, ports, ends, use.flows, use.back))
    retained = ports.array(("retained", *ends.key, held, alone, use.keep[1], sums),
                           lambda: _retained(ends, held, alone, use.keep[1], sums))
    transient = ports.array(("transient", *ends.key, use.flows), lambda: _transient(ends, use.flows))
    return Table(seconds, retained, transient, (writes.classes, reads.classes))


def _ends(ports: Ports, table: Routes, writes: Port, reads: Port, parameter: bool) -> _Ends:
    here, wanted = (ports.positions(writes, k, table) for k in (0, 1))
    there, yields = (ports.positions(reads, k, table) for k in (0, 1))
    again = np.array([value[2] for value in writes.values]) & parameter
    return _Ends(table, here, there, yields, wanted, again, parameter)


def _seconds(pricing: Pricing, ports: Ports, ends: _Ends, flows: bool, back: bool) -> Array:
    """Conversions there, and of the gradient back, a block of rows at a time."""
    forward, backward = pricing.times(ends.parameter, ends.again, back)
    found = np.empty(ends.shape)
    step = max(1, CELLS // ends.shape[1])
    returned = np.empty((step, ends.shape[1]))
    for begin in range(0, len(found), step):
        rows = slice(begin, begin + step)
        part = found[rows]
        _gather(ends.routes.seconds, ends.here[rows], ends.there, forward[rows], part)
        if flows:
            more = returned[:len(part)]
            _gather(ports.turned(ends.routes), ends.wanted[rows], ends.yields, backward[rows], more)
            part += more
    return counted(found, pricing.hidden) if ends.parameter else found


def _gather(seconds: Array, rows: Classes, columns: Classes, times: npt.NDArray[np.int64], out: Array) -> None:
    """`seconds` at rows and columns, `times` so often a row."""
    seconds[rows].take(columns, axis=1, out=out, mode="clip")
    if (times == times[0]).all():
        if times[0] != 1:
            out *= float(times[0])
    else:
        out *= times[:, None].astype(np.float64)


def _retained(ends: _Ends, held: bool, alone: bool, own: bool, sums: bool) -> Array:
    """The copy that is `held`, made even of an equal layout where the writer does not keep its own output and stands
    `alone`; the writer's `own`; and, with `sums`, gradients that add up over microbatches before they are sent."""
    before, after = ends.routes.nbytes[ends.here] * own, ends.routes.nbytes[ends.there] * held
    found = np.add(before[:, None], after)
    if not alone:
        rows, columns = _same(ends.here, ends.there)
        found[rows, columns] = before[rows]
    found[ends.again] = before[ends.again, None]
    if sums:
        sent = ends.routes.sends(ends.yields, ends.wanted).T & ~ends.again[:, None]
        found += ends.routes.nbytes[ends.yields] * sent
    return found


def _transient(ends: _Ends, flows: bool) -> Array:
    """What is converted, before and after, and the gradient that the reader yields."""
    yields = ends.routes.nbytes[ends.yields] * flows
    found = np.add(ends.routes.nbytes[ends.here][:, None], ends.routes.nbytes[ends.there] + yields)
    rows, columns = _same(ends.here, ends.there)
    found[rows, columns] = yields[columns]
    return found


def _same(here: Classes, there: Classes) -> tuple[Classes, Classes]:
    """The cells (i, j) with here[i] == there[j]."""
    order = np.argsort(there, kind="stable")
    first, last = (np.searchsorted(there, here, side, sorter=order) for side in ("left", "right"))
    rows = np.repeat(np.arange(len(here)), last - first)
    return rows, order[np.arange(len(rows)) - (np.cumsum(last - first) - last)[rows]]


def counted(seconds: Array, hidden: float) -> Array:
    """The part of seconds that is not hidden; what is not possible stays so."""
    return np.where(np.isfinite(seconds), seconds, 0.0) * (1 - hidden) + np.where(np.isfinite(seconds), 0.0, np.inf) \
        if hidden else seconds
