"""Every verb with a plan that has stages: it answers for all of them, or says in one line how to ask."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from shell import FACTORY, PAIR, shell

from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan, load_plan
from autoddl.core.record import Event, Record, RecordedStep, header_text, step_text
from autoddl.cost_models import show_seconds
from autoddl.explain.assumptions import untried
from autoddl.explain.compare_run import planned_traffic
from autoddl.explain.diff import difference
from autoddl.explain.pareto import front_of_devices
from autoddl.explain.staged_run import foreseen_stages
from autoddl.launch.record_writer import header_of

TIED = f"{Path(FACTORY).parent / 'tiny_tied.py'}:tied"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster of two devices, and `plan.json` with a stage on each."""
    made = tmp_path_factory.mktemp("stages")
    (made / "pair.yaml").write_text(PAIR)
    said = shell("plan", FACTORY, str(made / "pair.yaml"), "--set", "dropout=0.0", "--stages", "2", "--microbatches",
                 "2", "-o", str(made / "plan.json"))
    assert said.code == 0, said
    return made


@pytest.mark.ranks  # on a new machine matplotlib asks fc-list for the fonts
@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_stages_are_drawn(folder: Path, kind: str, start: bytes) -> None:
    out = folder / f"picture.{kind}"
    said = shell("draw", str(folder / "plan.json"), "-o", str(out))
    assert (said.code, said.out) == (0, f"written: {out}\n")
    assert out.read_bytes().startswith(start)
    if kind == "svg":
        shown = out.read_text()
        assert all(f"<!-- {text} -->" in shown for text in (
            "rank 0", "rank 1", "rank 0 to rank 1", "rank 1 to rank 0", "0F0", "1B1", "GB of a rank",
            "budget, 1 GB, not in the picture", "rank 1, stage 1"))


def test_a_trace_has_every_task_of_the_schedule(folder: Path) -> None:
    assert shell("draw", str(folder / "plan.json"), "-o", str(folder / "picture.json")).code == 0
    rows = json.loads((folder / "picture.json").read_text())["traceEvents"]
    line = foreseen_stages(load_plan(folder / "plan.json")).timeline
    timed = zip(line.tasks, line.starts, strict=True)
    wanted = sorted((rank, task.name, round(start * 1e6, 3)) for task, start in timed for rank in task.ranks)
    assert sorted((row["pid"], row["name"], row["ts"]) for row in rows if row["ph"] == "X") == wanted
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        "predicted, rank 0", "predicted, rank 1"}


def test_uniform_pipelines_are_compared(folder: Path) -> None:
    said = shell("compare", FACTORY, str(folder / "pair.yaml"), "--set", "dropout=0.0", "--stages", "1,2",
                 "--microbatches", "2", "--json")
    assert said.code == 0, said
    rows = {row["name"]: row for row in json.loads(said.out)}
    one = rows["uniform pipeline, 1f1b"]
    assert one["stages"] == 2 and one["detail"] == "data parallel 1 x tensor parallel 1, 1 block a stage"
    assert rows["found"]["predicted_seconds"] <= one["predicted_seconds"] and one["ratio"] >= 1
    other = rows["uniform pipeline, interleaved:2"]
    assert other["stages"] == 4 and other["detail"].endswith("1 block a stage, one less in the first and the last")
    assert rows["data parallel"]["predicted_seconds"] and "stages" not in rows["data parallel"]


def test_named_blocks_run_again_in_their_stages_alone(folder: Path) -> None:
    out = folder / "named.json"
    said = shell("plan", FACTORY, str(folder / "pair.yaml"), "--stages", "2", "--microbatches", "2", "--set",
                 "layers=4", "--recompute", "blocks.0+blocks.3:selective", "-o", str(out))
    assert said.code == 0, said
    plan = load_plan(out)
    assert plan.pipeline is not None
    again = [stage.plan.recompute for stage in plan.pipeline.stages]
    assert sum(again, ()) == ("blocks.0", "blocks.3:selective")
    shown = shell("show", str(out))
    assert "stage 0: 1 block in backward: blocks.0" in shown.out and "no recomputation" not in shown.out
    assert "stage 1: 1 block in backward, selective: blocks.3" in shown.out
    assert json.loads(shell("show", str(out), "--json").out)["recompute"] == ["blocks.0", "blocks.3:selective"]
    for command in (("explain", "--proof"), ("explain", "--stage", "0", "--proof"), ("explain", "--stage", "1")):
        assert shell(command[0], str(out), *command[1:]).code == 0


