"""The outer search: over meshes and regions, best first, with a result that does not depend on the number of workers.

    floor         all work split evenly over all devices, no communication: a bound before anything is solved
    bound(mesh)   the exact optimum of seconds + price * (bytes - budget): a lower bound, and a plan if it fits
    then, cheapest bound first, two at a time, the budgeted problem of every mesh whose bound is below the best plan

Meshes of one or two axes come first, with a price of 0: they are quickly solved, and what a byte is worth in the best
of them is the price at which those of three are bounded. Meshes of more axes come last: their problems are large
(`search.large`), and there is a plan by then that they must beat. Where there are such and there is no time limit, all
candidates are solved roughly before any is solved to the end, so that what takes long is done to few.

With k * m microbatches a step takes at least as long as with m on the same mesh without a budget: launches and
latencies come more often, and by the formulas nothing gets cheaper than in proportion to its size (curves of a measured
device may, and a microbatch of one row can be split as larger ones cannot: `candidates.bounds`). So numbers of
microbatches are tried rising, on those meshes alone where the bound without a budget of a number that divides them
leaves hope; with more axes first the number that was fastest with few.

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
from autoddl.planner.candidates import Candidate, Solved, bounds, chosen
from autoddl.planner.process_pool import mapper
from autoddl.planner.search_jobs import Answer, Guess, Job, Jobs
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import Row
from autoddl.pricing.price import floor_seconds

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
    """The fastest plan, the least bound over all candidates, the seconds that the search took."""

    best: Solved
    bound: float
    seconds: float
    interrupted: bool = False


def cut_short(proof: str) -> str:
    """What a plan says of its proof where an interrupt ended the search."""
    return f"{proof}; interrupted"


@dataclass(slots=True)
class _State:
    """What is known so far: a bound per candidate, the best plan and where it is, what was `reached` with a number of
    microbatches."""

    bounds: list[float]
    best: Solution | None = None
    row: Row | None = None
    where: int = -1
    failed: list[Infeasible | InputError] = field(default_factory=list)
    done: int = 0
    reached: dict[int, float] = field(default_factory=dict)

    def take(self, i: int, microbatches: int, answer: Answer) -> None:
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
        best = "no plan yet" if self.best is None else f"best {self.seconds:.4g} s"
        return f"{best}, bound {self.bound:.4g} s"


def _workers(task: PlanTask, candidates: Sequence[Candidate]) -> int:
    """As asked; else two where two processors and enough work are there."""
    if task.options.workers is not None:
        return task.options.workers
    heavy = sum(len(c.mesh.axes) > 2 for c in candidates)
    return min(TOGETHER, cpu_count() or 1) if heavy > 1 else 1


def search(task: PlanTask, candidates: Sequence[Candidate], progress: Progress | None = None) -> Found:
    """The fastest plan over all candidates. Raises Infeasible, with the least bytes that any needs, if none fits, and
    KeyboardInterrupt if it is interrupted before there is a plan."""
    start, tell = perf_counter(), progress or (lambda what, done, total: None)
    state = _State([floor_seconds(task.graph, task.cluster)] * len(candidates))
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
    return Found(best, state.bound, perf_counter() - start, interrupted)


def _worst(failed: Sequence[Infeasible | InputError]) -> Infeasible | InputError:
    """Why there is no plan: the least bytes that no candidate excludes, and the smallest plan that any knows."""
    starved = [error for error in failed if isinstance(error, Infeasible)]
    if not starved:
        return failed[0]
    first = min(starved, key=lambda error: error.needed)
    return Infeasible(first.needed, first.budget, first.detail, min(error.reachable for error in starved))


def _turn(candidate: Candidate) -> int:
    """0 with few axes, 2 with many."""
    axes = len(candidate.mesh.axes)
    return (axes > FEW) + (axes >= MANY)


def _gains_by_roughness(task: PlanTask, candidates: Sequence[Candidate]) -> bool:
    """Whether several meshes of many axes are to come, and a wide gap is reached sooner than the asked one: other
    solvers know none, and time is granted once."""
    many, options = sum(_turn(candidate) == 2 for candidate in candidates), task.options
    return many > 1 and options.solver == "exact" and options.time_limit is None and options.tolerance < ROUGH


def _rounds(state: _State, candidates: Sequence[Candidate]) -> Iterator[tuple[int, int]]:
    """(turn, number of microbatches): few axes first, rising; then the number with which those were fastest, and so
    on."""
    counts = sorted({c.microbatches for c in candidates})
    yield from ((0, n) for n in counts)
    for turn in (1, 2):
        yield from ((turn, n) for n in sorted(counts, key=lambda n: (state.reached.get(n, inf), n)))


def _capture(state: _State, task: PlanTask, candidates: Sequence[Candidate], which: Sequence[int], tell: Progress
             ) -> None:
    """The model in as many parts as the candidates of `which` have microbatches: workers know what was captured."""
    for n in sorted({candidates[i].microbatches for i in which}):
        if not task.has(n):
            tell(f"capturing one of {n} microbatches: {state.text()}", state.done, 2 * len(candidates))
            task.variant(n)


Run = Callable[[Sequence[Job]], Iterable[Answer]]


def _candidate(job: Job) -> int:
    return job[0]


def _bound(state: _State, task: PlanTask, candidates: Sequence[Candidate], which: Sequence[int], run: Run,
           tell: Progress) -> None:
    """The bound of every candidate of `which`, and of more microbatches on the same meshes."""
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
    """Every candidate of `which` whose bound is below the best plan, to this gap, cheapest bound first; with many axes
    the first alone: its plan, and what a byte is worth in it, spare most of the others."""
    order = sorted(which, key=lambda i: state.bounds[i])
    alone = any(_turn(candidates[i]) == 2 for i in order)
    for these in (order[:1], *_together(order[1:])) if alone else _together(order):
        left = [i for i in these if not _hopeless(state, i, tolerance)]
        jobs = [(i, state.seconds, state.guess, tolerance) for i in left]
        for i, answer in zip(left, run(jobs), strict=True):
            state.take(i, candidates[i].microbatches, answer)
            tell(f"solved {candidates[i]}: {state.text()}", state.done, 2 * len(candidates))
        state.done += len(these)


def _together(order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Those that are solved without knowing of each other."""
    return (order[begin:begin + TOGETHER] for begin in range(0, len(order), TOGETHER))
