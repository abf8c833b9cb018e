"""Chooses the layouts of stages together: each stage is searched again for the seconds that the step waits for.

A stage alone is searched for the least of m (f + b) + gather + reduce + update. In a pipeline other seconds count:
those on a critical path, and those of messages to its neighbours. With all other stages fixed, no choice of stage s is
below

    sum over its seconds x of c[x] x  +  sum over its boundaries of d[boundary] transfer  +  what others take

on a path with these counts c and d (`timelines.pipeline_bounds`). So the layouts of s are searched for the least of
this, and the next stage with these. For both ends of a message may have to change before the step gets shorter. Counts
are those of the critical path, then of the mean of all paths so far. Some are those of a stage alone, so that nothing
is free. A tensor and its gradient count by the longer of both and by their mean. The fastest of all pipelines met is
taken (`improved`).

That takes a search for every stage and every path. Before it, few searches do most (`filled_bubbles`). Bubbles of the
schedule hide some of W, and of what comes once a step. So each stage gets plans that are fastest where these count for
less, and stages that are alike are searched once. One stage after another takes the plan with which the pipeline is
fastest.

The same gives bounds. A blend of paths, with weights of sum 1, is below every step: it counts every second of a stage
once, in the mean. With these counts, and with the least of its messages, each stage has a least (`StageParts.count`).
So the blend has one too, whatever all stages choose. The best blend for mixtures of the plans met so far is a linear
program (`search.path_tables.blend_of_plans`). Its counts then find other plans, until both agree (`blend_paths`). That
each stage has a mixture of its own, and not all stages those of some pipelines, takes few such turns.

Stages of one part of the cluster share the memory of its ranks. Their bytes have a price in the linear program, one for
each such part, beside the weights of the paths. They are those at the fullest moment of the rank, while none runs. A
stage then has the least of its seconds and its bytes' price, and the budget's own price is taken off
(`core.pipeline_cuts`). So the bound knows that stages must fit together.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from autoddl.core.cost_table import Array
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.pipeline import Flight
from autoddl.core.pipeline_cuts import PathBound, StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, cut_graph
from autoddl.cost_models.timelines.pipeline_bounds import critical_path
from autoddl.planner.pipelines.solved_stages import Made, OutOfTime
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.stage_ports import StageMessages
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import alone_seconds, stage_times
from autoddl.planner.pipelines.stored_once import bytes_twice, together_bytes
from autoddl.planner.pipelines.tied_stages import following, led
from autoddl.pricing.price import Counts
from autoddl.schedule.stage_bytes import alone_bytes, at_moments, resting_bytes
from autoddl.schedule.stage_lanes import stored_apart
from autoddl.search.cut_planes import blended
from autoddl.search.path_tables import Blend, FoundPlans, blend_of_plans

__all__ = ["Blended", "SharedPrice", "blend_paths", "filled_bubbles", "groups_of", "improved", "priced_groups",
           "stage_weights"]

ROUNDS = 6
"""Times that every stage of a cut is searched again, at most."""

STALE = 2
"""Times in a row that no stage finds better before the search ends."""

BLENDS = 6
"""Blends of the paths of one cut, at most."""

DIGITS = 6
"""Decimals of the counts of a blend of which something is known."""

DRAWN = 4
"""Times that plans between two are drawn, at most."""

MIXED = 0.1
"""Part of the counts of a stage that are those of a stage alone."""

HIDDEN = ((1.0, 0.2), (0.6, 1.0), (0.6, 0.2))
"""How often W counts of a microbatch, and what comes once a step, where bubbles of the schedule hide the rest."""

Waits = tuple[tuple[float, ...], ...]
"""By stage, how often each of its StageSeconds counts; and last, how often each boundary does."""


@dataclass(frozen=True, slots=True)
class _Joint:
    """The plans of all stages with their seconds and transfers, the seconds of the pipeline, and a critical path.

    Seconds `alone` are without what stages exchange with each other.
    """

    plans: tuple[Plan, ...]
    alone: tuple[StageSeconds, ...]
    stages: tuple[StageSeconds, ...]
    transfers: tuple[float, ...]
    seconds: float
    path: PathBound


def improved(part: StageParts, staged: Staged, plans: Sequence[Plan]) -> tuple[tuple[Plan, ...], float]:
    """(plans of the stages, seconds of the pipeline), no slower than those given, with layouts chosen together."""
    graphs, flights = cut_graph(part.graph, staged.cuts), staged.flights
    best = _joint(part, staged, tuple(plans), graphs)
    seen, stale = [best.path], 0
    for turn in range(ROUNDS):
        before, now = best.seconds, best
        for waits in _waits(seen):
            for s in (range(staged.stages) if turn % 2 else reversed(range(staged.stages))):
                found = _replanned(part, staged, now, waits, s, graphs, flights)
                if found is not None:
                    seen.append(found.path)
                    now, best = found, found if found.seconds < best.seconds else best
        stale = stale + 1 if best.seconds > before * (1 - 1e-6) else 0
        if stale == STALE or part.late():
            break
    return best.plans, best.seconds


class _Option(NamedTuple):
    """A plan that a stage may have.

        plan     itself; of one that is not drawn one with its layouts
        seconds  of the stage alone
        nbytes   at every moment of its rank
        made     what makes a plan that is not drawn
    """

    plan: Plan
    seconds: StageSeconds
    nbytes: Array
    made: Made | None = None


def filled_bubbles(part: StageParts, staged: Staged, plans: Sequence[Plan]) -> tuple[tuple[Plan, ...], float]:
    """(plans of the stages, seconds of the pipeline), no slower than those given, by few searches.

    Every stage has the best of some plans, one stage after another, again while that is faster. Some are the fastest
    where what bubbles may hide counts for less (`HIDDEN`). Others lie between two that are known: they compute some of
    their blocks again, and are drawn where they are chosen. Stages that are alike are searched once.
    """
    graphs = cut_graph(part.graph, staged.cuts)
    best = _joint(part, staged, tuple(plans), graphs)
    menus = [_menu(part, staged, s, graph, best) for s, graph in enumerate(graphs)]
    at = [0] * staged.stages
    for _ in range(DRAWN):
        chosen, undrawn = _descended(part, staged, best, menus, at, graphs), False
        for s, k in enumerate(chosen):
            made = menus[s][k].made
            if made is not None:
                undrawn, plan = True, part.on(s).plan_of_choice(graphs[s], staged.flights[s], *made)
                menus[s][k] = _option(part, staged, s, graphs[s], plan)
        now = _joint(part, staged, tuple(menus[s][k].plan for s, k in enumerate(chosen)), graphs, best)
        if now.seconds < best.seconds and _fit(part, staged, now.plans, graphs):
            best, at = now, chosen
        if not undrawn or part.late():
            break
    return best.plans, best.seconds


def _menu(part: StageParts, staged: Staged, s: int, graph: StageGraph, best: _Joint) -> list[_Option]:
    """Plans of a stage: that which it has, those fastest where bubbles hide some, and those between others."""
    m, on, flight = part.each, part.on(s), staged.flights[s]
    found = [_option(part, staged, s, graph, best.plans[s])]
    with suppress(Infeasible, InputError, OutOfTime):
        for late, once in HIDDEN:
            plan = on.freely_counted(graph, flight, Counts(m, m, once, once, 1.0, late * m)
                                     ) if late == 1 or staged.splits else None
            found += [] if plan is None else [_option(part, staged, s, graph, plan)]
        for line in on.between(graph, flight, on.known_prices(graph, flight), roughly=True) if part.shares else ():
            more, less = (_option(part, staged, s, graph, plan) for plan in (line.more, line.less))
            found += [more, less, *(_mixed(more, less, way, made) for way, made in line.ways())]
    return found


def _option(part: StageParts, staged: Staged, s: int, graph: StageGraph, plan: Plan) -> _Option:
    moments = staged.moments.get(staged.placement[s])
    nbytes = np.array([alone_bytes(plan, staged.flights[s])]) if moments is None else at_moments(
        [plan], moments, moments.stages.index(s))[0]
    return _Option(plan, alone_seconds(part.task.cluster, plan, staged, graph, s), nbytes)


def _mixed(more: _Option, less: _Option, way: float, made: Made) -> _Option:
    """What a plan takes about that lies some part of the way from one to another."""
    return _Option(more.plan, StageSeconds(*(a + way * (b - a) for a, b in zip(more.seconds, less.seconds,
                                                                             strict=True))),
                   more.nbytes + way * (less.nbytes - more.nbytes), made)


def _descended(part: StageParts, staged: Staged, first: _Joint, menus: Sequence[Sequence[_Option]],
               at: Sequence[int], graphs: Sequence[StageGraph]) -> list[int]:
    """By stage, the number of its option: one after another takes that with which the pipeline is fastest.

    It begins `at` the options of the first pipeline. Where a rank is too full then, another of its stages takes its
    fastest option that fits.
    """
    best, chosen = first, [*at]
    for _ in range(ROUNDS):
        before = best.seconds
        for s, k in [(s, k) for s, menu in enumerate(menus) for k in range(len(menu))]:
            for change in _changes(part, staged, menus, chosen, s, k):
                options = [menus[i][change.get(i, n)] for i, n in enumerate(chosen)]
                stages = [options[i].seconds if i in change else one for i, one in enumerate(best.stages)]
                plans = tuple(one.plan for one in options)
                if best.path.seconds(stages, best.transfers) >= best.seconds or stored_apart(
                        plans, graphs, staged.placement) is not None:
                    continue
                now = _joint(part, staged, plans, graphs, alone=[one.seconds for one in options])
                if now.seconds < best.seconds:
                    best, chosen = now, [change.get(i, n) for i, n in enumerate(chosen)]
                    break
        if best.seconds > before * (1 - part.task.options.tolerance / 4) or part.late():
            break
    return chosen


def _changes(part: StageParts, staged: Staged, menus: Sequence[Sequence[_Option]], chosen: Sequence[int], s: int,
             k: int) -> Iterator[dict[int, int]]:
    """Yields option k of stage s, alone or with another of a stage of its rank: by stage, so that all fit the rank."""
    mine = [i for i, place in enumerate(staged.placement) if place == staged.placement[s]]
    room = part.task.budget - menus[s][k].nbytes - sum(menus[i][chosen[i]].nbytes for i in mine if i != s)
    if (room >= 0).all():
        yield {s: k}
    for i in (i for i in mine if i != s):
        fits = [n for n, one in enumerate(menus[i]) if (one.nbytes <= room + menus[i][chosen[i]].nbytes).all()]
        fast = min(fits, key=lambda n: sum(menus[i][n].seconds[:3]), default=chosen[i])
        if fast != chosen[i]:
            yield {s: k, i: fast}


@dataclass(frozen=True, slots=True)
class SharedPrice:
    """The stages of a part of the cluster, how often the seconds of each count, and the price of a byte in seconds."""

    stages: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    price: float


@dataclass(frozen=True, slots=True)
class Blended:
    """Blends of paths that bound pipelines that are cut so.

        blends    of paths
        prices    of bytes, where stages share the memory of a part
        plans     of the fastest pipeline met
        seconds   of that pipeline
    """

    blends: tuple[Blend, ...]
    prices: tuple[SharedPrice, ...]
    plans: tuple[Plan, ...]
    seconds: float


def blend_paths(part: StageParts, staged: Staged, plans: Sequence[Plan], enough: float = inf) -> Blended:
    """The blends of paths that say most of pipelines cut so, found from some plans of its stages that fit.

    What is known of stages with the counts of these blends, and under these prices, is in `part` then. None is sought
    behind one which says that no pipeline cut so takes less than `enough` seconds.
    """
    graphs, flights = cut_graph(part.graph, staged.cuts), staged.flights
    ends = (0, *(part.places.index(cut) + 1 for cut in staged.cuts), part.units)
    best = _joint(part, staged, tuple(plans), graphs)
    groups = priced_groups(staged) if part.task.budget < inf else []
    met, blends, prices = [best], list[Blend](), list[SharedPrice]()
    if groups:
        met.append(_joint(part, staged, tuple(map(part.freely_planned, graphs, flights)), graphs))
    done, alike = set[object](), [(part.on(s).size, part.on(s).alone(a, b)[1], s in chain(*groups)) for s, (a, b) in
                                  enumerate(pairwise(ends))]
    for _ in range(BLENDS):
        blend, paid = _best_blend(part, staged, met, alike, groups)
        weights = stage_weights(blend)
        priced = [SharedPrice(group, tuple(weights[s] for s in group), float(f"{total / part.task.budget:.6g}"))
                  for group, total in zip(groups, paid, strict=True) if total > 0]
        if (blend, *priced) in done:
            break
        done.add((blend, *priced))
        blends.append(blend)
        prices += priced
        each = {s: one.price for one in priced for s in one.stages}
        try:
            made = [part.count_priced(a, b, flight, counts, graph, each[s]) if s in each else
                    part.on(s).count(a, b, flight, counts, graph) for s, ((a, b), flight, counts, graph) in
                    enumerate(zip(pairwise(ends), flights, weights, graphs, strict=True))]
        except OutOfTime:
            break
        now = tuple(plan or old for plan, old in zip(made, best.plans, strict=True))
        met.append(_joint(part, staged, now, graphs, best))
        best = met[-1] if met[-1].seconds < best.seconds and _fit(part, staged, now, graphs) else best
        if not priced and _known_of(part, ends, flights, weights) >= enough:
            break
    return Blended(tuple(dict.fromkeys(blends)), tuple(dict.fromkeys(prices)), best.plans, best.seconds)


def _known_of(part: StageParts, ends: Sequence[int], flights: Sequence[Flight],
              weights: Sequence[tuple[float, ...]]) -> float:
    """Seconds of a cut that are known of a blend with these weights: each end of a message has a half of it."""
    sides, found = (0.0, *part.transfers, 0.0), 0.0
    for s, ((a, b), flight, counts) in enumerate(zip(pairwise(ends), flights, weights, strict=True)):
        sent = (counts[6] * sides[s] + counts[7] * sides[s + 1]) / 2
        found += max(float(part.on(s).counted(flight, counts)[a, b]), sent) - part.twice[s].seconds(counts)
    return found


def _best_blend(part: StageParts, staged: Staged, met: Sequence[_Joint], alike: Sequence[Hashable],
                groups: Sequence[Sequence[int]]) -> tuple[Blend, tuple[float, ...]]:
    """(the blend of paths that says most of the plans that were met, prices of whole budgets).

    A stage may have the plan of any that is `alike`.
    """
    least, found = np.min([one.transfers for one in met], axis=0), list[tuple[FoundPlans, ...]]()
    shared = {*chain(*groups)}
    for s, flight in enumerate(staged.flights):
        rows = dict[tuple[float, ...], float]()
        for t in (t for t, name in enumerate(alike) if name == alike[s]):
            for one in met:
                more = (0.0, *(np.array(one.transfers) - least) / 2, 0.0)
                terms = tuple(float(f"{x:.9g}") for x in (*one.stages[t], more[t], more[t + 1]))
                taken = resting_bytes(one.plans[t], flight) / part.task.budget if s in shared else 0.0
                rows[terms] = min(taken, rows.get(terms, inf))
        found.append((FoundPlans(1.0, np.array([*rows]), np.array([*rows.values()])),))
    _, blend, paid = blend_of_plans(found, least.tolist(), partial(critical_path, staged.schedule()), groups)
    return blend, paid


def groups_of(staged: Staged) -> list[tuple[int, ...]]:
    """The stages of every part that has several."""
    every = [tuple(s for s, place in enumerate(staged.placement) if place == at) for at in range(staged.parts)]
    return [group for group in every if len(group) > 1]


def priced_groups(staged: Staged) -> list[tuple[int, ...]]:
    """Those of which there is a moment at which each stage has something: prices of bytes count what it has then."""
    return [group for group in groups_of(staged) if all(staged.flights[s].most for s in group)]


def stage_weights(blend: Blend) -> list[tuple[float, ...]]:
    """By stage, how often its seconds count in a blend, and how often the transfers before it and behind it do."""
    mean = blended(blend)
    sent = (0.0, *mean.transfers, 0.0)
    return [tuple(round(x, DIGITS) for x in (*row, sent[s], sent[s + 1])) for s, row in enumerate(mean.stages)]


def _waits(seen: Sequence[PathBound]) -> Iterator[Waits]:
    """How often everything counts: on the last path, then on the mean of all."""
    yield (*seen[-1].stages, seen[-1].transfers)
    if len(seen) > 1:
        rows = zip(*[(*path.stages, path.transfers) for path in seen], strict=True)
        yield tuple(tuple(sum(column) / len(seen) for column in zip(*row, strict=True)) for row in rows)


def _joint(part: StageParts, staged: Staged, plans: tuple[Plan, ...], graphs: Sequence[StageGraph],
           known: _Joint | None = None, alone: Sequence[StageSeconds] = ()) -> _Joint:
    """The pipeline of these plans; that with some of them, or the seconds of stages `alone`, may be known."""
    cluster = part.task.cluster
    alone = tuple(alone) or tuple(known.alone[s] if known and plan is known.plans[s] else
                  alone_seconds(cluster, plan, staged, graphs[s], s) for s, plan in enumerate(plans))
    seconds, between = stage_times(cluster, plans, staged, part.graph, alone)
    makespan, path = critical_path(staged.schedule(), seconds, between)
    return _Joint(plans, alone, seconds, between, makespan, path)


def _replanned(part: StageParts, staged: Staged, best: _Joint, waits: Waits, s: int, graphs: Sequence[StageGraph],
               flights: Sequence[Flight]) -> _Joint | None:
    """The pipeline in which stage s is searched again with these counts; None where that changes nothing or fails."""
    m = part.each
    own = [(1 - MIXED) * x + MIXED * alone for x, alone in zip(waits[s], (m, m, m, 1, 1, 1), strict=True)]
    if not any((*waits[s], *waits[-1][max(0, s - 1):s + 1])):
        return None  # neither the stage nor its messages are waited for
    ports = StageMessages.of(part.task.cluster, part.graph, staged, best.plans, s, tuple(map(float, waits[-1])))
    counts, found = Counts(own[0], own[1], own[3], own[4], own[5], own[2]), list[_Joint]()
    at, twice = staged.placement[s], bytes_twice(best.plans, graphs, staged.placement)
    room = part.task.budget + sum(twice.get(at, {}).values()) - sum(
        resting_bytes(plan, flights[k]) for k, plan in enumerate(best.plans) if staged.placement[k] == at and k != s)
    for stages in filter(None, (part.on(s), following(part, staged, best.plans, graphs, s))):
        with suppress(Infeasible, InputError, OutOfTime):
            plan = stages.searched_for(graphs[s], flights[s], counts, ports, room)
            if plan is not None and (plan.decisions, plan.stored) != (best.plans[s].decisions, best.plans[s].stored):
                plans = (*best.plans[:s], plan, *best.plans[s + 1:])
                if stored_apart(plans, graphs, staged.placement) is not None:
                    plans = led(part, staged, plans, graphs, flights, s)
                found += [_joint(part, staged, plans, graphs, best)] if _fit(part, staged, plans, graphs) else []
    return min(found, key=lambda one: one.seconds, default=None)


def _fit(part: StageParts, staged: Staged, plans: Sequence[Plan], graphs: Sequence[StageGraph]) -> bool:
    """Whether the stages of every part of the cluster fit its ranks together, and store alike what they share."""
    return max(together_bytes(plans, graphs, staged.placement, staged.moments).values()
               ) <= part.task.budget and stored_apart(
        plans, graphs, staged.placement) is None
