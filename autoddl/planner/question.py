"""Builds the problem that a plan solves again, without the model: all later questions about a plan start from it.

`Plan.source` keeps everything that the problem depends on: the captured graph, the cluster's text, the optimizer, the
pins and the meshes. It keeps the numbers of microbatches too, with the graphs that others are derived from. The space
and the prices are functions of these, so they are computed again; the plan's layouts name the choice. A plan whose
predicted seconds do not come out again was made by another version of the prices.

    rebuild(plan)               its mesh's problem and its choice
    whole_question_of(plan)     the question of a search over stages; each stage answers a question of its own too
    solve_question(question)    the whole search, perhaps with something changed: other pins, cluster or budget
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from autoddl.core.errors import AutoDDLError, InputError, MismatchError
from autoddl.core.graph import Graph, Op, graph_from_text, graph_to_text
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan, Stored
from autoddl.core.problem import Problem, Solution
from autoddl.core.recompute import NO_RECOMPUTE, policy_text
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.candidates import Built, Candidate, Space, build_network, picked, space_of, under_policies
from autoddl.planner.mesh_search import Found, Progress, search
from autoddl.planner.microbatch_variants import Variant, Variants
from autoddl.planner.options import PlanOptions
from autoddl.planner.peaks import Peaks
from autoddl.planner.pins import allowed_meshes, region_of
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import CostNetwork, Row, problem_of
from autoddl.pricing.kept_tensors import KeptTensors, with_kept_tensors
from autoddl.pricing.lifetimes import Moment
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, Variable

if TYPE_CHECKING:
    from autoddl.planner.candidates import Solved

__all__ = ["Question", "Rebuilt", "candidates_of", "graphs_beside", "network_on", "options_text", "problem_on",
           "question_of", "rebuild", "repriced", "solve_question", "source_of", "space_of_plan",
           "split_by_microbatches", "task_of_question", "whole_question_of"]

_ASKED = ("mesh", "pins", "budget", "optimizer", "precision", "tolerance", "max_axes", "microbatches", "recompute",
          "stages", "schedule", "cut", "compress", "sparse", "stage_ranks")
"""Options of a search over stages that its plan keeps."""

SAME = 1e-9
"""Seconds that differ by less are the same sum in another order."""


class Rebuilt(NamedTuple):
    """The problem of a plan on its mesh, with the bytes of the plan's row, and the chosen option of every variable."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    problem: Problem
    choice: tuple[int, ...]
    network: CostNetwork
    kept: KeptTensors
    """The network for rows of bytes."""
    row: Row
    """The row that the bound was proved under; where the budget does not bind, the moment of the plan's own peak."""

    def with_bytes(self) -> tuple[Problem, tuple[int, ...]]:
        """The problem of the row, over the choices of `kept`, and the plan's choice of it."""
        return self.kept.network.problem(self.problem.budget, self.row), self.kept.settled(self.choice)

    def row_bytes(self, moment: Moment) -> float:
        """The bytes of the plan at one moment, as the rows count them."""
        return self.kept.row_bytes(self.choice, {moment: 1.0})


