"""A run's record, the plan's time line, and the one beside the other."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from threading import Thread

import pytest
import torch
import zoo
from planmaker import cluster_of, random_plans
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from shell import FACTORY, PAIR, Said, shell
from tiny import Tiny
from warm_launch import warm_launch

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan, load_plan
from autoddl.core.precision import Precision
from autoddl.core.recompute import policy_blocks
from autoddl.core.record import (
    Event,
    Header,
    Record,
    RecordedStep,
    header_text,
    hidden_seconds,
    own_seconds,
    parse_record,
    read_record,
    step_text,
)
from autoddl.core.sparse import SPARSE
from autoddl.cost_models.timelines.timeline import simulate
from autoddl.explain.compare_run import foreseen
from autoddl.explain.record_statistics import Pair, late, later, misses, sparse_words, typical
from autoddl.launch.record_writer import step_of
from autoddl.planner.assemble import assemble_choice
from autoddl.planner.bucket_size import SIZES, best_buckets
from autoddl.planner.question import question_of
from autoddl.runtime.parallelize import parallelize
from autoddl.schedule.actions import Compute, Start, Wait
from autoddl.schedule.issue_order import list_actions
from autoddl.schedule.timeline import _tasks, predict_timeline
from autoddl.schedule.traffic import PlannedCollective, traffic

HEADER = Header("abc", "tiny", "net=2", "pair", "gloo", 2, {"torch": "2.13"})


def event(start: float, end: float, wait: float, axes: str = "net", rank: int = 0) -> Event:
    return Event(3, rank, "backward", "all-reduce", axes, "rack", 64, start, end, wait, "for something, 'quoted'")


def written(*steps: RecordedStep) -> str:
    return header_text(HEADER) + "".join(map(step_text, steps))


STEP = RecordedStep(3, 0, 1.5e9, 0.25, (("forward", 0.0), ("backward", 0.1), ("update", 0.2)),
            (event(0.11, 0.14, 0.01), event(0.12, 0.18, 0.04)))


def test_a_record_reads_back_as_it_was_written() -> None:
    other = replace(STEP, rank=1, events=(event(0.0, 0.1, 0.0, rank=1),))
    assert parse_record(written(STEP, other), "x") == Record(HEADER, (STEP, other))
    assert STEP.during("backward") == pytest.approx(0.1) and STEP.during("update") == pytest.approx(0.05)


def test_words_of_sparse_sums_are_told_beside_the_planned_ones() -> None:
    def sparse(number: int, rank: int, words: int) -> RecordedStep:
        one = replace(event(0, 1, 0), kind=SPARSE, nbytes=8 * 100, words=words)
        return replace(STEP, step=number, rank=rank, events=(one,))

    words = {(0, 0): 9000, (0, 1): 9000, (1, 0): 160, (1, 1): 180, (2, 0): 220, (2, 1): 200}
    steps = [sparse(*at, sent) for at, sent in words.items()]
    assert parse_record(written(*[replace(s, rank=0) for s in steps]), "x").steps[2].events[0].words == 160
    (row,) = sparse_words(steps, {"net": 2})
    assert (row.planned, row.limit) == (4 * 100 / 2, 6 * 100 / 2) and row.recorded == 210 and row.most == 220
    assert (row.above, row.steps, row.count, row.axes) == (1, 3, 1, "net")
    assert sparse_words([STEP], {"net": 2}) == ()


@pytest.mark.parametrize("events, own, exposed, hidden", [
    ([event(0, 1, 0.25)], [1], 0.25, 0.75),
    ([event(0, 1, 0)], [1], 0, 1),
    ([event(0, 1, 0.5), event(0, 2, 1)], [1, 1], 1.5, 0.5),  # one after the other on one link
    ([event(0, 1, 0), event(0, 2, 1.5)], [1, 1], 1.5, 0.5),  # waited for the second first
    ([event(0, 2, 0.5), event(0, 2, 0, axes="node")], [2, 2], 0.5, 1.5)])  # two links at once
def test_exposed_and_hidden(events: list[Event], own: list[float], exposed: float, hidden: float) -> None:
    step = replace(STEP, events=tuple(events))
    assert own_seconds(events) == pytest.approx(own)
    assert (step.exposed, step.hidden) == pytest.approx((exposed, hidden))
    assert hidden_seconds(events[:1], events) <= step.hidden


def test_a_record_that_broke_off_is_read_up_to_there(tmp_path: Path) -> None:
    text = written(STEP, replace(STEP, step=4))
    for cut in (1, 20, len(step_text(STEP)) - 1):
        assert parse_record(text[:-cut], "x").steps[:1] == (STEP,)
    assert parse_record(text[:-20], "x") == Record(HEADER, (STEP,), cut=True)
    for rank in (0, 1):
        (tmp_path / f"r.jsonl.{rank}").write_text(written(replace(STEP, rank=rank)))
    assert [step.rank for step in read_record(tmp_path / "r.jsonl").steps] == [0, 1]


@pytest.mark.parametrize("text, rule", [
    ("", "empty"), ("{}\n", "no header"), ("rubbish\n", "no header"), ('{"autoddl_record": 9}\n', "format 9"),
    ('{"autoddl_record": 1}\n', "has ranks = None"), (header_text(HEADER) + "rubbish\n" + step_text(STEP), "line 2"),
    (header_text(replace(HEADER, ranks=1)) + step_text(replace(STEP, rank=1)) + step_text(STEP), "rank 1 of 1")])
def test_what_is_no_record_is_said_so(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        parse_record(text, "x")


def model(batch: int = 4) -> Tiny:
    torch.manual_seed(0)
    return Tiny(2, 16, batch, 0.0)


@shared
def captured() -> Captured:
    return capture(model(), model().example_inputs())


@cache
def plans() -> list[Plan]:
    """Of random choices, gathered once and gathered again, of one microbatch and of two."""
    module = model()
    sample = module.example_inputs()
    return [plan for again, parts in ((None, 1), (True, 1), (None, 2)) for mesh in ("a=4", "a=2,b=2")
            for plan in random_plans(module, sample, mesh, 1, seed=7, regather=again, microbatches=parts,
                                     captured=captured())]


def test_the_time_line_sends_what_the_plan_sends() -> None:
    graph = add_hubs(captured().graph)
    for plan in plans():
        cluster = cluster_of(str(plan.mesh))
        for rank in range(4):
            sent = [(s.direction, s.kind, s.axes, s.nbytes) for s in traffic(plan, graph, plan.mesh.coordinate(rank))]
            line = predict_timeline(plan, graph, cluster, rank).step
            assert sorted(sent) == sorted((e.direction, e.kind, e.axes, e.nbytes) for e in line.events)
        whole = predict_timeline(plan, graph, cluster)
        assert whole.compute_seconds == pytest.approx(plan.predicted.compute, rel=1e-3)
        assert whole.step.seconds == pytest.approx(whole.compute_seconds + whole.step.exposed)
        assert predict_timeline(plan, graph, cluster, slowdown=1.5).step.seconds >= whole.step.seconds


@pytest.mark.parametrize("microbatches", [1, 2])
def test_casts_are_priced_as_the_time_line_has_them(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each weight once before O -> W where that sends, else at every gather."""
    model, sample = zoo.gpt()
    captured = capture(model, sample, Precision("bf16-mixed"))
    graph, place = add_hubs(captured.graph), cluster_of("a=2,b=2")
    drawn = [random_plans(model, sample, "a=2,b=2", 3, 3, microbatches=microbatches, captured=captured)]
    monkeypatch.setattr("autoddl.planner.assemble.cast_seconds", lambda *_: 0.0)
    monkeypatch.setattr("planmaker.assemble", lambda pricing, solution, space: assemble_choice(
        pricing, solution.choice, space))  # whose parts do not add up to the solution's seconds then
    drawn += [random_plans(model, sample, "a=2,b=2", 3, 3, microbatches=microbatches, captured=captured)]
    for plan, without in zip(*drawn, strict=True):
        spans = predict_timeline(plan, graph, place).computes
        casts = sum(span.end - span.start for span in spans if span.name.startswith("cast "))
        assert casts == pytest.approx(plan.predicted.compute - without.predicted.compute, rel=1e-6) and casts > 0


