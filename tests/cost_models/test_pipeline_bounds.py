"""Paths of pipelines: below every simulated pipeline, exact on their own, and the closed forms of equal stages."""

import random
from itertools import product

import pytest
from random_pipelines import NAMES, draw_schedule, draw_stages, draw_transfers, makespan
from sampling import parametrize_or_slow

from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models.timelines.pipeline_bounds import closed_paths, critical_path, done_once
from autoddl.cost_models.timelines.pipelines import simulate_pipeline

EXACT = 1e-12
DEPTHS = (2, 4, 6)


def check_random_pipeline(seed: int) -> None:
    """Closed paths and critical paths of other seconds are not above; the own critical path is exact."""
    rng = random.Random(seed)
    schedule, once = draw_schedule(rng, NAMES[seed % len(NAMES)]), rng.random() < 0.5
    transfers = draw_transfers(rng, schedule.stages)
    stages, others = (draw_stages(rng, schedule.stages, once) for _ in range(2))
    whole = makespan(schedule, stages, transfers)
    assert whole <= makespan(schedule, stages, transfers, 1.3) * (1 + EXACT)
    seconds, path = critical_path(schedule, stages, transfers)
    assert seconds == whole
    assert path.seconds(stages, transfers) == pytest.approx(whole, rel=EXACT)
    assert path.seconds(others, transfers) <= makespan(schedule, others, transfers) * (1 + EXACT)
    for bound in closed_paths(schedule, done_once(stages)):
        assert bound.seconds(stages, transfers) <= whole * (1 + EXACT)


def test_no_path_is_above_a_random_pipeline() -> None:
    for seed in range(300):
        check_random_pipeline(seed)


@pytest.mark.slow
def test_no_path_is_above_ten_thousand_random_pipelines() -> None:
    for seed in range(300, 10_300):
        check_random_pipeline(seed)


def check_closed_form(schedule: Schedule, stage: StageSeconds, expected: float, closed: bool = True) -> None:
    """Equal stages with free transfers take `expected` seconds; a critical path says so, and so do closed paths."""
    stages, free = [stage] * schedule.stages, [0.0] * (schedule.stages - 1)
    seconds, path = critical_path(schedule, stages, free)
    assert seconds == pytest.approx(expected, rel=EXACT)
    assert path.seconds(stages, free) == pytest.approx(expected, rel=EXACT)
    best = max(bound.seconds(stages, free) for bound in closed_paths(schedule))
    assert best <= expected * (1 + EXACT)
    assert not closed or best == pytest.approx(expected, rel=EXACT)


@parametrize_or_slow("depth", DEPTHS[:2], DEPTHS[2:])
def test_equal_stages_have_the_closed_forms(depth: int) -> None:
    """The bubbles of `core.pipeline_schedules`, for other seconds of F, B and W."""
    for f, b, w, turns in product((1.0, 0.7), (1.0, 1.6), (0.4, 1.0), (1, 2, 3)):
        n, stage = turns * depth, StageSeconds(f, b, w)
        for name in ("gpipe", "1f1b"):
            check_closed_form(generate(name, depth, n), stage, (n + depth - 1) * (f + b + w))
        for chunks in (2, 3):
            check_closed_form(generate(f"interleaved:{chunks}", depth, n), stage,
                              (chunks * n + depth - 1) * (f + b + w))
        extra = (depth - 1) * max(f, b, f + b - w)
        check_closed_form(generate("zb-h1", depth, n), stage, n * (f + b + w) + extra)


@parametrize_or_slow("depth", DEPTHS[:2], DEPTHS[2:])
def test_equal_parts_leave_no_bubble(depth: int) -> None:
    """F = B = W: rank r of D starts r parts after the first, and none waits."""
    for n in (2 * depth, 3 * depth):
        equal = StageSeconds(0.7, 0.7, 0.7)
        check_closed_form(generate("zb-h2", depth, n), equal, 0.7 * (3 * n + depth - 1))
        check_closed_form(generate("zb-v", depth, n), equal, 0.7 * (6 * n + depth - 1))
        check_closed_form(generate("dualpipe-v", depth, n), equal, 0.7 * (6 * n + depth - 1))


@pytest.mark.parametrize("depth", DEPTHS)
def test_two_directions(depth: int) -> None:
    """Chimera: (D/2f-1)(F+B) if F = B, whose units only a critical path sees; one unit with B = 2F."""
    for pairs, turns in product((1, 2), (1, 2, 3)):
        if depth % (2 * pairs) == 0:
            check_closed_form(generate(f"chimera:{pairs}", depth, turns * depth), StageSeconds(0.7, 0.3, 0.4),
                              0.7 * (2 * turns * depth + 2 * (depth // (2 * pairs) - 1)), closed=turns == 1)
    check_closed_form(generate("chimera:1", depth, depth), StageSeconds(0.7, 0.9, 0.5), 0.7 * depth + 1.4 *
                      (2 * depth - 2))


def test_tasks_that_run_once_a_step() -> None:
    """Two stages, by hand: the first F waits for its parameters, the optimizer for the reduction."""
    ones = [1.0, 1.0]
    line = simulate_pipeline(generate("1f1b", 2, 1), ones, ones, ones, 0.0, [2.0, 0.5], gather_seconds=[3.0, 5.0],
                             update_seconds=[0.25, 4.0])
    ends = dict(zip((task.name for task in line.tasks), line.ends, strict=True))
    assert (ends["0F0"], ends["1F0"], ends["1B0"], ends["0B0"]) == (4.0, 6.0, 8.0, 10.0)
    assert (ends["reduce 1"], ends["reduce 0"], ends["update 0 on 0"], ends["update 1 on 1"]) == (8.5, 12, 12.25, 12.5)
    seconds, path = critical_path(generate("1f1b", 2, 1), [StageSeconds(1, 1, 1, 3, 2, 0.25),
                                                           StageSeconds(1, 1, 1, 5, 0.5, 4)], [0.0])
    assert seconds == 12.5 and path.path == ("gather 1", "1F0", "1B0", "reduce 1", "update 1 on 1")
    assert path.stages == ((0,) * 6, (1,) * 6) and path.transfers == (0,)


def test_both_owners_of_a_stage_gather_it_together_and_update_it_alone() -> None:
    two = [1.0, 1.0]
    line = simulate_pipeline(generate("chimera:1", 2, 2), two, two, two, 0.0, two, gather_seconds=two,
                             update_seconds=two)
    assert {task.name: task.ranks for task in line.tasks if task.kind in ("gather", "update")} == {
        "gather 0": (0, 1), "gather 1": (0, 1), "update 0 on 0": (0,), "update 0 on 1": (1,),
        "update 1 on 0": (0,), "update 1 on 1": (1,)}
