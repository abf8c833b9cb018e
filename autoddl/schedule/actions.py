"""Actions of a rank: the items of the list that `issue_order` writes, and the conversions that become such items.

    Compute(name, seconds)    an op, or a local step of a conversion        Pass(name)   a pass begins
    Start(sent, seconds)      a collective is handed over                   Wait(k)      for the k-th that was started
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from autoddl.core.conversion import COLLECTIVES, Step, group_size, step_sizes
from autoddl.core.graph import Kind, Tensor
from autoddl.core.layout import Layout, local_shape
from autoddl.cost_models import MESSAGE_ALGORITHMS, collective, wire_seconds
from autoddl.pricing.price import Pricing, add_seconds, cast_seconds, left_seconds
from autoddl.schedule.traffic import PlannedCollective

__all__ = ["ADDED", "Action", "Actions", "Compute", "Leg", "Pass", "Start", "Wait"]


@dataclass(frozen=True, slots=True)
class Compute:
    """An op, or a local step of a conversion, with its seconds; `late` and `reduces` are as of Start."""

    name: str
    seconds: float
    late: float = 0.0
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is handed over.

        sent           the collective
        seconds        seconds until it is done, while the rank does nothing else
        host           those of them that it takes of the rank's own CPU, where that was timed
        busy           seconds more if the rank computes all the while
        drag           seconds that this computation loses besides `host`
        by_messages    whether it runs by messages of the runtime; else it is a collective of the library
        wire           seconds for which its bytes keep the links busy
        late           seconds that wait for W where a schedule splits backward: those of gradients of parameters
        reduces        whether it is a step of the reduction of a parameter's gradient
        coding         seconds in which the rank codes before, and decodes when it has waited
    """

    sent: PlannedCollective
    seconds: float
    host: float = 0.0
    busy: float = 0.0
    drag: float = 0.0
    by_messages: bool = False
    wire: float = 0.0
    late: float = 0.0
    reduces: bool = False
    coding: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits for the k-th collective that it started."""

    k: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass begins, "forward" or "backward"."""

    name: str


ADDED = "add gradient of"
"""Begins the names of computations that add a gradient to those of earlier microbatches."""

Action = Compute | Start | Wait | Pass
Leg = Compute | Start
"""A step of a conversion."""


@dataclass(slots=True)
class Actions:
    """The actions so far, of the rank at coordinate `at`.

        pricing        prices every step
        at             coordinate of the rank
        as_searched    whether a parameter has its share of the collectives of a full bucket, as the search prices it
        adds           the part that counts of every addition of a gradient to those of earlier microbatches
        done           the actions
        started        number of collectives started
        coded          by number, those in flight whose values are decoded behind the wait
    """

    pricing: Pricing
    at: tuple[int, ...]
    as_searched: bool = False
    adds: float = 1.0
    done: list[Action] = field(default_factory=list)
    started: int = 0
    coded: dict[int, Start] = field(default_factory=dict)

    def start(self, leg: Leg) -> int | None:
        """Appends a step; returns the number of a collective, None for a local step, which is done at once."""
        if isinstance(leg, Start) and leg.coding[0]:
            self.done.append(Compute(f"code {leg.sent.origin}", leg.coding[0]))
            self.coded[self.started] = leg
        self.done.append(leg)
        self.started += isinstance(leg, Start)
        return self.started - 1 if isinstance(leg, Start) else None

    def wait(self, k: int | None) -> None:
        """Appends the wait for collective k, if it is one, and the decoding of what it brought."""
        if k is not None:
            self.done.append(Wait(k))
            if k in self.coded:
                leg = self.coded.pop(k)
                self.done.append(Compute(f"decode {leg.sent.origin}", leg.coding[1]))

    def run(self, legs: Sequence[Leg]) -> None:
        """Appends steps one after the other, each waited for."""
        for leg in legs:
            self.wait(self.start(leg))

    def leg(self, direction: str, kind: str, axes: tuple[int, ...], nbytes: int, origin: str) -> Start:
        """The start of a collective on a full buffer of `nbytes`, priced."""
        price = collective(self.pricing.cluster, kind, self.pricing.group(axes), float(nbytes))
        names = "+".join(self.pricing.mesh.names[a] for a in axes)
        wire = wire_seconds(self.pricing.cluster, kind, self.pricing.group(axes), float(nbytes))
        sent = PlannedCollective(direction, kind, names, nbytes, origin)
        return Start(sent, price.seconds, price.host, price.busy, price.drag, price.algorithm in MESSAGE_ALGORITHMS,
                     wire)

    def cast(self, source: Tensor, target: Tensor, layouts: Sequence[Layout], origin: str) -> None:
        """Appends the cast of the smallest piece of several layouts, if the dtypes differ."""
        pieces = [local_shape(source.shape, layout, self.pricing.mesh, self.at) for layout in layouts]
        seconds = cast_seconds(self.pricing, source, target, min(map(prod, pieces)))
        if seconds:
            self.done.append(Compute(f"cast {origin}", seconds))

    def add_up(self, tensor: Tensor, layout: Layout, origin: str) -> None:
        """Appends the addition of a gradient to the sum of those of earlier microbatches, in a layout."""
        elements = prod(local_shape(tensor.shape, layout, self.pricing.mesh, self.at))
        seconds = self.adds * add_seconds(self.pricing, tensor, elements)
        if seconds:
            self.done.append(Compute(f"{ADDED} {origin}", seconds, seconds))

    def legs(self, steps: Sequence[Step], tensors: Sequence[Tensor], starts: Sequence[Layout], direction: str,
             origin: str, beside: float = 0.0) -> tuple[Leg, ...]:
        """The `steps` on `tensors` that begin in the layouts `starts`, each step one collective over all of them.

        They are sent `beside` a computation of so many seconds.
        """
        found = list[Leg]()
        price = self.pricing.bucket_seconds if tensors[0].kind is Kind.PARAMETER else self.pricing.step_seconds
        each = [step_sizes(tuple(steps), t.shape, t.itemsize, start, self.pricing.mesh, self.at)
                for t, start in zip(tensors, starts, strict=True)]
        for k, step in enumerate(steps):
            full, touched = sum(one[k][0] for one in each), sum(one[k][1] for one in each)
            size = tensors[0].itemsize
            if step.kind in COLLECTIVES:
                kind, nbytes = step.sends(group_size(step, self.pricing.mesh), full, size)
                leg = self.leg(direction, kind, step.axes, nbytes, origin)
                leg = replace(leg, seconds=left_seconds(step.kind, leg.seconds, beside)) if beside else leg
                if self.as_searched and tensors[0].kind is Kind.PARAMETER:
                    leg = replace(leg, seconds=sum(self.pricing.bucket_seconds(step, *one[k], size) for one in each))
                else:
                    leg = replace(leg, coding=self.pricing.coding(step, full, size))
                found.append(leg)
            else:
                found.append(Compute(f"{step.kind} {origin}", price(step, full, touched)))
        return tuple(found)
