"""Searches over the cuts of one candidate: so many stages and microbatches, and a schedule.

The least seconds of its stages are known (`cut_problems`), and with them a bound of all its cuts by the paths of its
schedule (`search.pipeline_cuts`). That bound comes first with what one search of one unit says, and closer only where
it is below the best plan. The cut that is least under what is known is solved: the layouts of its stages are searched,
and the pipeline is simulated. Then more is known, and the bound rises:

    Where units differ, cuts are divided into windows by where their boundaries lie (`cut_problems.CutWindow`). That of
    the least bound is looked into, and its cuts are solved.

    0  before any, units are searched under prices of their bytes, which rule out cuts that leave a rank too little
       (`rank_memory.unit_prices`), and where seconds count as in the blend that says most of the plans of units
    1  the stages of the cut are searched alone, and sharper where they were (`StageParts.bound`, `StageParts.sharpen`);
       where units differ, so are stages as long that lie where least is known of them
       where they do not fit their ranks so, a cut beside it whose stages do is solved first (`tried_cuts.roomier`)
    2  where that says nothing new, paths of this cut are blended (`joint_stages.blend_paths`), and then the plans of
       its stages are listed, where they are few (`listed_plans`)
    3  it ends where the bound reaches the best pipeline, or nothing is left that raises it; where no plan is known
       then, cuts near the last are tried, those first that leave most room (`tried_cuts.roomier_cuts`)
    4  where a gap is left, cuts beside the best are tried (`tried_cuts`), and the layouts of the best are chosen
       together. Some such cuts are tried on the way for every bound
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Flight, Schedule, sizes_text
from autoddl.core.pipeline_cuts import (
    CutProblem,
    CutSolution,
    ListedPlans,
    PathBound,
)
from autoddl.core.pipeline_proofs import TIME_OVER, Window, WindowProof, proofs_to_json
from autoddl.core.pipeline_schedules import schedule_title
from autoddl.cost_models.timelines.pipeline_bounds import closed_paths, critical_path, trace_cut, trace_mean
from autoddl.cost_models.timelines.pipelines import ONCE
from autoddl.planner.pipelines.cut_problems import CutWindow, KnownStages, cut_problem, likely_problem
from autoddl.planner.pipelines.joint_stages import SharedPrice, blend_paths, improved
from autoddl.planner.pipelines.listed_plans import list_plans
from autoddl.planner.pipelines.rank_memory import priced_ranks, rank_peak, rank_prices, shared_prices, unit_prices
from autoddl.planner.pipelines.solved_stages import OutOfTime
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.tried_cuts import TriedCuts, roomier
from autoddl.planner.process_pool import processor_seconds
from autoddl.search.cut_planes import blended
from autoddl.search.path_tables import Blend, blend_of_plans
from autoddl.search.pipeline_cuts import bound_of_paths, least_over_cuts

__all__ = ["Alternative", "CutSearch"]

ROUNDS = 24
"""Cuts of a candidate that are solved at most."""

ROUGH = 0.02
"""The gap of the first bounds."""

STALE = 2
"""Cuts whose stages were known already that are solved for one bound."""

CLIMBS = 6
"""Cuts beside the fastest that are tried for one bound."""

TOGETHER = 3
"""Cuts of a candidate whose stages are chosen together."""

BEHIND = 1 / 4
"""The part of the time of bounds that better cuts may take of a candidate that has not the best plan."""

FIRST = 3
"""Cuts of a candidate whose plans are found roughly at most, until there is one."""

ELSEWHERE = 4
"""Times that stages are sought where least is known of them, at most, for one cut."""

STARVED = "no stage has a plan that fits the budget with its microbatches in flight"

SOUGHT = 8
"""Blends of the plans of units that are sought for one answer, at most."""

TURNS = 3
"""Times that a blend is found of all cuts, and what units take where seconds count so: before anything is solved, and
under prices of bytes for every bound.
"""

FARTHEST = 1.1
"""Times of the bound that a mean of cuts may take of which something is learned, before a plan is known."""

IMPLIED = 1 / 16
"""The part of the gap to which cuts are searched by which what other counts imply of units may be too little."""

FIRST_EFFORT, EFFORT = 6, 30
"""Boxes of cuts that are looked into before any plan is known, and for each bound then.

