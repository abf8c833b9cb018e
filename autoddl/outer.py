"""The outer search: over meshes and regions, best first, with a result that does not depend on the number of workers.

    floor         all work split evenly over all devices, no communication: a bound before anything is solved
    bound(mesh)   the exact optimum of seconds + price * (bytes - budget): a lower bound, and a plan if it fits
    then, cheapest bound first, two at a time, the budgeted problem of every mesh whose bound is below the best plan

Meshes of one or two axes come first, with a price of 0: they are quickly solved, and what a byte is worth in the best
of them is the price at which the others are bounded.

With k * m microbatches a step takes at least as long as with m on the same mesh without a budget: launches and
latencies come more often, and by the formulas nothing gets cheaper than in proportion to its size (curves of a measured
device may). So numbers of microbatches are tried
rising, on those meshes alone where the bound without a budget of a number that divides them leaves hope; with more axes
first the number that was fastest with few.

A mesh is not solved further once its bound is no better than the best plan by more than the tolerance. The bound of the
whole is the least over all meshes of what was proved for each. An interrupt ends the search with the best plan so far,
and with the bound that holds then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from os import cpu_count
from time import perf_counter
from typing import Any

from autoddl.cost_models import Cluster
from autoddl.errors import Infeasible, InputError
from autoddl.graph import Graph
from autoddl.layout import Mesh
from autoddl.price import Pricing, floor_seconds
from autoddl.problem import Problem, Solution
from autoddl.search import Above, Space, relax, solve, space_of
from autoddl.space import Choice, Region, Variable, variables
from autoddl.tables import problem_of
from autoddl.variants import Variant, Variants
from autoddl.workers import mapper

__all__ = ["Candidate", "Found", "Progress", "Solved", "Task", "posed", "search"]

Progress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)."""

FEW = 2
"""Axes of the meshes that are searched first."""

TOGETHER = 2
"""Candidates that are solved without knowing of each other."""


@dataclass(frozen=True, slots=True)
class Task:
    """What every mesh is solved for. `variants` captures the model with one of several microbatches, once each;
    `hidden` is what `Pricing` leaves out."""

    graph: Graph
    original: Graph
    spec: Mapping[str, Any]
    cluster: Cluster
    budget: float
    optimizer: str
    solver: str
    tolerance: float
    time_limit: float | None
    about: Mapping[str, Any]
    capture_seconds: float
    began: float
    workers: int | None = None
    variants: Variants | None = None
    hidden: float = 0.0

    def has(self, microbatches: int) -> bool:
        """Whether `variant` has it without capturing."""
        return self.variants is None or self.variants.has(microbatches)

    def variant(self, microbatches: int) -> Variant:
        """The model with one of so many microbatches, perhaps stretched."""
        return self._whole if self.variants is None else self.variants(microbatches)

    def confirmed(self, microbatches: int) -> Variant:
        """The model with one of so many microbatches, captured."""
        return self._whole if self.variants is None else self.variants.confirmed(microbatches)

    @property
    def _whole(self) -> Variant:
        return Variant(self.graph, self.original, self.spec)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, the region of its plans that is searched, and the number of microbatches."""

    mesh: Mesh
    region: Callable[[Graph, Mesh], Region]
    microbatches: int = 1

    def __str__(self) -> str:
        return f"{self.mesh}" + (f" x {self.microbatches} microbatches" if self.microbatches > 1 else "")


@dataclass(frozen=True, slots=True)
class Solved:
    """One mesh, solved: `variables` have what was chosen alone, and `problem` is what that costs."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    problem: Problem
    solution: Solution


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest plan, the least bound over all candidates, the seconds that the search took."""

    best: Solved
    bound: float
    seconds: float
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """What became of one candidate: a solution that fits or only bounds, a bound, or why there is neither, and whether
    that is `proved` to be no plan; `free` is a bound of any budget."""

    solution: Solution | None
    fits: bool = False
    problem: Infeasible | InputError | None = None
    proved: bool = False
    bound: float = 0.0
    free: float = 0.0


@dataclass(slots=True)
class _State:
    """What is known so far: a bound per candidate, the best plan and where it is, what was `reached` with a number of
    microbatches."""

    bounds: list[float]
    best: Solution | None = None
    where: int = -1
    failed: list[Infeasible | InputError] = field(default_factory=list)
    done: int = 0
    reached: dict[int, float] = field(default_factory=dict)

    def take(self, i: int, microbatches: int, answer: _Answer) -> None:
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
                self.best, self.where = answer.solution, i

    @property
    def seconds(self) -> float:
        return inf if self.best is None else self.best.seconds

    @property
    def price(self) -> float:
        return 0.0 if self.best is None else self.best.price

    @property
    def bound(self) -> float:
        return min([self.seconds, *self.bounds])

    def text(self) -> str:
        best = "no plan yet" if self.best is None else f"best {self.seconds:.4g} s"
        return f"{best}, bound {self.bound:.4g} s"


Posed = tuple[Pricing, tuple[Variable, ...], Problem]


def posed(task: Task, candidate: Candidate) -> Posed:
    """The candidate's problem under the budget."""
    pricing, choices = _framed(task, candidate)
    return pricing, choices, problem_of(pricing, choices, task.budget)


