"""Computes the peak of a choice's memory line, and the moment whose row comes closest to it.

The line of a plan (`schedule.memory_line`) is the memory of a rank as a step goes. Rows (`pricing.lifetimes`) are sums
over choices that lie below it. The line of a choice is drawn once (`Peaks`). The moment of its peak is one of the op at
which the line is highest, namely the one whose row is largest. The bucket size is chosen later (`bucket_size`). So
lines are drawn with one tensor a bucket, which needs the least memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autoddl.core.plan import Plan
from autoddl.core.problem import Solution
from autoddl.planner.assemble import assemble_choice, plan_of
from autoddl.pricing.build_problem import CostNetwork
from autoddl.pricing.lifetimes import KINDS, UPDATE, Moment
from autoddl.schedule.memory_line import predict_memory

__all__ = ["Peak", "Peaks", "draft_of"]

LEVEL = 1e-4
"""A moment that says more is taken if its bytes are so close, relatively, to the most."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a rank holds, and the op at which; None at the optimizer's update."""

    nbytes: float
    op: str | None


def draft_of(network: CostNetwork, choice: Sequence[int]) -> Plan:
    """The plan of a choice without proof, sample and origin: its layouts and conversions, one gradient a bucket."""
    pricing, options = network.resolve(choice)
    solution = Solution(options, 0.0, 0.0, 0.0, "", "")
    made = plan_of(assemble_choice(pricing, options, network.variables), pricing, solution, {
        "model": "", "bound": 0.0, "budget": 0.0, "candidates": 1, "sample": {}, "fingerprints": {},
        "source": {"cluster": pricing.cluster.name}})
    return replace(made, bucket_bytes=1)


@dataclass(frozen=True, eq=False)
class Peaks:
    """The peaks of the choices of one network, each drawn once."""

    network: CostNetwork
    _known: dict[tuple[int, ...], Peak] = field(default_factory=dict)

    def of(self, choice: Sequence[int]) -> Peak:
        """The peak of the memory line of `choice`."""
        key = tuple(choice)
        if key not in self._known:
            self._known[key] = self._drawn(key)
        return self._known[key]

    def _drawn(self, choice: tuple[int, ...]) -> Peak:
        pricing = self.network.pricing
        heap = predict_memory(draft_of(self.network, choice), pricing.graph, pricing.optimizer, pricing.cluster)
        here, nbytes = max(heap.line, key=lambda point: point[1])
        ops = pricing.graph.ops
        return Peak(nbytes, None if here == 2 * len(ops) else ops[here % len(ops)].name)

    def moment_of(self, choice: Sequence[int], row_bytes: Callable[[Sequence[int], Moment], float]) -> Moment:
        """The moment of the peak's op whose row has the most bytes under `choice`, by `row_bytes` of a moment."""
        at = self.of(choice).op
        if at is None:
            return UPDATE
        rows = {moment: row_bytes(choice, moment) for moment in (f"{kind} {at}" for kind in KINDS)}
        return next(moment for moment, nbytes in rows.items() if nbytes >= max(rows.values()) * (1 - LEVEL))

    @property
    def least(self) -> tuple[int, ...] | None:
        """The choice with the least peak of those drawn so far."""
        return min(self._known, key=lambda choice: self._known[choice].nbytes, default=None)

    @property
    def least_bytes(self) -> float:
        """The least peak drawn so far, infinite where there is none."""
        return min((peak.nbytes for peak in self._known.values()), default=inf)

    @property
    def drawn(self) -> tuple[tuple[int, ...], ...]:
        """The choices drawn so far."""
        return tuple(self._known)