@dataclass(frozen=True, slots=True)
class Question:
    """The question that a plan answers: a model, a cluster and the options of planning."""

    graph: Graph
    """The captured graph, without hubs, of one of `microbatches`."""
    cluster: Cluster
    """The devices and links to plan for."""
    options: PlanOptions
    """The options with which the plan was searched."""
    microbatches: int = 1
    """The number of microbatches of the plan."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """By number, graphs of some other numbers of microbatches that the options ask for, as text."""
    recompute: str = NO_RECOMPUTE
    """The blocks that the plan computes again, as text (`core.recompute`)."""
    in_flight: int = 1
    """The number of microbatches of the plan whose activations are there at once."""
    waiting: int = 0
    """The number of those whose gradients of weights wait."""
    later: int = 0
    """How many more wait at another time (`core.pipeline.Flight`)."""

    def asking(self, **options: Any) -> "Question":
        """The question with some options replaced."""
        return replace(self, options=replace(self.options, **options))


def source_of(task: PlanTask, solved: "Solved", options: PlanOptions) -> dict[str, Any]:
    """Everything that `rebuild` needs, as JSON. `inner` tells choices with equal layouts apart."""
    chosen = zip(solved.variables, solved.solution.choice, strict=True)
    inner = {v.name: list(v.choices[k].inner) for v, k in chosen if v.choices[k].inner}
    return {"graph": graph_to_text(task.original), "cluster": task.cluster.to_yaml(), "optimizer": options.optimizer,
            "precision": options.precision, "tolerance": options.tolerance, "pins": list(options.pins),
            "mesh": options.mesh, "max_axes": options.max_axes, "inner": inner,
            "row": dict(solved.row) if solved.solution.price else {}, "counts": list(options.microbatches),
            "recompute": list(options.recompute), "compress": list(options.compress),
            "parts": graphs_beside(task, solved.pricing.microbatches, options.microbatches)} | (
                {"mine": options.mine} if options.mine else {}) | (
                    {"sparse": options.sparse} if options.sparse else {}) | (
                        {"notes": list(task.notes)} if task.notes else {})


def graphs_beside(task: PlanTask, own: int, counts: Sequence[int]) -> dict[str, str]:
    """By number, the graphs from which, with that of the plan's `own`, those of all `counts` can be derived.

    A number of microbatches into which the batch cannot be cut has none.
    """
    kept = Variants(_absent, {own: task.variant(own)})
    for n in counts:
        if not kept.has(n):
            with suppress(AutoDDLError):
                kept.captured[n] = task.variant(n)
    return {str(n): graph_to_text(one.original) for n, one in kept.captured.items() if n != own}


def _absent(microbatches: int) -> Variant:
    raise InputError(f"the plan does not keep the model with {microbatches} microbatches; make it again")


def question_of(plan: Plan) -> Question:
    """The question that `plan` answers. Raises InputError for a plan that does not keep it, or has stages.

    Every stage of a plan answers a question of its own.
    """
    source = plan.source
    if plan.pipeline is not None:
        raise InputError(f"this plan has {len(plan.pipeline.stages)} stages, and the question is about one of them: "
                         f"take the plan of a stage, from 0 to {len(plan.pipeline.stages) - 1}")
    if "graph" not in source or "row" not in source:
        raise InputError("this plan does not say what it was made from: an earlier version made it; make it again")
    cluster = parse_cluster(source["cluster"], "the plan's cluster")
    options = PlanOptions(mesh=source["mesh"], mine=source.get("mine"), pins=tuple(source["pins"]), budget=plan.budget,
                          optimizer=source["optimizer"], precision=source["precision"],
                          tolerance=source["tolerance"], max_axes=source["max_axes"],
                          microbatches=tuple(source.get("counts", ())) or (plan.microbatches,),
                          recompute=source.get("recompute", (policy_text(plan.recompute),)),
                          compress=source.get("compress", ()), sparse=source.get("sparse"))
    return Question(graph_from_text(source["graph"]), cluster, options, plan.microbatches, source.get("parts", {}),
                    policy_text(plan.recompute), plan.in_flight, plan.waiting, plan.later)


def options_text(options: PlanOptions) -> dict[str, Any]:
    """The options that say what is asked for, as JSON; the others say how to search."""
    found = {name: getattr(options, name) for name in _ASKED
             if name not in ("sparse", "stage_ranks") or getattr(options, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def whole_question_of(plan: Plan) -> Question:
    """The whole question of a plan: of one that was searched with stages, with all of these.

    Raises InputError for a plan that does not keep it.
    """
    asked: Mapping[str, Any] | None = plan.source.get("asked")
    if asked is None and plan.pipeline is None:
        return question_of(plan)
    if asked is None or "graph" not in plan.source:
        raise InputError(f"this plan has {len(plan.pipeline.stages) if plan.pipeline else 0} stages, and does not keep "
                         "what was asked for: make it again, or name a stage with --stage")
    return Question(graph_from_text(plan.source["graph"]), parse_cluster(plan.source["cluster"], "the plan's cluster"),
                    PlanOptions(**asked), plan.microbatches, plan.source.get("parts", {}))


def _variants(question: Question) -> Variants:
    graphs = {int(n): graph_from_text(text) for n, text in question.parts.items()} | {
        question.microbatches: question.graph}
    return Variants(_absent, {n: Variant(add_hubs(graph), graph, {}) for n, graph in graphs.items()})


def split_by_microbatches(question: Question) -> Iterator[Question]:
    """Yields the question once for each number of microbatches that was tried."""
    variants = _variants(question)
    for n in question.options.microbatches:
        if variants.has(n):
            yield replace(question.asking(microbatches=(n,)), graph=variants(n).original, microbatches=n)


def task_of_question(question: Question, variants: Variants | None = None) -> PlanTask:
    """The task of searching for the question's answer again; `variants` are by default those that it keeps."""
    variants = variants or _variants(question)
    first = variants(1) if variants.has(1) else variants(question.microbatches)
    return PlanTask(first.graph, first.original, {}, question.cluster, question.options.limit(question.cluster),
                    question.options, {}, 0.0, perf_counter(), variants=variants)


def network_on(question: Question, mesh: Mesh) -> CostNetwork:
    """All choices that the question leaves on one mesh, priced, with its own number of microbatches."""
    own = replace(question, parts={})
    candidate = Candidate(mesh, region_of(question.options), question.microbatches, question.recompute,
                          question.in_flight, question.waiting, question.later)
    return build_network(task_of_question(own), candidate)


