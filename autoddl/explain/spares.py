"""Plans for what is left of a cluster: its question is asked again on the largest parts with at most so many devices.

A part has at most as many children at every level as the cluster, and is regular, as a mesh needs it. Of 4 nodes with 8
devices, one of which is lost, the largest are 3 nodes of 8 and 4 nodes of 7. The fastest plan on any of these is taken;
it may use fewer devices still.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.explain.pareto import level_of_size
from autoddl.explain.run_seconds import told_like
from autoddl.planner.finish import answer_plan
from autoddl.planner.mesh_search import Progress
from autoddl.planner.question import whole_question_of

__all__ = ["largest_parts", "plan_for", "spare_plans"]


def plan_for(plan: Plan, devices: int, progress: Progress | None = None) -> Plan:
    """The fastest plan of the question of `plan` on a part of its cluster with at most `devices` of them.

    Raises Infeasible where no such plan fits, InputError where the plan does not keep its question."""
    asked = whole_question_of(plan)
    if asked.options.mesh is not None:
        asked = asked.asking(mesh=None)
    best: Plan | None = None
    problem: Infeasible | InputError = InputError(f"no part of {plan.cluster} with {devices} devices has a plan: its "
                                                  "stages, pins or topology allow none")
    text = plan.source.get("bare")
    parts = largest_parts(asked.cluster, devices)
    bare = largest_parts(parse_cluster(text, "the plan's cluster"), devices) if text else [None] * len(parts)
    for place, alone in zip(parts, bare, strict=True):
        try:
            found = answer_plan(replace(asked, cluster=place), plan, progress)
        except (Infeasible, InputError) as error:
            problem = error
            continue
        if best is None or found.predicted.seconds < best.predicted.seconds:
            best = told_like(plan, found, alone)
    if best is None:
        raise problem
    return best


def spare_plans(plan: Plan, lost: int, progress: Progress | None = None) -> tuple[Plan, ...]:
    """Plans for when 1, 2, ... `lost` devices are lost, the largest first; one that serves several comes once."""
    found: list[Plan] = []
    for devices in range(plan.mesh.size - 1, max(0, plan.mesh.size - lost - 1), -1):
        if not found or found[-1].mesh.size > devices:
            found.append(plan_for(plan, devices, progress))
    return tuple(found)


def largest_parts(cluster: Cluster, devices: int) -> Sequence[Cluster]:
    """The parts of a cluster with at most `devices` of them that lie in no other such part, the largest first."""
    sizes = [level.size for level in cluster.levels]
    fitting = [chosen for chosen in product(*(range(1, size + 1) for size in sizes)) if prod(chosen) <= devices]
    found = []
    for chosen in fitting:
        larger = ((*chosen[:i], n + 1, *chosen[i + 1:]) for i, n in enumerate(chosen) if n < sizes[i])
        if any(prod(one) <= devices for one in larger):
            continue
        try:
            levels = tuple(level_of_size(level, n) for level, n in zip(cluster.levels, chosen, strict=True))
        except InputError:  # a torus of another size is no part of this one
            continue
        found.append(replace(cluster, levels=levels))
    return sorted(found, key=lambda one: -one.size)