Boxes of earlier bounds are bounded again first, and do not count. As they take long too, then as many more are looked
into, up to MOST_BOXES.
"""

MOST_BOXES = 100
"""Boxes of cuts that are looked into for one bound, at most."""

DIVIDED = 8
"""Windows of cuts that are divided for one bound, at most."""

MOST_WINDOWS = 48
"""Windows of the cuts of a candidate, at most."""

FIRST_WINDOWS = 1 / 4
"""The part of the limit that boxes may take before cuts are solved, where windows are divided."""

QUICK = 1 / 100
"""The part of the limit that looking into a window may take in the mean, before cuts are solved."""

IN_WINDOWS = 12
"""New boxes of the cuts of a window that are looked into for one bound, where windows are divided."""

ALONE = 4
"""Boxes of a single cut that are looked into."""

MOST_PRICES = 48
"""Prices of bytes by what units take, at most."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The outcome of a candidate with stages.

        stages         number of stages
        schedule       name of the schedule
        microbatches   number of microbatches
        seconds        those of a step of its best pipeline; None where none was found
        nbytes         peak bytes of a rank of that pipeline
        bound          seconds that none of its pipelines is below
        detail         why its search ended
        proof          by window of cuts the least seconds of stages from which the bound follows, and its proof
        marks          the places of cuts
        sizes          ranks of every stage; none: all have as many
    """

    stages: int
    schedule: str
    microbatches: int
    seconds: float | None
    nbytes: float | None
    bound: float
    detail: str
    proof: tuple[WindowProof, ...] = ()
    marks: tuple[int | None, ...] = ()
    sizes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as JSON."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "sizes" or self.sizes}
        del found["marks"]
        return found | {"bound": None if self.bound == inf else self.bound,
                        "proof": proofs_to_json(self.proof, self.marks) if self.proof else None}


@dataclass(eq=False)
class CutSearch:
    """The search over the cuts of one candidate: `advance` it until it is done, and perhaps `look_around` then.

        part       the stages, and what is known of them
        name       name of the schedule
        tell       tells progress
        best_known  tells the seconds of the best plan of any candidate, of all processes
        cuts       the cuts that were tried
        paths      paths of the schedule that bound its seconds; none before the first bound
        is_closer  whether that bound knows all of the commonest unit, not M alone
        blends     of such paths
        prices     of bytes of stages that share memory, of which something is known
        blended    cuts whose paths were blended
        listed     cuts whose plans were to be listed; None where they are too many, or left to bounds
        is_tight   whether no cut beside the last was found whose stages fit their ranks without a budget
        bound      seconds that no cut is below
        proof      of the bound, by window
        answer     the cuts that are to be solved next
        windows    of all cuts: each where its boundaries lie
        looks      how often a window was looked into
        turns      how often a blend of all cuts was found before any was solved
        pricing    how often prices of bytes are to be learned for the answer
        rounds     how often cuts were solved
        stale      rounds since the bound rose in which nothing new became known
        is_hurried  whether a first plan was looked for before bounds were known closer
        took       seconds of the processor that better cuts took, stages of those that are solved, boxes of cuts, and
                   plans of cuts that are solved
        ended      why nothing is left to be done
        needed     the least bytes of a rank that some stage needs, of those that another process found not to fit
    """

    part: StageParts
    name: str
    tell: Callable[[str], None]
    best_known: Callable[[], float] = lambda: inf
    cuts: TriedCuts = field(init=False)
    paths: Sequence[PathBound] = ()
    is_closer: bool = False
    blends: list[Blend] = field(default_factory=list)
    prices: list[SharedPrice] = field(default_factory=list)
    blended: set[tuple[int, ...]] = field(default_factory=set)
    listed: dict[tuple[int, ...], ListedPlans | None] = field(default_factory=dict)
    is_tight: bool = False
    bound: float = 0.0
    proof: tuple[WindowProof, ...] = ()
    answer: CutSolution | None = None
    windows: list[CutWindow] = field(default_factory=lambda: [CutWindow()])
    looks: int = 0
    turns: int = 0
    pricing: int = 0
    rounds: int = 0
    stale: int = 0
    is_hurried: bool = False
    took: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("climb", "solve", "boxes", "plans"), 0.0))
    ended: str = ""
    needed: float = inf

    def __post_init__(self) -> None:
        self.cuts = TriedCuts(self.part, self.name)

    @property
    def schedule(self) -> Schedule:
        """The schedule. Raises InputError where there is none so."""
        return self.cuts.schedule

    @property
    def flights(self) -> tuple[Flight, ...]:
        """By stage, the microbatches in flight."""
        return self.cuts.flights

    @property
    def late(self) -> Callable[[], bool]:
        """Whether the time that the search may take is over."""
        return self.part.late

    @property
    def seconds(self) -> float:
        """The seconds of the fastest pipeline; infinite where there is none."""
        return self.cuts.fastest.seconds if self.cuts.fastest else inf

    @property
    def best(self) -> float:
        """The seconds of the best plan that is known of any candidate."""
        return min(self.best_known(), self.seconds)

    @property
    def row(self) -> Alternative:
        """The outcome of the candidate so far."""
        found, bound = self.cuts.fastest, min(self.bound, self.seconds)
        peak = rank_peak(self.part, self.cuts.staged(found.cut), found.plans) if found else None
        detail = "proved" if found and self._reaches(found.seconds) else \
            "no better than the best" if self._reaches(self.best) else self.ended or TIME_OVER
        return Alternative(self.part.stages, self.name, self.part.microbatches, found.seconds if found else None, peak,
                           bound, detail, self.proof, self.part.marks, self.part.sizes)

    def _reaches(self, seconds: float) -> bool:
        return self.bound >= seconds * (1 - self.part.task.options.tolerance)

    @property
    def is_closed(self) -> bool:
        """Whether the bound reaches the best pipeline, of this candidate or of any."""
        return self._reaches(self.best)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left that raises the bound or finds a better pipeline."""
        return bool(self.ended) or self.is_closed

    def hurry(self) -> None:
        """Looks for a first plan: that of the cut which is least under what little is known."""
        self.is_hurried = True
        with suppress(OutOfTime):
            answer = self.answer or self._least_known(1)
            if answer is not None:
                self._say("a first plan")
                self.cuts.find(self.cuts.placed.near(self.part.cut_of(answer.cut), answer.seconds), roughly=True)

    def advance(self, climbs: bool = True) -> None:
        """Solves the cuts that are least, and finds the bound of what is known then; at first that of paths alone.

        Cuts beside the fastest are tried before that unless another process tries them (`climbs`).
        """
        if not self.paths:
            self.paths = closed_paths(self.schedule, ONCE)
            self._begin(closer=False)
        elif not self.is_closer:
            self.is_closer = True
            with suppress(OutOfTime):
                self._begin(closer=True)
        elif self.turns < TURNS:
            self._learn_first()
        elif self.answer is None:
            self._answer_next()
        elif self.pricing:
            self._answer_priced()
        else:
            self._solve_answer(self.answer, climbs)
            if not self.is_closed:
                self._answer_next()

    def _answer_next(self) -> None:
        """Finds the bound, and the cuts that are to be solved next; what their blend tells is learned then."""
        answer = self._least_known(self._effort if self.rounds and self.best < inf else FIRST_EFFORT)
        self.answer = self._more_boxes(answer) if self.rounds else answer
        is_new = self._learn_blend(self.answer)
        self.pricing = TURNS if is_new and self.rounds and self.prices else 0
        if not self.pricing:
            self._end()

    def _end(self) -> None:
        """Tells why nothing is left to be done, where that is so; a plan is looked for then if none is known."""
        if self.answer is None:
            self.bound, self.proof, self.ended = inf, (), STARVED
        elif self.stale > STALE or self.rounds == ROUNDS:
            if self.best == inf:
                near = self.cuts.placed.near(self.part.cut_of(self.answer.cut), self.answer.seconds)
                self.cuts.find_any(near, self._say)
            self.ended = "no cut is left that raises the bound" if self.stale > STALE else f"{ROUNDS} cuts were solved"

    def _answer_priced(self) -> None:
        """Finds the next answer, and learns of its blend and prices of bytes; again while the bound rises."""
        before, self.pricing = self.bound, self.pricing - 1
        self.answer = self._least_known(self._effort) or self.answer
        if not self._learn_blend(self.answer) or self.bound <= before * (1 + self._tolerance / 4) or not self.pricing:
            self.pricing = 0
            self._end()

    def _learn_first(self) -> None:
        """Learns of a blend of all cuts, before any is solved; the first time also of bytes of units."""
        if not self.turns:
            with suppress(OutOfTime):
                self.prices += unit_prices(self.part, self.flights, self.paths, self.bound)
        self.turns = self.turns + 1 if self._learn_blend(self._least_known(1)) else TURNS

    def _more_boxes(self, answer: CutSolution | None) -> CutSolution | None:
        """Looks into more boxes of cuts, while that raises the bound and took less than stages did, under a limit."""
        before = 0.0
        while (answer is not None and self._is_limited and not self.is_closed and not self.late()
               and self.took["boxes"] < self.took["solve"] and self.bound > before * (1 + self._tolerance / 4)):
            before = self.bound
            answer = self._least_known(self._effort) or answer
        return answer

    @property
    def _effort(self) -> int:
        """New boxes of cuts that are looked into for one bound."""
        return min(EFFORT + (self.answer.boxes.count if self.answer and self.answer.boxes else 0), MOST_BOXES)

    @property
    def _is_limited(self) -> bool:
        """Whether the search has a limit, so that what it finds depends on seconds in any case."""
        return self.part.task.options.stages_limit is not None

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds the seconds of the processor that something takes."""
        began = processor_seconds()
        try:
            yield
        finally:
            self.took[what] += processor_seconds() - began

    def _least_known(self, effort: int) -> CutSolution | None:
        return self._least(self._tolerance, effort)

    def _learn_blend(self, answer: CutSolution | None) -> bool:
        """Learns what units take where seconds count as in a blend; whether that was new of any.

        It is that which says most of plans of units that were found, in the mean of cuts of which least is known. Where
        that is not new, or cuts there take longer than need be, it is that of the least cut. Where units do not tell,
        it is the blend of what is known.
        """
        if answer is None or answer.blend is None or self.is_closed:
            return False
        cut, new = self.part.cut_of(answer.weakest), False
        with suppress(OutOfTime):
            for places in dict.fromkeys((self.part.fractional_cut(answer.mean) or cut, cut)):
                found = self._blend_of_units(places, inf if places == cut else min(self.best, FARTHEST * self.bound))
                if found is None and places != cut:
                    continue
                blend, prices = found or (answer.blend, [])
                new = self._learn_prices(prices)
                for s in {*range(self.part.stages)} - {s for one in prices if one in self.prices for s in one.stages}:
                    counts = blend.stages[s]
                    new = self.part.on(s).learn_direction(s, counts, cut, self._tolerance * IMPLIED) or new
                if new:
                    break
        return new

    def _blend_of_units(self, cut: Sequence[float], most: float) -> tuple[PathBound, list[SharedPrice]] | None:
        """(the blend that says most of all plans of the units of a cut, nearly; prices of bytes); None if none tell.

        It is that of the plans that were found, while its counts and prices find others. The cut may be a mean of cuts.
        It is None where the cut takes more than `most` seconds by these plans, or none of them fit.
        """
        found, before, ends = None, inf, list(pairwise((0.0, *cut, float(self.part.units))))
        groups = priced_ranks(self.part, self.flights)
        for _ in range(SOUGHT):
            plans = [self.part.on(s).found_units(*own, self.flights[s] if groups else None)
                     for s, own in enumerate(ends)]
            if not all(plans):
                return None
            seconds, paths, paid = blend_of_plans(plans, self.part.sent_at(cut), partial(critical_path, self.schedule),
                                                  groups)
            if seconds == inf or (seconds > most and before < inf):
                return None
            found = blended(paths), shared_prices(self.part, blended(paths), groups, paid, self.bound)
            if seconds > before * (1 - self._tolerance * IMPLIED):
                break
            before = seconds
            priced = {s for one in found[1] for s in one.stages}
            news = [self.part.on(s).find_units(*ends[s], counts, self._tolerance * IMPLIED)
                    for s, counts in enumerate(found[0].stages) if s not in priced]
            news += [self.part.find_turns(*ends[s], self.flights[s], counts, one.price) for one in found[1]
                     for s, counts in zip(one.stages, one.weights, strict=True)]
            if not any(news):
                break
        return found

    def _learn_prices(self, prices: Sequence[SharedPrice]) -> bool:
        """Learns what stages of ranks take under prices of their bytes; whether one was new."""
        new = [one for one in prices if one not in self.prices][:max(0, MOST_PRICES - len(self.prices))]
        for one in new:
            for s, counts in zip(one.stages, one.weights, strict=True):
                self.part.learn_turns(s, self.flights[s], counts, one.price)
        self.prices += new
        return bool(new)

    def _begin(self, closer: bool) -> None:
        """Finds the bound of the schedule's closed paths, which takes little time."""
        for one in self.part.every:
            one.begin(closer)
        problem = cut_problem(self.part, self.schedule, self.flights)
        try:
            bound, proof = bound_of_paths(problem, self.paths, partial(trace_mean, likely_problem(problem)))
            for window in self.windows:
                window.learn(bound, problem, proof, ())
            self._take_over()
        except InputError:
            self.bound, self.proof, self.ended = inf, (), STARVED

    def _take_over(self) -> None:
        """Takes over the least bound of all windows where that is greater, with their proofs."""
        bound = min(one.bound for one in self.windows)
        if bound == inf:
            self.bound, self.proof, self.ended = inf, (), STARVED
        elif bound > self.bound:
            rises = bound * (1 - self.part.task.options.tolerance) > self.bound
            self.stale = 0 if rises else self.stale
            self.bound = bound
            self.proof = tuple({id(one.proof): one.proof for one in self.windows if one.proof}.values())

    @property
    def _tolerance(self) -> float:
        """The gap to which cuts are searched: a part of what is left between the bound and the best pipeline."""
        left = 1 - self.bound / self.best if self.best < inf else 1.0
        return max(self.part.task.options.tolerance / 4, min(ROUGH, left / 8))

    def _least(self, tolerance: float, effort: int = EFFORT) -> CutSolution | None:
        """The cut that is least under what is known, within a gap; None where no stage has a plan.

        It is that of the window of the least bound, which is divided while it matters where the stages of its weakest
        cut lie.
        """
        known = KnownStages(self.part, self.schedule, self.flights, self.prices,
                            [one for one in self.listed.values() if one is not None])
        looked, left = set[CutWindow](), DIVIDED if len(self.part.common_units) > 1 else 0
        effort = min(effort, IN_WINDOWS) if len(self.windows) > 1 or (left and self._has_time_for_windows) else effort
        while True:
            one = min(self.windows, key=lambda one: one.bound)
            if one not in looked:
                looked.add(one)
                with self._timed("boxes"):
                    self._look_into(one, known, tolerance, effort)
                continue
            halves = None
            if left and self._has_time_for_windows and not self.late():
                with self._timed("boxes"):
                    halves = self._halves(one, known, tolerance)
            if halves is None:
                break
            left -= 1
            self.windows += halves
            self.windows.remove(one)
        self._take_over()
        return one.answer

    @property
    def _has_time_for_windows(self) -> bool:
        """Whether boxes took no longer than stages did, under a limit; else whether cuts were solved.

        Boxes may take some of a limit first, while looking into a window takes little of that.
        """
        limit, boxes = self.part.task.options.stages_limit, self.took["boxes"]
        if limit is None:
            return self.rounds > 0
        first = limit * FIRST_WINDOWS if boxes <= self.looks * limit * QUICK else 0.0
        return boxes < max(self.took["solve"], first)

    def _look_into(self, one: CutWindow, known: KnownStages, tolerance: float, effort: int) -> None:
        """Finds the least cut of a window, and its bound; that is infinite where there is none."""
        problem, self.looks = known.problem(one.ends), self.looks + 1
        try:
            one.answer = self._least_in(problem, tolerance, effort, one.answer)
            self.paths = one.answer.paths
            one.learn(one.answer.bound, problem, one.answer.proof, one.ends)
        except InputError:
            one.end(problem, self.paths[0])

    def _least_in(self, problem: CutProblem, tolerance: float, effort: int, before: CutSolution | None) -> CutSolution:
        likely = likely_problem(problem)
        return least_over_cuts(problem, self.paths, partial(trace_cut, likely), mean=partial(trace_mean, likely),
                               effort=effort, tolerance=tolerance, blends=self.blends, ceiling=self.best,
                               late=self.late, stages=partial(critical_path, self.schedule),
                               before=before.boxes if before else None)

    def _halves(self, one: CutWindow, known: KnownStages, tolerance: float) -> list[CutWindow] | None:
        """The parts of a window, if its weakest cut takes more than is known of as many blocks elsewhere in it."""
        if one.answer is None or len(self.windows) >= MOST_WINDOWS or one.bound >= self.best * (
                1 - self.part.task.options.tolerance):
            return None
        cut = self.part.cut_of(one.answer.weakest)
        exactly = known.problem(tuple((self.part.ends[k],) * 2 for k in cut))
        with suppress(InputError):
            if self._least_in(exactly, tolerance, ALONE, None).bound <= one.bound * (1 + tolerance):
                return None
        halves = known.halves(one.ends, cut)
        return halves and [CutWindow(ends, one.bound, one.proof, one.answer) for ends in halves]

    def _solve_answer(self, answer: CutSolution, climbs: bool) -> None:
        """Solves the cut that is least, and the one of which least is proved; near the first also one that is tried.

        Where there is a plan, better ones are tried first: blends of a cut take longer, and are of the best then.
        """
        self._say(f"bound {self.bound:.4g} s")
        if climbs:
            self._climb()
        asked, stale = [self.part.cut_of(sizes) for sizes in (answer.cut, answer.weakest)], self.stale
        first = self.cuts.placed.near(asked[0], answer.seconds)
        with self._timed("solve"):
            for cut in dict.fromkeys((first, *asked)):
                if self.is_closed:
                    break
                with suppress(OutOfTime):
                    self._solve(cut, cut == first)
                if cut not in asked:
                    self.stale = stale
            with suppress(OutOfTime):
                if self._solve_elsewhere(answer.weakest):
                    self.stale = stale
        self.rounds += 1

    def _solve_elsewhere(self, sizes: Sequence[int]) -> bool:
        """Makes more known of stages of these numbers of blocks where least is known of them; whether any was new.

        Where units differ, the stages of a cut are not those of its numbers of blocks that may take least.
        """
        news = False
        for _ in range(ELSEWHERE if len(self.part.common_units) > 1 else 0):
            wholes = {one: one.wholes(set(self.flights)) for one in self.part.every}
            stages = [(self.part.least_place(s, n, wholes[self.part.on(s)][flight], self._window), flight)
                      for s, (n, flight) in enumerate(zip(sizes, self.flights, strict=True))]
            new = [self._known(one, stages) for one in (StageParts.bound, StageParts.sharpen)]
            if self.is_closed or not any(new):
                break
            news = True
        return news

    def _climb(self) -> None:
        """Tries cuts beside the fastest, some times, while there is time, and other layouts of the best.

        Under a limit the cuts take no more of it than bounds took, and less where another candidate has the best plan.
        """
        left, is_best = CLIMBS if self.cuts.fastest and self.rounds else 0, self.seconds <= self.best
        while left and not self.is_closed and (not self._is_limited or self._has_time_for_cuts(is_best)):
            with self._timed("climb"):
                left = left - 1 if self.cuts.step(self.best, self._met) else 0
        if self.rounds and not self.is_closed and (is_best or not self._is_limited):
            with self._timed("climb"):
                self.cuts.fill_bubbles()

    def _has_time_for_cuts(self, is_best: bool) -> bool:
        """Whether one cut more takes no more than the part of the time of bounds that better cuts may take."""
        each = self.took["plans"] / max(1, self.rounds)
        most = self.took["solve"] + self.took["boxes"]
        return self.took["climb"] <= most if is_best else self.took["climb"] + each <= most * BEHIND

    @property
    def _window(self) -> Window:
        """The window of the answer."""
        return next((one.ends for one in self.windows if one.answer is self.answer), ())

    @property
    def _met(self) -> list[tuple[int, ...]]:
        """The cut that is least under what is known, and the others that were met."""
        answer = self.answer
        return [self.part.cut_of(sizes) for sizes in (answer.cut, *answer.evaluations)] if answer else []

    def _solve(self, cut: tuple[int, ...], tries: bool) -> None:
        """Makes more known of the stages of a cut, by the first way that says something new; `tries` its pipeline too.
        """
        stages = list(zip(pairwise((0, *cut, self.part.units)), self.flights, strict=True))
        news = self._known(StageParts.bound, stages) or self._known(StageParts.sharpen, stages)
        is_known = cut in self.blended
        if not news and not is_known and self.part.shares:
            news = self._price(cut)
        at = self._roomier(cut) if tries and news else None if news else cut
        roughly = tries and at is None and self.cuts.fastest is None and len(self.cuts.tried) < FIRST
        at = cut if roughly else at
        with self._timed("plans"):
            one = None if at is None else self.cuts.find(at, roughly or (news and at in self.cuts.rough))
        if not news and one is None and not self.part.shares:
            news = self._known(StageParts.fit, stages)
        if not news and one is not None and not is_known and not self.late() and not self.is_closed:
            made = blend_paths(self.part, self.cuts.staged(cut), one.plans,
                               self.best * (1 - self.part.task.options.tolerance))
            self.cuts.add_plans(cut, made.plans)
            self.blends += made.blends
            self.prices += made.prices
            self.blended.add(cut)
            news = True
        self.stale += not (news or self._list_plans(cut))

    def _list_plans(self, cut: tuple[int, ...]) -> bool:
        """Lists the plans of the stages of a cut, where they are few; whether that was new."""
        if cut in self.listed or self.late():
            return False
        found = list_plans(self.part, self.cuts.staged(cut), self.paths)
        self.listed[cut] = found and found[0]
        if found is not None and found[1]:
            self.cuts.add_plans(cut, found[1])
        return found is not None

    def _roomier(self, cut: tuple[int, ...]) -> tuple[int, ...] | None:
        """The cut, or one beside it, whose stages fit their ranks without a budget; None where none is found.

        It is not looked for where one was not found before, and a plan is known.
        """
        if not self.part.shares or cut in self.cuts.tried:
            return cut
        if self.is_tight and self.cuts.fastest:
            return None
        found = roomier(self.part, self.name, cut, self.flights, self.cuts.placed.seconds)
        self.is_tight = found is None
        return found

    def _price(self, cut: tuple[int, ...]) -> bool:
        """Learns what stages of a rank take together under a price of its bytes; whether that was new of any."""
        before = len(self.prices)
        made = rank_prices(self.part, self.cuts.staged(cut), self.paths)
        self.prices += [one for one in made if one not in self.prices]
        return len(self.prices) > before

    def _known(self, learn: Callable[[StageParts, int, int, Flight], bool],
               stages: Sequence[tuple[tuple[int, int], Flight]]) -> bool:
        """Learns of the stages while there is time, first of those with most microbatches; whether any was new.

        What fits them fits stages that are like them and have fewer.
        """
        order = sorted(range(len(stages)), key=lambda s: stages[s][1], reverse=True)
        return bool(sum(not self.late() and learn(self.part.on(s), *stages[s][0], stages[s][1]) for s in order))

    def look_around(self, bound: float) -> None:
        """Solves cuts beside the best, and chooses the layouts of the fastest together, where a gap is left.

        `bound` is that of all candidates: the fastest of them may be the best of its own and leave a gap. At last the
        bound is made as sharp as what is known proves.
        """
        if self.late():
            return
        leaves = self.seconds <= self.best and bound < self.best * (1 - self.part.task.options.tolerance)
        if leaves or not self.is_closed:
            self.find_better()
            self.choose_together()
        if not self.late():
            self._least(self.part.task.options.tolerance / 4)

    def find_better(self) -> None:
        """Tries cuts beside the fastest while a gap is left, there is time and one is likely better.

        Other layouts of the fastest come first: they bring most.
        """
        if not self.is_closed:
            self.cuts.fill_bubbles()
        while not self.is_closed and self.cuts.step(self.best, self._met):
            self._say("cuts beside the best")
        if not self.is_closed:
            self.cuts.fill_bubbles()

    def choose_together(self) -> None:
        """Chooses the layouts of the fastest together, while there is time."""
        with suppress(OutOfTime):
            for one in () if self.late() else self.cuts.found[:TOGETHER]:
                plans, seconds = improved(self.part, self.cuts.staged(one.cut), one.plans)
                self.cuts.add_plans(one.cut, plans)
                if self.late() or seconds > one.seconds * (1 - self.part.task.options.tolerance):
                    break

    def _say(self, what: str) -> None:
        part = self.part
        ranks = f" of {sizes_text(part.sizes)} ranks" if part.sizes else ""
        self.tell(f"solving {part.stages} stages{ranks}, {schedule_title(self.name)}, {part.microbatches} "
                  f"microbatches: {what}")