def _ran(plan: Plan) -> tuple[list[tuple[str, ...]], RecordedStep]:
    """One rank: what was started in a step, in order, and the step as it is recorded."""
    module = model()
    parallel = parallelize(module, plan, captured=captured())
    parallel.recorder.timed = True
    start = time.perf_counter_ns()
    parallel.step(model(4 * plan.microbatches).example_inputs())
    step = step_of(plan, parallel.recorder, 0, torch.distributed.get_rank(), start, time.perf_counter_ns())
    return [(e.direction, e.kind, e.axes, str(e.nbytes)) for e in parallel.recorder.executed], step


def test_the_loss_is_waited_for_when_backward_is_done() -> None:
    graph, found = add_hubs(captured().graph), 0
    for plan in (one for one in plans() if one.microbatches == 1):
        actions = list_actions(plan, graph, cluster_of(str(plan.mesh)), 0)
        starts = [a for a in actions if isinstance(a, Start)]
        last = max(k for k, a in enumerate(actions) if isinstance(a, Compute))
        for k, start in enumerate(starts):
            if start.sent.origin.endswith("for output") and start.sent.direction == "forward":
                found += 1
                assert actions.index(start) < last < actions.index(Wait(k))
    assert found


def test_library_collectives_run_two_at_a_time_and_messages_one_by_one() -> None:
    """Three of 1 second each that share no link: the third waits for a lane, messages for each other."""
    sent = [PlannedCollective("forward", "all-reduce", axes, 8, "x") for axes in "aab"]
    for ours, end in ((False, 1.0), (True, 3.0)):
        starts = [Start(one, 1.0, by_messages=ours) for one in sent]
        assert simulate(_tasks((*starts, *map(Wait, range(3))), {})[0]).makespan == end
    three = [Start(sent[0], 1.0)] * 3
    assert simulate(_tasks((*three, *map(Wait, range(3))), {})[0]).makespan == 2.0


