"""Searches over meshes and regions, best first; the number of workers does not change the result.

    floor         all work split evenly over all devices, no communication: a bound before anything is solved
    bound(mesh)   the exact optimum of seconds + price * (bytes - budget): a lower bound, and a plan if it fits
    then, cheapest bound first, the first alone and others two at a time, the budgeted problem of every mesh whose
    bound is below the best plan

Meshes of one or two axes come first, with a price of 0, because they are quickly solved. The value of a byte in the
best of them is the price at which meshes of three axes are bounded. Meshes of more axes come last: their problems are
large (`search.large`), and by then there is a plan that they must beat. Where there are such meshes and no time limit,
all candidates are first solved roughly. So only few of them are solved to the end.

On one mesh and without a budget, a step of k * m microbatches takes at least as long as one of m. Launches and
latencies come more often, and by the formulas nothing gets cheaper than in proportion to its size. There are two
exceptions (`candidates.bounds`): curves of a measured device, and microbatches of one row. So numbers of microbatches
are tried rising. A mesh is tried with more of them only if its bound without a budget is below the best plan. That
bound is one of a number of microbatches that divides them. On meshes of more axes the number that was fastest on few
axes comes first.

A mesh is not solved further once its bound is no better than the best plan by more than the tolerance. The bound of the
whole is the least over all meshes of what was proved for each. An interrupt ends the search with the best plan so far,
and with the bound that holds then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from os import cpu_count
from time import perf_counter

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Solution
from autoddl.cost_models import show_seconds
from autoddl.planner.candidates import Candidate, Solved, bounds, chosen
from autoddl.planner.process_pool import mapper
from autoddl.planner.search_jobs import Answer, Guess, Job, Jobs
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import Row
from autoddl.pricing.floors import floor_seconds

__all__ = ["Found", "Progress", "cut_short", "search"]

Progress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)."""

FEW, MANY = 2, 4
"""Axes of the meshes that are searched first, and of those that are searched last."""

TOGETHER = 2
"""Candidates that are solved without knowing of each other."""

ROUGH = 0.02
"""The gap to which meshes of many axes are solved at first."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search over candidates.

        best          the fastest plan
        bound         the least bound over all candidates, in seconds
        seconds       how long the search took
        interrupted   whether an interrupt ended it
        candidate     the candidate of the fastest plan
        solution      that of the candidate, before its choices are taken alone (`candidates.chosen`)
    """

    best: Solved
    bound: float
    seconds: float
    interrupted: bool
    candidate: Candidate
    solution: Solution


def cut_short(proof: str) -> str:
    """The text of a plan's proof where an interrupt ended the search."""
    return f"{proof}; interrupted"


@dataclass(slots=True)
class _State:
    """The state of the search: a bound of every candidate, and the best plan so far."""

    bounds: list[float]
    """By candidate, seconds that none of its plans is below; infinite where it has none."""
    best: Solution | None = None
    """The fastest plan that fits."""
    row: Row | None = None
    """The row under which the best plan was found."""
    where: int = -1
    """The candidate of the best plan."""
    failed: list[Infeasible | InputError] = field(default_factory=list)
    """Why candidates have no plan."""
    done: int = 0
    """Jobs that are done, for telling progress."""
    reached: dict[int, float] = field(default_factory=dict)
    """By number of microbatches, seconds of the fastest plan that fits."""

    def take(self, i: int, microbatches: int, answer: Answer) -> None:
        """Takes in the answer of candidate i, which has that many microbatches."""
        if answer.problem is not None:
            self.failed.append(answer.problem)
        if answer.proved:
            self.bounds[i] = inf
        self.bounds[i] = max(self.bounds[i], answer.bound)
        if answer.solution is not None:
            self.bounds[i] = max(self.bounds[i], answer.solution.bound)
            if answer.fits:
                self.reached[microbatches] = min(self.reached.get(microbatches, inf), answer.solution.seconds)
            if answer.fits and (self.best is None or answer.solution.seconds < self.best.seconds):
                self.best, self.row, self.where = answer.solution, answer.row, i

    @property
    def seconds(self) -> float:
        return inf if self.best is None else self.best.seconds

    @property
    def guess(self) -> Guess:
        """The row under which the best plan was found, and what a byte of it is worth."""
        return (None, 0.0) if self.best is None or not self.best.price else (self.row, self.best.price)

    @property
    def bound(self) -> float:
        return min([self.seconds, *self.bounds])

    def text(self) -> str:
        bound = f"no plan below {show_seconds(self.bound)}" if self.bound < inf else "no plan fits"
        if self.best is None:
            return f"no plan yet, {bound}"
        gap = 1 - self.bound / self.seconds if self.seconds else 0.0
        return f"best {show_seconds(self.seconds)}, {bound}, gap {gap:.2%}"


def _workers(task: PlanTask, candidates: Sequence[Candidate]) -> int:
    """The number of processes: as asked for, else two where there are two processors and enough work."""
    if task.options.workers is not None:
        return task.options.workers
    heavy = sum(len(c.mesh.axes) > 2 for c in candidates)
    return min(TOGETHER, cpu_count() or 1) if heavy > 1 else 1


