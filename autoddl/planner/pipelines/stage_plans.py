"""Makes the plan of a pipeline whose stages, schedule and microbatches are given: every stage is planned by itself.

A pipeline cuts the cluster along its outermost levels into equal parts (`stage_cluster`), one for each stage, or for
several where the schedule is interleaved. A stage is a graph (`core.stages`) on its part, planned like any model, with
as many microbatches in flight as the schedule has there. Stages of one part share the budget of its ranks.

    stage        min of  m (f + b) + gather + reduce + update      over its meshes and layouts
    pipeline     makespan of the schedule with these seconds, and those of the transfers (`cost_models.pipelines`)

Where messages may be coded (`core.codecs`), each tensor and each gradient is sent as what is fastest. The seconds in
which ranks code and decode then count as the transfer's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import gcd
from typing import NamedTuple

from autoddl.core.codecs import CODECS, codecs_of
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.layout import Axis, Layout, Mesh
from autoddl.core.pipeline import Flight, Schedule, check_schedule, flights_of
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import VERSION, Pipeline, Plan, Prediction, Stage
from autoddl.core.recompute import policy_of_part
from autoddl.core.stages import StageGraph, Transfer, cut_graph, shared_parameters, transfers_of
from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.cost_models.pipelines import simulate_pipeline
from autoddl.cost_models.timeline import Timeline
from autoddl.planner.assemble import Assembled, assemble, plan_of
from autoddl.planner.bucket_size import fitting_buckets
from autoddl.planner.candidates import Candidate, under_policies
from autoddl.planner.mesh_search import Found, search
from autoddl.planner.pins import allowed_meshes, pins_of_part, region_of
from autoddl.planner.pipelines.stored_once import bytes_twice, update_twice
from autoddl.planner.priced_bytes import PricedSearch
from autoddl.planner.question import source_of
from autoddl.planner.task import PlanTask
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.schedule.stage_lanes import stored_apart
from autoddl.schedule.stage_messages import Message, busiest, messages
from autoddl.schedule.stage_seconds import stage_seconds

__all__ = ["PIPE", "Staged", "StagedStep", "boundary_seconds", "chunks_of", "finish_stage", "pipeline_plan",
           "prices_of_stage", "search_stage", "simulated", "splits_backward", "stage_cluster", "stage_task",
           "stage_times", "staged_step", "transfer_ends", "transfer_passes", "transfer_seconds"]

PIPE = "pipe"
"""Name of the mesh axis of a plan with stages along which they lie."""


def stage_cluster(cluster: Cluster, stages: int) -> Cluster:
    """The part of a cluster that one of `stages` equal stages has: the outermost levels are cut first.

    Raises InputError where the levels cannot be cut so, or parts would differ.
    """
    levels, left = [*cluster.levels], stages
    for i in reversed(range(len(levels))):
        level, cut = levels[i], gcd(left, levels[i].size)
        if left > 1 and cut < min(left, level.size):
            break
        if cut > 1 and cut < level.size and (level.dims or level.leaf or level.topology not in ("switch", "fat-tree",
                                                                                               "fully-connected")):
            break
        left //= cut
        levels[i] = replace(level, size=level.size // cut, dims=() if cut > 1 else level.dims)
    if left > 1 or cluster.parts:
        sizes = ", ".join(f"{level.name}={level.size}" for level in reversed(cluster.levels))
        raise InputError(f"{stages} stages do not cut cluster {cluster.name} ({sizes}) into equal parts: stages take "
                         "whole factors of its levels, the outermost first")
    return replace(cluster, name=f"{cluster.name}/{stages}", levels=tuple(levels))


@dataclass(frozen=True, slots=True)
class Staged:
    """A pipeline that is to be planned: where it is cut, and how it runs.

        cuts          positions of the cuts (`core.stages`)
        name          of the schedule (`core.pipeline_schedules`)
        microbatches  of a step
        compress      messages that may be coded, as text (`core.codecs`)
        codecs        by lane, as text, what it is sent as; None where that is to be decided
    """

    cuts: tuple[int, ...]
    name: str
    microbatches: int
    compress: tuple[str, ...] = ()
    codecs: Mapping[str, str] | None = None

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @property
    def splits(self) -> bool:
        """Whether backward is split into B and W."""
        return splits_backward(self.name)

    @property
    def placement(self) -> tuple[int, ...]:
        """By stage, the part of the cluster that has it."""
        return generate(self.name, self.parts, self.microbatches).placement[0]

    @property
    def parts(self) -> int:
        """Number of parts of the cluster."""
        return self.stages // chunks_of(self.name)

    def schedule(self) -> Schedule:
        """The schedule, checked. Raises InputError where there is none so."""
        made = generate(self.name, self.parts, self.microbatches)
        check_schedule(made)
        if len(made.placement) > 1 or made.stages != self.stages:
            raise InputError(f"schedule {self.name} cannot be planned yet, only drawn: take gpipe, 1f1b, "
                             "interleaved:2, zb-h1, zb-h2, zb-v or dualpipe-v")
        if self.splits and self.microbatches == 1:
            raise InputError(f"schedule {self.name} puts gradients of weights off behind other microbatches, and a "
                             "step of one microbatch has no other: take 1f1b, or more microbatches")
        return made


def splits_backward(name: str) -> bool:
    """Whether a schedule splits backward into B and W."""
    return name.startswith("zb-") or name == "dualpipe-v"


def chunks_of(name: str) -> int:
    """The number of stages that a schedule has on every part of the cluster."""
    kind, _, width = name.partition(":")
    if kind in ("zb-v", "dualpipe-v"):
        return 2
    return int(width) if kind == "interleaved" and width.isdecimal() and int(width) else 1


@dataclass(frozen=True, slots=True)
class StagedStep:
    """The predicted step of a pipeline: seconds of its stages and transfers, and the time line."""

    stages: tuple[StageSeconds, ...]
    transfers: tuple[float, ...]
    timeline: Timeline


class Sent(NamedTuple):
    """How messages are sent: the seconds, and the codec, which is empty where values are sent as they are."""

    seconds: float
    codec: str


def transfer_seconds(cluster: Cluster, parts: int, source: int, target: int, nbytes: float) -> float:
    """Seconds in which every rank of one part of the cluster sends `nbytes` to one of another, all at once."""
    if not nbytes or source == target:
        return 0.0
    size = cluster.size // parts
    level = next(i for i, unit in enumerate(cluster.units[1:]) if source * size // unit == target * size // unit)
    return collective(cluster, "send", Group(((2, max(size, cluster.units[level])),)), float(nbytes)).seconds


def boundary_seconds(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph) -> list[float]:
    """Seconds of the transfers of a microbatch over every boundary, those of gradients where these take longer.

    A tensor that skips stages counts at the boundary before its reader.
    """
    found = [[0.0, 0.0] for _ in plans[1:]]
    for one in transfers_of(graph, staged.cuts):
        for way, sent in enumerate(transfer_passes(cluster, staged, graph, one, *transfer_ends(one, plans))):
            found[one.target - 1][way] += sent.seconds
    return [max(both) for both in found]


def transfer_ends(one: Transfer, plans: Sequence[Plan]) -> tuple[tuple[Layout, Mesh], tuple[Layout, Mesh]]:
    """The layout in which a tensor is sent with the sender's mesh, and that in which it is received."""
    sender, receiver = (next(d for d in plans[stage].decisions if d.name == name) for stage, name in
                        ((one.source, one.sender), (one.target, one.receiver)))
    return (sender.inputs[0], plans[one.source].mesh), (receiver.outputs[0], plans[one.target].mesh)


