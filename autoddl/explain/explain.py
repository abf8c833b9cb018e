"""Explains a plan from the plan alone: why it is as it is, what other choices cost, and how sure that is.

    explain        where the seconds and bytes go; for a parameter or op its choice and the price of every other
    proved         the lower bound by a certificate that is checked without the solver
    price_of_pins  the price of each pin: the search without it
    stages_with    the stages that have what is asked for by name

The price of another choice is that of the best whole plan with it, on the plan's mesh and within its pins.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import zip_longest
from math import inf, prod

from autoddl.core.errors import Infeasible, InputError, MismatchError
from autoddl.core.graph import RECEIVE, Kind, Op, Tensor
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.layout import Mesh, local_shape
from autoddl.core.names import near_names
from autoddl.core.plan import Conversion, Decision, Plan, Stored
from autoddl.core.problem import Problem
from autoddl.core.recompute import SEARCH, policy_blocks
from autoddl.core.stages import SEND, cut_graph
from autoddl.explain.breakdown import BlockCost, block_costs, row_text
from autoddl.explain.compare_run import graph_of_plan
from autoddl.explain.rows.memory_rows import check_row
from autoddl.explain.switch_facts import switch_texts
from autoddl.operators.own_facts import told_by_trials
from autoddl.planner.assemble import assemble_choice
from autoddl.planner.budget_search import BudgetSearch
from autoddl.planner.candidates import policies_on
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pins import allowed_meshes
from autoddl.planner.question import (
    Question,
    Rebuilt,
    network_on,
    problem_on,
    question_of,
    rebuild,
    solve_question,
    split_by_microbatches,
)
from autoddl.planner.row_problems import least_peak
from autoddl.pricing.build_problem import Row
from autoddl.pricing.price import Pricing, add_seconds
from autoddl.pricing.space import Variable
from autoddl.schedule.buckets import parameter_edges
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.search.certify.alternatives import alternatives, bounding_beliefs, option_bounds
from autoddl.search.certify.certificate import check_certificate
from autoddl.search.certify.prove import prove

__all__ = ["Explained", "Named", "Other", "PinPrice", "Proved", "explain", "price_of_pins", "proved",
           "stages_with"]


@dataclass(frozen=True, slots=True)
class Other:
    """A choice, and the seconds of the best whole plan with it.

    They are exactly `seconds`, or, where that is None, at least `bound`; infinite where no plan fits. The plan's own
    choice is among the others.
    """

    layouts: str
    seconds: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter or op with its choice, and every choice that it has, those with a known price first.

    `alike` names others with the same pattern of names, choice and bounds, to which the answer applies too.
    """

    name: str
    target: str
    chosen: str
    others: tuple[Other, ...]
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explained:
    """The seconds and bytes of a plan, by parts.

        seconds    seconds of the step
        nbytes     bytes of a rank at the peak of the memory line
        budget     bytes that a rank may use
        blocks     seconds and bytes of each block
        axes       (mesh axes, seconds, bytes sent) of the collectives over them
        added      seconds in which gradients of microbatches are added up
        moment     the moments of the row that the budget is proved by, and its bytes under the plan
        unruled    (operator, seconds) of the operators that are replicated because they have no rule
        tried      (operator, dimension string) of those whose rule was found by trying
        untried    (operator, reason) of those of which nothing was found, or no more
        named      the parameters and ops that were asked for by name
        switches   which all-reduces run in switches that reduce, and why others do not
    """

    seconds: float
    nbytes: float
    budget: float
    blocks: tuple[BlockCost, ...]
    axes: tuple[tuple[str, float, float], ...]
    added: float
    moment: tuple[str, float]
    unruled: tuple[tuple[str, float], ...]
    tried: tuple[tuple[str, str], ...]
    untried: tuple[tuple[str, str], ...]
    named: tuple[Named, ...]
    switches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Proved:
    """A checked certificate: no plan on `meshes` takes less than `bound` seconds."""

    meshes: tuple[str, ...]
    """The meshes, as text; those with other microbatches or recomputation than the plan's say so."""
    seconds: float
    """Seconds of the plan's step."""
    bound: float
    """Seconds that no plan is below."""
    claimed: float
    """The bound that the plan itself states."""
    inequalities: int
    """The number of inequalities that were checked."""
    distinct: int
    """The number of different ones among them."""
    multipliers: tuple[float, ...]
    """Multipliers of the budget, in seconds per byte; one for each part into which the space was divided."""

    @property
    def gap(self) -> float:
        """The part of the plan's seconds that the best plan may save at most, between 0 and 1."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class PinPrice:
    """The price of a pin: the best plan without it takes `seconds` on `mesh`, which is `price` seconds less."""

    pin: str
    seconds: float
    price: float
    mesh: str


def explain(plan: Plan, names: Sequence[str] = (), count: int = 3, until: float = inf) -> Explained:
    """The seconds and bytes of `plan` by parts, and the choices of the parameters and ops that `names` match.

    Prices of the `count` cheapest choices of each are exact; the others are bounds. From the moment `until` of
    `time.monotonic`, in seconds, no further price is searched for. Raises InputError for a name that
    matches nothing, and MismatchError for a plan of another version.
    """
    made, predicted = rebuild(plan), plan.predicted
    axes = tuple((name, seconds, predicted.volume.get(name, 0.0)) for name, seconds in
                 sorted(predicted.communication.items(), key=lambda pair: -pair[1]))
    unruled = tuple(sorted(predicted.fallback.items(), key=lambda pair: -pair[1]))
    tried, untried = (tuple(said.items()) for said in told_by_trials(made.pricing.graph))
    problem, choice = made.with_bytes()
    moment = row_text(made.row), problem.nbytes(choice)
    return Explained(predicted.seconds, predicted.peak_bytes, plan.budget, block_costs(made), axes,
                     _added(plan, made.pricing), moment, unruled, tried, untried,
                     _named(made, names, count, plan.source["tolerance"], until) if names else (), switch_texts(plan))


def _added(plan: Plan, pricing: Pricing) -> float:
    """Seconds in which a rank adds gradients of microbatches up."""
    return (plan.microbatches - 1) * sum(
        add_seconds(pricing, edge.tensor, prod(local_shape(edge.tensor.shape, edge.added, plan.mesh)))
        for edge in parameter_edges(plan, pricing.graph) if edge.tensor.trained and edge.added is not None)


def _matching(made: Rebuilt, names: Sequence[str]) -> list[int]:
    """The variables that any of `names` matches; a hub only by its own name. A name that matches none raises."""
    texts = [_texts(variable) for variable in made.variables]
    for name in names:
        if not any(fnmatchcase(text, name) for several in texts for text in several):
            parameters = [v.name for v in made.variables if not isinstance(v.item, Op)]
            near = near_names(name, (text for several in texts for text in several),
                              f"parameters are {', '.join(parameters[:4])}, ...")
            raise InputError(f"{name!r} matches no parameter, module or op of the plan; {near}")
    return [v for v, several in enumerate(texts) if any(fnmatchcase(text, name) for text in several for name in names)]


def stages_with(plan: Plan, names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """By stage, those of the names that match a parameter, module or op there; stages without any are left out.

    Raises InputError for a name that matches nothing in any stage, or for a plan that keeps no graph.
    """
    assert plan.pipeline is not None
    texts = [{text for many in (stage.graph.ops, stage.graph.tensors) for one in many for text in _names_of(one)}
             for stage in cut_graph(graph_of_plan(plan), plan.pipeline.cuts)]
    found = {k: tuple(name for name in names if any(fnmatchcase(text, name) for text in own))
             for k, own in enumerate(texts)}
    for name in names:
        if not any(name in own for own in found.values()):
            every = dict.fromkeys(text for own in texts for text in sorted(own))
            raise InputError(f"{name!r} matches no parameter, module or op of any stage; "
                             + near_names(name, every, "--stage N asks for all of a stage"))
    return {k: own for k, own in found.items() if own}


def _names_of(one: Op | Tensor) -> tuple[str, ...]:
    """The names by which an op or a parameter of a stage may be asked for."""
    if isinstance(one, Op):
        return () if one.target in (SEND, RECEIVE) else tuple(filter(None, (one.name, one.module)))
    return (one.fqn, *one.aliases) if one.kind is Kind.PARAMETER else ()


def _texts(variable: Variable) -> tuple[str, ...]:
    item = variable.item
    if not isinstance(item, Op):
        return (item.fqn, *item.aliases)
    return (item.name,) if item.target == HUB else (item.name, item.module)


def _named(made: Rebuilt, names: Sequence[str], count: int, tolerance: float, until: float) -> tuple[Named, ...]:
    """The answer for every match; those with one pattern of names, one choice and equal bounds share an answer."""
    cost = made.problem.cost(made.choice)
    known = bounding_beliefs(made.problem, cost)
    groups: dict[object, list[int]] = {}
    for v in _matching(made, names):
        variable = made.variables[v]
        label = _texts(variable)[-1] if isinstance(variable.item, Op) else variable.name
        pattern = re.sub(r"\d+", "#", label)
        bounds = tuple(float(f"{b:.9g}") for b in option_bounds(known, v))
        target = variable.item.target if isinstance(variable.item, Op) else ""
        groups.setdefault((pattern, target, made.choice[v], id(variable.choices), bounds), []).append(v)
    found = []
    for members in groups.values():
        variable, chosen = made.variables[members[0]], made.choice[members[0]]
        every = alternatives(made.problem, members[0], known, count, tolerance, (chosen, cost), until)
        others = tuple(Other(str(variable.choices[a.option]), a.seconds, a.bound) for a in every)
        target = variable.item.target if isinstance(variable.item, Op) else "parameter"
        found.append(Named(_label(variable), target, str(variable.choices[chosen]), others,
                           tuple(_label(made.variables[v]) for v in members[1:])))
    return tuple(found)


def _label(variable: Variable) -> str:
    item = variable.item
    return f"{item.module} ({item.name})" if isinstance(item, Op) and item.module else variable.name


def proved(plan: Plan, everywhere: bool = False) -> Proved:
    """Makes the certificate of the plan's bound and checks it; the result covers the plan's mesh.

    With `everywhere` it covers every mesh that the plan was chosen from, with every number of microbatches and every
    policy of recomputation. A certificate that does not hold raises AssertionError; MismatchError where the file says
    anything else than what is proved.
    """
    made = rebuild(plan)
    seconds = made.problem.cost(made.choice)
    _check_file(plan, made)
    _check_memory_row(plan, made)
    problems = {str(plan.mesh): _whole(plan, made)} | (_others(plan, made.row) if everywhere else {})
    checked = [check_certificate(problem, prove(problem, seconds)) for problem in problems.values()]
    return Proved(tuple(problems), seconds, min(seconds, *(one.bound for one in checked)), plan.bound,
                  sum(one.inequalities for one in checked), sum(one.distinct for one in checked),
                  tuple(lam for one in checked for lam in one.multipliers))


def _check_file(plan: Plan, made: Rebuilt) -> None:
    """Raises MismatchError where what the file says ranks do is not what was priced and is proved."""
    again = assemble_choice(made.pricing, made.choice, made.variables)
    for what, written, priced in (("decision", plan.decisions, again.decisions), ("stored", plan.stored, again.stored),
                                  ("conversion", plan.conversions, again.conversions)):
        wrong = next((a for a, b in zip_longest(written, priced) if a != b), None)
        if written != priced:
            raise MismatchError(f"the plan's {what} {_about(wrong)} is not the one that its layouts have: the file was "
                                "changed; plan again instead of editing it")
    if plan.inputs != again.inputs:
        raise MismatchError("the plan's inputs are not laid out as its ops read them: the file was changed; plan again "
                            "instead of editing it")
    pricing = made.pricing
    peak = with_memory_peak(plan, pricing.graph, pricing.optimizer, pricing.cluster).predicted.peak_bytes
    if abs(peak - plan.predicted.peak_bytes) > 1:
        raise MismatchError(f"the plan says {plan.predicted.peak_bytes:,.0f} bytes at its peak, and has {peak:,.0f}: "
                            "the file was changed; plan again instead of editing it")


def _about(part: object) -> str:
    """Names what a part of a plan file is about, or that there is one too few."""
    match part:
        case Decision():
            return f"of {part.name}"
        case Stored():
            return f"of {part.fqn}"
        case Conversion():
            return f"of {part.tensor} for {part.op}"
    return "that is missing"


def _whole(plan: Plan, made: Rebuilt) -> Problem:
    """The problem of the plan's mesh, over all policies of recomputation where the search chose among them."""
    asked = question_of(plan)
    if SEARCH not in [each for policy in asked.options.recompute for each in policies_on(plan.mesh, policy)]:
        return made.with_bytes()[0]
    return problem_on(replace(asked, recompute=SEARCH), plan.mesh, made.row)[2]


