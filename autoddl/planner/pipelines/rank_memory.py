"""Plans the stages of a rank together, so that they fit its memory.

A byte has one price for all stages of a rank. It rises or falls until they just fit (`shared_budget`). Prices find
corners of fronts, so bytes may be left: at one price all blocks of a stage run again, and at the next none. Plans
between, in which some do, fill the rank. All are merged. Where the bound at the best price still leaves a gap, the
budget is divided by it. Then a stage that is slower than need be is searched with all that the others leave.

The first plans of a cut are made roughly. Then the prices between which the fullest rank fits serve all ranks. What was
found of stages with more in flight serves those with fewer. The same prices bound every pipeline cut so
(`core.pipeline_cuts`). `rank_prices` finds what stages take at least, counted as on the path on which a rank is most
busy.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from heapq import heappop, heappush
from itertools import pairwise
from math import floor, inf, log
from typing import NamedTuple

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.pipeline import Flight, RankMoments
from autoddl.core.pipeline_cuts import PathBound
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, check_parameters, cut_graph
from autoddl.planner.pipelines.joint_stages import SharedPrice, groups_of, priced_groups, stage_weights
from autoddl.planner.pipelines.shared_budget import EVEN, Point, least_together, moved, shares_of
from autoddl.planner.pipelines.solved_stages import Made, OutOfTime
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import simulated, stage_times
from autoddl.planner.pipelines.stored_once import together_bytes
from autoddl.planner.pipelines.tied_stages import agreed
from autoddl.schedule.stage_bytes import alone_bytes, at_moments, rank_peak_bytes, resting_bytes

__all__ = ["blend_prices", "fitting_plans", "lost_seconds", "price_of_bytes", "rank_peak", "rank_prices", "roomier",
           "roomier_cuts", "unit_prices"]

STEP = 1.3
"""The factor between two prices of a byte."""

FARTHER = 4
"""The steps to the next price while none is too high, or none too low."""

PRICES = 9
"""Prices that are tried for the stages of a rank."""

FINE = 2**0.25
"""The factor between two prices of a byte under which units are searched."""

COARSE = 4
"""The first steps between prices."""

NEAR = 4.0
"""The factor by which prices may be beside that of equal stages where seconds count otherwise."""

LEAST, MOST = 1 / 50, 4.0
"""The least and the greatest price of a whole budget under which units are searched, in times of a step."""

GAIN = 0.005
"""The part of a step by which a price raises what equal stages take, or it is left out: it takes time."""

MOST_PRICES = 48
"""Prices of bytes by what units take, at most."""

GUESS = 0.1
"""The first price of the whole budget, in seconds of the stages."""

DEAREST = 10.0
"""The price of a whole budget, in seconds of the stages without one: what does not fit there is not looked for."""

ROUGH = 0.01
"""The gap at which the budget of a rank is divided too."""

HOPELESS = 3.0
"""Stages of a rank that take so many times the seconds of the pipeline without a budget are not looked for."""

MOVES = 6
"""Blocks that are moved at most, to find a cut whose stages fit without a budget."""

FINER = 8
"""Parts of a share of the budget in which what other stages leave is told."""

MIXES = 6
"""Times that plans are drawn which compute again some of the blocks in which others differ."""

DIVISIONS = 3
"""Divisions of a rank's budget among its stages that are tried for a cut."""

Stages = Sequence[tuple[StageGraph, Flight]]
"""The stages of a part, and their microbatches as they count there."""


def fitting_plans(part: StageParts, staged: Staged, graphs: Sequence[StageGraph], flights: Sequence[Flight],
                  roughly: bool = False) -> tuple[Plan, ...]:
    """The plans of the stages; those of one part fit its ranks together, and store what they share in the same pieces.

    Those found `roughly` take seconds to find, and may be slower than need be. Raises why there are none.
    """
    check_parameters(graphs, staged.placement)
    plans: list[Plan | None] = [None] * staged.stages
    groups = [[s for s, place in enumerate(staged.placement) if place == at] for at in sorted(set(staged.placement))]
    prices = tuple[float, ...]()
    whole = cache(partial(_whole, part, staged, graphs, flights))
    for mine in sorted(groups, key=lambda group: sum(flights[s].in_flight for s in group), reverse=roughly):
        found, prices = _sharing(part.on(mine[0]), staged.moments.get(staged.placement[mine[0]]),
                                 [(graphs[s], flights[s]) for s in mine], whole, prices, roughly)
        for s, plan in zip(mine, found, strict=True):
            plans[s] = plan
    made = agreed(part, staged, [plan for plan in plans if plan is not None], graphs, flights)
    return tuple(replace(plan, budget=part.task.budget) for plan in made)