def search(task: PlanTask, candidates: Sequence[Candidate], progress: Progress | None = None) -> Found:
    """The fastest plan over all candidates, with the least bound over all of them.

    Raises Infeasible, with the least bytes that any candidate needs, if no plan fits. Raises KeyboardInterrupt if it is
    interrupted before there is a plan.
    """
    start, tell = perf_counter(), progress or (lambda what, done, total: None)
    least = min(1.0, task.counts.least) if task.counts else 1.0
    state = _State([floor_seconds(task.graph, task.cluster) * least] * len(candidates))
    jobs, workers, interrupted = Jobs(task, candidates), _workers(task, candidates), False
    rough = ROUGH if _gains_by_roughness(task, candidates) else task.options.tolerance
    try:
        for turn, count in _rounds(state, candidates):
            these = [i for i, c in enumerate(candidates) if c.microbatches == count and _turn(c) == turn]
            these = [i for i in these if not _hopeless(state, i, task.options.tolerance)]
            _capture(state, task, candidates, these, tell)
            with mapper(jobs.answer, workers if len(these) > 1 else 1, _candidate) as run:
                if turn < 2 or rough > task.options.tolerance:
                    _bound(state, task, candidates, these, run, tell)
                _solve(state, candidates, these, run, tell, rough)
        if rough > task.options.tolerance:
            left = [i for i in range(len(candidates)) if not _hopeless(state, i, task.options.tolerance)]
            state.done -= len(left)
            with mapper(jobs.answer, workers if len(left) > 1 else 1, _candidate) as run:
                _solve(state, candidates, left, run, tell, task.options.tolerance)
    except KeyboardInterrupt:
        if state.best is None:
            raise
        interrupted = True
    tell(f"searched: {state.text()}", 2 * len(candidates), 2 * len(candidates))
    if state.best is None:
        raise _worst(state.failed)
    assert state.row is not None
    best = chosen(task, candidates[state.where], state.best, state.row)
    return Found(best, state.bound, perf_counter() - start, interrupted, candidates[state.where], state.best)


def _worst(failed: Sequence[Infeasible | InputError]) -> Infeasible | InputError:
    """The error that says why there is no plan.

    It has the least bytes that any candidate needs, and the smallest peak that any candidate found.
    """
    starved = [error for error in failed if isinstance(error, Infeasible)]
    if not starved:
        return failed[0]
    first = min(starved, key=lambda error: error.needed)
    return Infeasible(first.needed, first.budget, first.detail, min(error.reachable for error in starved))


def _turn(candidate: Candidate) -> int:
    """The turn in which a candidate is searched: 0 for few axes, 1 for more, 2 for many."""
    axes = len(candidate.mesh.axes)
    return (axes > FEW) + (axes >= MANY)


def _gains_by_roughness(task: PlanTask, candidates: Sequence[Candidate]) -> bool:
    """Whether solving roughly first saves time: several meshes of many axes are to come, and a tight gap is asked for.

    Only the exact solver ends at a gap; with a time limit, every candidate is given its time once.
    """
    many, options = sum(_turn(candidate) == 2 for candidate in candidates), task.options
    return many > 1 and options.solver == "exact" and options.time_limit is None and options.tolerance < ROUGH


def _rounds(state: _State, candidates: Sequence[Candidate]) -> Iterator[tuple[int, int]]:
    """Yields (turn, number of microbatches) in the order of the search.

    With few axes numbers rise. In later turns those come first with which plans were fastest before.
    """
    counts = sorted({c.microbatches for c in candidates})
    yield from ((0, n) for n in counts)
    for turn in (1, 2):
        yield from ((turn, n) for n in sorted(counts, key=lambda n: (state.reached.get(n, inf), n)))


def _capture(state: _State, task: PlanTask, candidates: Sequence[Candidate], which: Sequence[int], tell: Progress
             ) -> None:
    """Captures one of each number of microbatches that candidates of `which` have, before workers are forked."""
    for n in sorted({candidates[i].microbatches for i in which}):
        if not task.has(n):
            tell(f"capturing one of {n} microbatches: {state.text()}", state.done, 2 * len(candidates))
            task.variant(n)


Run = Callable[[Sequence[Job]], Iterable[Answer]]


def _candidate(job: Job) -> int:
    return job[0]


def _bound(state: _State, task: PlanTask, candidates: Sequence[Candidate], which: Sequence[int], run: Run,
           tell: Progress) -> None:
    """Bounds every candidate of `which`, and with it those of more microbatches on the same mesh."""
    guess = state.guess
    for i, answer in zip(which, run([(i, None, guess, task.options.tolerance) for i in which]), strict=True):
        state.take(i, candidates[i].microbatches, answer)
        here = candidates[i]
        for j, other in enumerate(candidates):
            if bounds(task, here, other):
                state.bounds[j] = max(state.bounds[j], answer.free)
        state.done += 1
        tell(f"bounded {candidates[i]}: {state.text()}", state.done, 2 * len(candidates))


def _hopeless(state: _State, i: int, tolerance: float) -> bool:
    return state.bounds[i] >= state.seconds * (1 - tolerance)


def _solve(state: _State, candidates: Sequence[Candidate], which: Sequence[int], run: Run, tell: Progress,
           tolerance: float) -> None:
    """Solves every candidate of `which` whose bound is below the best plan, to this gap, the cheapest bound first.

    The first is solved alone. Its plan, and the value of a byte in it, spare most of the others.
    """
    order = sorted(which, key=lambda i: state.bounds[i])
    for these in (order[:1], *_together(order[1:])):
        left = [i for i in these if not _hopeless(state, i, tolerance)]
        jobs = [(i, state.seconds, state.guess, tolerance) for i in left]
        for i, answer in zip(left, run(jobs), strict=True):
            state.take(i, candidates[i].microbatches, answer)
            tell(f"solved {candidates[i]}: {state.text()}", state.done, 2 * len(candidates))
        state.done += len(these)


def _together(order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cuts the order into groups whose candidates are solved without knowing of each other."""
    return (order[begin:begin + TOGETHER] for begin in range(0, len(order), TOGETHER))
