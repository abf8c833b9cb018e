"""Computes figures of recorded steps, to compare with those of a predicted one.

    later     the steps that every rank has, without the first, in which connections are made
    typical   the mean over the ranks, the median over the steps
    least     by position, the least over the ranks, which the last rank to come saw, and the median over the steps;
              it is less than the collective takes where the others could begin without that rank
    late      the exposed seconds for ranks that came late: by position, the mean wait minus the least
    a miss    recorded minus predicted seconds of one collective, and the tensor that it was for
    sparse    words that a rank sends for sparse sums: 4 k (n-1)/n planned, at most 6 k (n-1)/n but in a step of the
              warm-up, of a share that falls, or of new thresholds (`core.sparse`)
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean, median

from autoddl.core.conversion import ring_bytes
from autoddl.core.record import Event, Record, RecordedStep, hidden_seconds, own_seconds
from autoddl.core.sparse import ENTRY_BYTES, SPARSE, word_limit

__all__ = ["Miss", "Pair", "Row", "SparseRow", "late", "later", "misses", "rows", "sparse_words", "typical"]

MISSES = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure as predicted and as recorded, both in seconds."""

    predicted: float
    recorded: float

    @property
    def error(self) -> float:
        """(predicted - recorded) / recorded; 0 where both are 0."""
        return (self.predicted - self.recorded) / self.recorded if self.recorded else float(bool(self.predicted))


@dataclass(frozen=True, slots=True)
class Row:
    """The collectives of one kind over the same mesh axes in one step; pairs are (predicted, recorded)."""

    kind: str
    """The kind of collective, like `all-reduce`."""
    axes: str
    """Names of the mesh axes."""
    level: str
    """The level of the cluster that they cross."""
    count: tuple[int, int]
    """The number of collectives."""
    nbytes: tuple[int, int]
    """Bytes of their buffers."""
    seconds: Pair
    """Seconds in which they run."""
    exposed: Pair
    """Seconds in which a rank waits for them."""
    hidden: Pair
    """Seconds in which they run while the rank computes."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A collective whose seconds are not as predicted."""

    origin: str
    """The tensor or the bucket that it is for."""
    direction: str
    """Whether it is of forward or of backward."""
    kind: str
    """The kind of collective, like `all-reduce`."""
    axes: str
    """Names of the mesh axes."""
    nbytes: int
    """Bytes of its buffer."""
    seconds: Pair
    """Seconds in which it runs, predicted and recorded."""


@dataclass(frozen=True, slots=True)
class SparseRow:
    """The words of 4 bytes that a rank sends in one step for the sparse sums over the same mesh axes."""

    axes: str
    """Names of the mesh axes."""
    count: int
    """The number of sums."""
    planned: float
    """Words of a step that needs no balance, as priced."""
    recorded: float
    """Words sent: the median over ranks and steps."""
    most: int
    """The most that a rank sent in a step within the limit."""
    limit: float
    """Words that a rank may send in a step, but in a warm-up, while the share falls, and for thresholds."""
    above: int
    """The number of steps in which a rank sent more than that."""
    steps: int
    """The number of steps."""


def sparse_words(steps: Sequence[RecordedStep], sizes: Mapping[str, int]) -> tuple[SparseRow, ...]:
    """A row for all axes over which gradients add up sparse; `sizes` are those of mesh axes by name."""
    every = sorted({event.axes for step in steps for event in step.events if event.kind == SPARSE})
    return tuple(_sparse_row(axes, prod(sizes[name] for name in axes.split("+")), steps) for axes in every)


