"""Answers about a plan, from the plan alone: why it is as it is, what else there is, and how sure that is.

    explain        where the seconds and bytes go; for a parameter or op its choice and what every other would cost
    proved         the lower bound by a certificate that is checked without the solver
    price_of_pins  what each pin costs: the search without it

What another choice costs is the cost of the best whole plan with that choice, on the plan's mesh and within its pins.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product

from autoddl.core.errors import InputError
from autoddl.core.graph import Op
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.plan import Plan
from autoddl.core.problem import Problem
from autoddl.core.recompute import SEARCH, policy_blocks
from autoddl.explain.breakdown import Share, row_text, shares
from autoddl.explain.memory_rows import check_row
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pins import allowed_meshes
from autoddl.planner.question import Rebuilt, problem_on, question_of, rebuild, solve_question, split_by_microbatches
from autoddl.pricing.space import Variable
from autoddl.search.certify.alternatives import alternatives, bounding_beliefs, option_bounds
from autoddl.search.certify.certificate import check_certificate
from autoddl.search.certify.prove import prove

__all__ = ["Explained", "Named", "Other", "PinPrice", "Proved", "explain", "price_of_pins", "proved"]


@dataclass(frozen=True, slots=True)
class Other:
    """A choice and the best whole plan with it: exactly `seconds`, or only known to be at least `bound`. A plan's own
    choice is among them. `seconds` is inf where no plan fits."""

    layouts: str
    seconds: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter or op: what was chosen, and every choice, those with a known price first. Names, choices and bounds
    of those in `alike` are alike."""

    name: str
    target: str
    chosen: str
    others: tuple[Other, ...]
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explained:
    """Where a plan spends.

        seconds    of the step
        nbytes     at the peak of the memory line
        budget     bytes that a rank has
        blocks     seconds and bytes of each block
        axes       (axes, seconds, bytes sent)
        moment     the moments of the row that the budget is proved by, and its bytes under the plan
        unruled    (operator, seconds) of what is replicated for want of a rule
        named      what was asked for by name
    """

    seconds: float
    nbytes: float
    budget: float
    blocks: tuple[Share, ...]
    axes: tuple[tuple[str, float, float], ...]
    moment: tuple[str, float]
    unruled: tuple[tuple[str, float], ...]
    named: tuple[Named, ...]


@dataclass(frozen=True, slots=True)
class Proved:
    """On `meshes`, of which those with other microbatches or recomputation than the plan's say so, no plan takes less
    than `bound`; `claimed` is the bound that the plan itself carries."""

    meshes: tuple[str, ...]
    seconds: float
    bound: float
    claimed: float
    inequalities: int
    distinct: int
    multipliers: tuple[float, ...]

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class PinPrice:
    """`seconds` of the best plan without this pin, on `mesh`; the pin costs `price` seconds a step."""

    pin: str
    seconds: float
    price: float
    mesh: str


def explain(plan: Plan, names: Sequence[str] = (), count: int = 3) -> Explained:
    """Where `plan` spends, and the choices of what `names` match; of each the `count` cheapest are exact."""
    made, predicted = rebuild(plan), plan.predicted
    axes = tuple((name, seconds, predicted.volume.get(name, 0.0)) for name, seconds in
                 sorted(predicted.communication.items(), key=lambda pair: -pair[1]))
    unruled = tuple(sorted(predicted.fallback.items(), key=lambda pair: -pair[1]))
    moment = row_text(plan.source["row"]), made.problem.nbytes(made.choice)
    return Explained(predicted.seconds, predicted.peak_bytes, plan.budget, shares(made), axes,
                     moment, unruled,
                     _named(made, names, count, plan.source["tolerance"]) if names else ())


