"""Plans stages that run on the same ranks and share a parameter: ranks store it once, so the stages store the same.

A tied embedding of the first and the last stage is such a parameter, where a schedule puts both on one part of the
cluster. Each stage of a part leads once: the others then take its mesh, and store in its layouts what they share with
it. These are pins, so the search of a stage knows nothing new. The fastest of all that fit is taken. Bounds are those
without these pins, so they stay true.
"""

from collections.abc import Iterator, Sequence
from math import inf

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.pipeline import Flight
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, shared_here
from autoddl.planner.pipelines.shared_budget import EVEN
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.stored_once import bytes_twice
from autoddl.schedule.stage_bytes import resting_bytes
from autoddl.schedule.stage_lanes import stored_apart

__all__ = ["agreed", "following", "led"]


def agreed(part: StageParts, staged: Staged, plans: Sequence[Plan], graphs: Sequence[StageGraph],
           flights: Sequence[Flight]) -> tuple[Plan, ...]:
    """The plans of all stages, in which those on the same ranks store what they share in the same pieces.

    Raises Infeasible or InputError, the last that was met, where no stage can lead.
    """
    found = tuple(plans)
    while (apart := stored_apart(found, graphs, staged.placement)) is not None:
        problem: Infeasible | InputError = InputError(
            f"stages {apart.first} and {apart.second} run on the same ranks and share {apart.fqn}, and no layout of "
            "it suits both: cut elsewhere, or take gpipe or 1f1b")
        best, most = None, inf
        for leader in _group(graphs, staged, apart.first):
            try:
                made = led(part, staged, found, graphs, flights, leader)
            except (Infeasible, InputError) as error:
                problem = error
                continue
            seconds = sum(plan.predicted.seconds for plan in made)
            if seconds < most and _agree(made, graphs, staged, apart.first):
                best, most = made, seconds
        if best is None:
            raise problem
        found = best
    return found


def _shared_with(graphs: Sequence[StageGraph], staged: Staged, stage: int) -> dict[int, list[str]]:
    """The other stages of a stage's part that share parameters with it, with these parameters."""
    found: dict[int, list[str]] = {}
    for fqn, parts in shared_here(graphs, staged.placement).items():
        for part in parts:
            for other in part if stage in part else ():
                if other != stage:
                    found.setdefault(other, []).append(fqn)
    return found


def _group(graphs: Sequence[StageGraph], staged: Staged, stage: int) -> list[int]:
    return sorted([stage, *_shared_with(graphs, staged, stage)])


def _agree(plans: Sequence[Plan], graphs: Sequence[StageGraph], staged: Staged, stage: int) -> bool:
    """Whether the stages of the part of a stage store alike what they share."""
    apart = stored_apart(plans, graphs, staged.placement)
    return apart is None or staged.placement[apart.first] != staged.placement[stage]


def led(part: StageParts, staged: Staged, plans: Sequence[Plan], graphs: Sequence[StageGraph],
         flights: Sequence[Flight], leader: int) -> tuple[Plan, ...]:
    """The plans where others follow a stage, each within what the stages beside it leave of the budget."""
    made = list(plans)
    for other, names in _shared_with(graphs, staged, leader).items():
        at = staged.placement[leader]
        two = tuple(at if s in (leader, other) else -1 - s for s in range(len(made)))
        beside = sum(resting_bytes(plan, flights[s]) for s, plan in enumerate(made)
                     if s != other and staged.placement[s] == at)
        beside -= sum(bytes_twice([plans[leader]] * len(made), graphs, two).get(at, {}).values())
        left = int(EVEN * (1 - beside / part.task.budget)) if part.task.budget < inf else EVEN
        if left < 1:
            raise Infeasible(beside, part.task.budget, f"stage {other} stores alike what it shares with stage {leader} "
                             "on the same ranks, and the others leave it no room: take gpipe or 1f1b")
        follower = part.pinned_to(plans[leader].mesh, tuple(_pins(plans[leader], names)))
        made[other] = follower.under(left).planned(graphs[other], flights[other])
    return tuple(made)


def following(part: StageParts, staged: Staged, plans: Sequence[Plan], graphs: Sequence[StageGraph], stage: int
              ) -> StageParts | None:
    """The stages pinned to what the others on the same ranks store of what they share with one; None if nothing is."""
    found: dict[str, list[str]] = {}
    others = _shared_with(graphs, staged, stage)
    for other, names in others.items():
        found.setdefault(str(plans[other].mesh), []).extend(_pins(plans[other], names))
    if len(found) != 1:
        return None
    return part.pinned_to(plans[min(others)].mesh, tuple(dict.fromkeys(*found.values())))


def _pins(plan: Plan, names: Sequence[str]) -> Iterator[str]:
    """Yields the pins of the layouts in which a stage stores parameters."""
    for one in plan.stored:
        if one.fqn in names:
            yield from (f"{one.fqn}: {axis}={state}" for axis, state in zip(plan.mesh.names, one.layout, strict=True))
