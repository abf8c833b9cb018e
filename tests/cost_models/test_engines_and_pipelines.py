"""Time lines: overlap by hand, both engines against each other, pipelines against published rates, errors."""

import random
from math import inf, nan

import pytest

from autoddl.cli.tables.pipeline_text import draw_timeline
from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models.timelines.events import FLOOR, TaskTraits, run_overlapping
from autoddl.cost_models.timelines.pipelines import add_ends, simulate_pipeline
from autoddl.cost_models.timelines.timeline import COMPUTE, Task, Timeline, order_edges, simulate

PUBLISHED = [  # ranks, microbatches, F, B, W, transfer in ms; bubble of 1F1B, of ZB-H1
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585), (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674), (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045), (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397), (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
]
"""Qi et al. 2024 (ICLR), table 5, with the profiled seconds of the same paper's appendix."""


def side_by_side(compute: float, other: float, slowdown: float) -> Timeline:
    return simulate([Task("c", compute), Task("n", other, stream="net")], slowdown)


@pytest.mark.parametrize(("compute", "other"), [(3, 1), (1, 3), (2, 2), (0, 1), (1, 0)])
@pytest.mark.parametrize("k", [1, 1.25, 2])
def test_overlap_slows_both(compute: float, other: float, k: float) -> None:
    """T = k min + (max - min)."""
    line = side_by_side(compute, other, k)
    both = min(compute, other)
    assert line.makespan == k * both + max(compute, other) - both
    assert (line.hidden(0), line.exposed(0)) == (k * both, max(0, other - both))
    assert line.busy(0) == max(0, compute - both) + k * both
    assert line.busy(0, "net") == line.hidden(0) + line.exposed(0)


def test_rates_change_when_something_starts_or_ends() -> None:
    """Communication of 2 from 1 on beside computation of 4: 1 alone, 3 for 2, 1.5 for 1, alone 0.5 ..."""
    tasks = [Task("a", 1), Task("b", 4), Task("x", 2, stream="net", needs=(0,)), Task("y", 1, stream="net")]
    line = simulate(tasks, 1.5)
    assert line.starts == (0, 1, 1, 4) and line.ends == (1, 6.5, 4, 5.5)
    assert (line.hidden(0), line.exposed(0), line.bubble) == (4.5, 0, 0)


def test_a_collective_waits_for_all_and_is_slowed_by_any() -> None:
    tasks = [Task("a", 1, (0,)), Task("b", 2, (1,)), Task("sum", 1, (0, 1), "net", (0, 1)),
             Task("c", 1, (1,), needs=(1,))]
    line = simulate(tasks, 2)
    assert line.starts == (0, 0, 2, 2) and line.ends == (1, 2, 4, 4)
    assert [line.exposed(rank) for rank in line.ranks] == [2, 0] and [line.hidden(r) for r in (0, 1)] == [0, 2]
    assert line.streams(1) == (COMPUTE, "net") and line.bubble == pytest.approx(1 - 5 / 8)


def test_two_communication_streams_do_not_slow_each_other() -> None:
    line = simulate([Task("x", 2, stream="node"), Task("y", 3, stream="net")], 1.5)
    assert line.ends == (2, 3) and line.exposed(0) == 3 and line.hidden(0) == 0


def test_tasks_on_one_link_share_it() -> None:
    """3 and 1 seconds on one link: both at half rate until the short one ends, the long one alone then."""
    line = simulate([Task("x", 3, stream="a", link="net"), Task("y", 1, stream="b", link="net"),
                     Task("z", 1, stream="c", link="node")])
    assert line.ends == (4.0, 2.0, 1.0)
    line = simulate([Task("x", 3, stream="a", link="net"), Task("y", 1, stream="b", link="net", share=0.5)])
    assert line.ends == (3.5, 1.5)
    line = simulate([Task("x", 3, stream="a", link="net", share=0.5), Task("y", 1, stream="b", link="net", share=0.5)])
    assert line.ends == (3.0, 1.0)


def test_sending_takes_what_computing_lacks() -> None:
    """A transfer of 2 seconds takes a quarter of the processor: 1.5 of 3 seconds are computed beside it."""
    line = simulate([Task("c", 3), Task("n", 2, stream="net", load=0.25)])
    assert line.ends == pytest.approx((3.5, 2.0))
    crowded = simulate([Task("c", 3), Task("n", 2, stream="net", load=5.0)])
    assert crowded.ends == pytest.approx((2 + 3 - 2 * FLOOR, 2.0))