def _whole(part: StageParts, staged: Staged, graphs: Sequence[StageGraph], flights: Sequence[Flight]) -> float:
    """Seconds of the pipeline whose stages are planned without a budget."""
    plans = [part.on(s).freely_planned(*one) for s, one in enumerate(zip(graphs, flights, strict=True))]
    return simulated(staged.schedule(), *stage_times(part.task.cluster, plans, staged, part.graph)).makespan


def price_of_bytes(part: StageParts, staged: Staged, plans: Sequence[Plan]) -> float:
    """Seconds of the stages that a byte costs, in the mean, by which those of a rank do not fit it freely."""
    graphs, flights = cut_graph(part.graph, staged.cuts), staged.flights
    free = [part.on(s).freely_planned(*one) for s, one in enumerate(zip(graphs, flights, strict=True))]
    sizes = together_bytes(free, graphs, staged.placement, staged.moments)
    over = {group: sizes[staged.placement[group[0]]] - part.task.budget for group in groups_of(staged)}
    full = [group for group in over if over[group] > 0]
    lost = sum(plans[s].predicted.seconds - free[s].predicted.seconds for group in full for s in group)
    return max(0.0, lost) / sum(over[group] for group in full) if full else 0.0


def lost_seconds(part: StageParts, cut: tuple[int, ...], flights: Sequence[Flight], price: float,
                 known: dict[tuple[int, int, int], float]) -> list[float]:
    """By stage, seconds of a step that bytes cost about, by which those of its rank do not fit it freely.

    They are of the stage of a rank with most in flight. A byte costs its `price`. None are told where a stage has no
    plan, or the time is over. What stages need freely is added to what is `known`, by their numbers and places.
    """
    stages, found = [(s, *at) for s, at in enumerate(pairwise((0, *cut, part.units)))], [0.0] * len(flights)
    try:
        for s, a, b in (one for one in stages if one not in known):
            on = part.on(s)
            known[s, a, b] = alone_bytes(on.freely_planned(on.alone(a, b)[0], flights[s]), flights[s])
    except (Infeasible, InputError, OutOfTime):
        return found
    for place in set(part.together):
        mine = [s for s, at in enumerate(part.together) if at == place]
        most = max(mine, key=lambda s: flights[s][:2])
        found[most] = price * max(0.0, sum(known[stages[s]] for s in mine) - part.task.budget)
    return found


def rank_peak(part: StageParts, staged: Staged, plans: Sequence[Plan]) -> float:
    """Bytes of the fullest rank with all stages that it has."""
    return max(together_bytes(plans, cut_graph(part.graph, staged.cuts), staged.placement, staged.moments).values())


def roomier(part: StageParts, name: str, cut: tuple[int, ...], flights: Sequence[Flight],
            seconds: Callable[[tuple[int, ...]], float]) -> tuple[int, ...] | None:
    """A cut whose stages fit their ranks together without a budget: this, or one found by moves; None where none was.

    A move takes a unit from a stage of the fullest rank, so that the cut takes the least `seconds`.
    """
    seen = {cut}
    for _ in range(MOVES):
        full = _freely_full(part, name, cut, flights)
        most = max(full, key=full.__getitem__)
        if full[most] <= part.task.budget:
            return cut
        near = [one for one in _smaller(part.staged(name, cut), cut, most)
                if one not in seen and all(a < b for a, b in pairwise((0, *one, part.units)))]
        if not near:
            return None
        cut = min(near, key=seconds)
        seen.add(cut)
    return None


def roomier_cuts(part: StageParts, name: str, cut: tuple[int, ...], flights: Sequence[Flight]
                 ) -> Iterator[tuple[int, ...]]:
    """Yields cuts, first this, then of those beside all before the one whose fullest rank has the fewest bytes.

    The bytes are those without a budget, as long as stages have plans so.
    """
    heap, seen = [(0.0, cut)], {cut}
    while heap:
        _, cut = heappop(heap)
        yield cut
        for i, at in ((i, k + step) for i, k in enumerate(cut) for step in (-1, 1)):
            other = (*cut[:i], at, *cut[i + 1:])
            if other not in seen and all(a < b for a, b in pairwise((0, *other, part.units))):
                seen.add(other)
                with suppress(Infeasible, InputError):
                    heappush(heap, (max(_freely_full(part, name, other, flights).values()), other))


