"""Predicts the step of a plan with stages from the plan alone, and compares it with the record of a run.

    counts and bytes   the collectives and messages of every recorded step and rank against the plan's: equal, or there
                       is a mismatch
    seconds            of the step, and for the ranks of each part of the cluster: computing, waiting, updating

A rank computes its stages' operators one after another. All else of a step is waiting, for other ranks or for what is
sent: waiting = makespan of the schedule - compute - update. Recorded are the mean over the ranks of a part, and the
median over the steps. A step is as long as on its slowest rank.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import needed_ops
from autoddl.core.pipeline import Flight, Schedule, first_ranks, moments_of
from autoddl.core.plan import Pipeline, Plan
from autoddl.core.record import Record, RecordedStep
from autoddl.core.stages import cut_graph
from autoddl.cost_models import parse_cluster
from autoddl.explain.compare_run import axis_sizes, check_record, differences, graph_of_plan, lacking, planned_traffic
from autoddl.explain.record_statistics import Pair, SparseRow, later, sparse_words, typical
from autoddl.planner.pipelines.staged_steps import StagedStep, staged_step
from autoddl.planner.pipelines.stored_once import bytes_twice
from autoddl.schedule.stage_bytes import level_bytes
from autoddl.schedule.stage_lanes import copies_of

__all__ = ["ComparedStages", "PartRow", "RankMemory", "SentRow", "compare_staged_run", "foreseen_stages",
           "foreseen_waiting", "memory_of_ranks", "ranks_of_stage", "ranks_text", "stage_beginnings", "stages_there"]


@dataclass(frozen=True, slots=True)
class PartRow:
    """Seconds of a step on the ranks of one part of the cluster, predicted and recorded."""

    ranks: str
    """The ranks, like `ranks 4-7`."""
    stages: tuple[int, ...]
    """The stages that they have."""
    compute: Pair
    """Seconds in which a rank runs operators."""
    waiting: Pair
    """Seconds in which it waits for messages and collectives."""
    update: Pair
    """Seconds of the optimizer's update."""


@dataclass(frozen=True, slots=True)
class SentRow:
    """The messages or collectives of one kind, in one step of a rank of a part; planned, then recorded."""

    ranks: str
    """The ranks of the part."""
    kind: str
    """The kind, like `send` or `all-reduce`."""
    axes: str
    """Names of the mesh axes; that of the stages for messages between them."""
    count: tuple[int, int]
    """How many there are."""
    nbytes: tuple[int, int]
    """Bytes of their buffers."""
    waited: float
    """Recorded seconds in which the rank waited for them."""


@dataclass(frozen=True, slots=True)
class ComparedStages:
    """The comparison of a plan with stages with the record of its run."""

    parts: tuple[PartRow, ...]
    """A row for each part of the cluster that the record has a rank of."""
    rows: tuple[SentRow, ...]
    """What is sent, by part, kind and axes."""
    mismatches: tuple[str, ...]
    """What was planned and did not run, or the other way round; empty where the run followed the plan."""
    step: Pair
    """From the begin of a step to its end."""
    steps: int
    """The number of steps compared."""
    ranks: int
    """The number of ranks compared."""
    sparse: tuple[SparseRow, ...] = ()
    """Words of sparse sums, by mesh axes; of all steps."""
    note: str = ""
    """What the record lacks, in words."""

    @property
    def equal(self) -> bool:
        """Whether the run sent exactly what was planned."""
        return not self.mismatches


def foreseen_stages(plan: Plan) -> StagedStep:
    """The predicted step of a plan with stages. Raises InputError for a plan that does not keep its graph."""
    return staged_step(plan, graph_of_plan(plan), parse_cluster(plan.source["cluster"], "the plan's cluster"))


