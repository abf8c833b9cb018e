"""Finds the plan with the shortest time line, on which communication may hide behind computation.

The search adds all seconds up. On the time line (`timeline`) some collectives overlap computation: those of parameters,
of the loss and of new buffers. All others are waited for at once. So the search runs again, with only the part 1 - h of
the seconds of the first kind counted:

    h = 0         the sum
    h in HIDDEN   plans that send more for parameters and less for activations
    h = 1         computation and collectives that are waited for: no time line is shorter than its optimum

These searches run on all meshes, on each alone, and as every named strategy. All plans that they find are put on the
time line, and the shortest is taken. The search with h = 1 bounds all time lines. A plan is passed over if its graph,
which was derived for its number of microbatches, turns out to be wrong.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.planner.candidates import Candidate, Solved
from autoddl.planner.mesh_search import Found, Progress, cut_short, search
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.floors import floor_seconds
from autoddl.schedule.timeline import predict_timeline

__all__ = ["HIDDEN", "overlapped"]

HIDDEN = (0.0, 0.5, 0.9)

Finish = Callable[[Found], Plan]


def overlapped(task: PlanTask, first: Found, plan: Plan, spaces: Sequence[Sequence[Candidate]], finish: Finish,
               progress: Progress | None = None) -> Plan:
    """The plan with the shortest time line: `plan`, made of `first`, or one that another search finds.

    Each search takes one of `spaces`, of which the first is the whole, and one part of hidden seconds. Then `finish`
    makes a plan of what it found. An interrupt ends it with the best plan so far, whose proof says so.
    """
    best, least, bound = plan, _line(task, plan), floor_seconds(task.graph, task.cluster)
    try:
        whole = search(replace(task, hidden=1.0), spaces[0])
        bound = whole.bound
        if whole.interrupted:
            raise KeyboardInterrupt
        for made in _finished(_others(task, first, spaces, progress), finish):
            line = _line(task, made)
            if line < least and made.predicted.peak_bytes <= task.budget:
                best, least = made, line
    except KeyboardInterrupt:
        best = replace(best, proof=cut_short(best.proof))
    said = replace(best.predicted, line_seconds=least, line_bound=min(bound, least))
    return replace(best, predicted=said)


def _finished(found: Iterator[Found], finish: Finish) -> Iterator[Plan]:
    """Yields the plans of the results, but for those whose derived graph is wrong."""
    for one in found:
        try:
            made = finish(one)
        except InputError:
            continue
        yield made


def _others(task: PlanTask, first: Found, spaces: Sequence[Sequence[Candidate]], progress: Progress | None
            ) -> Iterator[Found]:
    """Yields the results of the searches, each plan once, with all of its seconds counted.

    A part of the space in which nothing fits yields none. Raises KeyboardInterrupt where a search is interrupted.
    """
    known = {_key(first.best)}
    for k, (space, share) in enumerate(product(spaces, HIDDEN)):
        if progress:
            progress("looking for shorter time lines; an interrupt ends it with the best so far", k,
                     len(spaces) * len(HIDDEN))
        if space is spaces[0] and not share:
            continue  # that is the first
        try:
            other = search(replace(task, hidden=share), space)
        except (Infeasible, InputError):
            continue
        if other.interrupted:
            raise KeyboardInterrupt
        found = other.best
        if _key(found) not in known:
            known.add(_key(found))
            yield replace(first, best=_counted(found, first.bound))


def _key(solved: Solved) -> Hashable:
    chosen = tuple(v.choices[k] for v, k in zip(solved.variables, solved.solution.choice, strict=True))
    return solved.pricing.mesh, solved.pricing.microbatches, chosen


def _counted(solved: Solved, bound: float) -> Solved:
    """The result with all seconds of its choice counted; `bound` is that of their sum."""
    pricing = replace(solved.pricing, hidden=0.0)
    seconds = problem_of(pricing, solved.variables, None).cost(solved.solution.choice)
    solution = replace(solved.solution, seconds=seconds, bound=min(bound, seconds),
                       proof=f"{solved.solution.proof}; taken for its time line")
    return replace(solved, pricing=pricing, solution=solution)


def _line(task: PlanTask, plan: Plan) -> float:
    graph = task.confirmed(plan.microbatches).graph
    return predict_timeline(plan, graph, task.cluster).step.seconds + plan.predicted.update
