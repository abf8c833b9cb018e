"""Predicts the step of a plan with stages from the plan alone.

    foreseen_stages    seconds of stages and transfers, and the time line of the schedule
    ranks_text         the ranks of a part of the cluster, for labels
"""

from autoddl.core.errors import InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.planner.stage_plans import StagedStep, staged_step

__all__ = ["foreseen_stages", "ranks_text"]


def foreseen_stages(plan: Plan) -> StagedStep:
    """The predicted step of a plan with stages. Raises InputError for a plan that does not keep its graph."""
    if plan.pipeline is None or not {"graph", "cluster"} <= plan.source.keys():
        raise InputError("this plan does not keep the graph and the cluster that its stages were cut from: make it "
                         "again with `autoddl plan`")
    return staged_step(plan, graph_from_text(plan.source["graph"]),
                       parse_cluster(plan.source["cluster"], "the plan's cluster"))


def ranks_text(plan: Plan, part: int) -> str:
    """The ranks of a part of the cluster, by its place on the axis along which stages lie: `ranks 4-7`."""
    size = plan.mesh.size // plan.mesh.sizes[0]
    return f"rank {part}" if size == 1 else f"ranks {part * size}-{(part + 1) * size - 1}"