def foreseen_waiting(plan: Plan) -> float:
    """Seconds of a step in which ranks wait, in the mean over all ranks, as predicted."""
    assert plan.pipeline is not None
    return fmean(_figures(plan, part)[1] for part in range(len(plan.pipeline.ranks)) for _ in _ranks(plan, part))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of the ranks of one part over a step: `nbytes[i]` from `times[i]` seconds on.

    `when` says in words when they have most, and `microbatches` how many of all their stages are there then.
    """

    times: tuple[float, ...]
    nbytes: tuple[float, ...]
    when: str
    microbatches: int

    @property
    def peak(self) -> float:
        """The most bytes."""
        return max(self.nbytes)


def memory_of_ranks(plan: Plan, step: StagedStep) -> tuple[RankMemory, ...]:
    """The memory of the ranks of every part, by the actions of their schedule. What stages share counts once.

    Of a rank with one stage it is at most what the memory line of the stage says.
    """
    assert plan.pipeline is not None
    schedule, stages = Schedule.parse(plan.pipeline.schedule), [stage.plan for stage in plan.pipeline.stages]
    placement = first_ranks(schedule.placement)
    twice = bytes_twice(stages, cut_graph(graph_of_plan(plan), plan.pipeline.cuts), placement)
    spans = {(task.name, rank): (start, end) for task, start, end in zip(
        step.timeline.tasks, step.timeline.starts, step.timeline.ends, strict=True) for rank in task.ranks}
    return tuple(_memory_of(schedule, stages, rank, spans, sum(twice.get(placement[min(
        action.stage for action in actions)], {}).values())) for rank, actions in enumerate(schedule.actions))


Spans = Mapping[tuple[str, int], tuple[float, float]]
"""By name of a task and rank, when it starts and ends."""


def _memory_of(schedule: Schedule, plans: Sequence[Plan], rank: int, spans: Spans, twice: float) -> RankMemory:
    """The memory of the ranks of one part; `twice` are the bytes that its stages count once too often."""
    own = sorted({action.stage for action in schedule.actions[rank]})
    parts, most = [plans[s].predicted.parts for s in own], inf if len(own) > 1 else plans[own[0]].predicted.peak_bytes
    stages = [one for one in parts if one is not None]
    if len(stages) < len(own):
        raise InputError("this plan does not say what its stages keep beside others, as an older version made it: plan "
                         "again")
    levels = [(0.0, level_bytes(stages, [Flight(0, begun=False)] * len(own)), "at the start", 0)]
    for action, (now, then) in zip(schedule.actions[rank], moments_of(schedule, rank), strict=True):
        start, end = spans[str(action), rank]
        levels.append((start, min(most, level_bytes(stages, now.flights, own.index(now.stage), now.kind)),
                       f"while it runs {action}", now.total[0]))
        levels.append((end, min(most, level_bytes(stages, then)), f"behind {action}",
                       now._replace(flights=then).total[0]))
    levels.append((levels[-1][0], sum(sum(one.update.values()) for one in stages), "in the update", 0))
    fullest = max(levels, key=lambda level: level[1])
    return RankMemory(tuple(level[0] for level in levels), tuple(level[1] - twice for level in levels), *fullest[2:])


def stage_beginnings(plan: Plan) -> tuple[str, ...]:
    """By stage, the module that it begins with. Raises InputError for a plan that does not keep its graph."""
    assert plan.pipeline is not None
    ops = needed_ops(graph_of_plan(plan))
    return tuple(next((op.module for op in ops[slice(*stage.ops)] if op.module), "") for stage in plan.pipeline.stages)


def ranks_text(plan: Plan, part: int) -> str:
    """The ranks of a part of the cluster, by its place on the axis along which stages lie: `ranks 4-7`."""
    ranks = _ranks(plan, part)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _ranks(plan: Plan, part: int) -> range:
    assert plan.pipeline is not None
    return range(*plan.pipeline.ranks[part])


def ranks_of_stage(pipeline: Pipeline, stage: int) -> str:
    """The ranks that have a stage, in every pipe: `0-3`, or `0-3 and 12-15`."""
    size = pipeline.stages[stage].plan.mesh.size
    return " and ".join(f"{one.first}-{one.first + size - 1}" for one in copies_of(pipeline) if one.stage == stage)


def stages_there(plan: Plan, part: int) -> tuple[int, ...]:
    """The stages that a part of the cluster has, by its place on the axis along which stages lie."""
    assert plan.pipeline is not None
    return tuple(sorted(one.stage for one in copies_of(plan.pipeline) if one.first == _ranks(plan, part)[0]))


def _figures(plan: Plan, part: int) -> tuple[float, float, float]:
    """Predicted seconds of computing, waiting and updating on the ranks of a part."""
    assert plan.pipeline is not None
    own = [plan.pipeline.stages[k].plan.predicted for k in stages_there(plan, part)]
    compute, update = sum(one.compute for one in own), sum(one.update for one in own)
    return compute, max(0.0, plan.predicted.seconds - compute - update), update


def compare_staged_run(plan: Plan, record: Record) -> ComparedStages:
    """The comparison of a plan with stages with the record of its run.

    Raises MismatchError for a record of another plan or without a whole step, and InputError for a plan that does not
    keep its graph.
    """
    assert plan.pipeline is not None
    graph = graph_of_plan(plan)
    check_record(plan, record)
    steps = later(record)
    parts = [k for k in range(len(plan.pipeline.ranks)) if any(step.rank in _ranks(plan, k) for step in steps)]
    longest: dict[int, float] = defaultdict(float)
    for step in steps:
        longest[step.step] = max(longest[step.step], step.seconds)
    return ComparedStages(
        tuple(_part(plan, part, steps) for part in parts),
        tuple(row for part in parts for row in _sent(plan, part, graph, steps)),
        differences(plan, graph, record), Pair(plan.predicted.seconds, median(longest.values())),
        len(longest), len({step.rank for step in steps}), sparse_words(record.steps, axis_sizes(plan)), lacking(record))


def _part(plan: Plan, part: int, steps: tuple[RecordedStep, ...]) -> PartRow:
    compute, waiting, update = _figures(plan, part)
    own = [step for step in steps if step.rank in _ranks(plan, part)]

    def computed(step: RecordedStep) -> float:
        return step.seconds - step.exposed - step.during("update")

    return PartRow(ranks_text(plan, part), stages_there(plan, part), Pair(compute, typical(own, computed)),
                   Pair(waiting, typical(own, lambda step: step.exposed)),
                   Pair(update, typical(own, lambda step: step.during("update"))))


def _sent(plan: Plan, part: int, graph: Graph, steps: tuple[RecordedStep, ...]) -> list[SentRow]:
    """The messages and collectives of the first recorded rank of a part, in the first of its steps."""
    rank = min(step.rank for step in steps if step.rank in _ranks(plan, part))
    own = [step for step in steps if step.rank == rank]
    sums: dict[tuple[str, str], list[list[int]]] = defaultdict(lambda: [[], []])
    for one in planned_traffic(plan, graph, rank):
        sums[one.kind, one.axes][0].append(one.nbytes)
    for event in own[0].events:
        sums[event.kind, event.axes][1].append(event.nbytes)
    found = []
    for (kind, axes), (planned, recorded) in sorted(sums.items()):
        waited = median(sum(e.wait for e in step.events if (e.kind, e.axes) == (kind, axes)) for step in own)
        found.append(SentRow(ranks_text(plan, part), kind, axes, (len(planned), len(recorded)),
                             (sum(planned), sum(recorded)), waited))
    return found