def _matching(made: Rebuilt, names: Sequence[str]) -> list[int]:
    """The variables that any of `names` matches; a hub only by its own name. A name that matches none raises."""
    texts = [_texts(variable) for variable in made.variables]
    for name in names:
        if not any(fnmatchcase(text, name) for several in texts for text in several):
            parameters = [v.name for v in made.variables if not isinstance(v.item, Op)]
            raise InputError(f"{name!r} matches no parameter, module or op of the plan; parameters are "
                             f"{', '.join(parameters[:4])}, ...")
    return [v for v, several in enumerate(texts) if any(fnmatchcase(text, name) for text in several for name in names)]


def _texts(variable: Variable) -> tuple[str, ...]:
    item = variable.item
    if not isinstance(item, Op):
        return (item.fqn, *item.aliases)
    return (item.name,) if item.target == HUB else (item.name, item.module)


def _named(made: Rebuilt, names: Sequence[str], count: int, tolerance: float) -> tuple[Named, ...]:
    """Every match; those with one pattern of names, one choice and one set of bounds are answered once."""
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
        every = alternatives(made.problem, members[0], known, count, tolerance, (chosen, cost))
        others = tuple(Other(str(variable.choices[a.option]), a.seconds, a.bound) for a in every)
        target = variable.item.target if isinstance(variable.item, Op) else "parameter"
        found.append(Named(_label(variable), target, str(variable.choices[chosen]), others,
                           tuple(_label(made.variables[v]) for v in members[1:])))
    return tuple(found)


def _label(variable: Variable) -> str:
    item = variable.item
    return f"{item.module} ({item.name})" if isinstance(item, Op) and item.module else variable.name


def proved(plan: Plan, everywhere: bool = False) -> Proved:
    """The certificate of the plan's mesh, made and checked; `everywhere`: of every mesh that it was chosen from, with
    every number of microbatches and every policy of recomputation."""
    made = rebuild(plan)
    seconds = made.problem.cost(made.choice)
    _check_memory_row(plan, made)
    problems = {str(plan.mesh): _whole(plan, made)} | (_others(plan) if everywhere else {})
    checked = [check_certificate(problem, prove(problem, seconds)) for problem in problems.values()]
    return Proved(tuple(problems), seconds, min(seconds, *(one.bound for one in checked)), plan.bound,
                  sum(one.inequalities for one in checked), sum(one.distinct for one in checked),
                  tuple(lam for one in checked for lam in one.multipliers))


def _whole(plan: Plan, made: Rebuilt) -> Problem:
    """The problem of the plan's mesh, over all policies of recomputation where the search chose among them."""
    asked = question_of(plan)
    if SEARCH not in asked.options.recompute:
        return made.problem
    return problem_on(replace(asked, recompute=SEARCH), plan.mesh, plan.source["row"])[2]


def _check_memory_row(plan: Plan, made: Rebuilt) -> None:
    """Asserts that the row of the bound has the bytes of the plan's layouts, and none above its memory line."""
    row, pricing = plan.source["row"], made.pricing
    claimed = {moment: made.network.row_bytes(made.choice, {moment: 1.0}) for moment in row}
    check_row(plan, pricing.graph, pricing.optimizer, pricing.cluster, row, claimed)


def _others(plan: Plan) -> dict[str, Problem]:
    """What else the plan was chosen from. Where the pins leave no layout there was nothing to choose."""
    asked, found = question_of(plan), dict[str, Problem]()
    for one in split_by_microbatches(asked):
        n = one.microbatches
        parts = "" if n == plan.microbatches else f" x {n} microbatch{'es' * (n > 1)}"
        for policy, mesh in product(asked.options.recompute, allowed_meshes(asked.cluster, asked.options)):
            same = policy == SEARCH or set(plan.recompute) == set(policy_blocks(add_hubs(one.graph), policy))
            name = f"{mesh}{parts}" + ("" if same else f", recompute {policy}")
            if name != str(plan.mesh):
                with suppress(InputError):
                    found[name] = problem_on(replace(one, recompute=policy), mesh, plan.source["row"])[2]
    return found


def price_of_pins(plan: Plan, progress: Progress | None = None) -> tuple[PinPrice, ...]:
    """For each pin the search without it, then without any. A plan without pins has no rows."""
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
