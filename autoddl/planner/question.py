"""Plan -> the very problem that it solves, without the model: what every later question about a plan starts from.

`Plan.source` keeps what the problem was posed from: the captured graph, the cluster's text, the optimizer, the pins,
the meshes, the numbers of microbatches with what their graphs are stretched from. The space and the prices are
functions of these, so they are made again; the plan's layouts pick the choice.
A plan whose predicted seconds do not come out again was made by another version of the prices.

    rebuild(plan)         its mesh's problem and its choice
    again(plan, ...)      the whole search with something changed: other pins, another cluster, another budget
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from autoddl.core.errors import AutoDDLError, InputError, MismatchError
from autoddl.core.graph import Graph, Op, graph_from_text, graph_to_text
from autoddl.core.hubs import HUB, planned
from autoddl.core.layout import Layout, Mesh
from autoddl.core.plan import Plan
from autoddl.core.problem import Problem
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.candidates import Candidate
from autoddl.planner.mesh_search import Found, Progress, search
from autoddl.planner.meshes import meshes
from autoddl.planner.microbatch_variants import Variant, Variants
from autoddl.planner.pins import mesh_allows, parse_pin, pinned
from autoddl.planner.task import Task
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, Variable, variables

if TYPE_CHECKING:
    from autoddl.planner.candidates import Solved

__all__ = ["Question", "Rebuilt", "again", "answered", "counted", "posed", "question_of", "rebuild", "source_of",
           "tried"]

SAME = 1e-9
"""Seconds that differ by less are the same sum in another order."""


class Rebuilt(NamedTuple):
    """A plan's problem, on its mesh, and the option that it chose for every variable."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    problem: Problem
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is the answer to. `mesh` is the one that the user fixed. `graph` is that of one of `microbatches`;
    where several numbers were tried, `counts` are these, and `parts` the graphs of some of them, as text."""

    graph: Graph
    cluster: Cluster
    budget: float
    optimizer: str
    tolerance: float
    pins: tuple[str, ...]
    mesh: str | None
    max_axes: int
    microbatches: int = 1
    counts: tuple[int, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)


def source_of(task: Task, solved: "Solved", pins: Sequence[str], mesh: str | None, max_axes: int,
              counts: Sequence[int] = ()) -> dict[str, Any]:
    """What `rebuild` needs, as JSON. `inner` tells choices with equal layouts apart."""
    chosen = zip(solved.variables, solved.solution.choice, strict=True)
    inner = {v.name: list(v.choices[k].inner) for v, k in chosen if v.choices[k].inner}
    return {"graph": graph_to_text(task.original), "cluster": task.cluster.to_yaml(), "optimizer": task.optimizer,
            "tolerance": task.tolerance, "pins": list(pins), "mesh": mesh, "max_axes": max_axes, "inner": inner,
            "counts": list(counts), "parts": _parts(task, solved.pricing.microbatches, counts)}


def _parts(task: Task, own: int, counts: Sequence[int]) -> dict[str, str]:
    """The graphs from which, beside the plan's `own`, those of all `counts` can be stretched. A number by which the
    batch cannot be cut has none."""
    kept = Variants(_absent, {own: task.variant(own)})
    for n in counts:
        if not kept.has(n):
            with suppress(AutoDDLError):
                kept.captured[n] = task.variant(n)
    return {str(n): graph_to_text(one.original) for n, one in kept.captured.items() if n != own}


def _absent(microbatches: int) -> Variant:
    raise InputError(f"the plan does not keep the model with {microbatches} microbatches; make it again")


def question_of(plan: Plan) -> Question:
    """The question that `plan` answers."""
    source = plan.source
    if "graph" not in source:
        raise InputError("this plan does not say what it was made from: an earlier version made it; make it again")
    cluster = parse_cluster(source["cluster"], "the plan's cluster")
    return Question(graph_from_text(source["graph"]), cluster, plan.budget, source["optimizer"], source["tolerance"],
                    tuple(source["pins"]), source["mesh"], source["max_axes"], plan.microbatches,
                    tuple(source.get("counts", ())), source.get("parts", {}))


def _variants(asked: Question) -> Variants:
    graphs = {int(n): graph_from_text(text) for n, text in asked.parts.items()} | {asked.microbatches: asked.graph}
    return Variants(_absent, {n: Variant(planned(graph), graph, {}) for n, graph in graphs.items()})


def counted(asked: Question) -> Iterator[Question]:
    """`asked` with each number of microbatches that was tried alone."""
    variants = _variants(asked)
    for n in asked.counts or (asked.microbatches,):
        if variants.has(n):
            yield replace(asked, graph=variants(n).original, microbatches=n, counts=())


def posed(asked: Question, mesh: Mesh) -> tuple[Pricing, tuple[Variable, ...], Problem]:
    """The problem that `asked` poses on one mesh."""
    pricing = Pricing(planned(asked.graph), mesh, asked.cluster, asked.optimizer, asked.microbatches)
    space = variables(pricing.graph, mesh, pinned(tuple(map(parse_pin, asked.pins)), pricing.graph, mesh))
    return pricing, space, problem_of(pricing, space, asked.budget)


def rebuild(plan: Plan) -> Rebuilt:
    """The problem that `plan` solves and its choice. Raises MismatchError if the plan does not come out again."""
    pricing, space, problem = posed(question_of(plan), plan.mesh)
    choice = _choice(plan, space)
    seconds = problem.cost(choice)
    if abs(seconds - plan.predicted.seconds) > SAME * plan.predicted.seconds:
        raise MismatchError(f"the plan says {plan.predicted.seconds} s, this AutoDDL prices it at {seconds} s: "
                            "it was made by another version; make it again")
    return Rebuilt(pricing, space, problem, choice)


def _key(choice: Choice, hub: bool) -> tuple[object, ...]:
    return (choice.inputs, choice.outputs, choice.wanted[0] if hub else None, choice.inner)


def _choice(plan: Plan, space: tuple[Variable, ...]) -> tuple[int, ...]:
    """The option of every variable that the plan's layouts name."""
    decided = {d.name: d for d in plan.decisions}
    stored = {s.fqn: (s.layout, s.regather) for s in plan.stored}
    inner: Mapping[str, list[int]] = plan.source["inner"]
    index: dict[tuple[int, bool], dict[tuple[object, ...], int]] = {}
    found: list[int] = []
    for variable in space:
        k: int | None
        if isinstance(variable.item, Op):
            hub = variable.item.target == HUB
            at = (id(variable.choices), hub)
            if at not in index:
                index[at] = {_key(c, hub): k for k, c in enumerate(variable.choices)}
            one = decided.get(variable.name)
            k = None if one is None else index[at].get((one.inputs, one.outputs, one.gradient if hub else None,
                                                        tuple(inner.get(variable.name, ()))))
        else:
            k = _stored(variable, stored.get(variable.name))
        if k is None:
            raise MismatchError(f"the plan's layouts of {variable.name} are none that this AutoDDL knows: "
                                "it was made by another version; make it again")
        found.append(k)
    return tuple(found)


