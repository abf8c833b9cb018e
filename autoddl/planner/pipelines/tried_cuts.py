"""Plans the stages of one cut, and simulates the pipeline that they make."""

from dataclasses import dataclass

from autoddl.core.pipeline import flights_of
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph
from autoddl.planner.pipelines.rank_memory import fitting_plans
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import simulated, stage_times

__all__ = ["TriedCut", "simulated_cut", "try_cut"]


@dataclass(frozen=True, slots=True)
class TriedCut:
    """A cut that was solved: the plans of its stages, the seconds of the pipeline, and of stages and transfers if told.

    Stages that share ranks are planned again under a part of the budget, where they do not fit together.
    """

    cut: tuple[int, ...]
    plans: tuple[Plan, ...]
    seconds: float
    stages: tuple[StageSeconds, ...] = ()
    transfers: tuple[float, ...] = ()


def try_cut(part: StageParts, name: str, cut: tuple[int, ...], roughly: bool = False) -> TriedCut:
    """Solves the stages of a cut, or finds some plans `roughly`, and simulates the pipeline.

    Raises why a stage has no plan.
    """
    staged = part.staged(name, cut)
    plans = fitting_plans(part, staged, cut_graph(part.graph, staged.cuts), flights_of(staged.schedule()), roughly)
    return simulated_cut(part, staged, cut, plans)


def simulated_cut(part: StageParts, staged: Staged, cut: tuple[int, ...], plans: tuple[Plan, ...]) -> TriedCut:
    """The pipeline of these plans of its stages."""
    seconds, between = stage_times(part.task.cluster, plans, staged, part.graph)
    return TriedCut(cut, plans, simulated(staged.schedule(), seconds, between).makespan, tuple(seconds), tuple(between))
