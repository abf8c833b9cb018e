"""Gathers everything that a report of a plan shows, from the functions that compute it."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from autoddl.core.graph import Kind, graph_from_text
from autoddl.core.plan import Plan
from autoddl.core.record import Record
from autoddl.explain.assumptions import throughput
from autoddl.explain.axis_splits import AxisSplit, axis_splits
from autoddl.explain.compare_run import Compared, compare_run, foreseen, foreseen_bytes
from autoddl.explain.explain import Explained, explain
from autoddl.explain.pareto import PointOfBytes, front_of_bytes
from autoddl.explain.run_seconds import StepAsRun, step_as_run
from autoddl.explain.staged_run import ComparedStages, compare_staged_run, foreseen_stages
from autoddl.explain.utilisation import model_flops_utilisation
from autoddl.explain.what_if import Sensitivity, sensitivities
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pipelines.staged_steps import StagedStep
from autoddl.schedule.memory_line import MemoryLine
from autoddl.schedule.timeline import PredictedStep

__all__ = ["LIMIT", "Facts", "facts_of", "largest_first"]

LIMIT = 20.0
"""Seconds for the searches of a page."""

LARGEST = 4
"""Parameters whose alternatives are priced: those of most bytes, patterns of names counted once."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a page shows. Only plans without stages have what is None or empty in those with stages."""

    plan: Plan
    """The plan."""
    utilisation: float | None
    """Model-FLOP utilisation."""
    throughput: Mapping[str, float]
    """Samples, and tokens, a second."""
    splits: tuple[AxisSplit, ...]
    """What each axis of the mesh splits."""
    step: PredictedStep | None
    """The predicted step of rank 0."""
    memory: MemoryLine | None
    """The memory of rank 0 over the step."""
    staged: StagedStep | None
    """The predicted step of a plan with stages."""
    explained: Explained | None
    """Seconds and bytes by block, and alternatives."""
    front: tuple[PointOfBytes, ...]
    """The front of seconds against bytes; empty where it was not asked for."""
    worth: tuple[Sensitivity, ...]
    """What one per cent of each resource is worth."""
    compared: Compared | ComparedStages | None
    """The comparison with a record."""
    ran: StepAsRun | None = None
    """The step as the plan's program runs it, which throughput and utilisation are of; None where none was named."""
    ended: float = 0.0
    """Seconds after which searches for the front and for prices of alternatives were ended; 0 where none was."""


def facts_of(plan: Plan, record: Record | None = None, quick: bool = False, progress: Progress | None = None,
             limit: float = LIMIT) -> Facts:
    """The facts of a plan; `quick` leaves out what needs searches: the front and exact prices of alternatives.

    These searches end after about `limit` seconds, a third of them for alternatives; what is not found by then is left
    out. What more memory is worth is left out where it takes a search of the whole space.

    Raises InputError for a plan that does not keep its question, and MismatchError for a record of another plan.
    """
    tell, ran = progress or (lambda what, done, total: None), step_as_run(plan)
    step_seconds = None if ran is None else ran.seconds
    speed, mfu = throughput(plan, step_seconds), model_flops_utilisation(plan, step_seconds)
    if plan.pipeline is not None:
        staged = None if record is None else compare_staged_run(plan, record)
        worth = sensitivities(plan, searching=False)
        return Facts(plan, mfu, speed, (), None, None, foreseen_stages(plan), None, (), worth, staged, ran)
    compared = None if record is None else compare_run(plan, record)
    tell("predicting the step", 0, 4)
    step = foreseen(plan)
    memory = foreseen_bytes(plan, step)
    tell("pricing what one per cent is worth", 1, 4)
    worth = sensitivities(plan, searching=False)
    tell("pricing alternatives", 2, 4)
    began = monotonic()
    explained = explain(plan, () if quick else _largest(plan), 2, began + limit / 3)
    priced = monotonic()
    tell("finding the front, which takes a search for each point and which --quick leaves out", 3, 4)
    front = () if quick else front_of_bytes(plan, 4, until=began + limit)
    ended = limit if not quick and (priced > began + limit / 3 or monotonic() > began + limit) else 0.0
    return Facts(plan, mfu, speed, axis_splits(plan), step, memory, None, explained, front, worth, compared, ran,
                 ended)


def largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """The parts that are not 0, the largest first."""
    return sorted(((name, value) for name, value in parts.items() if value), key=lambda pair: -pair[1])


def _largest(plan: Plan) -> tuple[str, ...]:
    """Names of the parameters of most bytes; of those that differ in numbers alone, one."""
    tensors: list[Any] = [t for t in graph_from_text(plan.source["graph"]).tensors if t.kind is Kind.PARAMETER]
    found: dict[str, str] = {}
    for tensor in sorted(tensors, key=lambda t: -t.nbytes):
        found.setdefault("".join(c for c in tensor.fqn if not c.isdigit()), tensor.fqn)
    return tuple(found.values())[:LARGEST]