def _stored(variable: Variable, one: tuple[Layout, bool] | None) -> int | None:
    return next((k for k, c in enumerate(variable.choices) if one == (c.outputs[0], c.regather)), None)


def tried(asked: Question) -> tuple[Mesh, ...]:
    """The meshes among which `asked` leaves the choice."""
    pins = tuple(map(parse_pin, asked.pins))
    every = (Mesh.parse(asked.mesh),) if asked.mesh else meshes(asked.cluster, asked.max_axes)
    allowed = tuple(mesh for mesh in every if mesh_allows(pins, mesh))
    if not allowed:
        raise InputError(f"no mesh of cluster {asked.cluster.name} fits the pins {', '.join(asked.pins)}")
    return allowed


def answered(asked: Question, progress: Progress | None = None) -> Found:
    """The whole search for `asked`: its mesh, or all that its pins allow, and its numbers of microbatches. Raises
    Infeasible."""
    region, variants = partial(pinned, tuple(map(parse_pin, asked.pins))), _variants(asked)
    first = variants(1) if variants.has(1) else variants(asked.microbatches)
    task = Task(first.graph, first.original, {}, asked.cluster, asked.budget, asked.optimizer, "exact",
                asked.tolerance, None, {}, 0.0, perf_counter(), variants=variants)
    counts = [one.microbatches for one in counted(asked)]
    return search(task, [Candidate(m, region, n) for n in counts for m in tried(asked)], progress)


def again(plan: Plan, progress: Progress | None = None, **changes: Any) -> Found:
    """The search of `plan` with other `pins`, `cluster`, `budget` or `mesh`."""
    return answered(replace(question_of(plan), **changes), progress)
