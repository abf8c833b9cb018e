"""Says what each mesh axis splits: the bytes of the parameters, and the results of the operators.

    parameters   bytes of the parameters that are stored split along the axis, as a fraction of all parameters' bytes
    results      numbers of operators' results by their state along the axis: `S(0)`, `B`, `P`
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autoddl.core.graph import Kind, graph_from_text
from autoddl.core.hubs import HUB
from autoddl.core.layout import Split
from autoddl.core.plan import Plan

__all__ = ["AxisSplit", "axis_splits"]


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """The splits along one mesh axis."""

    axis: str
    """Name of the axis."""
    size: int
    """Its number of ranks."""
    level: str
    """The level of the cluster in which it lies; empty for an axis of one rank."""
    parameters: float | None
    """Fraction of the parameters' bytes that is stored split along it; None where the plan does not keep its graph."""
    results: Mapping[str, int]
    """Numbers of operators' results by their state along it."""


def axis_splits(plan: Plan) -> tuple[AxisSplit, ...]:
    """The splits along each axis of a plan without stages, outermost first."""
    sizes = _bytes(plan)
    found = []
    for a, axis in enumerate(plan.mesh.axes):
        states = Counter(str(layout[a]) for one in plan.decisions if one.target != HUB for layout in one.outputs)
        split = sum(sizes.get(one.fqn, 0.0) for one in plan.stored if isinstance(one.layout[a], Split))
        share = split / sum(sizes.values()) if sizes else None
        found.append(AxisSplit(axis.name, axis.size, plan.levels.get(axis.name, ""), share,
                               dict(sorted(states.items(), key=lambda pair: -pair[1]))))
    return tuple(found)


def _bytes(plan: Plan) -> dict[str, float]:
    """Bytes of every parameter by name; empty where the plan does not keep its graph."""
    if "graph" not in plan.source:
        return {}
    return {t.fqn: float(prod(t.shape) * t.stored.itemsize) for t in graph_from_text(plan.source["graph"]).tensors
            if t.kind is Kind.PARAMETER}
