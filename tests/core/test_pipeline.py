"""Schedules: text both ways, every generator complete, its bubble and its memory by closed form, and errors."""

import random
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from random_pipelines import draw_written

from autoddl.cli.tables.pipeline_text import draw_schedule
from autoddl.core.errors import InputError
from autoddl.core.pipeline import (
    Action,
    Flight,
    Schedule,
    check_schedule,
    counted_flights,
    first_ranks,
    flights_of,
    fullest,
    live_activations,
    needs,
    peak_activations,
    rank_moments,
)
from autoddl.core.pipeline_schedules import (
    chunks_of,
    generate,
    named_schedule,
    pipes_of,
    schedule_title,
    splits_backward,
    written_numbers,
)
from autoddl.cost_models.timelines.pipelines import simulate_pipeline

DEPTHS = range(2, 9)
LINES = [(text, depth, n) for depth in range(1, 9) for n in (1, depth, 2 * depth, 3 * depth + 1)
         for text in ("gpipe", "1f1b", "zb-h1", "zb-v")]
FULL = [(text, depth, n) for depth in DEPTHS for n in (2 * depth, 3 * depth)
        for text in ("dualpipe-v", "interleaved:1", "interleaved:2", "interleaved:3")]
PAIRS = [(f"chimera:{f}", depth, n * depth) for depth in range(2, 17, 2) for f in range(1, depth // 2 + 1)
         if depth % (2 * f) == 0 for n in (1, 2, 3)]
EVERY = LINES + FULL + PAIRS + [("chimera:1", 4, 2), ("chimera:2", 8, 20), ("chimera:1", 6, 8)]
ZIGZAG = "microbatches 2, stages on ranks 0 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"


def seconds(schedule: Schedule, forward: float = 1, backward: float = 1, weight: float = 1) -> float:
    """Makespan with equal stages and free transfers."""
    stages = schedule.stages
    return simulate_pipeline(schedule, [forward] * stages, [backward] * stages, [weight] * stages).makespan


@pytest.mark.parametrize("action", [Action(2, "F", 0), Action(1, "B", 3), Action(0, "W", 12), Action(2, "F", 0, 1)])
def test_an_action_reads_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_actions_as_text() -> None:
    assert [str(Action(2, "F", 0)), str(Action(0, "W", 12, 3))] == ["2F0", "3:0W12"]
    for text in ("", "2X0", "F0", "2F", "-1F0", "2F0 ", "1:2", "a:2F0", "2f0"):
        with pytest.raises(InputError, match="like '2F0' or '1:2F0'"):
            Action.parse(text)


def test_every_generator_runs_everything_once_and_reads_back() -> None:
    for text, depth, n in EVERY:
        schedule = generate(text, depth, n)
        check_schedule(schedule)
        assert Schedule.parse(str(schedule)) == schedule
        counts = Counter((action.kind, action.stage, action.microbatch) for action in schedule)
        assert set(counts.values()) == {1}
        for kind in "FB":
            assert sum(key[0] == kind for key in counts) == n * schedule.stages


def test_needs() -> None:
    schedule = Schedule.parse(ZIGZAG)
    first, second = Action(0, "F", 1), Action(1, "F", 1)
    assert needs(first, schedule) == () and needs(second, schedule) == (first,)
    assert needs(Action(1, "B", 1), schedule) == (second,)
    assert needs(Action(0, "B", 1), schedule) == (first, Action(1, "B", 1))
    assert needs(Action(1, "W", 1, 2), schedule) == (Action(1, "B", 1, 2),)


@pytest.mark.parametrize("depth", DEPTHS)
def test_bubbles_of_gpipe_and_1f1b(depth: int) -> None:
    """(D-1)/(N+D-1), whatever F and B."""
    for n, backward, text in product((1, depth, 2 * depth, 4 * depth), (0, 1), ("gpipe", "1f1b")):
        schedule, ones = generate(text, depth, n), [1.0] * depth
        line = simulate_pipeline(schedule, ones, [float(backward)] * depth, ones)
        assert line.bubble == pytest.approx((depth - 1) / (n + depth - 1))


@pytest.mark.parametrize("depth", DEPTHS)
def test_interleaving_divides_the_bubble(depth: int) -> None:
    """(D-1)(F+B)/v, where v chunks together take F and B."""
    for chunks, n in product((1, 2, 3, 4), (depth, 2 * depth, 3 * depth)):
        schedule = generate(f"interleaved:{chunks}", depth, n)
        assert seconds(schedule, 1, 1, 1) == 3 * chunks * n + 3 * (depth - 1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_bubble_of_zb_h1(depth: int) -> None:
    """(D-1)(F+B-W) if W is the shortest, as in Qi et al. 2024; a longer one leaves (D-1) max(F, B)."""
    for n, forward, backward, weight in product((depth, 3 * depth), (1, 2, 3), (1, 2, 3), (1, 2, 3)):
        extra = seconds(generate("zb-h1", depth, n), forward, backward, weight) - n * (forward + backward + weight)
        assert extra == (depth - 1) * max(forward, backward, forward + backward - weight)
        assert weight > min(forward, backward) or extra == (depth - 1) * (forward + backward - weight)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_v_of_equal_parts_has_no_bubble_on_any_rank(depth: int) -> None:
    """With F = B = W a rank never waits between its first and last action; rank r starts r later."""
    for n in (2 * depth, 3 * depth):
        schedule, ones = generate("zb-v", depth, n), [1.0] * 2 * depth
        line = simulate_pipeline(schedule, ones, ones, ones)
        for rank in range(depth):
            own = [i for i, task in enumerate(line.tasks) if rank in task.ranks]
            assert max(line.ends[i] for i in own) - min(line.starts[i] for i in own) == line.busy(rank) == 6 * n
        assert line.makespan == seconds(generate("dualpipe-v", depth, n)) == 6 * n + depth - 1


def test_chimera() -> None:
    """Bubble (D-2f)/(2fN+D-2f) if F = B; activations within [D-D/2f+1, D]; 2f stages per rank (Li & Hoefler 2021)."""
    for text, depth, n in PAIRS:
        schedule, pipes = generate(text, depth, n), 2 * int(text.partition(":")[2])
        line = simulate_pipeline(schedule, [1.0] * depth, [0.5] * depth, [0.5] * depth)
        assert line.bubble == pytest.approx((depth - pipes) / (pipes * n + depth - pipes))
        assert (min(peak_activations(schedule)), max(peak_activations(schedule))) == (depth - depth / pipes + 1, depth)
        stages = Counter(rank for pipe in schedule.placement for rank in pipe)
        assert stages == dict.fromkeys(range(depth), pipes)


def test_chimera_with_a_longer_backward() -> None:
    """One pair, N = D, B = 2F: D F + (2D-2) B."""
    for depth in range(2, 17, 2):
        assert seconds(generate("chimera:1", depth, depth)) == depth + (2 * depth - 2) * 2


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_held(depth: int) -> None:
    """Peaks in microbatches of a stage: those of the papers."""
    n, ranks = 3 * depth, range(depth)
    assert peak_activations(generate("gpipe", depth, n)) == (n,) * depth
    assert peak_activations(generate("1f1b", depth, n)) == tuple(depth - rank for rank in ranks)
    assert peak_activations(generate("zb-h1", depth, n)) == (depth,) * depth
    assert peak_activations(generate("zb-v", depth, n)) == (2 * depth,) * depth
    assert peak_activations(generate("dualpipe-v", depth, n)) == (2 * depth + 1,) * depth
    for chunks in (2, 3):  # Korthikanti et al. 2022, section 4.2.3: D(1 + (D-1)/(Dv)) of v chunks
        assert peak_activations(generate(f"interleaved:{chunks}", depth, n))[0] == depth * chunks + depth - 1
    assert all(row[-1] == 0 for row in live_activations(generate("zb-h1", depth, n)))


def test_held_in_bytes_and_after_a_split_backward() -> None:
    schedule = Schedule.parse("microbatches 1, stages on ranks 0 0\nrank 0: 0F0 1F0 1B0 0B0 1W0")
    assert live_activations(schedule) == ((1, 2, 2, 1, 0),)
    assert live_activations(schedule, sizes=[10, 4], kept=0.25) == ((10, 14, 11, 1, 0),)
    assert peak_activations(schedule, sizes=[10, 4]) == (14,)


def test_a_schedule_is_drawn() -> None:
    assert draw_schedule(Schedule.parse(ZIGZAG)) == ("rank 0 | 0F0 0F1         0B0----     0B1----\n"
                                            "rank 1 |     1F0 1B0---- 1F1 1B1----")


@pytest.mark.parametrize(("change", "words"), [
    (("1F0 1B0 1F1 1B1", "1F1 1B0 1F0 1B1"),
     r"rank 1, step 2: 1B0 waits for 1F0, which comes later on the same rank, at step 3; .*\n"
     r"  rank 0: 0F0 0F1 0B0 0B1\n  rank 1: 1F1 \[1B0\] 1F0 1B1    <-- here$"),
    (("0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1", "0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1"),
     r"rank 0, step 2: 0B0 waits for 1B0, which rank 1 runs only after 1F1"),
    (("0F1", "0F0"), "rank 0, step 2: 0F0 has been run before"),
    (("1F1 1B1", "1F1"), r"(?s)rank 1, step 4: the rank ends without 1B1; .*1F1 \[\]    <-- here"),
    (("0B1", "1B1"), "rank 0, step 4: 1B1 is of a stage on rank 1; move it there"),
    (("1F0", "2F0"), "rank 1, step 1: 2F0 names a stage that is nowhere; there are pipes 0 to 0 with stages 0 to 1"),
    (("1F0", "1:1F0"), "1:1F0 names a stage that is nowhere"),
    (("1F0", "1F2"), "1F2: the microbatches are 0 to 1"),
    (("ranks 0 1", "ranks 0 2"), "stages are placed on rank 2, but actions are given for 2 ranks; add a line 'rank 2"),
    (("ranks 0 1", "ranks 0 1 / 1"), "equally many stages in every pipe"),
    (("microbatches 2", "microbatches 0"), "at least one microbatch and stage"),
])
def test_schedules_that_cannot_run(change: tuple[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_schedule(Schedule.parse(ZIGZAG.replace(*change)))


def test_a_microbatch_stays_in_its_pipe() -> None:
    text = "microbatches 1, stages on ranks 0 / 0\nrank 0: 0F0 1:0F0 0B0 1:0B0"
    with pytest.raises(InputError, match="step 2: 1:0F0: microbatch 0 goes through pipe 0 already"):
        check_schedule(Schedule.parse(text))


@pytest.mark.parametrize(("text", "words"), [
    ("", "begins no schedule; write it like 'microbatches 4, stages on ranks 0 1 2 3'"),
    ("2 microbatches", "begins no schedule"),
    (ZIGZAG.replace("rank 1", "rank 2"), "here the actions of rank 1 are expected, like 'rank 1: 0F0 0B0'"),
    (ZIGZAG.replace("1B1", "1Z1"), "'1Z1' is no action"),
])
def test_texts_that_are_no_schedule(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Schedule.parse(text)


@pytest.mark.parametrize("seed", range(40))
def test_a_written_schedule_has_its_actions_as_its_name(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    made = draw_written(rng, rng.randint(1, 4), rng.randint(1, 5))
    check_schedule(made)
    (tmp_path / "own.txt").write_text(f"# mine\n\n{made}\n")
    name = named_schedule(str(tmp_path / "own.txt"))
    ranks, count = len(made.actions), made.microbatches
    assert named_schedule(name) == name and "," not in name and written_numbers(name) == (ranks, count)
    assert generate(name, ranks, count) == made and schedule_title(name).startswith("written schedule of")
    assert splits_backward(name) == any(one.kind == "W" for one in made)
    assert (chunks_of(name), pipes_of(name)) == (made.stages // ranks, 1)
    with pytest.raises(InputError, match=f"is for these numbers alone, and {ranks} ranks and {count + 1} microbatches"):
        generate(name, ranks, count + 1)


@pytest.mark.parametrize(("text", "words"), [
    ("microbatches 1, stages on ranks 0 1\nrank 0: 0F0 0B0\nrank 1: 1B0 1F0", "own.txt: rank 1, step 1: 1B0 waits for"),
    ("microbatches 1, stages on ranks 0 1 1\nrank 0: 0F0 0B0\nrank 1: 1F0 2F0 2B0 1B0", "give each as many"),
    ("1F0 1B0", "begins no schedule"), ("microbatches 1, stages on ranks 0\nrank 0: 0F0 0X0", "'0X0' is no action")])
def test_a_written_schedule_that_cannot_run_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "own.txt").write_text(text)
    with pytest.raises(InputError, match=words):
        named_schedule(str(tmp_path / "own.txt"))


def test_the_fullest_rank_is_where_most_is_live() -> None:
    assert fullest(generate("1f1b", 3, 4)) == (3, 0, Action(0, "F", 2))
    assert fullest(generate("gpipe", 2, 4))[0] == 4


@pytest.mark.parametrize(("text", "ranks", "n", "words"), [
    ("1f1c", 4, 8, "'1f1c' is no schedule; write gpipe, 1f1b, interleaved:CHUNKS"),
    ("gpipe:2", 4, 8, "is no schedule"), ("interleaved", 4, 8, "is no schedule"), ("chimera:0", 4, 8, "is no schedule"),
    ("interleaved:x", 4, 8, "is no schedule"), ("1f1b", 0, 8, "at least one of each"), ("1f1b", 4, 0, "at least one"),
    ("interleaved:2", 4, 6, "6 microbatches are no multiple of 4 ranks; use 8"),
    ("dualpipe-v", 4, 7, "7 microbatches are too few for 4 ranks; use 8 or more"),
    ("chimera:1", 3, 4, "both have to be multiples of 2"), ("chimera:2", 8, 6, "both have to be multiples of 4"),
])
def test_schedules_that_do_not_exist(text: str, ranks: int, n: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(text, ranks, n)


@pytest.mark.parametrize("text,depth,n", [("zb-v", 4, 12), ("dualpipe-v", 4, 12), ("interleaved:3", 4, 8),
                                          ("interleaved:2", 2, 2), ("chimera:1", 4, 8), ("chimera:2", 8, 16)])
def test_what_a_rank_has_is_no_more_than_at_some_of_its_moments(text: str, depth: int, n: int) -> None:
    """At every action again; and each moment is of an action."""
    schedule, every = generate(text, depth, n), set[tuple[int, str, tuple[tuple[int, int], ...]]]()
    late, firsts = {action for action in schedule if action.kind == "W"}, first_ranks(schedule.placement)
    for rank, actions in enumerate(schedule.actions):
        stages = sorted({action.stage for action in actions})
        kept = rank_moments(schedule)[firsts[stages[0]]]
        assert kept.stages == tuple(stages)
        for i, (stage, kind, *_) in enumerate(actions):
            before = Counter((one.stage, one.kind) for one in actions[:i])
            waits = Counter(one.stage for one in actions[:i] if one.kind == "B" and one._replace(kind="W") in late)
            now = tuple((before[s, "F"] - before[s, "B"] + (s == stage and kind == "F"), waits[s] - before[s, "W"])
                        for s in stages)
            every.add((stage, kind, now))
            assert any((one.stage, one.kind) == (stage, kind) and all(
                a <= flight.in_flight and b <= flight.waiting and (not before[s, "B"] or flight.begun)
                for s, (a, b), flight in zip(stages, now, one.flights, strict=True)) for one in kept.moments), rank
    for one in (one for kept in rank_moments(schedule).values() for one in kept.moments):
        assert (one.stage, one.kind, tuple(flight[:2] for flight in one.flights)) in every


def test_stages_count_what_they_have_when_their_rank_has_most() -> None:
    """Zero-bubble V keeps as many as 1F1B on every rank, though each of its stages has more at some time."""
    for depth in (2, 4, 8):
        schedule = generate("zb-v", depth, 3 * depth)
        flights, placement = counted_flights(schedule), schedule.placement[0]
        for rank in range(depth):
            own = [flight for flight, at in zip(flights, placement, strict=True) if at == rank]
            assert sum(flight.in_flight + flight.waiting for flight in own) == 2 * depth
            assert all(flight.own == most for flight, most, at in zip(
                flights, flights_of(schedule), placement, strict=True) if at == rank)
        assert any(sum(most) > sum(flight[:2]) for flight, most in zip(
            flights, (flight[:2] for flight in flights_of(schedule)), strict=True))
    assert counted_flights(generate("zb-h1", 4, 8)) == flights_of(generate("zb-h1", 4, 8)), "one stage a rank"


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("parts,microbatches", [(2, 2), (2, 5), (4, 4), (4, 9), (8, 3), (8, 16)])
def test_a_stage_alone_on_its_rank_has_what_its_fullest_moment_has(name: str, parts: int, microbatches: int) -> None:
    """Whatever a microbatch keeps while it is in flight and while it waits: most at one time, not the most of each."""
    schedule = generate(name, parts, microbatches)
    for flight, moments in zip(flights_of(schedule), rank_moments(schedule, 1).values(), strict=True):
        there = [one.flights[0][:2] for one in moments.moments]
        assert flight.in_flight == max(k for k, _ in there)
        assert (flight.waiting + flight.later, name.startswith("zb")) == (max(w for _, w in there), flight.later > 0)
        for kept, late in ((5.0, 2.0), (3.0, 3.0), (2.0, 5.0), (0.0, 1.0)):
            most = max(k * kept + w * late for k, w in there)
            told = flight.in_flight * kept + flight.waiting * late + flight.later * max(0.0, late - kept)
            assert told == most, (flight, there)


def test_flights_are_the_same_for_what_they_count() -> None:
    assert Flight(3, 1, most=(7, 1)).counted == Flight(3, 1) and Flight(3, 1, most=(7, 1)).own == Flight(7, 1)
    assert Flight(1, 0, most=(1, 1)).counted == Flight(1, 0, most=(1, 1)) != Flight(1).counted, "gathered weights stay"
    assert Flight(1, 0, begun=False).counted != Flight(1).counted
    assert Flight(2, 1, later=1).counted == Flight(2, 1, later=1).own == Flight(2, 1, later=1)
    assert Flight(1, later=1).is_several and not Flight(1).is_several, "one that waits for W keeps gathered weights"
