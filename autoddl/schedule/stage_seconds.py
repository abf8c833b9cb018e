"""Takes the seconds of a stage of a pipeline apart: of each microbatch, and those that come once a step.

    forward, backward     of a microbatch between the first and the last, which neither gathers nor reduces what is kept
    weight                those of backward that wait for W, where a schedule splits it: gradients of weights
    gather                seconds that forward of the first microbatch takes more
    reduce                seconds that backward of the last microbatch takes more
    update                of the optimizer

The first of m microbatches has no gradients to add its own to. Each backward has (m - 1) / m of an addition: the mean.

One microbatch is the first and the last. All its reductions of gradients are `reduce`, as the search counts them
(`pricing.edge_tables`).

Seconds are sums over the actions of `issue_order`, each as long as it takes alone: as the search prices them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autoddl.core.graph import Graph
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.schedule.actions import Action, Compute, Pass, Start
from autoddl.schedule.issue_order import list_actions

__all__ = ["stage_seconds"]

PARTS = 3
"""Microbatches that are looked at: the first, one between, and the last."""


def stage_seconds(plan: Plan, graph: Graph, cluster: Cluster, splits: bool = False) -> StageSeconds:
    """The seconds of a stage; `splits` says whether its schedule splits backward into B and W.

    `graph` is the planned one of a microbatch, `cluster` that of the stage's ranks.
    """
    first, between, last = _first_between_last(plan, graph, cluster)
    weight = between.late if splits else 0.0
    return StageSeconds(between.forward, between.backward - weight, weight, max(0.0, first.forward - between.forward),
                        max(0.0, last.backward - between.backward), plan.predicted.update)


class _Seconds(NamedTuple):
    """Seconds of a microbatch: its forward and backward, those of it that wait for W, and that reduce gradients."""

    forward: float
    backward: float
    late: float
    reduced: float

    @property
    def unreduced(self) -> "_Seconds":
        """Those of it without any reduction."""
        return _Seconds(self.forward, self.backward - self.reduced, self.late - self.reduced, 0.0)


def _first_between_last(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[_Seconds, _Seconds, _Seconds]:
    """The seconds of the first microbatch, of one between, and of the last, which may be the first."""
    adds = (plan.microbatches - 1) / plan.microbatches
    first, between, last = _passes(list_actions(replace(plan, microbatches=PARTS), graph, cluster, as_searched=True,
                                                adds=adds))
    if plan.microbatches > 1:
        return first, between, last
    alone, = _passes(list_actions(plan, graph, cluster, as_searched=True))
    return alone, alone.unreduced._replace(forward=between.forward), alone


def _passes(actions: Sequence[Action]) -> list[_Seconds]:
    """The seconds of every microbatch."""
    every = list[list[float]]()
    for action in actions:
        if isinstance(action, Pass):
            every.append([0.0, 0.0, 0.0])
        elif isinstance(action, Compute | Start):
            for k, seconds in enumerate((action.seconds, action.late, action.seconds * action.reduces)):
                every[-1][k] += seconds
    return [_Seconds(forward[0], *backward) for forward, backward in zip(every[::2], every[1::2], strict=True)]