def test_collectives_at_once_share_the_link_for_as_long_as_their_bytes_need_it() -> None:
    """Two of 1 second over one link, of which the bytes take all, half or a tenth."""
    sent = PlannedCollective("forward", "all-reduce", "a", 8, "x")
    for wire, end in ((1.0, 2.0), (0.5, 1.0), (0.1, 1.0)):
        both = [Start(sent, 1.0, wire=wire)] * 2
        assert simulate(_tasks((*both, Wait(0), Wait(1)), {})[0]).makespan == pytest.approx(end)


def test_ranks_that_share_cores_come_late() -> None:
    """By the root of what they computed since all had started a collective that was waited for; where collectives run
    beside computation, that hides it."""
    def line(backend: str, late: float) -> float:
        sent = PlannedCollective("forward", "all-reduce", "a", 8, "x")
        actions = (Compute("x", 0.5), Compute("y", 0.14), Start(sent, 0.1), Wait(0), Start(sent, 0.1),
                   Compute("z", 0.01), Wait(1), Compute("w", 0.04), Start(sent, 0.1), Wait(2))
        tasks, _ = _tasks(actions, {} if backend == "gloo" else None, late)
        return simulate(tasks).makespan

    assert line("gloo", 0.05) == pytest.approx(line("gloo", 0.0) + 0.05 * (0.64**0.5 + 0.05**0.5))
    assert line("nccl", 0.05) == line("nccl", 0.0)
    sent = PlannedCollective("forward", "all-reduce", "a", 8, "x")
    overlapped = (Compute("x", 0.64), Start(sent, 0.1), Compute("y", 0.12), Wait(0))
    assert [simulate(_tasks(overlapped, {}, late)[0]).makespan for late in (0.0, 0.05)] == pytest.approx([0.76, 0.78])


def test_ranks_meet_along_an_axis_and_are_held_up_by_the_others() -> None:
    """Over a ranks compute 0.36 s until they meet; over b 0.36 + 0.28 s, whatever they did over a, and over a again
    0.28 s. The last of two comes less late than that of four, and what a part waits for takes its `busy` longer."""
    def sent(axes: str) -> Start:
        return Start(PlannedCollective("forward", "all-gather", axes, 8, "x"), 0.1, busy=0.02)

    def makespan(late: float, sizes: dict[str, int]) -> float:
        actions = (Compute("x", 0.36), sent("a"), Wait(0), Compute("y", 0.28), sent("b"), Wait(1), sent("a"), Wait(2),
                   sent("a+b"), Wait(3))
        return simulate(_tasks(actions, {"a": "", "b": ""}, late, 0.0, sizes)[0]).makespan

    assert makespan(0.0, {}) == pytest.approx(0.36 + 0.28 + 4 * 0.1)
    two, four = (NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) for n in (2, 4))
    late = 0.05 * (0.36**0.5 + 0.64**0.5 + 0.28**0.5) * two / four
    assert makespan(0.05, {"a": 2, "b": 2}) == pytest.approx(0.36 + 0.28 + 4 * 0.1 + 3 * 0.01 + late)
    assert makespan(0.05, {"a": 4, "b": 1}) == pytest.approx(0.36 + 0.28 + 4 * 0.1 + 0.015 + 0.05 * (
        0.36**0.5 + 0.28**0.5))