def transfer_passes(cluster: Cluster, staged: Staged, graph: Graph, one: Transfer, here: tuple[Layout, Mesh],
                    there: tuple[Layout, Mesh]) -> tuple[Sent, Sent]:
    """How a tensor of a microbatch is sent, and its gradient, in 0 seconds where it has none."""
    tensor = next(tensor for tensor in graph.tensors if tensor.name == one.tensor)
    ways = messages(tensor.shape, *here, *there), messages(tensor.shape, *there, *here) if one.gradient else ()
    forth, back = (_as_sent(cluster, staged, tensor, lane, sent, (one.source, one.target)) for lane, sent in
                   zip(one.lanes, ways, strict=True))
    return forth, back


def _as_sent(cluster: Cluster, staged: Staged, tensor: Tensor, lane: str, sent: tuple[Message, ...],
             stages: tuple[int, int]) -> Sent:
    """The fastest way to send the messages of a lane between two stages, or that of its codec if it is known."""
    here, there = (staged.placement[stage] for stage in stages)

    def seconds(codec: str) -> float:
        wire = transfer_seconds(cluster, staged.parts, here, there, busiest(sent, tensor.itemsize, codec))
        passes, values = CODECS[codec].passes if codec and wire else (), 4.0 * busiest(sent)
        return wire + sum(elementwise_seconds(cluster.device, times * values) for times in passes)

    codecs = ("", *codecs_of(staged.compress, "pipeline", tensor.dtype)) if staged.codecs is None else (
        staged.codecs.get(lane, ""),)
    return min((Sent(seconds(codec), codec) for codec in codecs), key=lambda way: way.seconds)


