"""Prepares a plan with stages on one rank: groups, agreement, the program of each stage, and what stays in the module.

The module keeps the parameters of this rank's stages. Those of other stages are taken out of it: they have no memory,
and `parameters`, optimizers and states do not see them. A buffer that another stage updates is taken out too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist
from torch import nn

from autoddl.capture.capture import Captured
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Schedule, check_copies, check_schedule, first_ranks, flights_of
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, check_parameters, check_updates, cut_graph
from autoddl.runtime.collectives.process_groups import Groups, StageRanks, connect_stages
from autoddl.runtime.lowering import communication_axes
from autoddl.schedule.stage_actions import stage_actions
from autoddl.schedule.stage_lanes import copies_of, lanes_of, links_of, stored_apart
from autoddl.schedule.traffic import traffic

__all__ = ["Stages", "captured_stage", "connected", "names_of", "stage_rows", "take_out"]


@dataclass(frozen=True, slots=True)
class Stages:
    """The ranks of a plan with stages, joined: this rank, the group of all, and the groups of its own stages."""

    rank: int
    world: dist.ProcessGroup | None
    groups: dict[int, Groups]
    timeout: timedelta


def _check_stages(plan: Plan, schedule: Schedule) -> None:
    """Raises InputError where the stages do not fit the schedule: other microbatches, ranks, or too few in flight."""
    assert plan.pipeline is not None
    stages = plan.pipeline.stages
    if schedule.stages != len(stages) or schedule.microbatches != plan.microbatches or {
            one.plan.microbatches * schedule.pipes for one in stages} != {plan.microbatches}:
        raise InputError(f"the schedule is of {schedule.stages} stages and {schedule.microbatches} microbatches in "
                         f"{schedule.pipes} pipe{'s' * (schedule.pipes > 1)}, the "
                         f"plan of {len(stages)} and {plan.microbatches}, its stages of "
                         f"{[one.plan.microbatches for one in stages]}: all must be alike; plan again")
    ranks = plan.pipeline.ranks
    begins = [0, *(end for _, end in ranks)]
    for s, (stage, places) in enumerate(zip(stages, zip(*schedule.placement, strict=True), strict=True)):
        first, size = begins[places[0]], stage.plan.mesh.size
        if stage.ranks != (first, first + size) or any(ranks[p][1] - begins[p] != size for p in places):
            raise InputError(f"stage {s} has the ranks {stage.ranks} and the mesh '{stage.plan.mesh}', the schedule "
                             f"places it on {size} ranks from {first} on; plan again")
        flight = flights_of(schedule)[s]
        waits, planned = flight.waiting + flight.later, stage.plan.waiting + stage.plan.later
        if stage.plan.in_flight < flight.in_flight or planned < waits:
            raise InputError(f"stage {s} is planned for {stage.plan.in_flight} microbatches in flight, the schedule "
                             f"has {flight.in_flight} there, and {waits} that wait for W where {planned} are planned: "
                             "plan again for this schedule")
    if begins[-1] != plan.mesh.size:
        raise InputError(f"the stages have ranks 0 to {begins[-1] - 1}, and the plan is for {plan.mesh.size}: plan "
                         "again")


def connected(plan: Plan, graph: Graph, timeout: timedelta) -> Stages:
    """Makes the groups of all stages; every rank calls it. `graph` is the captured one."""
    assert plan.pipeline is not None
    ready = dist.is_available() and dist.is_initialized()
    rank, wanted = dist.get_rank() if ready else 0, []
    parts, copies = cut_graph(graph, plan.pipeline.cuts), copies_of(plan.pipeline)
    for copy in copies:
        stage = plan.pipeline.stages[copy.stage].plan
        axes = communication_axes(stage, add_hubs(parts[copy.stage].graph))
        wanted.append(StageRanks(stage.mesh, copy.first, tuple(sorted(axes))))
    world, made = connect_stages(wanted, timeout) if ready else (None, wanted)
    own = {copy.stage: Groups(one.mesh, one.subsets, timeout,
                              plan.pipeline.stages[copy.stage].plan.source.get("cluster"), one)
           for copy, one in zip(copies, made, strict=True) if 0 <= rank - one.first < one.mesh.size}
    return Stages(rank, world, dict(sorted(own.items())), timeout)


def stage_rows(plan: Plan, graph: Graph) -> Iterator[object]:
    """Yields what all ranks must agree on before the first step: actions, lanes, and each stage's collectives."""
    assert plan.pipeline is not None
    lanes, stages, schedule = lanes_of(plan, graph), plan.pipeline.stages, Schedule.parse(plan.pipeline.schedule)
    check_schedule(schedule)
    check_copies(schedule)
    check_updates(graph, schedule.pipes)
    actions = stage_actions(schedule, links_of(lanes))
    _check_stages(plan, schedule)
    parts = cut_graph(graph, plan.pipeline.cuts)
    check_parameters(parts, first_ranks(schedule.placement))
    apart = stored_apart([stage.plan for stage in stages], parts, first_ranks(schedule.placement))
    if apart is not None:
        raise InputError(f"stages {apart.first} and {apart.second} run on the same ranks and share the parameter "
                         f"{apart.fqn}, but store other pieces of it: plan again")
    yield actions
    yield from lanes
    for stage, part in zip(stages, parts, strict=True):
        yield from traffic(stage.plan, add_hubs(part.graph))


def captured_stage(captured: Captured, stage: StageGraph) -> Captured:
    """The captured model as that of one stage: the same program, whose tensors have the stage's numbers."""
    place = {t: k for k, t in enumerate(stage.origin) if t >= 0}
    return replace(captured, graph=stage.graph,
                   tensors=MappingProxyType({key: place[t] for key, t in captured.tensors.items() if t in place}),
                   constants=MappingProxyType({place[t]: x for t, x in captured.constants.items() if t in place}),
                   outputs=tuple(place.get(t, -1) for t in captured.outputs))


def names_of(parts: Sequence[StageGraph], stages: Sequence[int]) -> set[str]:
    """The names of the parameters of some stages, and of the buffers that they update."""
    found = set[str]()
    for graph in (parts[s].graph for s in stages):
        updated = {old for old, _ in graph.updates}
        for t, tensor in enumerate(graph.tensors):
            if tensor.kind is Kind.PARAMETER or t in updated:
                found.update((tensor.fqn, *tensor.aliases))
    return found


def take_out(module: nn.Module, names: set[str]) -> None:
    """Takes parameters and buffers out of a module, which is left with None in their places."""
    for path, part in module.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for name in table:
                if f"{path}.{name}".removeprefix(".") in names:
                    table[name] = None
