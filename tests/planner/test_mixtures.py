"""Mixtures of at most three kinds of blocks fill a budget as well as many kinds do: against every choice."""

import random
from itertools import product

import pytest
from block_kinds import kinds
from shell import LAPTOP
from tiny import tiny

import autoddl
from autoddl.planner.mixtures import Measure, mixtures

PLACES = 4
"""Places at which a block has one of two choices: with 1 a place takes fewer bytes and more seconds."""


def knapsack(draw: random.Random, count: int) -> tuple[Measure, float]:
    """The seconds and bytes of a choice of so many blocks, and a budget that splits them."""
    sizes = [draw.choice((1.0, 1.0, 4.0)) for _ in range(PLACES)]
    times = [size * draw.uniform(0.9, 1.1) for size in sizes]

    def measure(choice: tuple[int, ...]) -> tuple[float, float]:
        light = [(size, time, choice[k::PLACES]) for k, (size, time) in enumerate(zip(sizes, times, strict=True))]
        return (1000.0 + sum(time * sum(one) for _, time, one in light),
                sum(size * (count - sum(one)) for size, _, one in light))

    return measure, draw.uniform(0.3, 0.9) * count * sum(sizes)


def best_of_all(measure: Measure, count: int, budget: float) -> tuple[int, ...]:
    """The fastest of all choices within the budget; blocks are alike, so only how many have each option counts."""
    totals = product(range(count + 1), repeat=PLACES)
    choices = (tuple(int(block < total[k]) for block in range(count) for k in range(PLACES)) for total in totals)
    return min((one for one in choices if measure(one)[1] <= budget), key=lambda one: measure(one)[0])


@pytest.mark.parametrize("seed", range(6))
def test_three_kinds_are_nearly_as_fast_as_many(seed: int) -> None:
    draw, count = random.Random(seed), 5
    measure, budget = knapsack(draw, count)
    best = best_of_all(measure, count, budget)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for block in range(count):
        positions = tuple(range(block * PLACES, (block + 1) * PLACES))
        groups.setdefault(tuple(best[p] for p in positions), []).append(positions)
    limit = measure(best)[0] * 1.001
    found = next(one for one in mixtures([*groups.values()], best, measure, limit, budget) if measure(one)[1] <= budget)
    chosen = {found[block * PLACES:(block + 1) * PLACES] for block in range(count)}
    assert len(chosen) <= 3 and measure(found)[0] <= limit
    assert measure(found)[0] >= measure(best)[0] - 1e-9


def test_a_block_that_stands_apart_keeps_what_it_has_and_counts_as_a_kind() -> None:
    """Any other option would cost the last block seconds that the same change saves nobody else."""
    count, last = 6, (0, 1, 0, 1)

    def measure(choice: tuple[int, ...]) -> tuple[float, float]:
        light = [sum(choice[k:-PLACES:PLACES]) for k in range(PLACES)]
        return (1000.0 + sum(light) + 10.0 * (choice[-PLACES:] != last), sum(count - 1 - one for one in light))

    many = tuple(int(k <= block) for block in range(count - 1) for k in range(PLACES))
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for block in range(count):
        positions = tuple(range(block * PLACES, (block + 1) * PLACES))
        groups.setdefault(tuple((*many, *last)[p] for p in positions), []).append(positions)
    seconds, peak = measure((*many, *last))
    found = next(one for one in mixtures([*groups.values()], (*many, *last), measure, seconds, peak)
                 if measure(one)[1] <= peak and measure(one)[0] <= seconds)
    chosen = {found[block * PLACES:(block + 1) * PLACES] for block in range(count)}
    assert found[-PLACES:] == last and len(groups) == 5 and len(chosen) <= 3


def test_a_plan_whose_memory_binds_has_at_most_three_kinds_of_blocks() -> None:
    model = tiny(layers=8, width=64, batch=16, dropout=0.0)
    free = autoddl.plan(model, LAPTOP, mesh="machine-pair=4", workers=1)
    plan = autoddl.plan(model, LAPTOP, mesh="machine-pair=4", workers=1, budget=0.9 * free.predicted.peak_bytes)
    assert kinds(plan) <= 3 and plan.gap <= 1e-3 and plan.predicted.peak_bytes <= plan.budget