def test_beside_computation_a_collective_takes_longer() -> None:
    """All of the way it takes twice as long; what is waited for at once does not."""
    sent = PlannedCollective("forward", "all-reduce", "a", 8, "x")
    hidden = (Start(sent, 0.1, busy=0.1), Compute("x", 0.3), Wait(0))
    partly = (Start(sent, 0.1, busy=0.1), Compute("x", 0.1), Wait(0))
    at_once = (Start(sent, 0.1, busy=0.1), Wait(0), Compute("x", 0.3))
    lines = [simulate(_tasks(actions, {}, 0.0)[0]) for actions in (hidden, partly, at_once)]
    assert [line.makespan for line in lines] == pytest.approx([0.3, 0.15, 0.4])
    assert lines[0].ends[0] == pytest.approx(0.2)
    sending = (Start(sent, 0.1, host=0.05, busy=0.1), Compute("x", 0.3), Wait(0))
    assert simulate(_tasks(sending, {}, 0.0)[0]).makespan == pytest.approx(0.35)  # the same work, more slowly
    dragging = (Start(sent, 0.1, host=0.05, busy=0.1, drag=0.03), *sending[1:])
    assert simulate(_tasks(dragging, {}, 0.0)[0]).makespan == pytest.approx(0.38)
    assert simulate(_tasks(dragging, {}, 0.0, 0.02)[0]).makespan == pytest.approx(0.40)
    assert simulate(_tasks(at_once, {}, 0.0, 0.02)[0]).makespan == pytest.approx(0.40)  # there the price has it


def _order_is_that_of_the_runtime(plan: Plan) -> None:
    """Every collective of every rank, in order, with where it comes from."""
    graph = add_hubs(captured().graph)
    for rank, (executed, step) in enumerate(on_ranks(4, _ran, plan)):
        actions = list_actions(plan, graph, cluster_of(str(plan.mesh)), rank)
        starts = [a.sent for a in actions if isinstance(a, Start)]
        assert [(s.direction, s.kind, s.axes, str(s.nbytes)) for s in starts] == executed
        assert [s.origin for s in starts] == [e.origin for e in step.events]
        for one in step.events:
            assert 0 <= one.start <= one.end <= step.seconds and 0 <= one.wait <= one.end - one.start + 1e-6
        assert 0 <= step.exposed <= step.seconds and 0 <= step.hidden <= step.seconds - step.exposed
        passes = [name for name, _ in step.passes if name]
        assert passes[-2 * plan.microbatches:] == ["forward", "backward"] * plan.microbatches


@pytest.mark.ranks
@parametrize_or_slow("some", [(3, 5)], [(0, 1, 2, 4)])
def test_the_time_line_has_the_order_of_the_runtime(some: tuple[int, ...]) -> None:
    for plan in map(plans().__getitem__, some):
        _order_is_that_of_the_runtime(plan)


@pytest.mark.ranks
@parametrize_or_slow("k, policy", [(3, "blocks.0:selective+blocks.1")], [
    *((k, policy) for k in range(6) for policy in ("full", "selective", "first-1:selective") if (k + len(policy)) % 2),
    *((k, "light") for k in range(6))])
def test_the_time_line_has_the_order_of_the_runtime_where_ops_run_again(k: int, policy: str) -> None:
    again = policy_blocks(add_hubs(captured().graph), policy)
    _order_is_that_of_the_runtime(replace(plans()[k], recompute=again))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A plan that splits a tiny model over two ranks, trained three steps on loopback."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "pair.yaml").write_text(PAIR)
    plan = folder / "plan.json"
    said = shell("plan", FACTORY, str(folder / "pair.yaml"), "--set", "dropout=0.0", "-o", str(plan))
    assert said.code == 0, said
    with warm_launch():
        return plan, shell("rehearse", str(plan), FACTORY, "--loopback", "--steps", "3", "--json")


@pytest.mark.ranks
def test_a_rehearsal_is_recorded_and_equals_its_plan(rehearsed: tuple[Path, Said], tmp_path: Path) -> None:
    plan, said = rehearsed
    assert said.code == 0, said
    data = json.loads(said.out)
    assert data["record"] == str(plan.with_suffix(".record.jsonl")) and data["collective_mismatches"] == 0
    assert len(data["step_seconds"]) == len(data["losses"]) == 3
    assert min(data["exposed_seconds"], data["hidden_seconds"]) >= 0 and data["predicted_exposed_seconds"] >= 0
    record = read_record(data["record"])
    assert sorted((s.step, s.rank) for s in record.steps) == [(k, r) for k in range(3) for r in range(2)]
    told = shell("compare-run", str(plan), data["record"], "--json", "--trace", str(tmp_path / "trace.json"))
    assert told.code == 0, told
    found = json.loads(told.out)
    assert found["equal"] and found["steps"] == 2 and found["rows"]
    assert found["exposed"]["recorded"] == pytest.approx(data["exposed_seconds"])
    for row in found["rows"]:
        assert row["count"][0] == row["count"][1] and row["nbytes"][0] == row["nbytes"][1] > 0
    table = shell("compare-run", str(plan), data["record"]).out
    assert "as planned, every count and every byte" in table and "largest misses" in table
    _check_trace(json.loads((tmp_path / "trace.json").read_text()))