def _check_memory_row(plan: Plan, made: Rebuilt) -> None:
    """Asserts that the row of the bound has the bytes of the plan's layouts, and none above its memory line."""
    row, pricing = made.row, made.pricing
    claimed = {moment: made.row_bytes(moment) for moment in row}
    check_row(plan, pricing.graph, pricing.optimizer, pricing.cluster, row, claimed, pricing.codecs)


def _under_policies(asked: Question) -> list[tuple[str, Mesh]]:
    """Every policy of recomputation with every mesh that the plan was chosen from."""
    return [(each, mesh) for policy in asked.options.recompute for mesh in allowed_meshes(asked.cluster, asked.options)
            for each in policies_on(mesh, policy)]


def _others(plan: Plan, row: Row) -> dict[str, Problem]:
    """By text, the problems of the other meshes that the plan was chosen from; those without a choice are left out."""
    asked, found = question_of(plan), dict[str, Problem]()
    for one in split_by_microbatches(asked):
        n = one.microbatches
        parts = "" if n == plan.microbatches else f" x {n} microbatch{'es' * (n > 1)}"
        for policy, mesh in _under_policies(asked):
            same = policy == SEARCH or set(plan.recompute) == set(policy_blocks(add_hubs(one.graph), policy))
            name = f"{mesh}{parts}" + ("" if same else f", recompute {policy}")
            if name != str(plan.mesh):
                with suppress(InputError):
                    here = replace(one, recompute=policy)
                    found[name] = problem_on(here, mesh, _row_on(here, mesh, plan, row))[2]
    return found


