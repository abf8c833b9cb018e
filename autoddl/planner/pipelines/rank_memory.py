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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
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

__all__ = ["fitting_plans", "price_of_bytes", "priced_ranks", "rank_peak", "rank_prices", "shared_prices",
           "unit_prices"]

STEP = 1.3
"""The factor between two prices of a byte."""

FARTHER = 4
"""The steps to the next price while none is too high, or none too low."""

PRICES = 9
"""Prices that are tried for the stages of a rank."""

FINE = 2**0.25
"""The factor between two prices under which units are searched, which takes less."""

COARSE = 4
"""The first steps between prices under which units are searched."""

LEAST, MOST = 1 / 50, 4.0
"""The least and the greatest price of a whole budget under which units are searched, in times of a step."""

GAIN = 0.005
"""The part of a step by which a price raises what equal stages take, or it is left out: it takes time."""

GUESS = 0.1
"""The first price of the whole budget, in seconds of the stages."""

DEAREST = 10.0
"""The price of a whole budget, in seconds of the stages without one: what does not fit there is not looked for."""

ROUGH = 0.01
"""The gap at which the budget of a rank is divided too."""

HOPELESS = 3.0
"""Stages of a rank that take so many times the seconds of the pipeline without a budget are not looked for."""

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


def rank_peak(part: StageParts, staged: Staged, plans: Sequence[Plan]) -> float:
    """Bytes of the fullest rank with all stages that it has."""
    return max(together_bytes(plans, cut_graph(part.graph, staged.cuts), staged.placement, staged.moments).values())


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
    even = list(pairwise(part.units * s // part.stages for s in range(part.stages + 1)))
    least, most = (times * seconds / part.task.budget for times in (LEAST, MOST))
    for group in priced_ranks(part, flights):
        for path in _busiest(paths, group):
            weights = tuple((*map(float, path.stages[s]), 0.0, 0.0) for s in group)
            told = cache(partial(_taken, part, flights, partial(_ends, flights), even, group, weights))
            price = _dearest(told, least, (least, most))
            found += [SharedPrice(group, weights, price)] if told(price) > told(_near(least)) + GAIN * seconds else []
    return found


def shared_prices(part: StageParts, blend: PathBound, groups: Sequence[Sequence[int]], paid: Sequence[float],
                  seconds: float) -> list[SharedPrice]:
    """The prices of bytes of ranks where seconds count as in a blend, and a whole budget costs so many of these.

    Those are left out that are hardly more than none, in a step of about so many `seconds`.
    """
    found, least = list[SharedPrice](), LEAST * seconds / part.task.budget
    for group, cost in zip(groups, paid, strict=True):
        most = max(max(blend.stages[s][:6]) for s in group)
        price = cost / most * part.each / part.task.budget if most > 0 else 0.0
        if price > least:
            weights = tuple((*part.rounded(blend.stages[s], most), 0.0, 0.0) for s in group)
            found.append(SharedPrice(tuple(group), weights, _near(price)))
    return found


def priced_ranks(part: StageParts, flights: Sequence[Flight]) -> list[tuple[int, ...]]:
    """The stages of each rank whose bytes may have a price, where units tell of them; none where they do not."""
    if part.sizes or part.task.budget == inf or part.apart_bytes == inf:
        return []
    groups = [tuple(s for s, at in enumerate(part.together) if at == place) for place in sorted(set(part.together))]
    return [one for one in groups if len(one) == 1 or all(flights[s].most for s in one)]


def _near(price: float) -> float:
    """The power of FINE that is next to a price."""
    return _power(round(log(price, FINE)), FINE)


def _dearest(told: Callable[[float], float], price: float, within: tuple[float, float]) -> float:
    """The price, of powers of FINE within some, at which what is told of it is greatest, looked for from some on.

    It is concave in the price.
    """
    at, low, high = (round(log(one, FINE)) for one in (price, *within))

    def value(k: int) -> float:
        return told(_power(k, FINE)) if low <= k <= high else -inf

    step = COARSE
    while step:
        other = max(at - step, at + step, key=value)
        if value(other) > value(at):
            at = other
        else:
            step //= 2
    return _power(at, FINE)


def _taken(part: StageParts, flights: Sequence[Flight], searched: Callable[[Flight], Iterable[Flight]],
           ends: Sequence[tuple[int, int]], group: Sequence[int], weights: Sequence[tuple[float, ...]], price: float
           ) -> float:
    """Seconds that stages of a rank take at least between these places under a price of bytes.

    Their units are searched with the microbatches in flight that are `searched` for those of a stage.
    """
    total = -price * part.task.budget
    for s, counts in zip(group, weights, strict=True):
        for at in searched(flights[s]):
            part.learn_turns(s, at, counts, price)
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


def _power(exponent: int, step: float = STEP) -> float:
    """A power of a step between prices with six digits, so that equal prices are told to be so."""
    return float(f"{step ** exponent:.6g}")


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
    options = list[list[tuple[Point, Made | None]]]()
    for i, (front, stage) in enumerate(zip(fronts, stages, strict=True)):
        options.append([(point, None) for point in _points(front, moments, i)])
        for line in part.between(*stage, prices, roughly=roughly):
            (more, most), (less, least) = _points([line.more, line.less], moments, i)
            options[i] += [((more + way * (less - more), most + way * (least - most)), made)
                           for way, made in line.ways()]
    for _ in range(MIXES):
        chosen = least_together([[point for point, _ in own] for own in options], part.task.budget) or ()
        new = [(i, k, made) for i, k in enumerate(chosen) if (made := options[i][k][1]) is not None]
        for i, k, made in new:
            fronts[i].append(part.plan_of_choice(*stages[i], *made))
            options[i][k] = _points(fronts[i][-1:], moments, i)[0], None
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
