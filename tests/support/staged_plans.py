"""Plans with stages for tests: given cuts, a schedule by name, and random layouts inside every stage."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from random_plans import random_plan

from autoddl.capture.capture import Captured
from autoddl.core.graph import Graph
from autoddl.core.hubs import needed_ops
from autoddl.core.layout import Axis, Mesh
from autoddl.core.pipeline import Schedule, first_ranks, flights_of
from autoddl.core.pipeline_schedules import chunks_of, generate
from autoddl.core.plan import VERSION, Pipeline, Plan, Stage
from autoddl.core.stages import cut_graph
from autoddl.schedule.stage_lanes import StoredApart, stored_apart

__all__ = ["apart", "cuts_before", "even_cuts", "staged_plan"]


def apart(captured: Captured, plan: Plan) -> StoredApart | None:
    """What stages on the same ranks share and store in other pieces; such a plan is refused."""
    assert plan.pipeline is not None
    return stored_apart([stage.plan for stage in plan.pipeline.stages], cut_graph(captured.graph, plan.pipeline.cuts),
                        first_ranks(Schedule.parse(plan.pipeline.schedule).placement))


def cuts_before(graph: Graph, modules: Sequence[str]) -> tuple[int, ...]:
    """The positions of the first op of each of these modules of the user."""
    names = [op.module for op in needed_ops(graph)]
    return tuple(next(i for i in range(1, len(names)) if names[i].endswith(module) or f"{module}." in names[i])
                 for module in modules)


def even_cuts(graph: Graph, stages: int) -> tuple[int, ...]:
    """Cuts into stages of about as many ops each, with a parameter in each, wherever the graph can be cut."""
    count = len(needed_ops(graph))
    found: list[int] = []
    for s in range(1, stages):
        wanted = count * s // stages
        found.append(min((c for c in range(max([0, *found]) + 1, count) if _cuttable(graph, (*found, c))),
                         key=lambda c: abs(c - wanted)))
    return tuple(found)


def _cuttable(graph: Graph, cuts: tuple[int, ...]) -> bool:
    try:
        cut_graph(graph, cuts)
    except Exception:
        return False
    return True


def staged_plan(captured: Captured, cuts: Sequence[int], name: str, mesh: str, microbatches: int, seed: int = 0,
                recompute: bool = False) -> Plan:
    """A plan of stages on meshes `mesh` each, or `one=1 / all=2` of two parts; `captured` is that of one microbatch.

    The schedule of `name` has as many ranks as there are stages, or a divisor of that if it is interleaved.
    """
    graphs, chunks = cut_graph(captured.graph, tuple(cuts)), chunks_of(name)
    schedule = generate(name, len(graphs) // chunks, microbatches)
    parts, ends = len(schedule.actions), [*cuts, len(needed_ops(captured.graph))]
    meshes = mesh.split(" / ") if "/" in mesh else [mesh] * parts
    ranks = [*pairwise(accumulate((Mesh.parse(one).size for one in meshes), initial=0))]
    whole = Mesh((Axis("pipe", ranks[-1][1]),)) if "/" in mesh else \
        Mesh((Axis("pipe", parts), Axis("rank", Mesh.parse(mesh).size)))
    flights = flights_of(schedule)
    stages = []
    for s, (part, first, end) in enumerate(zip(graphs, [0, *cuts], ends, strict=True)):
        place = schedule.placement[0][s]
        plan = random_plan(replace(captured, graph=part.graph), seed + s, meshes[place],
                           microbatches=microbatches // schedule.pipes, recompute=recompute, flight=flights[s])
        stages.append(Stage((first, end), ranks[place], plan))
    return replace(stages[0].plan, mesh=whole, decisions=(),
                   conversions=(), stored=(), inputs={}, levels={"pipe": ""}, in_flight=1, waiting=0, later=0,
                   recompute=(),
                   microbatches=microbatches,
                   fingerprints={"model": captured.graph.fingerprint(), "cluster": "", "autoddl": str(VERSION)},
                   pipeline=Pipeline(name, str(schedule), tuple(stages)))
