"""Compares a plan's prediction with the record of a run.

    counts and bytes   the collectives of every recorded step and rank against `traffic`: equal, or there is a mismatch
    seconds            by kind and axes, and the largest misses
    exposed, hidden    what ranks waited for, and what was in flight while they computed

Predicted times are those of `predict_timeline` on rank 0, read by the same functions as the record (`figures`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoddl.core.errors import InputError, MismatchError
from autoddl.core.graph import Graph, graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.record import Event, Record, RecordedStep
from autoddl.explain.record_statistics import (
    Miss,
    Pair,
    Row,
    SparseRow,
    late,
    later,
    misses,
    rows,
    sparse_words,
    typical,
)
from autoddl.planner.question import question_of
from autoddl.schedule.memory_line import MemoryLine, memory_line
from autoddl.schedule.stage_lanes import stage_traffic
from autoddl.schedule.timeline import PredictedStep, predict_timeline
from autoddl.schedule.traffic import PlannedCollective, traffic

__all__ = [
    "Compared",
    "axis_sizes",
    "check_record",
    "compare_run",
    "differences",
    "foreseen",
    "foreseen_bytes",
    "graph_of_plan",
    "lacking",
    "planned_traffic",
]


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of a plan with the record of its run; pairs are (predicted, recorded) seconds of a step."""

    rows: tuple[Row, ...]
    """Collectives by kind and mesh axes."""
    misses: tuple[Miss, ...]
    """The collectives whose seconds are farthest from the prediction."""
    mismatches: tuple[str, ...]
    """Collectives that were planned and did not run, or the other way round; empty where the run followed the plan."""
    whole: Pair
    """From the begin of a step to its end, the optimizer's update included: what a step takes."""
    summed: float
    """The plan's own seconds of a step: all parts added up, as if no communication were hidden."""
    step: Pair
    """From the begin of a step until its gradients are complete."""
    compute: Pair
    """The part of `step` in which a rank does not wait."""
    exposed: Pair
    """The part of `step` in which a rank waits for collectives."""
    hidden: Pair
    """Seconds in which collectives were in flight while a rank computed."""
    late: float
    """Recorded seconds of `exposed` in which a rank waited for others that came later."""
    update: Pair
    """The optimizer's update."""
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
        """Whether the run sent exactly the planned collectives."""
        return not self.mismatches


def foreseen(plan: Plan) -> PredictedStep:
    """The time line of the plan's step on rank 0, from the plan alone."""
    asked = question_of(plan)
    return predict_timeline(plan, add_hubs(asked.graph), asked.cluster)


def foreseen_bytes(plan: Plan, line: PredictedStep) -> MemoryLine:
    """The memory of the plan's step on rank 0 over its time `line`, from the plan alone."""
    asked = question_of(plan)
    return memory_line(plan, line, add_hubs(asked.graph), asked.options.optimizer, asked.cluster)


def compare_run(plan: Plan, record: Record) -> Compared:
    """The comparison of `plan` with the record of its run.

    Raises MismatchError for a record of another plan or without a whole step. Raises InputError for a plan that does
    not keep its question, or has stages (`staged_run`).
    """
    check_record(plan, record)
    graph, predicted, steps = graph_of_plan(plan), foreseen(plan), later(record)
    line = predicted.step

    def computed(step: RecordedStep) -> float:
        return step.seconds - step.during("update") - step.exposed

    return Compared(
        rows(line, steps), misses(line.events, steps), differences(plan, graph, record),
        Pair(line.seconds + plan.predicted.update, typical(steps, lambda step: step.seconds)), plan.predicted.seconds,
        Pair(line.seconds, typical(steps, lambda step: step.seconds - step.during("update"))),
        Pair(predicted.compute_seconds, typical(steps, computed)),
        Pair(line.exposed, typical(steps, lambda step: step.exposed)),
        Pair(line.hidden, typical(steps, lambda step: step.hidden)),
        late(steps), Pair(plan.predicted.update, typical(steps, lambda step: step.during("update"))),
        len({step.step for step in steps}),
        len({step.rank for step in steps}), sparse_words(record.steps, axis_sizes(plan)), lacking(record))


def check_record(plan: Plan, record: Record) -> None:
    """Raises MismatchError for a record of another plan or without a whole step."""
    if record.header.plan != plan.fingerprint():
        raise MismatchError(f"the record is of another plan ({record.header.plan}, of {record.header.model}) than this "
                            f"one ({plan.fingerprint()}, of {plan.model}): give the plan that ran")
    if not record.steps:
        raise MismatchError("the record has no whole step: the run broke off in its first; run it again")


def graph_of_plan(plan: Plan) -> Graph:
    """The graph that the plan was made for, of one microbatch; of a plan with stages without hubs.

    Raises InputError for a plan that does not keep it.
    """
    if plan.pipeline is None:
        return add_hubs(question_of(plan).graph)
    if not {"graph", "cluster"} <= plan.source.keys():
        raise InputError("this plan does not keep the graph and the cluster that its stages were cut from: make it "
                         "again with `autoddl plan`")
    return graph_from_text(plan.source["graph"])


def planned_traffic(plan: Plan, graph: Graph, rank: int) -> tuple[PlannedCollective, ...]:
    """The collectives and messages of one step on a rank; `graph` is that of `graph_of_plan`."""
    if plan.pipeline is not None:
        return stage_traffic(plan, graph, rank)
    return traffic(plan, graph, plan.mesh.coordinate(rank))


def differences(plan: Plan, graph: Graph, record: Record) -> tuple[str, ...]:
    """Texts of the collectives that the plan has and a step of the record has not, or the other way round.

    `graph` is that of `graph_of_plan`.
    """
    found = []
    expected = {rank: _counted(planned_traffic(plan, graph, rank))
                for rank in sorted({step.rank for step in record.steps})}
    for step in record.steps:
        planned_, recorded = expected[step.rank], _counted(step.events)
        for what, more in (("not run", planned_ - recorded), ("not planned", recorded - planned_)):
            found += [f"rank {step.rank}, step {step.step}: {what}: {text} x {n}" for text, n in more.items()]
    return tuple(found)


def _counted(many: Iterable[PlannedCollective | Event]) -> Counter[str]:
    return Counter(f"{one.direction} {one.kind} over {one.axes} of {one.nbytes} bytes" for one in many)


def axis_sizes(plan: Plan) -> dict[str, int]:
    """By name, how many ranks lie along the axes of the plan's mesh, and of those of its stages."""
    every = [plan, *(stage.plan for stage in (plan.pipeline.stages if plan.pipeline else ()))]
    return {name: size for one in every for name, size in zip(one.mesh.names, one.mesh.sizes, strict=True)}


def lacking(record: Record) -> str:
    """A text that says what the record lacks; empty where it is whole."""
    steps = [len(record.of_rank(rank)) for rank in range(record.header.ranks)]
    if min(steps) == max(steps):
        return "the last line of the record is not whole" if record.cut else ""
    short = [f"rank {rank} has {count} steps" for rank, count in enumerate(steps) if count < max(steps)]
    return f"the run broke off: {', '.join(short)} of {max(steps)}"
