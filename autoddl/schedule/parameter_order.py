"""When the runtime gathers parameters and reduces their gradients: `gather` and `reducer` on names instead of tensors.

    Gathers    bucket k is waited for by its first reader, which has started all up to k + PREFETCH
               what is gathered anew: backward's first reader waits for it, and has started PREFETCH buckets before it
    Reductions a bucket starts when its last gradient is there, but never before the one in front of it; one of several
               steps takes its next whenever a later bucket starts; few are under way at once (`in_flight`), and all
               are finished at the end of backward

Of several microbatches the buckets of `each` do this in every one; the others are gathered in the first, and reduced in
the last.
"""

from collections.abc import Mapping, Sequence

from autoddl.schedule.actions import Actions, Leg
from autoddl.schedule.buckets import PREFETCH, Bucket, ParameterEdge, frees, overdue

__all__ = ["Gathers", "Reductions"]


Edges = Mapping[str, ParameterEdge]


class Gathers:
    """`place`: the bucket of each parameter that is gathered."""

    def __init__(self, actions: Actions, edges: Edges, buckets: tuple[Bucket, ...]) -> None:
        self._actions, self._edges, self._buckets = actions, edges, buckets
        self.place = {fqn: b for b, bucket in enumerate(buckets) for fqn in bucket.members}
        self._held: set[int] = set()
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        """Before a microbatch."""
        self._open: dict[int, int | None] = {}
        self._first: dict[int, tuple[int, str]] = {}
        self._next, self._back, self._last = 0, len(self._buckets), last

    def _start(self, b: int, direction: str) -> None:
        """All steps but the last are waited for."""
        bucket = self._buckets[b]
        members = [self._edges[fqn] for fqn in bucket.members]
        legs = self._actions.legs(bucket.steps, [m.tensor for m in members], [m.conversion.source for m in members],
                                  direction, f"{bucket.members[0]} and {len(members) - 1} more")
        self._actions.run(legs[:-1])
        self._open[b] = self._actions.start(legs[-1])

    def take(self, fqn: str, i: int) -> None:
        """Op i reads `fqn`: the first reader of its bucket waits for it."""
        b = self.place[fqn]
        if b in self._first:
            return
        self._first[b] = i, fqn
        while self._next < len(self._buckets) and self._next <= b + PREFETCH:
            if self._next not in self._held:
                self._start(self._next, "forward")
            self._next += 1
        if b not in self._held:
            self._actions.wait(self._open.pop(b))
        if not self._last and not self._buckets[b].each:
            self._held.add(b)

    def read_back(self, fqns: set[str]) -> None:
        """Backward of an op that reads these parameters: those that are gathered again are needed now."""
        for b in sorted({self.place[fqn] for fqn in fqns if fqn in self.place}, reverse=True):
            if self._buckets[b].regather:
                while self._back > max(0, b - PREFETCH):
                    self._back -= 1
                    if self._buckets[self._back].regather:
                        self._start(self._back, "backward")
                if b in self._open:
                    self._actions.wait(self._open.pop(b))

    def handed_on(self, i: int, fqn: str) -> list[str]:
        """The gradients that arrive where op i read `fqn`: of its whole bucket, last first, if it was the first to read
        of it; of one that is not gathered, its own."""
        if fqn not in self.place:
            return [fqn]
        b = self.place[fqn]
        return [*reversed(self._buckets[b].members)] if self._first.get(b) == (i, fqn) else []


class Reductions:
    """Per bucket its steps, the next of them, the one under way, and how many gradients are missing."""

    def __init__(self, actions: Actions, edges: Edges, buckets: tuple[Bucket, ...]) -> None:
        self._actions, self._edges, self._buckets = actions, edges, buckets
        self._place = {fqn: b for b, bucket in enumerate(buckets) for fqn in bucket.members}
        self._paths = [self._path(bucket) for bucket in buckets]
        self._frees = [frees(bucket) for bucket in buckets]
        self.begin(last=True)

    def _path(self, bucket: Bucket) -> tuple[Leg, ...]:
        members = [self._edges[fqn] for fqn in bucket.members]
        starts = [m.conversion.gradient or m.conversion.target for m in members]
        return self._actions.legs(bucket.steps, [m.tensor for m in members], starts, "backward",
                                  f"the gradients of {bucket.members[0]} and {len(members) - 1} more")

    def begin(self, last: bool) -> None:
        """Before a microbatch."""
        self._due = [b for b, bucket in enumerate(self._buckets) if last or bucket.each]
        self._next, self._left = 0, [len(bucket.members) for bucket in self._buckets]
        self._at, self._open = [0] * len(self._buckets), list[int | None]([None] * len(self._buckets))

    def add(self, fqns: Sequence[str]) -> None:
        """These gradients are there."""
        for fqn in fqns:
            edge = self._edges.get(fqn)
            if fqn in self._place:
                self._left[self._place[fqn]] -= 1
                while self._next < len(self._due) and self._left[self._due[self._next]] <= 0:
                    self._start()
            elif edge is not None and edge.tensor.trained and edge.conversion.gradient is not None:
                self._actions.run(self._actions.legs(edge.backward, [edge.tensor], [edge.conversion.gradient],
                                                     "backward", fqn))

    def _start(self) -> None:
        earlier, new = self._due[:self._next], self._due[self._next]
        more = {b for b in earlier if self._at[b] < len(self._paths[b])}
        late = overdue([b for b in earlier if self._frees[b] and (b in more or self._open[b] is not None)],
                       self._frees[new])
        for b in earlier:
            if b in more or b in late:
                self._advance(b)
        self._advance(new)
        self._next += 1

    def _advance(self, b: int) -> bool:
        """Wait for the step under way and start the next; False when there is none."""
        self._actions.wait(self._open[b])
        self._open[b] = None
        if self._at[b] == len(self._paths[b]):
            return False
        self._open[b] = self._actions.start(self._paths[b][self._at[b]])
        self._at[b] += 1
        return True

    def finish(self) -> None:
        """The end of a backward."""
        while self._next < len(self._due):
            self._start()
        while sum(self._advance(b) for b in self._due):
            pass