def problem_on(question: Question, mesh: Mesh, row: Row | None = None) -> Built:
    """The prices, variables and problem of the question on one mesh, in which hubs say whether their tensor is kept.

    Bytes are those of `row`; those of the optimizer's update by default, and where the graph lacks a moment of `row`.
    """
    network = with_kept_tensors(network_on(question, mesh)).network
    known = row if row is not None and network.lifetimes.has(row) else None
    return network.pricing, network.variables, network.problem(question.options.limit(question.cluster), known)


def rebuild(plan: Plan) -> Rebuilt:
    """The problem that `plan` solves, and its choice. Raises MismatchError if its seconds do not come out again."""
    network = network_on(question_of(plan), plan.mesh)
    choice = _choice(plan, network.variables)
    kept = with_kept_tensors(network)
    row: Row = plan.source["row"] or {
        Peaks(network).moment_of(choice, lambda one, moment: kept.row_bytes(one, {moment: 1.0})): 1.0}
    if not network.lifetimes.has(row):
        raise MismatchError(f"the plan's bound is under moments that its graph lacks ({', '.join(row)}): "
                            "plan again instead of editing the file")
    problem = network.problem(plan.budget, row)
    seconds = problem.cost(choice)
    if abs(seconds - plan.predicted.seconds) > SAME * plan.predicted.seconds:
        raise MismatchError(f"the plan says {plan.predicted.seconds} s, this AutoDDL prices it at {seconds} s: "
                            "it was made by another version; make it again")
    return Rebuilt(network.pricing, network.variables, problem, choice, network, kept, row)


def _key(choice: Choice, hub: bool) -> tuple[object, ...]:
    return (choice.inputs, choice.outputs, choice.wanted[0] if hub else None, choice.inner)


def _choice(plan: Plan, space: tuple[Variable, ...]) -> tuple[int, ...]:
    """The option of every variable that the plan's layouts name."""
    parts, sparse = plan.index(), plan.sparse_sums
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
            one = parts.decisions.get(variable.name)
            k = None if one is None else index[at].get((one.inputs, one.outputs, one.gradient if hub else None,
                                                        tuple(inner.get(variable.name, ()))))
        else:
            k = _stored(variable, parts.stored.get(variable.name), variable.item.name in sparse)
        if k is None:
            raise MismatchError(f"the plan's layouts of {variable.name} are none that this AutoDDL knows: "
                                "it was made by another version; make it again")
        found.append(k)
    return tuple(found)


def _stored(variable: Variable, one: Stored | None, sparse: bool) -> int | None:
    return next((k for k, c in enumerate(variable.choices)
                 if one is not None and (one.layout, one.depths, sparse) == (c.outputs[0], c.depths, c.sparse)), None)


def space_of_plan(plan: Plan, cluster: Cluster | None = None) -> tuple[Space, tuple[int, ...]]:
    """The space of the plan's mesh, none of it priced, and the option of every variable that the plan chose.

    Prices will be those of `cluster`, by default the plan's. Raises MismatchError where its layouts are none that this
    AutoDDL knows.
    """
    asked = question_of(plan)
    own = replace(asked, parts={}, cluster=cluster or asked.cluster)
    space = space_of(task_of_question(own), Candidate(plan.mesh, region_of(own.options), own.microbatches,
                                                      own.recompute, own.in_flight, own.waiting, own.later))
    return space, _choice(plan, space.variables)


def repriced(plan: Plan, cluster: Cluster) -> float:
    """Seconds of the layouts of `plan` on another cluster of the same levels, converted there the cheapest way.

    Raises MismatchError where the layouts are none that this AutoDDL knows.
    """
    space, choice = space_of_plan(plan, cluster)
    alone = picked(space, Solution(choice, 0.0, 0.0, 0.0, "", ""), {})
    return problem_of(alone.pricing, alone.variables, None).cost(alone.solution.choice)


def candidates_of(question: Question) -> list[Candidate]:
    """The question's mesh, or all that its pins allow, with its numbers of microbatches and its policies."""
    region = region_of(question.options)
    counts = [one.microbatches for one in split_by_microbatches(question)]
    every = allowed_meshes(question.cluster, question.options)
    plain = [Candidate(mesh, region, n, in_flight=question.in_flight, waiting=question.waiting,
                       later=question.later)
             for n in counts for mesh in every]
    return under_policies(plain, question.options.recompute)


def solve_question(question: Question, progress: Progress | None = None) -> Found:
    """Searches for the question's answer again: the fastest plan and a bound of all. Raises Infeasible where none fits.
    """
    return search(task_of_question(question), candidates_of(question), progress)