def _shared_seconds(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graphs: Sequence[StageGraph]
                    ) -> list[float]:
    """By stage, seconds in which gradients of parameters that several stages read are exchanged, once a step.

    Each stage sends its own pieces to every other one, behind its reductions. Stages of one part have the same pieces,
    and the first of them sends.
    """
    found, parts, at = [0.0] * len(plans), staged.parts, staged.placement
    stored = [plan.index().stored for plan in plans]
    for fqn, stages in shared_parameters(graphs).items():
        tensor = next(t for t in graphs[stages[0]].graph.tensors if t.fqn == fqn and t.kind is Kind.PARAMETER)
        firsts = {at[s]: s for s in reversed(stages)}.values()
        for a, b in permutations(sorted(firsts) if tensor.trained else (), 2):
            sent = messages(tensor.shape, stored[a][fqn].layout, plans[a].mesh, stored[b][fqn].layout, plans[b].mesh)
            seconds = transfer_seconds(cluster, parts, at[a], at[b], busiest(sent) * tensor.stored.itemsize)
            found[a], found[b] = found[a] + seconds / 2, found[b] + seconds / 2
    return found


def stage_times(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph
                ) -> tuple[tuple[StageSeconds, ...], tuple[float, ...]]:
    """(the seconds of every stage, those of a transfer over every boundary); `graph` is the captured one.

    What stages exchange once a step counts as part of their reductions. Both ways of an exchange run at once.
    """
    part, graphs = stage_cluster(cluster, staged.parts), cut_graph(graph, staged.cuts)
    alone = [stage_seconds(one, add_hubs(stage.graph), part, staged.splits)
             for one, stage in zip(plans, graphs, strict=True)]
    shared, twice = _shared_seconds(cluster, plans, staged, graphs), update_twice(plans, graphs, staged.placement, part)
    seconds = tuple(one._replace(reduce=one.reduce + more, update=max(0.0, one.update - less))
                    for one, more, less in zip(alone, shared, twice, strict=True))
    return seconds, tuple(boundary_seconds(cluster, plans, staged, graph))


def staged_step(plan: Plan, graph: Graph, cluster: Cluster) -> StagedStep:
    """The predicted step of a plan with stages; `graph` is the captured one, of one microbatch."""
    assert plan.pipeline is not None
    pipeline = plan.pipeline
    staged = Staged(pipeline.cuts, pipeline.name, plan.microbatches, codecs=pipeline.codecs)
    seconds, between = stage_times(cluster, [stage.plan for stage in pipeline.stages], staged, graph)
    return StagedStep(seconds, between, simulated(Schedule.parse(pipeline.schedule), seconds, between))


def simulated(schedule: Schedule, stages: Sequence[StageSeconds], transfers: Sequence[float]) -> Timeline:
    """The time line of a schedule with these seconds."""
    columns = list(zip(*stages, strict=True))
    return simulate_pipeline(schedule, columns[0], columns[1], columns[2], transfers, columns[4],
                             gather_seconds=columns[3], update_seconds=columns[5])


def stage_task(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int) -> PlanTask:
    """The task of planning one stage on its part of the cluster, with the pins and the named blocks that it has."""
    graph = add_hubs(stage.graph)
    recompute = tuple(dict.fromkeys(policy_of_part(policy, graph) for policy in task.options.recompute))
    options = replace(task.options, microbatches=(microbatches,), stages=(1,), cut=(), recompute=recompute,
                      pins=pins_of_part(task.options.pins, graph, task.graph))
    return replace(task, graph=graph, original=stage.graph, spec={}, cluster=cluster, options=options, variants=None)


def search_stage(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight,
                 within: Sequence[Candidate] = ()) -> Found:
    """The fastest layouts of one stage on its part of the cluster, with a bound of all of them.

    `within` are the meshes and regions to look into, by default all that the options allow. Raises Infeasible where no
    plan fits the budget with so many microbatches in flight.
    """
    return search(*_searched(task, stage, cluster, microbatches, flight, within))


def prices_of_stage(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight,
                    within: Sequence[Candidate] = ()) -> PricedSearch:
    """The search for the least seconds + price * bytes at the peak of one stage; all is as in `search_stage`."""
    return PricedSearch(*_searched(task, stage, cluster, microbatches, flight, within))


def _searched(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight,
              within: Sequence[Candidate]) -> tuple[PlanTask, list[Candidate]]:
    """The task of a stage, and the candidates of its plans."""
    own = stage_task(task, stage, cluster, microbatches)
    free = within or [Candidate(mesh, region_of(own.options)) for mesh in allowed_meshes(cluster, own.options)]
    plain = [replace(one, microbatches=microbatches, in_flight=flight.in_flight, waiting=flight.waiting)
             for one in free]
    return own, under_policies(plain, own.options.recompute)