def _framed(task: Task, candidate: Candidate) -> tuple[Pricing, tuple[Variable, ...]]:
    graph = task.variant(candidate.microbatches).graph
    pricing = Pricing(graph, candidate.mesh, task.cluster, task.optimizer, candidate.microbatches, task.hidden)
    return pricing, variables(graph, candidate.mesh, candidate.region(graph, candidate.mesh))


def _taken(task: Task, candidate: Candidate, solution: Solution) -> Solved:
    """What `solution` chose, priced alone: a worker priced the rest, and that stays there. Variables with the same
    choices that chose alike share one, so that they are priced once."""
    pricing, choices = _framed(task, candidate)
    single: dict[tuple[int, int], tuple[Choice, ...]] = {}
    taken = tuple(Variable(v.item, single.setdefault((id(v.choices), k), (v.choices[k],)))
                  for v, k in zip(choices, solution.choice, strict=True))
    problem = problem_of(pricing, taken, task.budget)
    return Solved(pricing, taken, problem, replace(solution, choice=(0,) * len(taken)))


Job = tuple[int, float | None, float]
"""(candidate, ceiling of its seconds or None for a bound alone, a guess of the price of a byte)."""


class _Candidates:
    """The jobs of a worker. The last problems are kept: most candidates are asked for twice."""

    CELLS = 20_000_000

    def __init__(self, task: Task, candidates: Sequence[Candidate]) -> None:
        self.task, self.candidates = task, candidates
        self.kept: dict[int, tuple[Posed, Space | None]] = {}

    def ready(self, i: int) -> tuple[Posed, Space | None]:
        """The problem, and for the exact solver what it makes of it first."""
        if i not in self.kept:
            made = posed(self.task, self.candidates[i])
            self.kept[i] = made, space_of(made[2]) if self.task.solver == "exact" else None
            while len(self.kept) > 1 and sum(_cells(made[2]) for made, _ in self.kept.values()) > self.CELLS:
                del self.kept[next(iter(self.kept))]
        return self.kept[i]

    def answer(self, job: Job) -> _Answer:
        """A bound of candidate i, or its best plan; what costs more than the ceiling is not wanted."""
        i, ceiling, price = job
        try:
            self.ready(i)
        except InputError as error:
            return _Answer(None, problem=error, proved=True)
        try:
            return self._bound(i, price) if ceiling is None else self._plan(i, ceiling, price)
        except Above as above:
            return _Answer(None, bound=above.bound)
        except Infeasible as error:
            return _Answer(None, problem=error, proved=error.needed > error.budget)
        except InputError as error:  # of a solver that gave up
            return _Answer(None, problem=error)

    def _bound(self, i: int, price: float) -> _Answer:
        (_, _, problem), space = self.ready(i)
        if space is None:
            solution = solve(problem.within(None), self.task.solver, time_limit=self.task.time_limit)
            return _Answer(solution, self._fits(solution), free=solution.bound)
        solution = relax(problem, price, space)
        if not price or self._alone(i):
            return _Answer(solution, self._fits(solution), free=0.0 if price else solution.bound)
        free = relax(problem, 0.0, space).bound
        return _Answer(solution, self._fits(solution), bound=free, free=free)

    def _fits(self, solution: Solution) -> bool:
        """What an elimination that only bounds reads back may be forbidden."""
        return solution.seconds < inf and solution.nbytes <= self.task.budget

    def _alone(self, i: int) -> bool:
        """Whether no other candidate can use a bound of any budget."""
        return not any(_bounds(self.task, self.candidates[i], other) for other in self.candidates)

    def _plan(self, i: int, ceiling: float, price: float) -> _Answer:
        (_, _, problem), space = self.ready(i)
        task = self.task
        if space is not None:
            space.forget(price)
        return _Answer(solve(problem, task.solver, time_limit=task.time_limit, tolerance=task.tolerance,
                             ceiling=ceiling, price=price, space=space), True)


