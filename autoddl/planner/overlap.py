"""The plan with the shortest time line, for who asks what is hidden to count.

The search adds all seconds up. On the time line (`timeline`) the collectives of parameters, of the loss and of new
buffers run beside computation, and all others are waited for at once. So the search is asked again, with the part 1 - h
of their seconds counted:

    h = 0         the sum
    h in HIDDEN   plans that send more for parameters and less for activations
    h = 1         what is computed and waited for at once: no plan's time line is shorter than its optimum

The plans that these find, on all meshes, on each alone and as every named strategy, are put on the time line; the
shortest is taken, with the bound of h = 1 on all time lines. One with a number of microbatches for which the model
turns out to be another than was searched is passed over.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.planner.candidates import Candidate, Solved
from autoddl.planner.mesh_search import Found, cut_short, search
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import floor_seconds
from autoddl.schedule.timeline import predict_timeline

__all__ = ["HIDDEN", "overlapped"]

HIDDEN = (0.0, 0.5, 0.9)

Finish = Callable[[Found], Plan]


def overlapped(task: PlanTask, first: Found, plan: Plan, spaces: Sequence[Sequence[Candidate]], finish: Finish) -> Plan:
    """`plan`, made of `first`, or the plan of a part of the space and another share of hidden seconds that is shorter
    on the time line. The first of `spaces` is the whole. An interrupt ends it with the best so far, which says so."""
    best, least, bound = plan, _line(task, plan), floor_seconds(task.graph, task.cluster)
    try:
        whole = search(replace(task, hidden=1.0), spaces[0])
        bound = whole.bound
        if whole.interrupted:
            raise KeyboardInterrupt
        for made in _finished(_others(task, first, spaces), finish):
            line = _line(task, made)
            if line < least and made.predicted.peak_bytes <= task.budget:
                best, least = made, line
    except KeyboardInterrupt:
        best = replace(best, proof=cut_short(best.proof))
    said = replace(best.predicted, line_seconds=least, line_bound=min(bound, least))
    return replace(best, predicted=said)


def _finished(found: Iterator[Found], finish: Finish) -> Iterator[Plan]:
    """The plans of what was found, but for those of a graph that was guessed wrongly."""
    for one in found:
        try:
            made = finish(one)
        except InputError:
            continue
        yield made


def _others(task: PlanTask, first: Found, spaces: Sequence[Sequence[Candidate]]) -> Iterator[Found]:
    """What the searches find, once each, by the account of the sum. A part in which nothing fits has none. Raises
    KeyboardInterrupt where one is interrupted."""
    known = {_key(first.best)}
    for space, share in product(spaces, HIDDEN):
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
    """The same choice with all of its seconds; `bound` is that of their sum."""
    pricing = replace(solved.pricing, hidden=0.0)
    seconds = problem_of(pricing, solved.variables, None).cost(solved.solution.choice)
    solution = replace(solved.solution, seconds=seconds, bound=min(bound, seconds),
                       proof=f"{solved.solution.proof}; taken for its time line")
    return replace(solved, pricing=pricing, solution=solution)


def _line(task: PlanTask, plan: Plan) -> float:
    graph = task.confirmed(plan.microbatches).graph
    return predict_timeline(plan, graph, task.cluster).step.seconds + plan.predicted.update