def finish_stage(task: PlanTask, stage: StageGraph, found: Found, made: Assembled) -> Plan:
    """The plan of what was found for a stage; `task` is that of the stage."""
    solved = found.best
    about = dict(task.about) | {
        "bound": min(found.bound, made.predicted.seconds), "budget": task.budget, "candidates": 1, "sample": {},
        "fingerprints": {"model": stage.graph.fingerprint(), "cluster": task.cluster.fingerprint,
                         "autoddl": str(VERSION)},
        "source": source_of(task, solved, task.options), "precision": task.options.precision}
    plan = plan_of(made, solved.pricing, solved.solution, about)
    return with_memory_peak(replace(plan, bucket_bytes=1), task.graph, task.options.optimizer, task.cluster)


def solve_stage(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight) -> Plan:
    """The fastest plan of one stage, with the best bucket size. Raises Infeasible as `search_stage`."""
    found = search_stage(task, stage, cluster, microbatches, flight)
    made = assemble(found.best.pricing, found.best.solution, found.best.variables)
    own = stage_task(task, stage, cluster, microbatches)
    return fitting_buckets(finish_stage(own, stage, found, made), own.graph, own.options.optimizer, cluster)


def pipeline_plan(task: PlanTask, staged: Staged, plans: Sequence[Plan] = ()) -> Plan:
    """The plan of a pipeline; `plans` are those of its stages where they are known already.

    Its bound is that of no other pipeline: the caller knows more. Raises InputError where the graph or the cluster
    cannot be cut so, and Infeasible where a stage has no plan.
    """
    staged = replace(staged, compress=task.options.compress)
    schedule, variant = staged.schedule(), task.confirmed(staged.microbatches)
    part = stage_cluster(task.cluster, staged.parts)
    graphs = cut_graph(variant.original, staged.cuts)
    if not plans:
        flights = flights_of(schedule)
        plans = [solve_stage(task, graph, part, staged.microbatches, flight)
                 for graph, flight in zip(graphs, flights, strict=True)]
    if (apart := stored_apart(plans, graphs, schedule.placement[0])) is not None:
        raise InputError(f"stages {apart.first} and {apart.second} run on the same ranks and share the parameter "
                         f"{apart.fqn}, but store other pieces of it: cut elsewhere, or take gpipe or 1f1b")
    ends = [*staged.cuts, len(needed_ops(variant.original))]
    stages = tuple(Stage((first, end), (at * part.size, (at + 1) * part.size), plan) for at, first, end, plan in
                   zip(schedule.placement[0], [0, *staged.cuts], ends, plans, strict=True))
    mesh = Mesh((Axis(PIPE, staged.parts), Axis("rank", part.size)))
    whole = Plan(mesh=mesh, decisions=(), conversions=(), stored=(), inputs={}, predicted=plans[0].predicted,
                 bound=0.0, proof="", budget=task.budget, candidates=1, cluster=task.cluster.name,
                 backend=task.cluster.backend, levels={PIPE: task.cluster.levels[-1].name},
                 fingerprints={"model": variant.original.fingerprint(), "cluster": task.cluster.fingerprint,
                               "autoddl": str(VERSION)},
                 sample=dict(variant.spec), microbatches=staged.microbatches, precision=task.options.precision,
                 pipeline=Pipeline(staged.name, str(schedule), stages,
                                   _coded(task.cluster, plans, staged, variant.original)), **task.about)
    return replace(whole, predicted=_predicted(whole, staged_step(whole, variant.original, task.cluster),
                                               bytes_twice(plans, graphs, staged.placement)))


def _coded(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph) -> tuple[str, ...]:
    """The lanes that are sent coded, with their codecs."""
    return tuple(f"{lane} as {sent.codec}" for one in transfers_of(graph, staged.cuts) for lane, sent in zip(
        one.lanes, transfer_passes(cluster, staged, graph, one, *transfer_ends(one, plans)), strict=True) if sent.codec)


def _predicted(plan: Plan, step: StagedStep, twice: Mapping[int, Mapping[str, float]]) -> Prediction:
    """The prediction of a plan with stages: seconds of the time line, the rest of the busiest and the fullest rank.

    Of stages of one part the peaks are added, though they may come at different times, less what they count twice.
    """
    assert plan.pipeline is not None
    stages = plan.pipeline.stages
    parts = [[stage.plan.predicted for stage in stages if stage.ranks == ranks]
             for ranks in sorted({stage.ranks for stage in stages})]
    every = [{kind: nbytes - twice.get(at, {}).get(kind, 0.0) for kind, nbytes in _summed(
        one.nbytes for one in part).items()} for at, part in enumerate(parts)]
    fullest = max(every, key=lambda kinds: sum(kinds.values()))
    slowest = max(parts, key=lambda part: sum(one.seconds for one in part))
    return Prediction(step.timeline.makespan, sum(one.compute for one in slowest),
                      _summed(one.communication for one in slowest), _summed(one.volume for one in slowest),
                      fullest, {}, sum(one.update for one in slowest),
                      in_switches=_summed(one.in_switches for one in slowest))


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums by name."""
    found = Counter[str]()
    for part in parts:
        found.update(part)
    return dict(found)
