"""Exports a plan to a target, and imports a target's text: what `autoddl export` and `autoddl import` say.

    export    describe, find the nearest, price it, describe what was found, write it
    import    read, and make options of `autoddl plan` of it; with a model, price it
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from autoddl.api import Progress
from autoddl.api import plan as find
from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.names import near_names
from autoddl.core.pipeline import Schedule, first_ranks, rank_moments
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph
from autoddl.cost_models import Cluster
from autoddl.export.accelerate import ACCELERATE
from autoddl.export.configuration import Configuration
from autoddl.export.deepspeed import DEEPSPEED
from autoddl.export.describe import describe_plan, has_idle_axes, norm_modules, tensor_pieces
from autoddl.export.fsdp2 import FSDP2
from autoddl.export.megatron import MEGATRON
from autoddl.export.nearest import nearest_configuration
from autoddl.export.price import meshes_of, price_configuration, task_of_plan
from autoddl.export.recompute_policy import short_policy
from autoddl.export.subject import Subject, subject_of
from autoddl.export.target import Target
from autoddl.export.torchtitan import TORCHTITAN
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.staged import stage_cluster
from autoddl.planner.pipelines.stored_once import together_bytes
from autoddl.planner.task import PlanTask, task_of
from autoddl.schedule.memory_line import with_memory_peak

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TARGETS", "Exported", "Imported", "export_plan", "import_text", "options_of", "price_anyway",
           "price_import", "target_of"]

TARGETS: Mapping[str, Target] = {one.name: one for one in (TORCHTITAN, MEGATRON, DEEPSPEED, ACCELERATE, FSDP2)}
"""Every target, by name."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in the words of a target.

        target           name of the target
        configuration    the nearest that it has
        text             the configuration as the target reads it
        lost             what the plan does that the target cannot, a line each
        notes            what has the same name there and is different
        plan             the best plan of the configuration: its predicted seconds and peak are what to expect
        seconds          predicted seconds of a step of the exported plan
        nbytes           its predicted peak, in bytes of a rank
        most_bytes       the peak of `plan` where the target keeps all that its selective recomputation may keep
    """

    target: str
    configuration: Configuration
    text: str
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    plan: Plan
    seconds: float
    nbytes: float
    most_bytes: float

    def to_json(self) -> dict[str, Any]:
        """The fields under stable names, in seconds and bytes."""
        best = self.plan.predicted
        return {"target": self.target, "configuration": dict(self.configuration.to_json()), "text": self.text,
                "lost": list(self.lost), "notes": list(self.notes), "predicted_seconds": best.seconds,
                "peak_bytes": best.peak_bytes, "most_bytes": self.most_bytes, "plan_seconds": self.seconds,
                "plan_peak_bytes": self.nbytes, "mesh": str(self.plan.mesh)}


def target_of(name: str) -> Target:
    """The target of a name. Raises InputError for an unknown one."""
    if name not in TARGETS:
        near = near_names(name, TARGETS, f"there are {', '.join(TARGETS)}", most=1)
        raise InputError(f"there is no target {name!r}; {near}")
    return TARGETS[name]


def export_plan(plan: Plan, name: str, progress: Progress | None = None) -> Exported:
    """The nearest configuration of a target to a plan, its text, its price, and what was lost.

    Raises InputError where the target has none near, and Infeasible where the nearest does not fit the plan's budget.
    """
    target, subject = target_of(name), subject_of(plan)
    found: list[_Priced] = []
    problems: list[AutoDDLError] = []
    for idle in ("zero-1", "tensor") if has_idle_axes(plan) else ("tensor",):
        try:
            found.append(_priced(plan, subject, target, idle, progress))
        except (Infeasible, InputError) as error:
            problems.append(error)
    if not found:
        raise problems[-1]
    best, made, lost = min(found, key=lambda one: one.plan.predicted.seconds)
    if best.pipeline is None:
        subject = replace(subject, pieces=tensor_pieces(best), norms=norm_modules(subject.hubs))
    may_keep = target.keeps and made.recompute.endswith("selective")
    most = peak_without_recomputation(best, subject, plan.source["optimizer"]) if may_keep else \
        best.predicted.peak_bytes
    return Exported(name, made, target.write(made, subject), lost, tuple(target.notes(made)), best,
                    plan.predicted.seconds, plan.predicted.peak_bytes, most)


def peak_without_recomputation(plan: Plan, subject: Subject, optimizer: str) -> float:
    """Bytes of a rank at the peak of a plan of the subject, if backward computed nothing again.

    Those of the stages of a rank are added, as in the plan's own prediction (`stored_once`).
    """
    if plan.pipeline is None:
        return _with_all_kept(plan, subject.hubs, optimizer, subject.cluster).predicted.peak_bytes
    part, cuts = stage_cluster(subject.cluster, len(plan.pipeline.ranks)), cut_graph(subject.graph, plan.pipeline.cuts)
    stages = [_with_all_kept(one.plan, add_hubs(cut.graph), optimizer, part)
              for one, cut in zip(plan.pipeline.stages, cuts, strict=True)]
    schedule = Schedule.parse(plan.pipeline.schedule)
    return max(together_bytes(stages, cuts, first_ranks(schedule.placement), rank_moments(schedule)).values())


def _with_all_kept(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster) -> Plan:
    """The plan with the peak that it has if backward computes nothing again; `graph` is the planned one."""
    return with_memory_peak(replace(plan, recompute=()), graph, optimizer, cluster)


class _Priced(NamedTuple):
    """The best plan of a configuration, the configuration, and what was lost."""

    plan: Plan
    configuration: Configuration
    lost: tuple[str, ...]


def _priced(plan: Plan, subject: Subject, target: Target, idle: str, progress: Progress | None) -> _Priced:
    """The nearest configuration of a target with idle ranks in one role. Raises as `export_plan`."""
    said = describe_plan(plan, subject, idle)
    found = nearest_configuration(said.configuration, target)
    try:
        best = price_configuration(task_of_plan(plan), found.configuration, found.policies, subject, progress)
    except Infeasible as error:
        raise Infeasible(error.needed, error.budget, f"{target.title} has nothing nearer than {found.configuration}; "
                         "plan with microbatches, recomputation or stages that it has", error.reachable) from None
    stages = [best] if best.pipeline is None else [stage.plan for stage in best.pipeline.stages]
    names = [block for one in stages for block in one.recompute]
    sequence = found.configuration.sequence and describe_plan(best, subject).configuration.sequence
    made = replace(found.configuration, recompute=short_policy(subject.hubs, names), sequence=sequence)
    return _Priced(best, made, (*said.lost, *found.lost))


def import_text(text: str, name: str, ranks: int | None = None) -> Configuration:
    """The configuration that a text of a target says, on so many ranks where that is known.

    Raises InputError for a text that is none, with the nearest known word for one that is unknown.
    """
    target = target_of(name)
    if target.read is None:
        readable = ", ".join(one.name for one in TARGETS.values() if one.read is not None)
        raise InputError(f"{target.title} is a program, and no configuration is read from it; import from {readable}")
    found = target.read(text, ranks)
    if ranks is not None and found.ranks != ranks:
        raise InputError(f"{found} has {found.ranks} ranks, and there are {ranks}: let them agree")
    return found


def options_of(given: Configuration, cluster: Cluster | None = None, mesh: str = "",
               subject: Subject | None = None) -> tuple[str, ...]:
    """The options of `autoddl plan` that say a configuration; a mesh and roles only where the cluster is known.

    The mesh is `mesh`, or the one whose axes lie in one level each. Cuts are said where the model is known, and each
    part of the cluster has one stage; else they are left to the search.
    """
    found: list[str] = []
    if given.stages > 1:
        found += ["--stages", str(given.stages), "--schedule", given.schedule]
    found += ["--microbatches", str(given.microbatches), "--precision", given.precision]
    if given.recompute != "none":
        found += ["--recompute", given.recompute]
    if cluster is not None:
        every = meshes_of(given, stage_cluster(cluster, given.stages))
        chosen = next((one for one in every if str(one.mesh) == mesh), every[-1])
        found += ["--mesh", str(chosen.mesh)]
        for axis, role in chosen.roles.items():
            found += ["--pin", f"{axis}={role}"]
    if subject is not None and given.stages > 1 and given.stages == given.all_stages:
        for name in subject.beginnings(given.layers, given.stages):
            found += ["--cut", name]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration priced for a model.

        plan       its best plan; of those that fit the memory, where any do; None where there is none
        problem    why there is none that fits
        best       the found plan: of any layouts, with the same batch, precision and numbers of microbatches
        options    of `autoddl plan` that say the configuration
    """

    plan: Plan | None
    problem: AutoDDLError | None
    best: Plan
    options: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Seconds and bytes of both, under stable names."""
        own, best = self.plan.predicted if self.plan else None, self.best.predicted
        return {"predicted_seconds": own.seconds if own else None, "peak_bytes": own.peak_bytes if own else None,
                "found_seconds": best.seconds, "found_peak_bytes": best.peak_bytes, "found_mesh": str(self.best.mesh),
                "bound_seconds": self.best.bound, "detail": str(self.problem or ""), "options": list(self.options)}


ROOM = 1000.0
"""The memory of a device, as a multiple of what it has, under which a configuration that does not fit is priced."""


def price_anyway(task: PlanTask, given: Configuration, subject: Subject, progress: Progress | None = None
                 ) -> tuple[Plan | None, AutoDDLError | None]:
    """The best plan of a configuration, and why none of its plans fits; that plan then takes more than there is."""
    try:
        return price_configuration(task, given, (given.recompute,), subject, progress), None
    except Infeasible as error:
        try:
            large = replace(task, budget=task.budget * ROOM, options=replace(task.options, budget=task.budget * ROOM))
            return price_configuration(large, given, (given.recompute,), subject, progress), error
        except (Infeasible, InputError):
            return None, error
    except InputError as error:
        return None, error


def price_import(given: Configuration, model: "nn.Module", cluster: Cluster, sample: object = None, *, name: str = "",
                 factory: Mapping[str, Any] | None = None, progress: Progress | None = None) -> Imported:
    """The best plan of a configuration for a model on a cluster, beside the best plan of all.

    The found plan has the configuration's precision and number of microbatches, or one, and any recomputation. Raises
    InputError where the model's batch is another.
    """
    counts = tuple(sorted({1, given.microbatches}))
    options = PlanOptions(precision=given.precision, microbatches=counts, recompute=("search",),
                          stages=tuple(sorted({1, given.stages})), schedule=(given.schedule,))
    task = task_of(model, cluster, sample, options, name, factory)
    whole = Subject(task.about["model"], task.variant(given.microbatches).original, cluster, task.spec, factory or {})
    if whole.rows * given.microbatches != given.rows:
        raise InputError(f"{given} has a batch of {given.rows} rows, and the model's sample has "
                         f"{whole.rows * given.microbatches}: set the batch of the factory, like --set "
                         f"batch={given.rows}")
    plan, problem = price_anyway(task, given, whole, progress)
    best = find(model, cluster, sample, name=name, factory=factory, progress=progress, **options.words())
    first = plan if plan is None or plan.pipeline is None else plan.pipeline.stages[0].plan
    return Imported(plan, problem, best, options_of(given, cluster, str(first.mesh) if first else "", whole))