def _row_on(asked: Question, mesh: Mesh, plan: Plan, row: Row) -> Row:
    """The row that bounds another part of the space best, as far as a search of it finds one.

    Any row bounds every plan that fits, so the proof depends on no search.
    """
    if not plan.source["row"]:
        return row
    network = network_on(asked, mesh)
    search, known = BudgetSearch(network, plan.budget), row if network.lifetimes.has(row) else None
    try:
        return search.solve(known, 0.0, inf, plan.source["tolerance"]).row
    except Infeasible:
        needed, found = least_peak(search, tuple(known or ()))
        return found if needed > plan.budget else row


def price_of_pins(plan: Plan, progress: Progress | None = None) -> tuple[PinPrice, ...]:
    """The price of each pin by the search without it, then that of all together; none for a plan without pins."""
    asked = question_of(plan)
    pins_of = asked.options.pins
    without = [(pin, tuple(p for p in pins_of if p is not pin)) for pin in pins_of]
    if len(without) > 1:
        without.append(("all pins", ()))
    found = []
    for name, pins in without:
        best = solve_question(asked.asking(pins=pins), progress).best
        seconds = min(best.solution.seconds, plan.predicted.seconds)
        found.append(PinPrice(name, seconds, plan.predicted.seconds - seconds, str(best.pricing.mesh)))
    return tuple(found)
