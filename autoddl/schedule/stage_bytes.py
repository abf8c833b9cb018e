"""Takes the bytes of a stage apart, so that those of all stages of a rank can be told at any moment of it.

The memory line of a stage (`memory_line`) is of the stage alone. On its ranks other stages run in between. Each of
these has then what it keeps, and one of them runs. With k microbatches of a stage in flight and w that wait for W,

    between its actions   R(k, w) = base + k kept + w late, and sums more once a backward has ended
    in an action          R(k, w) + forward, R(k, w) + backward, or R(k, w) + first in its first backward
    rank                  max over its moments of  sum over stages of R  +  what the one that runs has more
    update                sum over stages of update: one optimizer updates all

Of the passes of the line `kept` is what a forward leaves behind. All else is the most that any pass has above that: so
R plus the action is never below the line. `rank_bytes` adds up the stages of a rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, get_args

import numpy as np

from autoddl.core.cost_table import Array
from autoddl.core.pipeline import Flight, Kind, RankMoment, RankMoments
from autoddl.core.plan import Plan, StageBytes
from autoddl.operators.footprints.storages import Heap

__all__ = [
    "Passes",
    "alone_bytes",
    "at_moments",
    "bytes_in_parts",
    "level_bytes",
    "rank_bytes",
    "rank_kinds",
    "rank_peak_bytes",
    "resting_bytes",
]

Bytes = Mapping[str, float]
"""Bytes by kind."""


class _Pass(NamedTuple):
    """A pass of the line: its kind, microbatches in flight with its own, whether one was backward before, its peak."""

    kind: Kind
    in_flight: int
    begun: bool
    most: Bytes


@dataclass(slots=True)
class Passes:
    """Notes the passes of a stage's memory line as they are acted out, and what there is between them.

        heap      counts the bytes
        late      bytes that a microbatch which waits for W keeps, of so many that wait all the time (`waiting`)
        between   (microbatches in flight, whether a backward has ended, bytes by kind)
        passes    the passes
        kept      what a forward leaves behind
        in_flight, begun    as it is now, of those that are acted out one by one
        others    more in flight that are like these
        later     bytes that are there besides, of microbatches which wait at another time: no part counts them
    """

    heap: Heap
    late: Bytes
    waiting: int
    between: list[tuple[int, bool, Bytes]] = field(default_factory=list)
    passes: list[_Pass] = field(default_factory=list)
    kept: Bytes = field(default_factory=dict)
    in_flight: int = 0
    begun: bool = False
    others: int = 0
    later: float = 0.0

    def start(self) -> None:
        """Notes what there is before the first pass."""
        self._note()
        self.heap.begin_pass()

    def ended(self, kind: Kind) -> None:
        """Notes the pass that has ended."""
        count = self.in_flight + self.others + (kind == "F")
        self.passes.append(_Pass(kind, count, self.begun, self._counted(self.heap.of_pass or {})))
        self.begun = self.begun or kind == "B"
        if kind == "F" and len(self.passes) <= 2 and not self.begun:
            self.kept = _less(self._counted(self.heap.parts), self.between[-1][2])
        self.in_flight += 1 if kind == "F" else -1
        self._note()
        self.heap.begin_pass()

    def _note(self) -> None:
        self.between.append((self.in_flight + self.others, self.begun, self._counted(self.heap.parts)))

    def _counted(self, there: Bytes) -> Bytes:
        return _less(there, {"transient": self.later}) if self.later else dict(there)

    def in_parts(self, update: Bytes) -> StageBytes:
        """The bytes in parts; `update` are those at the update."""
        always = {kind: self.waiting * nbytes for kind, nbytes in self.late.items()}
        plain = [(begun, _less(parts, self.kept, k, always)) for k, begun, parts in self.between]
        base = _most([parts for begun, parts in plain if not begun])
        sums = _most([{}, *(_less(parts, base) for begun, parts in plain if begun)])
        rest = {begun: Counter(base) for begun in (False, True)}
        rest[True].update(sums)
        more: dict[str, list[dict[str, float]]] = {"F": [], "B": [], "first": []}
        for one in self.passes:
            name = one.kind if one.begun or one.kind == "F" else "first"
            more[name].append(_less(_less(one.most, self.kept, one.in_flight, always), rest[one.begun]))
        return StageBytes(base, sums, {**self.kept}, {**self.late}, _most(more["F"]),
                          _most(more["B"] or more["first"]), _most(more["first"]), {**update})


def _less(one: Bytes, other: Bytes, times: int = 1, more: Bytes | None = None) -> dict[str, float]:
    """Bytes by kind without those of others, so many times, and without some more."""
    found = {kind: one.get(kind, 0.0) - times * other.get(kind, 0.0) - (more or {}).get(kind, 0.0)
             for kind in dict.fromkeys((*one, *other, *(more or {})))}
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def _most(every: Sequence[dict[str, float]]) -> dict[str, float]:
    """Those of the most bytes together."""
    return max(every, key=_total)


def _total(one: Bytes) -> float:
    return sum(one.values())


@lru_cache(maxsize=2048)
def _weights(moments: RankMoments) -> Array:
    """[moment, stage, part of StageBytes]: how often each part counts; the update is the last moment."""
    rows = [[_counts(flight, one.kind if s == one.stage else None)
             for s, flight in zip(moments.stages, one.flights, strict=True)] for one in moments.moments]
    return np.array([*rows, [UPDATE] * len(moments.stages)], dtype=float)


UPDATE = (0,) * 7 + (1,)
"""How often each part of StageBytes counts at the update."""


def _counts(flight: Flight, kind: Kind | None) -> tuple[int, ...]:
    """How often each part of StageBytes counts, while an action of the stage of this kind runs, or none does."""
    forward, first = kind == "F", kind in ("B", "W") and not flight.begun
    return (1, flight.begun, flight.in_flight, flight.waiting, forward, kind is not None and not forward and not first,
            first, 0)


def _totals(parts: StageBytes) -> tuple[float, ...]:
    return tuple(map(_total, _each(parts)))


def _each(parts: StageBytes) -> tuple[Bytes, ...]:
    return (parts.base, parts.sums, parts.kept, parts.late, parts.forward, parts.backward, parts.first, parts.update)


def bytes_in_parts(plan: Plan) -> StageBytes:
    """The bytes of a stage in parts; a plan that is not of a stage has none."""
    assert plan.predicted.parts is not None, "a stage of a pipeline has its bytes in parts"
    return plan.predicted.parts


def rank_bytes(stages: Sequence[StageBytes], moments: RankMoments) -> tuple[float, RankMoment | None]:
    """(the most bytes of a rank with these stages, the moment at which; None at the update)."""
    sums = np.einsum("nsp,sp->n", _weights(moments), np.array([_totals(one) for one in stages]))
    most = int(sums.argmax())
    return float(sums[most]), moments.moments[most] if most < len(moments.moments) else None


def level_bytes(stages: Sequence[StageBytes], flights: Sequence[Flight], runs: int | None = None, kind: Kind = "F"
                ) -> float:
    """Bytes of a rank whose stages have so many microbatches, while an action of one of them runs, or none does."""
    return sum(n * nbytes for i, (one, flight) in enumerate(zip(stages, flights, strict=True))
               for n, nbytes in zip(_counts(flight, kind if i == runs else None), _totals(one), strict=True))


def rank_peak_bytes(plans: Sequence[Plan], moments: RankMoments | None) -> float:
    """The most bytes of a rank with the stages of these plans; without moments it has one."""
    return plans[0].predicted.peak_bytes if moments is None else rank_bytes([*map(bytes_in_parts, plans)], moments)[0]


def at_moments(plans: Sequence[Plan], moments: RankMoments, stage: int) -> Array:
    """[plan, moment]: what each of these plans of one stage, counted from 0 on its ranks, adds to a rank's bytes."""
    found: Array = np.array([_totals(bytes_in_parts(plan)) for plan in plans]) @ _weights(moments)[:, stage].T
    return found


