"""Adds the parameters' collectives to the actions of a step: the parameter protocol on names and seconds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoddl.core.conversion import Step
from autoddl.schedule.actions import Actions, Leg
from autoddl.schedule.buckets import Bucket, ParameterEdge
from autoddl.schedule.parameter_protocol import Advance, Fill, GatherProtocol, ReduceProtocol

__all__ = ["TimedGathers", "TimedReductions"]

Edges = Mapping[str, ParameterEdge]


class TimedGathers:
    """Writes gathers as actions; `place` is the bucket of each parameter that is gathered."""

    def __init__(self, actions: Actions, edges: Edges, buckets: tuple[Bucket, ...]) -> None:
        self._actions, self._edges, self._buckets = actions, edges, buckets
        self.place = {fqn: b for b, bucket in enumerate(buckets) for fqn in bucket.members}
        self._protocol = GatherProtocol(buckets)
        self._weights = set[int]()
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        """Before a microbatch, the `last` of the step or not."""
        self._open: dict[int, int | None] = {}
        self._first: dict[int, tuple[int, str]] = {}
        self._protocol.begin(last)

    def _start(self, b: int, direction: str) -> None:
        """Starts the gather of bucket b; all its steps but the last are waited for."""
        bucket = self._buckets[b]
        members = [self._edges[fqn] for fqn in bucket.members]
        if not (bucket.once and b in self._weights):
            for m in members:
                self._actions.cast(m.tensor.stored, m.tensor, [m.conversion.source], m.tensor.fqn)
            self._actions.run(self._legs(bucket, bucket.once, members, direction))
            self._weights.add(b)
        legs = self._legs(bucket, bucket.steps, members, direction)
        self._actions.run(legs[:-1])
        self._open[b] = self._actions.start(legs[-1])

    def _legs(self, bucket: Bucket, steps: tuple[Step, ...], members: Sequence[ParameterEdge], direction: str
              ) -> tuple[Leg, ...]:
        return self._actions.legs(steps, [m.tensor for m in members], [m.gather_start(bucket, steps) for m in members],
                                  direction, f"{bucket.members[0]} and {len(members) - 1} more")

    def take(self, fqn: str, i: int) -> None:
        """Called when op i reads `fqn`: the first reader of its bucket waits for it."""
        b = self.place[fqn]
        if b in self._first:
            return
        self._first[b] = i, fqn
        asked = self._protocol.take(b)
        for other in asked.starts:
            self._start(other, "forward")
        if asked.waits:
            self._actions.wait(self._open.pop(b))
        if self._buckets[b].regather:
            self._protocol.note(b, 0)

    def read_back(self, fqns: set[str]) -> None:
        """Called in backward of an op that reads these parameters: waits for those that are gathered again."""
        for b in sorted({self.place[fqn] for fqn in fqns if fqn in self.place}, reverse=True):
            if self._buckets[b].regather:
                asked = self._protocol.read(b)
                for other in asked.starts:
                    self._start(other, "backward")
                if asked.waits:
                    self._actions.wait(self._open.pop(b))

    def handed_on(self, i: int, fqn: str) -> list[str]:
        """Names of the parameters whose gradients arrive where op i read `fqn`.

        The first reader of a bucket has those of the whole bucket, last first, later readers none. A parameter that is
        not gathered has its own.
        """
        if fqn not in self.place:
            return [fqn]
        b = self.place[fqn]
        return [*reversed(self._buckets[b].members)] if self._first.get(b) == (i, fqn) else []


class TimedReductions:
    """Writes reductions as actions."""

    def __init__(self, actions: Actions, edges: Edges, buckets: tuple[Bucket, ...]) -> None:
        self._actions, self._edges, self._buckets = actions, edges, buckets
        self._place = {fqn: b for b, bucket in enumerate(buckets) for fqn in bucket.members}
        self._paths = [self._path(bucket) for bucket in buckets]
        self._added = {fqn: edge.added for fqn, edge in edges.items() if edge.added is not None}
        self._protocol = ReduceProtocol(buckets)
        self.begin(0, last=True)

    def _path(self, bucket: Bucket) -> tuple[Leg, ...]:
        members = [self._edges[fqn] for fqn in bucket.members]
        starts = [m.gradient_start(bucket, bucket.steps) for m in members]
        origin = f"the gradients of {bucket.members[0]} and {len(members) - 1} more"
        return _of_reduction(self._actions.legs((*bucket.steps, *bucket.once),
                                                [m.tensor.gradient for m in members], starts, "backward", origin))

    def begin(self, part: int, last: bool) -> None:
        """Before microbatch `part`, the `last` of the step or not."""
        self._part = part
        self._protocol.begin(last)
        self._open: dict[int, int | None] = {}

    def add(self, fqns: Sequence[str]) -> None:
        """Called when the gradients of these parameters are there."""
        for fqn in fqns:
            edge = self._edges.get(fqn)
            if edge is None or not edge.tensor.trained or edge.conversion.gradient is None:
                continue
            tensor, start = edge.tensor, edge.conversion.gradient
            self._actions.cast(tensor, tensor.gradient, [start], f"gradient of {fqn}")
            if fqn in self._place:
                if not self._buckets[self._place[fqn]].per_microbatch:
                    self._add_up([fqn])
                self._do(self._protocol.arrive(self._place[fqn]))
            else:
                legs = self._actions.legs(edge.backward, [tensor.gradient], [start], "backward", fqn)
                self._actions.run(_of_reduction(legs))
                self._add_up([fqn])

    def finish(self) -> None:
        """Called at the end of a backward: reduces everything that is left, and adds up what the steps came to."""
        self._do(self._protocol.finish())
        for b in self._protocol.due:
            bucket = self._buckets[b]
            if bucket.per_microbatch and not (bucket.once and self._protocol.is_last):
                self._add_up(bucket.members)

    def _add_up(self, fqns: Sequence[str]) -> None:
        """Adds gradients to those of earlier microbatches, where there are any."""
        for fqn in fqns if self._part else ():
            self._actions.add_up(self._edges[fqn].tensor, self._added[fqn], fqn)

    def _do(self, asked: Iterable[Advance | Fill]) -> None:
        for one in asked:
            if isinstance(one, Advance):
                self._actions.wait(self._open.pop(one.bucket, None))
                bucket = self._buckets[one.bucket]
                if bucket.once and one.step == len(bucket.steps):
                    self._add_up(bucket.members)
                if one.step is not None:
                    self._open[one.bucket] = self._actions.start(self._paths[one.bucket][one.step])


def _of_reduction(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """The steps as those of a reduction, all of whose seconds wait for W."""
    return tuple(replace(leg, late=leg.seconds, reduces=True) for leg in legs)
