"""Takes the seconds of a stage of a pipeline apart: of each microbatch, and those that come once a step.

    forward, backward     of a microbatch between the first and the last, which neither gathers nor reduces what is kept
    weight                those of backward that wait for W, where a schedule splits it: gradients of weights
    gather                seconds that forward of the first microbatch takes more
    reduce                seconds that backward of the last microbatch takes more
    update                of the optimizer

The first of m microbatches has no gradients to add its own to. Each backward has (m - 1) / m of an addition: the mean.

Seconds are sums over the actions of `issue_order`, each as long as it takes alone: as the search prices them.
"""

from collections.abc import Sequence
from dataclasses import replace

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
    adds = (plan.microbatches - 1) / plan.microbatches
    actions = list_actions(replace(plan, microbatches=PARTS), graph, cluster, as_searched=True, adds=adds)
    (first, _, _), (forward, backward, late), (_, last, _) = _passes(actions)
    weight = late if splits else 0.0
    return StageSeconds(forward, backward - weight, weight, max(0.0, first - forward), max(0.0, last - backward),
                        plan.predicted.update)


def _passes(actions: Sequence[Action]) -> list[tuple[float, float, float]]:
    """(forward, backward, those of backward that wait for W) seconds of every microbatch."""
    sums, late = list[float](), list[float]()
    for action in actions:
        if isinstance(action, Pass):
            sums.append(0.0)
            late.append(0.0)
        elif isinstance(action, Compute | Start):
            sums[-1] += action.seconds
            late[-1] += action.late
    return list(zip(sums[::2], sums[1::2], late[1::2], strict=True))