def _sparse_row(axes: str, ranks: int, steps: Sequence[RecordedStep]) -> SparseRow:
    sums = {(step.step, step.rank): [event for event in step.events if (event.kind, event.axes) == (SPARSE, axes)]
            for step in steps}
    sums = {at: events for at, events in sums.items() if events}
    words, (first, *_) = {at: sum(event.words for event in events) for at, events in sums.items()}, sums.values()
    limits = {at: sum(word_limit(event.nbytes // ENTRY_BYTES, ranks) for event in sums[at]) for at in sums}
    within = [sent for at, sent in words.items() if sent <= limits[at]]
    return SparseRow(axes, len(first), sum(ring_bytes(SPARSE, ranks, event.nbytes) for event in first) / 4,
                     median(words.values()), max(within, default=0), max(limits.values()),
                     len({at[0] for at, sent in words.items() if sent > limits[at]}), len({step for step, _ in words}))


def later(record: Record) -> tuple[RecordedStep, ...]:
    """The steps that every rank has, without the first where there are others."""
    ranks = {step.rank for step in record.steps}
    seen = Counter(step.step for step in record.steps)
    whole = sorted(number for number, count in seen.items() if count == len(ranks)) or sorted(seen)
    kept = set(whole[1:] or whole)
    return tuple(step for step in record.steps if step.step in kept)


def typical(steps: Sequence[RecordedStep], figure: Callable[[RecordedStep], float]) -> float:
    """The mean of a figure over the ranks, and of these the median over the steps."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_step[step.step].append(figure(step))
    return median(fmean(values) for values in by_step.values())


def _columns(steps: Sequence[RecordedStep], figures: Callable[[RecordedStep], Sequence[float]]
             ) -> list[list[tuple[float, ...]]]:
    """By step and position, the figures of all ranks."""
    by_step: dict[int, list[Sequence[float]]] = defaultdict(list)
    for step in steps:
        by_step[step.step].append(figures(step))
    return [list(zip(*ranks, strict=False)) for ranks in by_step.values()]


def _least(steps: Sequence[RecordedStep]) -> list[float]:
    """The own seconds of each collective, on the rank that came to it last."""
    least = [[min(ranks) for ranks in columns] for columns in _columns(steps, lambda one: own_seconds(one.events))]
    return [median(column) for column in zip(*least, strict=False)]


def late(steps: Sequence[RecordedStep]) -> float:
    """Seconds of a step in which a rank waits for others to come."""
    return median(sum(fmean(ranks) - min(ranks) for ranks in columns)
                  for columns in _columns(steps, lambda one: [event.wait for event in one.events]))


def rows(predicted: RecordedStep, steps: Sequence[RecordedStep]) -> tuple[Row, ...]:
    """A row for every kind and axes that either has; counts and bytes are of the first of `steps`."""
    ahead, behind = _summed(predicted.events, own_seconds(predicted.events)), _summed(steps[0].events, _least(steps))
    return tuple(_row(key, predicted, steps, ahead.get(key, (0, 0, 0.0, "")), behind.get(key, (0, 0, 0.0, "")))
                 for key in sorted({*ahead, *behind}))


_Key = tuple[str, str]
_Sum = tuple[int, int, float, str]


def _summed(events: Iterable[Event], seconds: Sequence[float]) -> dict[_Key, _Sum]:
    """By kind and axes: count, bytes, seconds, and the level."""
    found: dict[_Key, _Sum] = {}
    for event, own in zip(events, seconds, strict=False):
        count, nbytes, took, _ = found.get((event.kind, event.axes), (0, 0, 0.0, ""))
        found[event.kind, event.axes] = count + 1, nbytes + event.nbytes, took + own, event.level
    return found


def _row(key: _Key, predicted: RecordedStep, steps: Sequence[RecordedStep], ahead: _Sum, behind: _Sum) -> Row:
    def exposed(step: RecordedStep) -> float:
        return sum(event.wait for event in step.events if (event.kind, event.axes) == key)

    def hidden(step: RecordedStep) -> float:
        return hidden_seconds([event for event in step.events if (event.kind, event.axes) == key], step.events)

    return Row(*key, ahead[3] or behind[3], (ahead[0], behind[0]), (ahead[1], behind[1]), Pair(ahead[2], behind[2]),
               Pair(exposed(predicted), typical(steps, exposed)), Pair(hidden(predicted), typical(steps, hidden)))


def misses(predicted: Sequence[Event], steps: Sequence[RecordedStep]) -> tuple[Miss, ...]:
    """The largest misses: each recorded collective is paired with the predicted one of equal form and number."""
    waiting: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
    for event, own in zip(predicted, own_seconds(predicted), strict=True):
        waiting[event.direction, event.kind, event.axes, event.nbytes].append(own)
    found = []
    for event, recorded in zip(steps[0].events, _least(steps), strict=False):
        queue = waiting[event.direction, event.kind, event.axes, event.nbytes]
        if queue:
            found.append(Miss(event.origin, event.direction, event.kind, event.axes, event.nbytes,
                              Pair(queue.pop(0), recorded)))
    return tuple(sorted(found, key=lambda miss: -abs(miss.seconds.recorded - miss.seconds.predicted))[:MISSES])