def _cells(problem: Problem) -> int:
    return sum(table.core[0].size for table in problem.tables)


def _workers(task: Task, candidates: Sequence[Candidate]) -> int:
    """As asked; else two where two processors and enough work are there."""
    if task.workers is not None:
        return task.workers
    heavy = sum(len(c.mesh.axes) > 2 for c in candidates)
    return min(TOGETHER, cpu_count() or 1) if heavy > 1 else 1


def search(task: Task, candidates: Sequence[Candidate], progress: Progress | None = None) -> Found:
    """The fastest plan over all candidates. Raises Infeasible, with the least bytes that any needs, if none fits, and
    KeyboardInterrupt if it is interrupted before there is a plan."""
    start, tell = perf_counter(), progress or (lambda what, done, total: None)
    state = _State([floor_seconds(task.graph, task.cluster)] * len(candidates))
    jobs, workers, interrupted = _Candidates(task, candidates), _workers(task, candidates), False
    try:
        for few, microbatches in _rounds(state, candidates):
            these = [i for i, c in enumerate(candidates) if c.microbatches == microbatches
                     and (len(c.mesh.axes) <= FEW) is few and not _hopeless(state, task, i)]
            if these and not task.has(microbatches):
                tell(f"capturing one of {microbatches} microbatches: {state.text()}", state.done, 2 * len(candidates))
                task.variant(microbatches)
            with mapper(jobs.answer, workers if len(these) > 1 else 1, _candidate) as run:
                _bound(state, task, candidates, these, run, tell)
                _solve(state, task, candidates, these, run, tell)
    except KeyboardInterrupt:
        if state.best is None:
            raise
        interrupted = True
    tell(f"searched: {state.text()}", 2 * len(candidates), 2 * len(candidates))
    if state.best is None:
        raise min(state.failed, key=lambda e: e.needed if isinstance(e, Infeasible) else inf)
    best = _taken(task, candidates[state.where], state.best)
    return Found(best, state.bound, perf_counter() - start, interrupted)


def _rounds(state: _State, candidates: Sequence[Candidate]) -> Iterator[tuple[bool, int]]:
    """(few axes?, microbatches): few axes first, rising; then the number with which those were fastest, and so on."""
    counts = sorted({c.microbatches for c in candidates})
    yield from ((True, n) for n in counts)
    yield from ((False, n) for n in sorted(counts, key=lambda n: (state.reached.get(n, inf), n)))


Run = Callable[[Sequence[Job]], Iterable[_Answer]]


def _candidate(job: Job) -> int:
    return job[0]


def _bound(state: _State, task: Task, candidates: Sequence[Candidate], which: Sequence[int], run: Run, tell: Progress
           ) -> None:
    """The bound of every candidate of `which`, and of more microbatches on the same meshes."""
    price = state.price
    for i, answer in zip(which, run([(i, None, price) for i in which]), strict=True):
        state.take(i, candidates[i].microbatches, answer)
        here = candidates[i]
        for j, other in enumerate(candidates):
            if _bounds(task, here, other):
                state.bounds[j] = max(state.bounds[j], answer.free)
        state.done += 1
        tell(f"bounded {candidates[i]}: {state.text()}", state.done, 2 * len(candidates))


def _bounds(task: Task, one: Candidate, other: Candidate) -> bool:
    """Whether the seconds of `one` without a budget bound those of `other`. Measured kernels may be faster where they
    are small."""
    return (not task.cluster.device.curves and other.mesh == one.mesh and other.region is one.region
            and other.microbatches > one.microbatches and other.microbatches % one.microbatches == 0)


def _hopeless(state: _State, task: Task, i: int) -> bool:
    return state.bounds[i] >= state.seconds * (1 - task.tolerance)


def _solve(state: _State, task: Task, candidates: Sequence[Candidate], which: Sequence[int], run: Run, tell: Progress
           ) -> None:
    """Every candidate of `which` whose bound is below the best plan, cheapest bound first."""
    order = sorted(which, key=lambda i: (state.bounds[i], i))
    for done in range(0, len(order), TOGETHER):
        left = [i for i in order[done:done + TOGETHER] if not _hopeless(state, task, i)]
        for i, answer in zip(left, run([(i, state.seconds, state.price) for i in left]), strict=True):
            state.take(i, candidates[i].microbatches, answer)
            tell(f"solved {candidates[i]}: {state.text()}", state.done, 2 * len(candidates))
        state.done += len(order[done:done + TOGETHER])