def rank_kinds(plans: Sequence[Plan], moments: RankMoments | None) -> dict[str, float]:
    """The bytes of a rank by kind, where it has most."""
    if moments is None:
        return plans[0].predicted.nbytes
    stages, found = [*map(bytes_in_parts, plans)], Counter[str]()
    _, at = rank_bytes(stages, moments)
    weights = _weights(moments)[moments.moments.index(at) if at else -1]
    for row, parts in zip(weights, stages, strict=True):
        for times, one in zip(row, _each(parts), strict=True):
            found.update({kind: float(times) * nbytes for kind, nbytes in one.items()})
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def resting_bytes(plan: Plan, flight: Flight) -> float:
    """Bytes of a stage while none of its actions runs, at a moment of its rank; of one that is alone there its peak."""
    if flight.most is None:
        return plan.predicted.peak_bytes
    return level_bytes([bytes_in_parts(plan)], [flight])


def alone_bytes(plan: Plan, flight: Flight) -> float:
    """Bytes of a stage while it runs, counted as at a moment of its rank; of one that is alone there its peak."""
    if flight.most is None:
        return plan.predicted.peak_bytes
    parts, kinds = bytes_in_parts(plan), get_args(Kind)
    return max(*(level_bytes([parts], [flight], 0, kind) for kind in kinds), _total(parts.update))