def _check_trace(trace: dict[str, object]) -> None:
    """As the trace event format wants it: complete bars that do not overlap on a track, and names for all tracks."""
    rows = trace["traceEvents"]
    assert isinstance(rows, list)
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names[0] == "predicted, rank 0" and names[1].startswith("recorded, rank 0") and len(names) == 3
    tracks = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in rows:
        if row["ph"] == "X":
            bars.setdefault((row["pid"], row["tid"]), []).append((row["ts"], row["ts"] + row["dur"]))
    assert bars.keys() <= tracks and (0, 2) in bars and (1, 2) in bars
    for track in bars.values():
        track.sort()
        assert all(before <= start + 0.01 for (_, before), (start, _) in pairwise(track))


@pytest.mark.ranks
def test_buckets_are_as_large_as_the_time_line_likes(rehearsed: tuple[Path, Said]) -> None:
    plan = load_plan(rehearsed[0])
    question = question_of(plan)
    best = best_buckets(plan, add_hubs(question.graph), question.cluster)
    assert best.bucket_bytes in {*SIZES, plan.bucket_bytes} and replace(best, bucket_bytes=plan.bucket_bytes) == plan
    assert all(foreseen(best).step.seconds <= foreseen(replace(plan, bucket_bytes=n)).step.seconds for n in SIZES[::4])


def test_late_ranks_are_told_apart() -> None:
    steps = [replace(STEP, rank=rank, events=(event(0.0, 1.0, wait, rank=rank),))
             for rank, wait in enumerate((0.9, 0.5))]
    assert late(steps) == pytest.approx(0.2) and typical(steps, lambda step: step.exposed) == pytest.approx(0.7)
    assert later(Record(HEADER, tuple(steps))) == tuple(steps)
    assert misses(steps[0].events, steps)[0].seconds == Pair(1.0, 1.0) and Pair(1.0, 2.0).error == -0.5


@pytest.mark.ranks
def test_a_record_that_differs_from_its_plan_is_told(rehearsed: tuple[Path, Said], tmp_path: Path) -> None:
    plan, said = rehearsed
    record = read_record(json.loads(said.out)["record"])
    wrong = replace(record.steps[0].events[0], nbytes=record.steps[0].events[0].nbytes + 4)
    first = replace(record.steps[0], events=(wrong, *record.steps[0].events[1:]))
    path = tmp_path / "record.jsonl"
    path.write_text(header_text(record.header) + "".join(map(step_text, (first, *record.steps[1:]))))
    told = shell("compare-run", str(plan), str(path))
    assert told.code == 1 and "not planned" in told.out and "not run" in told.out
    path.write_text(header_text(replace(record.header, plan="other")) + step_text(first))
    told = shell("compare-run", str(plan), str(path))
    assert told.code == 2 and "another plan" in told.err
    assert shell("compare-run", str(plan), str(tmp_path / "nothing")).code == 2


@pytest.mark.ranks
def test_a_killed_rank_leaves_what_it_had_finished(rehearsed: tuple[Path, Said], tmp_path: Path) -> None:
    plan, path = rehearsed[0], tmp_path / "record.jsonl"

    def kill() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (path.exists() and path.read_text().count("\n") > 8):
            time.sleep(0.02)
        os.kill(ranks[1].pid, signal.SIGKILL)

    with warm_launch() as ranks:
        killer = Thread(target=kill)
        killer.start()
        said = shell("run", str(plan), FACTORY, "--steps", "1000000", "--record", str(path))
        killer.join()
    assert len(ranks) == 2 and not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks)
    assert said.code == 4 and "rank 1 was killed by SIGKILL; all ranks were ended" in said.err
    assert min(len(read_record(path).of_rank(rank)) for rank in (0, 1)) >= 2
    assert shell("compare-run", str(plan), str(path)).code == 0
    assert load_plan(plan).fingerprint() == read_record(path).header.plan
