"""When buckets of parameters are gathered and their gradients reduced: one state machine, run by three interpreters.

The runtime runs it on tensors (`runtime.parameter_gather`, `runtime.gradient_reducer`), the time line on names
(`parameter_order`) and the memory line on bytes (`memory_gathers`, `memory_reductions`). It is told what happens and
answers with what to do now; it starts nothing itself, and depends on no time, so every rank does the same in every run.

    forward     taking bucket b waits for it, and has started all up to b + PREFETCH
    between     a bucket that is regathered keeps nothing but notes of where backward will read it
    backward    the first read of bucket b waits for it, and has started PREFETCH buckets before it
    reduce      a bucket starts when its last gradient is there, but never before the one in front of it; one of several
                steps takes its next step whenever a later bucket starts; few are under way at once (`overdue`)
    finish      all that are due are started, and advanced in turn until none has a step left

Of several microbatches every one does this for the buckets that are converted per microbatch; the others are gathered
in the first, kept until the last has taken them, and reduced in the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autoddl.schedule.buckets import PREFETCH, Bucket, frees, overdue

__all__ = ["Advance", "Fill", "GatherProtocol", "ReduceProtocol", "Take"]


class Take(NamedTuple):
    """What taking or reading a bucket asks for."""

    starts: tuple[int, ...]
    """Buckets to start now, in this order."""
    waits: bool
    """Whether the bucket is under way and must be waited for."""
    keeps: bool = False
    """Whether what was gathered stays for later microbatches."""


class Advance(NamedTuple):
    """One move of a bucket of gradients."""

    bucket: int
    waits: bool
    """Whether a step of it is under way and must be waited for."""
    step: int | None
    """The step to start then; None: there is none left."""


class Fill(NamedTuple):
    """Gradients of a bucket that backward did not yield count as zeros."""

    bucket: int


@dataclass(slots=True)
class GatherProtocol:
    """The gathers of one rank's step, by the position of a bucket in the order of first use."""

    buckets: Sequence[Bucket]
    _last: bool = True
    _next: int = 0
    _back: int = 0
    _kept: set[int] = field(default_factory=set)
    _open: set[int] = field(default_factory=set)
    _notes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin(True, keep=False)

    def begin(self, last: bool, keep: bool = True) -> None:
        """Before a microbatch, the `last` of a step or not; without `keep` nothing of an earlier one is left."""
        self._last, self._next, self._back = last, 0, len(self.buckets)
        self._kept = self._kept if keep else set()
        self._open = set()
        self._notes = [[0] * len(bucket.members) for bucket in self.buckets]

    def take(self, b: int) -> Take:
        """The program takes bucket b for its first reader."""
        starts = []
        while self._next < len(self.buckets) and self._next <= b + PREFETCH:
            if self._next not in self._kept:
                starts.append(self._next)
            self._next += 1
        self._open.update(starts)
        waits = b not in self._kept
        self._open.discard(b)
        keeps = not (self._last or self.buckets[b].per_microbatch)
        (self._kept.add if keeps else self._kept.discard)(b)
        return Take(tuple(starts), waits, keeps)

    def note(self, b: int, k: int) -> None:
        """Backward will read member k of bucket b once more."""
        self._notes[b][k] += 1

    def read(self, b: int) -> Take:
        """Backward reads from bucket b, which is regathered."""
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
        """Backward has read member k of bucket b; whether that was the last note of it."""
        self._notes[b][k] -= 1
        return not self._notes[b][k]


@dataclass(slots=True)
class ReduceProtocol:
    """The reductions of one rank's step, by the position of a bucket in the order of reduction."""

    buckets: Sequence[Bucket]
    _last: bool = True
    _due: list[int] = field(default_factory=list)
    _next: int = 0
    _left: list[int] = field(default_factory=list)
    _at: list[int] = field(default_factory=list)
    _open: list[bool] = field(default_factory=list)
    _frees: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._frees = [frees(bucket) for bucket in self.buckets]
        self.begin(True)

    def begin(self, last: bool) -> None:
        """Before a microbatch, the `last` of a step or not."""
        self._last, self._due = last, [b for b, one in enumerate(self.buckets) if last or one.per_microbatch]
        self._next = 0
        self._left = [len(bucket.members) for bucket in self.buckets]
        self._at = [0] * len(self.buckets)
        self._open = [False] * len(self.buckets)

    @property
    def due(self) -> Sequence[int]:
        """The buckets that this backward reduces."""
        return self._due

    def is_due(self, b: int) -> bool:
        """Whether this backward reduces bucket b."""
        return self._last or self.buckets[b].per_microbatch

    def arrive(self, b: int) -> list[Advance]:
        """One more gradient of bucket b is there."""
        self._left[b] -= 1
        found: list[Advance] = []
        while self._next < len(self._due) and self._left[self._due[self._next]] <= 0:
            found += self._start()
        return found

    def finish(self) -> Iterator[Advance | Fill]:
        """The end of a backward: start what is left, then advance all until none has a step left."""
        while self._next < len(self._due):
            yield Fill(self._due[self._next])
            yield from self._start()
        more = True
        while more:
            more = False
            for b in self._due:
                advance = self._advance(b)
                more |= advance.step is not None
                yield advance

    def _start(self) -> list[Advance]:
        """One step of everything under way, in order, and an end of what is overdue; then the next bucket's first."""
        earlier, new = self._due[:self._next], self._due[self._next]
        more = {b for b in earlier if self._at[b] < len(self.buckets[b].steps)}
        late = overdue([b for b in earlier if self._frees[b] and (b in more or self._open[b])], self._frees[new])
        self._next += 1
        return [*(self._advance(b) for b in earlier if b in more or b in late), self._advance(new)]

    def _advance(self, b: int) -> Advance:
        waits, step = self._open[b], self._at[b] if self._at[b] < len(self.buckets[b].steps) else None
        self._open[b] = step is not None
        self._at[b] += step is not None
        return Advance(b, waits, step)