def random_tasks(seed: int) -> list[Task]:
    rng = random.Random(seed)
    streams = (COMPUTE, "node", "net")
    ranks = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]
    return [Task(str(i), rng.choice((0, 1, 2.5, rng.random())), rng.choice(ranks), rng.choice(streams),
                 tuple(rng.sample(range(i), min(i, rng.randrange(3))))) for i in range(40)]


@pytest.mark.parametrize("seed", range(20))
def test_both_engines_agree_and_work_is_kept(seed: int) -> None:
    tasks = random_tasks(seed)
    alone = simulate(tasks)
    where = [TaskTraits(task.ranks, task.stream == COMPUTE) for task in tasks]
    starts, ends = run_overlapping([task.seconds for task in tasks], order_edges(tasks), where, 1.0)
    assert (tuple(starts), tuple(ends)) == (alone.starts, alone.ends)
    slow = simulate(tasks, 1.5)
    assert slow == simulate(tasks, 1.5)
    for i, task in enumerate(tasks):
        assert task.seconds - 1e-9 <= slow.ends[i] - slow.starts[i] <= 1.5 * task.seconds + 1e-9
        assert all(slow.ends[n] <= slow.starts[i] for n in task.needs)
    assert alone.makespan <= slow.makespan <= 1.5 * alone.makespan + 1e-9
    for rank in slow.ranks:
        assert slow.busy(rank) + slow.exposed(rank) <= slow.makespan + 1e-9


@pytest.mark.parametrize(("ranks", "n", "f", "b", "w", "move", "plain", "split"), PUBLISHED)
def test_published_bubbles(ranks: int, n: int, f: float, b: float, w: float, move: float, plain: float, split: float
                           ) -> None:
    for text, rate in (("1f1b", plain), ("zb-h1", split)):
        line = simulate_pipeline(generate(text, ranks, n), [f] * ranks, [b] * ranks, [w] * ranks, move)
        assert 1 - n * (f + b + w) / line.makespan == pytest.approx(rate, abs=0.5e-4)


def test_published_bubble_of_interleaved_1f1b() -> None:
    """0.1055, where the paper's simulation lets only the first of each 8 microbatches wait for its way round the ranks.

    That is in `get_interleave_schedule` of the paper's repository; if all wait, as they must, it is 0.1090.
    """
    ranks, n, f, b, w, move, *_ = PUBLISHED[0]
    third = [[x / 3] * 3 * ranks for x in (f, b, w)]
    schedule = generate("interleaved:3", ranks, n)
    line = simulate_pipeline(schedule, third[0], third[1], third[2], move)
    freed = [task._replace(needs=()) if action.microbatch % 8 and action.stage % 8 == (0 if action.kind == "F" else 7)
             else task for task, action in zip(line.tasks, schedule, strict=False)]
    loose = simulate([*freed, *line.tasks[len(freed):]])
    assert 1 - n * (f + b + w) / loose.makespan == pytest.approx(0.1055, abs=0.5e-4)
    assert 1 - n * (f + b + w) / line.makespan == pytest.approx(0.1090, abs=0.5e-4)


@pytest.mark.parametrize("seed", range(5))
def test_unequal_stages(seed: int) -> None:
    """GPipe: sum F + (N-1) max F + sum B + (N-1) max B; 1F1B is never below N times a stage and the way to it."""
    rng = random.Random(seed)
    stages, n = rng.randrange(2, 9), rng.randrange(1, 12)
    forward, backward, weight = ([float(rng.randrange(1, 9)) for _ in range(stages)] for _ in range(3))
    forward = list(add_ends(forward, 2, 5))
    whole = [b + w for b, w in zip(backward, weight, strict=True)]
    expected = sum(forward) + sum(whole) + (n - 1) * (max(forward) + max(whole))
    assert simulate_pipeline(generate("gpipe", stages, n), forward, backward, weight).makespan == expected
    least = max(n * (forward[s] + whole[s]) + sum(forward[:s]) + sum(whole[:s]) for s in range(stages))
    assert simulate_pipeline(generate("1f1b", stages, n), forward, backward, weight).makespan >= least


def test_ends() -> None:
    assert add_ends([1, 1, 1], 0.5, 2) == (1.5, 1, 3) and add_ends([1], 0.5, 2) == (3.5,)
    slow_last = simulate_pipeline(generate("1f1b", 4, 8), add_ends([1.0] * 4, 0, 1), [1.0] * 4, [1.0] * 4)
    assert slow_last.makespan == 3 * 3 + 8 * 4  # down and up three stages, and eight times through the slow one


