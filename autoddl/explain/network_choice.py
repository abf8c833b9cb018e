"""Finds the cheapest network on which a step takes at most so long: a plan's question on every network of `NETWORKS`.

    seconds    of the best plan where the network joins the units of the outermost level, with the same ports
    dollars    of its switches and cables, for all ports of that level
    within     the cheapest of those whose seconds are at most the deadline
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.core.errors import Infeasible, InputError, MismatchError
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, show_seconds
from autoddl.cost_models.network_prices import NETWORKS, PRICES, Bill, Prices, bill, level_of, ports_of
from autoddl.explain.run_seconds import as_planned, step_seconds, told_like
from autoddl.planner.finish import answer_plan
from autoddl.planner.mesh_search import Progress
from autoddl.planner.question import Question, question_of

__all__ = ["NetworkChoice", "cheapest_within", "networks_of_plan"]


@dataclass(frozen=True, slots=True)
class NetworkChoice:
    """A network for the ports of a cluster, with what it costs, and how long a step takes on it."""

    name: str
    dollars: float
    seconds: float | None
    """Seconds of the best plan, as its program runs it where one is named; None where there is none."""
    why: str = ""
    """Why there is none."""


def networks_of_plan(plan: Plan, cluster: Cluster, prices: Prices = PRICES, progress: Progress | None = None
                     ) -> tuple[NetworkChoice, ...]:
    """Every network that can be built for the ports of `cluster`, with the best plan of the plan's question on it.

    Raises MismatchError for a plan of another cluster, InputError for one that does not keep its question.
    """
    asked = question_of(plan)
    if asked.cluster.fingerprint != as_planned(plan, cluster).fingerprint:
        raise MismatchError(f"the plan was made for cluster {asked.cluster.name}, and this file has another, "
                            f"{cluster.name}: give the file that it was made with, or plan again")
    return tuple(_choices(plan, asked, prices, progress))


def _choices(plan: Plan, asked: Question, prices: Prices, progress: Progress | None) -> Iterator[NetworkChoice]:
    ports, links = ports_of(asked.cluster)
    outer = asked.cluster.levels[-1]
    for name in NETWORKS:
        built, level = bill(name, ports, links, prices), level_of(name, outer)
        if not isinstance(built, Bill):
            continue
        dollars = built.dollars(prices)
        if level is None:
            yield NetworkChoice(name, dollars, None, f"{outer.size} units of {outer.name} do not fill its boards")
            continue
        place = replace(asked.cluster, levels=(*asked.cluster.levels[:-1], level))
        try:
            found = answer_plan(replace(asked, cluster=place), plan, progress)
        except Infeasible as error:
            yield NetworkChoice(name, dollars, None, str(error))
        else:
            yield NetworkChoice(name, dollars, step_seconds(told_like(plan, found, None)))


def cheapest_within(choices: tuple[NetworkChoice, ...], deadline: float) -> NetworkChoice:
    """The cheapest network on which a step takes at most `deadline` seconds, of equally cheap ones the fastest.

    Raises InputError where there is none.
    """
    timed = [(one.dollars, one.seconds, one) for one in choices if one.seconds is not None]
    fine = [row for row in timed if row[1] <= deadline]
    if not fine:
        least = f"the fastest takes {show_seconds(min(row[1] for row in timed))}" if timed else "none has a plan"
        raise InputError(f"no network has a plan of at most {show_seconds(deadline)} a step: {least}")
    return min(fine, key=lambda row: row[:2])[2]