def _freely_full(part: StageParts, name: str, cut: tuple[int, ...], flights: Sequence[Flight]) -> dict[int, float]:
    """By part of the cluster, the bytes of a rank with the stages of a cut that are planned without a budget."""
    staged = part.staged(name, cut)
    graphs = cut_graph(part.graph, staged.cuts)
    plans = [part.on(s).freely_planned(*one) for s, one in enumerate(zip(graphs, flights, strict=True))]
    return together_bytes(plans, graphs, staged.placement, staged.moments)


def _smaller(staged: Staged, cut: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    """Yields cuts in which a stage of a part gives a unit to the stage before it, or behind it, of another part."""
    for s, place in enumerate(staged.placement):
        for at, other, step in ((s - 1, s - 1, 1), (s, s + 1, -1)):
            if place == most and 0 <= other < staged.stages and staged.placement[other] != most:
                yield (*cut[:at], cut[at] + step, *cut[at + 1:])


def rank_prices(part: StageParts, staged: Staged, paths: Sequence[PathBound]) -> list[SharedPrice]:
    """The price of a byte for the stages of every rank that do not fit it freely, counted as on its busiest paths.

    It is the best price for the fullest rank: any price is true of all. What stages so counted take at least is in
    `part` then.
    """
    graphs, flights = cut_graph(part.graph, staged.cuts), staged.flights
    ends = list(pairwise((0, *(part.places.index(cut) + 1 for cut in staged.cuts), part.units)))
    free = [part.freely_planned(graph, flight) for graph, flight in zip(graphs, flights, strict=True)]
    nbytes = together_bytes(free, graphs, staged.placement, staged.moments)
    sizes = {group: nbytes[staged.placement[group[0]]] for group in priced_groups(staged)}
    full = sorted((group for group in sizes if sizes[group] > part.task.budget), key=sizes.__getitem__, reverse=True)
    found = list[SharedPrice]()
    for group in full:
        price = found[0].price if found else _priced_fronts(
            part, staged.moments.get(staged.placement[group[0]]), [(graphs[s], flights[s]) for s in group],
            [[free[s]] for s in group], _whole(part, staged, graphs, flights)).price
        for path in _busiest(paths, group):
            weights = stage_weights(((path, 1.0),))
            found.append(SharedPrice(group, tuple(weights[s] for s in group), price))
            for s in group:
                for a, b in _alike(part, *ends[s]):
                    part.learn_priced(a, b, flights[s], weights[s], price)
    return found


def unit_prices(part: StageParts, flights: Sequence[Flight], paths: Sequence[PathBound], seconds: float
                ) -> list[SharedPrice]:
    """Prices of bytes for the stages of every rank, counted as on its busiest path, by what their units take at least.

    Under the price of a rank equal stages take most. It has none where that is hardly more than with next to none.
    `seconds` are about those of a step. There are none where units do not tell, or parts of the cluster differ.
    """
    found = list[SharedPrice]()
    if part.sizes or part.task.budget == inf or part.apart_bytes == inf:
        return found
    groups = [tuple(s for s, at in enumerate(part.together) if at == place) for place in sorted(set(part.together))]
    for group in (one for one in groups if len(one) == 1 or all(flights[s].most for s in one)):
        for path in _busiest(paths, group):
            weights = tuple((*map(float, path.stages[s]), 0.0, 0.0) for s in group)
            told = cache(partial(_learned, part, flights, group, weights))
            least, most = (_fine(log(times * seconds / part.task.budget, FINE)) for times in (LEAST, MOST))
            price = _dearest(told, least, (least, most))
            found += [SharedPrice(group, weights, price)] if told(price) > told(least) + GAIN * seconds else []
    return found


def blend_prices(part: StageParts, flights: Sequence[Flight], cut: Sequence[int], blend: PathBound,
                 known: Sequence[SharedPrice]) -> list[SharedPrice]:
    """Prices of bytes that are new, for stages of ranks of which some are known, counted as in a blend of paths.

    Each is that under which the stages of a cut take most, by what their units take at least. There are at most
    `MOST_PRICES`, with those that are known.
    """
    ends, found = list(pairwise((0, *cut, part.units))), list[SharedPrice]()
    near = {one.stages: one.price for one in known}
    for group, first in near.items():
        most = max(max(blend.stages[s][:6]) for s in group)
        weights = tuple((*part.rounded(blend.stages[s], most), 0.0, 0.0) for s in group) if most > 0 else ()
        told, least = cache(partial(_taken, part, flights, ends, group, weights)), _fine(log(first / NEAR, FINE))
        one = SharedPrice(group, weights, _dearest(told, first, (least, first * NEAR)) if weights else 0.0)
        if one.price > least and one not in known:
            found.append(one)
    return found[:max(0, MOST_PRICES - len(known))]


def _fine(exponent: float) -> float:
    """The power of FINE next to some exponent, with six digits."""
    return float(f"{FINE ** round(exponent):.6g}")


def _dearest(told: Callable[[float], float], price: float, within: tuple[float, float]) -> float:
    """The price, of powers of FINE within some, at which what is told of it is greatest, looked for from some on.

    It is concave in the price.
    """
    at, low, high = (round(log(one, FINE)) for one in (price, *within))

    def value(k: int) -> float:
        return told(_fine(k)) if low <= k <= high else -inf

    step = COARSE
    while step:
        other = max(at - step, at + step, key=value)
        if value(other) > value(at):
            at = other
        else:
            step //= 2
    return _fine(at)


def _learned(part: StageParts, flights: Sequence[Flight], group: Sequence[int],
             weights: Sequence[tuple[float, ...]], price: float) -> float:
    """Seconds that equal stages of a rank take at least under a price of bytes; units are searched for it.

    Of microbatches in flight these are the least and the most of all stages that have several, and one.
    """
    ends, total = [part.units * s // part.stages for s in range(part.stages + 1)], -price * part.task.budget
    for s, counts in zip(group, weights, strict=True):
        for at in _ends(flights, flights[s]):
            part.learn_turns(s, at, counts, price)
        total += float(part.priced(flights[s], counts, price)[ends[s], ends[s + 1]])
    return total


def _taken(part: StageParts, flights: Sequence[Flight], ends: Sequence[tuple[int, int]], group: Sequence[int],
           weights: Sequence[tuple[float, ...]], price: float) -> float:
    """Seconds that stages of a rank take at least between these places under a price of bytes; units are searched."""
    total = -price * part.task.budget
    for s, counts in zip(group, weights, strict=True):
        part.learn_turns(s, flights[s], counts, price)
        total += float(part.priced(flights[s], counts, price)[ends[s]])
    return total


def _ends(flights: Sequence[Flight], flight: Flight) -> set[Flight]:
    """The least and the most in flight of all stages that have several, where one of them has; else what it has."""
    if not flight.is_several:
        return {flight.counted}
    alike = [one for one in flights if one.is_several and one.begun == flight.begun]
    return {Flight(end(one.in_flight for one in alike), end(one.waiting for one in alike), flight.begun, (1, 1)).counted
            for end in (min, max)}


def _alike(part: StageParts, a: int, b: int) -> Iterator[tuple[int, int]]:
    """Yields the stage from place a to place b, and those at the same end of the chain with a unit more or less."""
    for n in (b - a, b - a + 1, b - a - 1):
        first, end = (0, n) if a == 0 else (part.units - n, part.units) if b == part.units else (a, a + n)
        if 0 <= first < end <= part.units and (a == 0) == (first == 0) and (b == part.units) == (end == part.units):
            yield first, end


def _busiest(paths: Sequence[PathBound], group: Sequence[int]) -> list[PathBound]:
    """The paths on which the stages of a rank run most: the one with most of all that they do."""
    return sorted(paths, key=lambda path: sum(sum(path.stages[s]) for s in group))[-1:]


def _sharing(part: StageParts, moments: RankMoments | None, stages: Stages, whole: Callable[[], float],
             prices: tuple[float, ...] = (), roughly: bool = False) -> tuple[Sequence[Plan], tuple[float, ...]]:
    """(the plans of the stages of one part, the fastest of those met that fit its ranks together; prices of a byte).

    The `prices` are those between which another rank fits, none where there was none: the search begins with them.
    Found `roughly`, plans under these are taken where they fit. `whole` tells the seconds of the pipeline without a
    budget. Raises why there are none.
    """
    if moments is None:
        return [part.planned(*stages[0])], prices
    free, budget = [part.freely_planned(*stage) for stage in stages], part.task.budget
    if rank_peak_bytes(free, moments) <= budget:
        return free, prices
    fronts = [[plan] for plan in free]
    if roughly and (known := _met(part, moments, stages, fronts, prices)) is not None:
        return known, prices
    priced = _priced_fronts(part, moments, stages, fronts, whole(), prices)
    _mix(part, moments, stages, fronts, priced.around)
    found = _merged(moments, fronts, budget)
    is_hopeless = found is None and priced.bound > HOPELESS * whole()
    is_close = found is not None and _seconds(found) * (1 - ROUGH) <= priced.bound
    if not is_hopeless and not is_close and (found is None or not roughly):
        found = _shared(part, moments, stages, fronts, priced.plans or free)
    if not found:
        least = rank_peak_bytes([min(front, key=lambda plan: alone_bytes(plan, flight)) for front, (_, flight)
                                 in zip(fronts, stages, strict=True)], moments)
        raise Infeasible(least, budget, "stages that run on the same ranks need more together: cut elsewhere, take "
                         "more stages or microbatches, or 1f1b")
    return (found if is_close or roughly else _filled(part, moments, stages, fronts, found)), priced.around


def _met(part: StageParts, moments: RankMoments, stages: Stages, fronts: list[list[Plan]], prices: Sequence[float]
         ) -> list[Plan] | None:
    """The fastest plans of stages that fit together, of those under these prices of bytes; None where none do.

    They are those of stages with more in flight, where there are some. All are added to the fronts.
    """
    for price in prices:
        for front, stage in zip(fronts, stages, strict=True):
            plan = part.planned_for(*stage, price, roughly=True)[0]
            front += [] if plan is None else [plan]
    if prices:
        _mix(part, moments, stages, fronts, prices, roughly=True)
    return _merged(moments, fronts, part.task.budget) if prices else None


class _Priced(NamedTuple):
    """Seconds that stages which fit together are about not below, the price of a byte that says so, and their plans.

    The plans are those under the least price at which they fit; there are none where they never did. Prices `around`
    are that and the greatest at which they do not fit.
    """

    bound: float
    price: float
    around: tuple[float, ...]
    plans: list[Plan]


def _priced_fronts(part: StageParts, moments: RankMoments | None, stages: Stages, fronts: list[list[Plan]],
                   whole: float, prices: Sequence[float] = ()) -> _Priced:
    """The best price for the stages of a rank, of powers of STEP; the plans on the way are added to the fronts.

    It is looked for from the first of some `prices` on, by ever more steps until one is too high and one too low. Each
    stage pays for its bytes while it runs, and one runs at a time: what is counted too often is given back.
    """
    budget, best, near = part.task.budget, (0.0, 0.0), list[Plan]()
    low, high, first = -inf, inf, GUESS * _seconds([front[0] for front in fronts]) / budget
    at, steps = round(log(prices[0] if prices else first, STEP)), 1 if prices else FARTHER
    for _ in range(PRICES):
        price = _power(at)
        made = [part.planned_for(*stage, price) for stage in stages]
        plans = [plan for plan, _ in made if plan is not None]
        room = budget + _counted_twice(moments, stages, plans) if len(plans) == len(stages) else budget
        best = max(best, (sum(value for _, value in made) - price * room, price))
        if len(plans) < len(stages) or best[0] > HOPELESS * whole:
            break
        for front, plan in zip(fronts, plans, strict=True):
            front.append(plan)
        if rank_peak_bytes(plans, moments) > budget:
            low = at
            if price * budget > DEAREST * _seconds([front[0] for front in fronts]):
                break
        else:
            high, near = at, plans
        if high - low <= 1:
            break
        at = at + steps if high == inf else at - steps if low == -inf else int(low + high) // 2
        steps = min(2 * steps, FARTHER)
    return _Priced(*best, tuple([_power(int(exponent)) for exponent in (high, low) if abs(exponent) < inf]), near)


def _power(exponent: int) -> float:
    """A power of STEP with six digits, so that equal prices are told to be so."""
    return float(f"{STEP ** exponent:.6g}")


def _counted_twice(moments: RankMoments | None, stages: Stages, plans: Sequence[Plan]) -> float:
    """Bytes that stages have together while each runs, above those that the rank has, where one runs at a time."""
    return sum(alone_bytes(plan, flight) for plan, (_, flight) in zip(plans, stages, strict=True)
               ) - rank_peak_bytes(plans, moments)


def _merged(moments: RankMoments | None, fronts: Sequence[Sequence[Plan]], budget: float) -> list[Plan] | None:
    """The plans of the least seconds together that fit, one of each front; None where none fit."""
    assert moments is not None, "a rank with several stages has moments"
    chosen = least_together([_points(front, moments, i) for i, front in enumerate(fronts)], budget)
    return None if chosen is None else [front[k] for front, k in zip(fronts, chosen, strict=True)]


def _mix(part: StageParts, moments: RankMoments, stages: Stages, fronts: Sequence[list[Plan]],
         prices: Sequence[float], roughly: bool = False) -> None:
    """Adds plans that compute again some of the blocks in which plans under these prices differ: those that serve.

    What they take is about in proportion to these blocks. Those that are fastest together so are drawn.
    """
    every = [[line for line in part.between(*stage, prices, roughly=roughly) if len(line) > 1] for stage in stages]
    ends = [[[part.plan_of_choice(*stage, *line[at]) for at in (0, -1)] for line in lines]
            for stage, lines in zip(stages, every, strict=True)]
    points = [_points(front, moments, i) for i, front in enumerate(fronts)]
    made: list[list[Made | None]] = [[None] * len(front) for front in fronts]
    for i, (lines, pairs) in enumerate(zip(every, ends, strict=True)):
        for line, pair in zip(lines, pairs, strict=True):
            more, less = _points(pair, moments, i)
            for k in range(1, len(line) - 1):
                x = k / (len(line) - 1)
                points[i].append((more[0] + x * (less[0] - more[0]), more[1] + x * (less[1] - more[1])))
                made[i].append(line[k])
    for _ in range(MIXES):
        chosen = least_together(points, part.task.budget) or ()
        new = [(i, k, one) for i, k in enumerate(chosen) if (one := made[i][k]) is not None]
        for i, k, one in new:
            plan = part.plan_of_choice(*stages[i], *one)
            fronts[i].append(plan)
            points[i][k], made[i][k] = _points([plan], moments, i)[0], None
        if not new:
            break


def _points(plans: Sequence[Plan], moments: RankMoments, stage: int) -> list[Point]:
    return [(plan.predicted.seconds, nbytes) for plan, nbytes in zip(
        plans, at_moments(plans, moments, stage), strict=True)]


def _seconds(plans: Sequence[Plan]) -> float:
    return sum(plan.predicted.seconds for plan in plans)


def _filled(part: StageParts, moments: RankMoments | None, stages: Stages, fronts: Sequence[list[Plan]],
            found: Sequence[Plan]) -> list[Plan]:
    """The plans, where each stage may have what the others leave of the budget; first the one that may gain most.

    Where the time is over they are those of before.
    """
    budget, best = part.task.budget, [*found]
    lost = [plan.predicted.seconds - front[0].predicted.seconds for plan, front in zip(found, fronts, strict=True)]
    for i in sorted(range(len(stages)), key=lost.__getitem__, reverse=True):
        room = budget - sum(resting_bytes(best[k], stages[k][1]) for k in range(len(stages)) if k != i)
        share = floor(room / budget * EVEN * FINER) / FINER
        if lost[i] > part.task.options.tolerance * _seconds(best) and share > 0:
            with suppress(Infeasible, InputError, OutOfTime):
                fronts[i].append(part.under(share).planned(*stages[i]))
                best = min(_merged(moments, fronts, budget) or best, best, key=_seconds)
    return best


def _shared(part: StageParts, moments: RankMoments | None, stages: Stages, fronts: Sequence[list[Plan]],
            like: Sequence[Plan]) -> list[Plan]:
    """The plans that are found under shares of the budget, first in proportion to some plans, and those of the fronts.

    Shares go to where a byte is worth most, while that is faster. What stages count together and the rank does not is
    shared too. Raises why there are none.
    """
    budget, best = part.task.budget, inf
    sizes, more = [alone_bytes(plan, flight) for plan, (_, flight) in zip(like, stages, strict=True)], max(
        0.0, _counted_twice(moments, stages, like))
    found, shares = _merged(moments, fronts, budget), shares_of(sizes, EVEN + floor(EVEN * more / budget))
    for _ in range(DIVISIONS):
        places = [part.under(share) for share in shares]
        try:
            for front, place, stage in zip(fronts, places, stages, strict=True):
                front.append(place.planned(*stage))
        except (Infeasible, InputError, OutOfTime):
            if not found:
                raise
            break
        found = _merged(moments, fronts, budget)
        if found is None:  # what plans need rounds up
            break
        prices = [place.price(*stage) for place, stage in zip(places, stages, strict=True)]
        other = moved(shares, prices)
        if other is None or _seconds(found) >= best * (1 - part.task.options.tolerance):
            break
        shares, best = other, _seconds(found)
    return found or []
