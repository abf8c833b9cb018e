"""Prices a configuration: the best plan that has its degrees, pipeline, microbatches and recomputation.

A configuration is a region of the space of plans. Its degrees become axes of a mesh, innermost last, cut where
they straddle levels of the cluster. Each axis has the role of its degree (`planner.strategies`). Everything
that roles leave open is free, as for every named strategy, so a configuration is priced at its best.

    task_of_plan    the task that a plan answers, from the plan alone
    meshes_of       meshes with roles for a configuration
    price_configuration    the best plan of a configuration
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from autoddl.api import Progress, plan_among
from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.graph import graph_from_text, graph_to_text
from autoddl.core.layout import Axis, Mesh
from autoddl.core.pipeline_schedules import splits_backward
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.export.configuration import DATA_ROLES, Configuration, Degree
from autoddl.export.subject import Subject
from autoddl.planner.candidates import Candidate, under_policies
from autoddl.planner.meshes import check_mesh
from autoddl.planner.options import PlanOptions
from autoddl.planner.pins import region_of
from autoddl.planner.pipelines.pipeline_search import plan_of_cut
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged, stage_cluster
from autoddl.planner.pipelines.tried_cuts import try_cut
from autoddl.planner.question import Question, question_of, task_of_question
from autoddl.planner.task import PlanTask

__all__ = ["RoledMesh", "meshes_of", "price_configuration", "task_of_plan"]

NAMES: Mapping[str, str] = {"tensor": "tp", "context": "cp"}
"""Names of axes by role; those that split the batch are dp."""


@dataclass(frozen=True, slots=True)
class RoledMesh:
    """A mesh whose axes have roles, by name of the axis."""

    mesh: Mesh
    roles: Mapping[str, str]


def task_of_plan(plan: Plan) -> PlanTask:
    """The task that a plan answers, with or without stages. Raises InputError for a plan that does not keep it."""
    if plan.pipeline is None:
        task = task_of_question(question_of(plan))
    else:
        source = plan.source
        options = PlanOptions(budget=plan.budget, optimizer=source["optimizer"], precision=plan.precision,
                              microbatches=(plan.microbatches,))
        task = task_of_question(Question(graph_from_text(source["graph"]),
                                         parse_cluster(source["cluster"], "the plan's cluster"), options,
                                         plan.microbatches))
    return replace(task, about={"model": plan.model, "factory": plan.factory}, spec=plan.sample)


def meshes_of(given: Configuration, cluster: Cluster) -> tuple[RoledMesh, ...]:
    """Meshes of a part of the cluster with the roles of a configuration, the one with fewest axes first.

    Raises InputError where degrees do not fit the levels of the cluster.
    """
    found: dict[Mesh, RoledMesh] = {}
    for fine in (False, True):
        pieces = [*_pieces(given.degrees, cluster, fine)]
        names = _names([one.role for one in pieces])
        mesh = Mesh(tuple(Axis(name, one.size) for name, one in zip(names, pieces, strict=True)) or (Axis("one", 1),))
        roles = {name: _role(one.role, given) for name, one in zip(names, pieces, strict=True)} or {"one": "data"}
        found.setdefault(check_mesh(mesh, cluster), RoledMesh(mesh, roles))
    return tuple(found.values())


def _role(role: str, given: Configuration) -> str:
    """The role of an axis as `strategies` has it: ranks that split the sequence store parameters as those around do."""
    if role == "tensor":
        return "split tensor" if given.sequence else "whole tensor"
    if role != "context":
        return role
    return f"context {next((one.role for one in reversed(given.degrees) if one.role in DATA_ROLES), 'data')}"


def _names(roles: Sequence[str]) -> list[str]:
    """`dp`, or `dp.1`, `dp.0` where several axes split the batch."""
    words = [NAMES.get(role, "dp") for role in roles]
    return [word if words.count(word) == 1 else f"{word}.{words[i + 1:].count(word)}" for i, word in enumerate(words)]


def _pieces(degrees: Sequence[Degree], cluster: Cluster, fine: bool) -> Iterator[Degree]:
    """Yields degrees, outermost first, cut where they straddle levels; with `fine` at every level that they span."""
    made: list[Degree] = []
    stride, levels = 1, [n for n in cluster.units if n > 1]
    for one in reversed(degrees):
        left = one.size
        while left > 1:
            end = next((unit for unit in levels if unit > stride), stride)
            room = end // stride if end % stride == 0 else 0
            whole = not fine and (stride == 1 or stride in levels) and stride * left in levels
            take = left if whole else gcd(left, room)
            if take < 2 or (take < left and take < room):
                sizes = ", ".join(f"{level.name}={level.size}" for level in reversed(cluster.levels))
                raise InputError(f"{one} does not fit cluster {cluster.name} ({sizes}): a degree takes whole "
                                 "factors of its levels, the innermost first")
            made.append(Degree(one.role, take))
            stride, left = stride * take, left // take
    return reversed(made)


def price_configuration(task: PlanTask, given: Configuration, policies: Sequence[str], subject: Subject,
                        progress: Progress | None = None) -> Plan:
    """The best plan of a configuration under any of some policies of recomputation; it keeps the pins of the roles.

    Raises InputError where the configuration does not fit model or cluster, or splits what no region splits. Raises
    Infeasible where no such plan fits the budget.
    """
    if given.experts > 1:
        raise InputError(f"experts over {given.experts} ranks: no region of plans fixes that; leave it out, and let "
                         "`autoddl plan` decide")
    if given.ranks != task.cluster.size:
        raise InputError(f"the configuration has {given.ranks} ranks, and cluster {task.cluster.name} has "
                         f"{task.cluster.size} devices: let them agree")
    place = stage_cluster(task.cluster, given.stages)
    found: list[Plan] = []
    problems: list[AutoDDLError] = []
    for one in meshes_of(given, place):
        pins = tuple(f"{axis}={role}" for axis, role in one.roles.items())
        options = replace(task.options, microbatches=(given.microbatches,), recompute=tuple(policies), pins=pins,
                          mesh=str(one.mesh), mine=None, stages=(1,), cut=(), overlap=False)
        own = replace(task, options=options)
        try:
            found.append(_unstaged(own, given, progress) if given.stages == 1 else _staged(own, given, subject))
        except (Infeasible, InputError) as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return min(found, key=lambda plan: plan.predicted.seconds)


def _unstaged(task: PlanTask, given: Configuration, progress: Progress | None) -> Plan:
    """The best plan without stages on the mesh and under the pins of the options."""
    tried = [Candidate(Mesh.parse(task.options.mesh or ""), region_of(task.options), given.microbatches)]
    return plan_among(task, under_policies(tried, task.options.recompute), progress)


def _staged(task: PlanTask, given: Configuration, subject: Subject) -> Plan:
    """The best pipeline whose stages have the mesh and the pins of the options, over policies of recomputation."""
    graph = task.variant(given.microbatches).original
    stages, cuts = given.all_stages, subject.cuts(given.layers, given.all_stages)
    splits = splits_backward(given.schedule)
    where = Staged(cuts, given.schedule, given.microbatches).pipes
    found: list[Plan] = []
    problems: list[AutoDDLError] = []
    for policy in task.options.recompute:
        own = replace(task, options=replace(task.options, recompute=(policy,)))
        part = StageParts(own, stages, given.stages, given.microbatches, cuts, where, splits=splits)
        try:
            found.append(plan_of_cut(part, given.schedule, try_cut(part, given.schedule, tuple(range(1, stages)))))
        except (Infeasible, InputError) as error:
            problems.append(error)
    if not found:
        raise problems[0]
    best = min(found, key=lambda plan: plan.predicted.seconds)
    source = {"graph": graph_to_text(graph), "cluster": task.cluster.to_yaml(), "pins": list(task.options.pins),
              "optimizer": task.options.optimizer}
    return replace(best, source=source, proof="none: the stages are those of a configuration, each at its best")