def test_transfers() -> None:
    """Two ranks, one microbatch: there and back; a boundary may have its own time, a turn on one rank has none."""
    ones = [1.0, 1.0]
    line = simulate_pipeline(generate("1f1b", 2, 1), ones, ones, ones, 0.25)
    assert line.makespan == 6.5 and line.streams(0) == (COMPUTE, "0 to 1", "1 to 0") and line.exposed(1) == 0.5
    four = [1.0] * 4
    there_and_back = 4 + 1 + 1 + 1 + 1 + 1 + 1 + 2 * (0.25 + 0.5)  # the W of stages 2 and 0 stand in the way
    assert simulate_pipeline(generate("zb-v", 2, 1), four, four, four, [0.25, 100.0, 0.5]).makespan == there_and_back


def test_the_reduction_of_a_stage_runs_beside_what_still_computes() -> None:
    """Two stages on one rank: that of stage 1 beside the last backward, that of stage 0 at the end."""
    ones = [1.0, 1.0]
    schedule = generate("interleaved:2", 1, 1)
    line = simulate_pipeline(schedule, ones, ones, ones, reduction_seconds=[1.0, 1.0], slowdown=1.5)
    assert line.makespan == 7.5 and line.hidden(0) == 1.5 and line.exposed(0) == 1.0
    assert simulate_pipeline(schedule, ones, ones, ones, reduction_seconds=[3.0, 0.0]).makespan == 9


def test_both_owners_of_a_stage_reduce_it_together() -> None:
    for pairs in (1, 2, 4):
        schedule = generate(f"chimera:{pairs}", 8, 16)
        line = simulate_pipeline(schedule, [1.0] * 8, [0.5] * 8, [0.5] * 8, 0.1, [2.0] * 8, 1.1)
        reductions = [task for task in line.tasks if task.kind == "reduce"]
        assert len(reductions) == 8 and all(len(task.ranks) == 2 * pairs for task in reductions)
        assert line.makespan > 32


def test_the_order_of_reductions_is_one_on_all_ranks() -> None:
    """Else ranks would wait for each other in a circle."""
    for text in ("1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved:2", "chimera:1", "chimera:2"):
        schedule = generate(text, 4, 8)
        ones = [1.0] * schedule.stages
        for slowdown in (1.0, 1.2):
            assert simulate_pipeline(schedule, ones, ones, ones, 0.125, ones, slowdown).makespan > 24


def test_drawing() -> None:
    line = simulate([Task("F", 2), Task("B", 4, needs=(0,)), Task("x", 1, stream="net", needs=(0,)), Task("t", 0)])
    assert draw_timeline(line, 12) == "rank 0     | F-- B------\nrank 0 net |     x"
    assert draw_timeline(line, 3) == "rank 0     | FB\nrank 0 net |  x"
    assert draw_timeline(simulate([]), 5) == ""
    with pytest.raises(InputError, match="0 columns"):
        draw_timeline(line, 0)


@pytest.mark.parametrize(("tasks", "slowdown", "words"), [
    ([Task("a", -1)], 1.0, "a finite time of at least 0"), ([Task("a", nan)], 1.0, "a finite time"),
    ([Task("a", inf)], 1.0, "a finite time"), ([Task("a", 1, ())], 1.0, "on one rank or more"),
    ([Task("a", 1, needs=(1,))], 1.0, "needs tasks 0 to 0"), ([Task("a", 1)], 0.9, "a slowdown of 0.9"),
    ([Task("a", 1, needs=(0,))], 1.0, "task 0, 'a', waits for itself"),
    ([Task("a", 1, needs=(1,)), Task("b", 1)], 1.0, "task 0, 'a', waits for itself"),
    ([Task("a", 1, needs=(1,)), Task("b", 1)], 1.5, "task 0, 'a', waits for itself"),
])
def test_time_lines_that_cannot_be(tasks: list[Task], slowdown: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(tasks, slowdown)


def test_pipelines_that_cannot_be() -> None:
    schedule, ones = generate("1f1b", 2, 2), [1.0, 1.0]
    with pytest.raises(InputError, match="give finite numbers of at least 0, one for each of 2 stages"):
        simulate_pipeline(schedule, [1.0], ones, ones)
    with pytest.raises(InputError, match="one for each of 2 stages"):
        simulate_pipeline(schedule, ones, [1.0, -1.0], ones)
    with pytest.raises(InputError, match="one for each of 1 boundaries"):
        simulate_pipeline(schedule, ones, ones, ones, ones)
