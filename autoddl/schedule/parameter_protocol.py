"""Decides when buckets of parameters are gathered and their gradients reduced: one state machine, three interpreters.

The runtime runs it on tensors (`runtime.parameter_gather`, `runtime.gradient_reducer`), the time line on names
(`parameter_order`) and the memory line on bytes (`memory_gathers`, `memory_reductions`). An interpreter reports events,
and the machine answers with the actions to take now. It starts nothing itself and never looks at the time, so every
rank does the same in every run.

    forward     taking bucket b waits for it, and has started all up to b + PREFETCH
    ahead       a stage of a pipeline starts the gathers of a step before its first microbatch: its ranks wait for other
                stages then. So it does with reductions: those that are left behind its last backward are started there,
                and waited for at the end of the step
    between     a bucket that is regathered keeps nothing but notes of where backward will read it
    backward    the first read of bucket b waits for it, and has started PREFETCH buckets before it
    reduce      a bucket starts when its last gradient is there, but never before the one in front of it; one of several
                steps takes its next step whenever a later bucket starts; few are in flight at once (`overdue_buckets`)
    finish      all that are due are started, and advanced in turn until none has a step left

With several microbatches, this happens in each of them for the buckets that are converted per microbatch. The other
buckets are gathered in the first, kept until the last has taken them, and reduced in the last. A bucket may
take some steps once. It is gathered as far as these go at its first start in a step, and goes on from there at every
start. Its reduction takes them in the last microbatch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autoddl.schedule.buckets import PREFETCH, Bucket, frees_memory, overdue_buckets

__all__ = ["Advance", "Fill", "GatherProtocol", "ReduceProtocol", "Take"]


class Take(NamedTuple):
    """The actions that taking or reading a bucket asks for."""

    starts: tuple[int, ...]
    """Buckets to start now, in this order."""
    waits: bool
    """Whether the bucket is in flight and must be waited for."""
    keeps: bool = False
    """Whether the gathered values stay for later microbatches."""


class Advance(NamedTuple):
    """One move of a bucket of gradients."""

    bucket: int
    waits: bool
    """Whether a step of it is in flight and must be waited for."""
    step: int | None
    """The step to start then, those taken once numbered behind the others; None if none is left."""


class Fill(NamedTuple):
    """A bucket whose missing gradients count as zeros, since backward did not yield them."""

    bucket: int


@dataclass(slots=True)
class GatherProtocol:
    """The gathers of one rank's step, by the position of a bucket in the order of first use.

        buckets    the buckets, in that order
        _last      whether this is the last microbatch of the step
        _next      the next bucket to start in forward
        _back      buckets from here on have been started in backward
        _kept      buckets whose values stay for later microbatches
        _open      buckets in flight
        _ahead     those of them that were started ahead
        _notes     for each member of each bucket, how often backward will still read it
    """

    buckets: Sequence[Bucket]
    _last: bool = True
    _next: int = 0
    _back: int = 0
    _kept: set[int] = field(default_factory=set)
    _open: set[int] = field(default_factory=set)
    _ahead: set[int] = field(default_factory=set)
    _notes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin(True, keep=False)

    def ahead(self) -> tuple[int, ...]:
        """Called before the first microbatch of a step: the buckets to start now, in this order.

        These are gathered once a step, by one step, so that nothing is waited for.
        """
        self._ahead = {b for b, one in enumerate(self.buckets)
                       if len(one.steps) == 1 and not (one.per_microbatch or one.regather or one.once)}
        return tuple(sorted(self._ahead))

    def is_ahead(self, b: int) -> bool:
        """Whether bucket b was started ahead, and was not taken yet."""
        return b in self._ahead

    def begin(self, last: bool, keep: bool = True) -> None:
        """Called before a microbatch, the `last` of a step or not; without `keep`, forgets all earlier ones."""
        self._last, self._next, self._back = last, 0, len(self.buckets)
        self._kept, self._ahead = (self._kept, self._ahead) if keep else (set(), set())
        self._open = set()
        self._notes = [[0] * len(bucket.members) for bucket in self.buckets]

    def take(self, b: int) -> Take:
        """Called when the program takes bucket b for its first reader."""
        starts = []
        while self._next < len(self.buckets) and self._next <= b + PREFETCH:
            if self._next not in self._kept and self._next not in self._ahead:
                starts.append(self._next)
            self._next += 1
        self._open.update(starts)
        waits = b not in self._kept
        self._open.discard(b)
        self._ahead.discard(b)
        keeps = not (self._last or self.buckets[b].per_microbatch)
        (self._kept.add if keeps else self._kept.discard)(b)
        return Take(tuple(starts), waits, keeps)

    def note(self, b: int, k: int) -> None:
        """Notes that backward will read member k of bucket b once more."""
        self._notes[b][k] += 1

    def read(self, b: int) -> Take:
        """Called when backward reads from bucket b, which is gathered again."""
        starts = []
        while self._back > max(0, b - PREFETCH):
            self._back -= 1
            if any(self._notes[self._back]):
                starts.append(self._back)
        self._open.update(starts)
        waits = b in self._open
        self._open.discard(b)
        return Take(tuple(starts), waits)

    def release(self, b: int, k: int) -> bool:
        """Called when backward has read member k of bucket b; returns whether that was its last note."""
        self._notes[b][k] -= 1
        return not self._notes[b][k]


@dataclass(slots=True)
class ReduceProtocol:
    """The reductions of one rank's step, by the position of a bucket in the order of reduction.

        buckets    the buckets, in that order
        _last      whether this is the last microbatch of the step
        _due       the buckets that this backward reduces
        _next      position in `_due` of the next bucket to start
        _more      the buckets that were started and have steps left
        _freeing   the buckets that were started, and free memory once they are waited for
        _left      gradients that have not come yet, for each bucket
        _at        the next step, for each bucket
        _open      whether a step is in flight, for each bucket
        _frees     whether waiting for its last step frees memory, for each bucket
    """

    buckets: Sequence[Bucket]
    _last: bool = True
    _due: list[int] = field(default_factory=list)
    _next: int = 0
    _more: list[int] = field(default_factory=list)
    _freeing: list[int] = field(default_factory=list)
    _left: list[int] = field(default_factory=list)
    _at: list[int] = field(default_factory=list)
    _open: list[bool] = field(default_factory=list)
    _frees: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._frees = [frees_memory(bucket) for bucket in self.buckets]
        self.begin(True)

    def begin(self, last: bool) -> None:
        """Called before a microbatch, the `last` of a step or not."""
        self._last, self._due = last, [b for b, one in enumerate(self.buckets) if last or one.per_microbatch]
        self._next, self._more, self._freeing = 0, [], []
        self._left = [len(bucket.members) for bucket in self.buckets]
        self._at = [0] * len(self.buckets)
        self._open = [False] * len(self.buckets)

    @property
    def due(self) -> Sequence[int]:
        """The buckets that this backward reduces."""
        return self._due

    @property
    def is_last(self) -> bool:
        """Whether this is the last microbatch of the step."""
        return self._last

    def is_due(self, b: int) -> bool:
        """Whether this backward reduces bucket b."""
        return self._last or self.buckets[b].per_microbatch

    def arrive(self, b: int) -> list[Advance]:
        """Called when one more gradient of bucket b is there."""
        self._left[b] -= 1
        found: list[Advance] = []
        while self._next < len(self._due) and self._left[self._due[self._next]] <= 0:
            found += self._start()
        return found

    def rest(self) -> Iterator[Advance | Fill]:
        """Called at the end of a backward: starts the rest."""
        while self._next < len(self._due):
            yield Fill(self._due[self._next])
            yield from self._start()

    def finish(self) -> Iterator[Advance | Fill]:
        """Called at the end of a backward, or behind `rest` at the end of a step.

        Starts the rest, then advances all until none has a step left.
        """
        yield from self.rest()
        more = True
        while more:
            more = False
            for b in self._due:
                advance = self._advance(b)
                more |= advance.step is not None
                yield advance

    def _start(self) -> list[Advance]:
        """Advances all buckets in flight by a step, in order, waits for those overdue, then starts the next."""
        new = self._due[self._next]
        more = [b for b in self._more if self._at[b] < self._length(b)]
        held = [b for b in self._freeing if self._open[b] or b in more]
        late = overdue_buckets(held, self._frees[new])
        self._next, self._more, self._freeing = self._next + 1, [*more, new], [*held, *([new] * self._frees[new])]
        return [*(self._advance(b) for b in sorted({*more, *late})), self._advance(new)]

    def _length(self, b: int) -> int:
        """Steps that bucket b takes in this microbatch."""
        return len(self.buckets[b].steps) + len(self.buckets[b].once) * self._last

    def _advance(self, b: int) -> Advance:
        waits, step = self._open[b], self._at[b] if self._at[b] < self._length(b) else None
        self._open[b] = step is not None
        self._at[b] += step is not None
        return Advance(b, waits, step)
