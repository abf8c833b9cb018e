"""Every rank's list of actions: complete, in one order for every pair of ranks, and free of circles."""

from itertools import product

import pytest

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_schedules import generate
from autoddl.schedule.stage_actions import (
    Link,
    StageAction,
    StageActions,
    arrived,
    check_stage_actions,
    forwards,
    posted_early,
    stage_actions,
)

LINES = [(name, depth, m) for name in ("gpipe", "1f1b") for depth in range(1, 7)
         for m in sorted({1, max(1, depth - 1), depth, 2 * depth})]
CHUNKED = [(f"interleaved:{v}", depth, m) for v in (2, 3) for depth in range(2, 5) for m in (depth, 2 * depth)]
CHUNKED += [("chimera:1", depth, m) for depth in (2, 4, 6) for m in (2, depth, 2 * depth)] + [("chimera:2", 8, 8)]


def links(stages: int, shape: str) -> list[Link]:
    """A line; a line where stage 0 is read by all (T5's encoder); one whose gradients never come back to stage 0."""
    line = [Link(s, s + 1, shape != "frozen" or s > 0) for s in range(stages - 1)]
    return line + [Link(0, s, True) for s in range(2, stages)] * (shape == "skip")


def blocking(made: StageActions) -> list[StageAction]:
    """Runs all lists with sends that wait for their receive; returns the actions in the order in which they ran."""
    left, ran, moved = [list(row) for row in made.lists], list[StageAction](), True
    while moved:
        moved = False
        for row in left:
            if row and not row[0].way:
                ran.append(row.pop(0))
                moved = True
            elif row and row[0].way == ">":
                action, _, other = row[0]
                there = left[made.there(row[0])]
                if there and there[0] == StageAction(action._replace(stage=other), "<", action.stage):
                    ran += [row.pop(0), there.pop(0)]
                    moved = True
    return ran


@pytest.mark.parametrize("shape", ["line", "skip", "frozen"])
def test_every_schedule_runs_even_if_every_send_waits(shape: str) -> None:
    for name, depth, m in LINES + CHUNKED:
        schedule = generate(name, depth, m)
        wanted = links(schedule.stages, shape)
        for one, back in ((schedule, 1), (forwards(schedule), 0)):
            made = stage_actions(one, wanted)
            assert len(blocking(made)) == sum(map(len, made.lists)), (name, depth, m)
            place = made.placement[0]
            apart = [link for link in wanted if place[link.source] != place[link.target]]
            crossing = sum((1 + back * link.gradient) * m for link in apart)
            ways = [action.way for _, action in made]
            assert (ways.count(">"), ways.count("<")) == (crossing, crossing)
            assert [[a.action for a in row if not a.way] for row in made.lists] == [list(row) for row in one.actions]


@pytest.mark.parametrize("shape", ["line", "skip", "frozen"])
def test_what_a_receive_shows_to_have_arrived_has(shape: str) -> None:
    """By the order of a run: the other stage ran what takes in the send before it made what is received."""
    for name, depth, m in LINES + CHUNKED:
        schedule = generate(name, depth, m)
        made = stage_actions(schedule, links(schedule.stages, shape))
        ran = {one: k for k, one in enumerate(blocking(made))}
        for rank in range(depth):
            for receive, sends in arrived(made, rank).items():
                source = ran[StageAction(receive.action._replace(stage=receive.other))]
                assert all(ran[StageAction(one.action._replace(stage=one.other))] <= source for one in sends)


def test_few_tensors_wait_to_arrive_however_many_microbatches_there_are() -> None:
    made, most = stage_actions(generate("1f1b", 4, 64), links(4, "line")), list[int]()
    for rank, row in enumerate(made.lists):
        gone, here = arrived(made, rank), list[int]()
        for one in row:
            here.append((here[-1] if here else 0) + (one.way == ">") - len(gone.get(one, ())))
        most.append(max(here))
    assert max(most) <= 6


def test_the_text_of_a_list_reads_back() -> None:
    made = stage_actions(generate("1f1b", 2, 2), links(2, "line"))
    assert str(made) == ("rank 0: 0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1\n"
                         "rank 1: 1F0<0 1F0 1F1<0 1B0 1B0>0 1F1 1B1 1B1>0")
    assert all(StageAction.parse(str(one)) == one for _, one in made)
    assert " ".join(map(str, posted_early(made.lists[1]))) == "1F0<0 1F1<0 1F0 1B0 1B0>0 1F1 1B1 1B1>0"
    assert " ".join(map(str, posted_early(made.lists[0]))) == "0F0 0F0>1 0B0<1 0F1 0F1>1 0B1<1 0B0 0B1"
    for text in ("0F0>", "0F0<>1", "F0>1", "0X0<1"):
        with pytest.raises(InputError):
            StageAction.parse(text)


def changed(rank: int, order: str) -> StageActions:
    """The lists of 1F1B on two ranks with two microbatches, with another row for a rank."""
    made = stage_actions(generate("1f1b", 2, 2), links(2, "line"))
    rows = list(made.lists)
    rows[rank] = tuple(map(StageAction.parse, order.split()))
    return StageActions(made.placement, tuple(rows))


@pytest.mark.parametrize(("rank", "order", "said"), [
    (0, "0F0 0F1 0F1>1 0F0>1 0B0<1 0B0 0B1<1 0B1", "rank 0 sends rank 1 what 1F1<0 receives, where rank 1 has 1F0<0"),
    (1, "1F0<0 1F0 1F1<0 1B0 1B0>0 1F1 1B1", "rank 1 sends rank 0 what nothing receives, where rank 0 has 0B1<1"),
    (0, "0F0 0F0>1 0F1 0F1>1 0B0 0B0<1 0B1<1 0B1", "rank 0, step 6: 0B0<1 stands on the wrong side of 0B0"),
    (0, "0F0 0F0>1 0B0<1 0B0 0B1<1 0F1 0F1>1 0B1", "in a circle: rank 0 at 0B0<1, rank 1 at 1F1<0")])
def test_lists_that_do_not_fit_are_refused(rank: int, order: str, said: str) -> None:
    made = changed(rank, order)
    with pytest.raises(InputError, match=said):
        check_stage_actions(made)


def test_schedules_that_no_plan_runs() -> None:
    stuck = Schedule.parse("microbatches 1, stages on ranks 0 0\nrank 0: 1F0 0F0 1B0 0B0")
    with pytest.raises(InputError, match="1F0 waits for what never comes"):
        stage_actions(stuck, [])


def test_skipped_links_of_random_graphs_run() -> None:
    for name, depth in product(("gpipe", "1f1b", "zb-h1", "zb-h2"), (3, 4)):
        every = [Link(a, b, (a + b) % 2 == 0) for a in range(depth) for b in range(a + 1, depth)]
        made = stage_actions(generate(name, depth, 2 * depth), every)
        assert len(blocking(made)) == sum(map(len, made.lists))