def test_solvers_are_not_compared_on_stages(folder: Path) -> None:
    said = shell("compare", FACTORY, str(folder / "pair.yaml"), "--stages", "2", "--solvers")
    assert said.code == 2 and "leave stages and cut out" in said.err and not said.out


def recorded(plan: Plan) -> Record:
    """A record of two steps of 0.1 s on both ranks, each of which sends what is planned and waits 1 ms for each."""
    graph, steps = graph_from_text(plan.source["graph"]), []
    for rank in range(plan.mesh.size):
        events = [Event(0, rank, one.direction, one.kind, one.axes, "net", one.nbytes, 0.01 * k, 0.01 * (k + 1), 1e-3,
                        one.origin) for k, one in enumerate(planned_traffic(plan, graph, rank))]
        steps += [RecordedStep(n, rank, float(n), 0.1 + 0.1 * (rank == 1) * n, (("forward", 0.0), ("update", 0.09)),
                               tuple(events)) for n in range(2)]
    return Record(header_of(plan), tuple(steps))


def written(folder: Path, record: Record) -> str:
    path = folder / "made.record.jsonl"
    path.write_text(header_text(record.header) + "".join(map(step_text, record.steps)))
    return str(path)


def test_a_record_of_stages_is_set_beside_its_plan(folder: Path) -> None:
    plan = load_plan(folder / "plan.json")
    file, trace = written(folder, recorded(plan)), folder / "trace.json"
    said = shell("compare-run", str(folder / "plan.json"), file, "--json", "--trace", str(trace))
    assert said.code == 0, said
    found = json.loads(said.out)
    assert found["equal"] and (found["steps"], found["ranks"]) == (1, 2)
    assert found["step"] == {"predicted": plan.predicted.seconds, "recorded": pytest.approx(0.2)}
    assert [part["stages"] for part in found["parts"]] == [[0], [1]]
    assert found["parts"][0]["waiting"]["recorded"] == pytest.approx(5e-3), "two messages, two back, and the loss"
    assert found["parts"][0]["compute"]["recorded"] == pytest.approx(0.1 - 5e-3 - 0.01)
    for part in found["parts"]:
        predicted = [part[name]["predicted"] for name in ("compute", "waiting", "update")]
        assert sum(predicted) == pytest.approx(plan.predicted.seconds)
    sent = {(row["ranks"], row["kind"]): row for row in found["rows"]}
    assert sent["rank 0", "send"]["count"] == [2, 2] and sent["rank 0", "receive"]["count"] == [3, 3]
    assert sent["rank 0", "send"]["nbytes"] == [2 * 4 * 6 * 16 * 4] * 2, "two microbatches of 4 rows, 6 x 16 floats"
    rows = json.loads(trace.read_text())["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        "predicted, rank 0", "predicted, rank 1", "recorded, rank 0, step 1", "recorded, rank 1, step 1"}


def test_a_message_that_did_not_run_is_told(folder: Path) -> None:
    whole = recorded(load_plan(folder / "plan.json"))
    first = replace(whole.steps[0], events=whole.steps[0].events[1:])
    file = written(folder, replace(whole, steps=(first, *whole.steps[1:])))
    said = shell("compare-run", str(folder / "plan.json"), file)
    assert said.code == 1 and "rank 0, step 0: not run: forward send over pipe of 1536 bytes x 1" in said.out


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rehearsal_of_stages_runs_as_planned(folder: Path) -> None:
    said = shell("rehearse", str(folder / "plan.json"), FACTORY, "--loopback", "--steps", "3", "--json")
    assert said.code == 0, said
    data = json.loads(said.out)
    assert data["collective_mismatches"] == 0 and data["predicted_exposed_seconds"] > 0
    told = shell("compare-run", str(folder / "plan.json"), data["record"], "--json")
    assert told.code == 0 and json.loads(told.out)["equal"], told


def test_a_pipeline_of_degrees_has_a_report_and_keeps_its_own_question(folder: Path) -> None:
    out = folder / "mine.json"
    assert shell("plan", FACTORY, str(folder / "pair.yaml"), "--set", "dropout=0.0", "--mine", "pp=2",
                 "--microbatches", "2", "-o", str(out)).code == 0
    assert shell("report", str(out), "--quick").code == 0 and (folder / "mine.html").exists()
    said = shell("what-if", str(out), "--set", "net.bandwidth=2x")
    assert said.code == 2 and "that of your degrees 'pp=2'" in said.err and "--mine on the changed cluster" in said.err


OWN = """microbatches 2, stages on ranks 0 1
rank 0: 0F0 0F1 0B0 0B1 0W0 0W1
rank 1: 1F0 1B0 1F1 1B1 1W0 1W1
"""


@pytest.fixture(scope="module")
def own(folder: Path) -> Path:
    """A plan of two stages on two ranks each, which both read a weight, by a schedule of a file."""
    (folder / "own.txt").write_text(OWN)
    (folder / "four.yaml").write_text(PAIR.replace("size: 2", "size: 4"))
    said = shell("plan", TIED, str(folder / "four.yaml"), "--stages", "2", "--schedule", str(folder / "own.txt"),
                 "--microbatches", "2", "-o", str(folder / "own.json"))
    assert said.code == 0, said
    return folder / "own.json"


def test_the_time_line_names_ranks_and_has_every_message_once(own: Path) -> None:
    shown = shell("show", str(own)).out
    assert "2 stages, written schedule of 2 parts and 2 microbatches\n" in shown
    line = shown[shown.index("\nranks 0-1"):].strip().split("\n\n")[0].splitlines()
    labels = [row.partition(" |")[0].strip() for row in line]
    assert set(labels) >= {"ranks 0-1", "ranks 2-3", "ranks 0-1 to ranks 2-3", "ranks 2-3 to ranks 0-1"}
    assert len(labels) == len(set(labels)) and all(row.partition("|")[2].strip() for row in line)
    names = {name.rstrip("-") for row in line for name in row.partition("|")[2].split()}
    assert all(re.fullmatch(r"\d[FBW]\d|[FBW]\d|[FBWgru]|(gather|reduce|update)( \d)?", name) for name in names if
               not name.isdecimal()), names
    assert "W its gradients of weights" in shown and "+ 2 for W: two more" in shown


def test_a_step_with_bubbles_names_more_microbatches(folder: Path, own: Path) -> None:
    """Those that divide the batch; not where as many were weighed, nor with a schedule that is for its own number."""
    plan = load_plan(folder / "plan.json")
    hint = "--microbatches 4,8 leaves shorter bubbles, as far as memory allows"
    assert hint in untried(plan, 0.3) and not any("bubbles" in text for text in untried(plan, 0.01))
    weighed = replace(plan, source=plan.source | {"asked": plan.source["asked"] | {"microbatches": [2, 4]}})
    assert not any("bubbles" in text for one in (weighed, load_plan(own)) for text in untried(one, 0.3))
    assert re.search(rf"\nsearch +1 configuration weighed\n(to try)? +{hint}", shell(
        "show", str(folder / "plan.json")).out)


def test_names_are_looked_for_in_all_stages(own: Path) -> None:
    """Each stage that has one answers, as it does with its number."""
    found = json.loads(shell("explain", str(own), "tokens.weight", "blocks.1.up.weight", "--json").out)
    where = {one["stage"]: {each["name"] for each in one["named"]} for one in found}
    assert len(where) == 2 and all("tokens.weight" in names for names in where.values())
    assert sum("blocks.1.up.weight" in names for names in where.values()) == 1
    alone = json.loads(shell("explain", str(own), "tokens.weight", "--stage", "0", "--json").out)
    assert (found[0]["stage"], found[0]["seconds"]) == (0, alone["seconds"])
    assert {each["name"]: each["chosen"] for each in found[0]["named"]}["tokens.weight"] == alone["named"][0]["chosen"]
    assert shell("explain", str(own), "tokens.*").out.count("whose own work takes") == 2
    said = shell("explain", str(own), "blocks.7.up.weight")
    assert said.code == 2 and "'blocks.7.up.weight' matches no parameter, module or op of any stage" in said.err


def test_a_stage_has_a_front_of_devices_without_what_its_ranks_share(own: Path) -> None:
    """One device is left of the level along which a pin asks for a layout: any plan has it."""
    plan = load_plan(own)
    assert plan.pipeline is not None
    stage = plan.pipeline.stages[0].plan
    one, two = front_of_devices(replace(stage, source=stage.source | {"pins": ["tokens.weight: net=B"]}))
    assert (one.devices, one.detail, two.devices) == (1, "", 2) and one.seconds is not None


def test_differences_of_stages_add_up_to_the_step(folder: Path, own: Path) -> None:
    """Stages of two models are not compared, but how many there are, their schedule and cuts."""
    found = difference(load_plan(folder / "plan.json"), load_plan(own))
    assert any(text.startswith("operators: ") for text in found.words) and not found.groups
    assert "schedule: 1f1b in the first, written schedule of 2 parts and 2 microbatches in the second" in found.words
    totals = {part: (x, y) for part, x, y, unit in found.totals if unit == "s"}
    step = totals.pop("step")
    assert totals["stages: messages"][0] > 0 and totals["stages: bubbles"][0] > 0
    assert [sum(both[k] for both in totals.values()) for k in range(2)] == pytest.approx(step)


def test_a_plan_with_stages_is_printed_with_them(folder: Path, own: Path) -> None:
    plan = load_plan(folder / "plan.json")
    waits = 1 - (plan.predicted.compute + plan.predicted.update) / plan.predicted.seconds
    assert ", 2 stages, 1f1b, 2 microbatches\n" in str(plan)
    assert f"on the ranks that do most, which wait for others {waits:.1%} of it\n" in str(plan)
    assert ", 2 stages, written schedule of 2 parts and 2 microbatches\n" in str(load_plan(own))


def test_messages_say_what_they_have(own: Path) -> None:
    rows = json.loads(shell("show", str(own), "--messages", "--json").out)["messages"]
    sends = {(row["rank"], row["of"]): row["count"][0] for row in rows if row["kind"] == "send"}
    assert sends == {(0, "activations"): 2, (0, "gradient of tokens.weight"): 1, (2, "gradients of activations"): 2,
                     (2, "gradient of tokens.weight"): 1, (2, "loss"): 1}
    assert "send gradient of tokens.weight" in shell("show", str(own), "--messages").out


def test_every_pipeline_that_was_weighed_says_what_rules_it_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without stages too; stages stand as they were asked for, beside their chunks.

    The plan's row has the peak that the plan shows, whatever its search counted: buckets come last and change it.
    """
    monkeypatch.setattr("autoddl.planner.pipelines.pipeline_candidate.rank_peak", lambda *_: 1.0)
    out, narrow = folder / "weighed.json", folder / "narrow.yaml"
    narrow.write_text(PAIR.replace("100 MB/s", "100 kB/s"))
    options = "--set dropout=0.0 --set layers=4 --set width=32 --set batch=32 --stages 1,2 --microbatches 2,4"
    said = shell("plan", FACTORY, str(narrow), *options.split(), "--schedule", "gpipe,interleaved:2", "-o", str(out))
    assert said.code == 0, said
    plan, rows = load_plan(out), json.loads(shell("explain", str(out), "--pipeline", "--json").out)
    assert [(row["parts"], row["stages"], row["schedule"], row["microbatches"]) for row in rows] == [
        (1, 1, None, None), (2, 2, "gpipe", 2), (2, 4, "interleaved:2", 2), (2, 2, "gpipe", 4),
        (2, 4, "interleaved:2", 4)]
    assert all(row["bound"] for row in rows) and plan.predicted.seconds < rows[0]["seconds"]
    best = next(row for row in rows if row["seconds"] == plan.predicted.seconds)
    assert best["nbytes"] == plan.predicted.peak_bytes and not any("proof" in row for row in rows)
    lines = shell("explain", str(out), "--pipeline").out.splitlines()[1:]
    assert all(f"no less than {show_seconds(row['bound'])}" in line for row, line in zip(rows, lines, strict=True)
               if row["seconds"] is None) and any(row["seconds"] is None for row in rows)
    assert "2 of 2 chunks  interleaved:2" in lines[2] and show_seconds(rows[0]["seconds"]) in lines[0]


def test_where_nothing_beats_plans_without_stages_they_have_their_row(folder: Path) -> None:
    out = folder / "plain.json"
    said = shell("plan", FACTORY, str(folder / "pair.yaml"), "--set", "layers=1", "--set", "dropout=0.0", "--stages",
                 "1,2", "--microbatches", "2", "-o", str(out))
    assert said.code == 0, said
    plan, rows = load_plan(out), json.loads(shell("explain", str(out), "--pipeline", "--json").out)
    assert plan.pipeline is None and rows[0]["detail"] == "proved" and rows[1]["detail"] == "no better than the best"
    assert (rows[0]["seconds"], rows[0]["nbytes"]) == (plan.predicted.seconds, plan.predicted.peak_bytes)
