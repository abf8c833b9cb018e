"""Whatever is wrong with stages that a person asks for, or asks of a plan that has some: one line, and a code."""

import json
import re
from pathlib import Path

import pytest
from shell import FACTORY, PAIR, Said, shell

from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan
from autoddl.explain.compare_run import foreseen
from autoddl.explain.explain import proved
from autoddl.explain.pareto import front_of_bytes
from autoddl.planner.question import question_of, rebuild


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clusters of two, three and four devices; `staged.json` has a stage on each of two, `plain.json` none."""
    made = tmp_path_factory.mktemp("bad-stages")
    for size in (2, 3, 4):
        (made / f"{size}.yaml").write_text(PAIR.replace("size: 2", f"size: {size}"))
    for name, options in (("staged", ("--cut", "blocks.1")), ("plain", ())):
        said = shell("plan", FACTORY, str(made / "2.yaml"), "-o", str(made / f"{name}.json"), *options)
        assert said.code == 0, said
    return made


def refused(said: Said, pattern: str, code: int = 2) -> None:
    """One line on stderr that matches the pattern, nothing on stdout, and the code."""
    assert (said.code, said.out) == (code, ""), said
    assert len(said.err.strip().splitlines()) == 1 and "Traceback" not in said.err, said.err
    assert re.search(pattern, said.err), said.err


@pytest.mark.parametrize(("size", "options", "pattern", "code"), [
    (4, "--stages 4 --set layers=1", "4 stages need 3 cuts, and this model can be cut at 2 places.*fewer stages", 2),
    (2, "--stages 4", r"4 stages do not cut cluster pair \(net=2\) into equal parts: stages take whole factors", 2),
    (3, "--stages 2", r"2 stages do not cut cluster pair \(net=3\)", 2),
    (2, "--stages 2 --microbatches 3", "3 microbatches cut dim 0.*multiple of 3, or take another number", 2),
    (2, "--cut nowhere", "no cut at 'nowhere': it names a module before which others run, like tokens", 2),
    (2, "--cut tokens", "no cut at 'tokens'", 2),
    (3, "--cut blocks.1 --cut blocks.0", "cut names 'blocks.1' before 'blocks.0'.*in the order in which they run", 2),
    (3, "--cut blocks.1 --cut blocks.1", "cut names 'blocks.1' before 'blocks.1'.*each once", 2),
    (2, "--cut blocks.1 --schedule interleaved:2", "2 stages on each of 2 parts.*leave cut out, or take 1f1b", 2),
    (4, "--cut blocks.1 --stages 4", "1 cuts make 2 stages, and stages asks for 4: leave it out", 2),
    (4, "--stages 4 --schedule interleaved:2 --microbatches 2 --set layers=8", "2 microbatches are no multiple", 2),
    (2, "--stages 2 --schedule zb-h1", "one microbatch has no other: take 1f1b, or more microbatches", 2),
    (2, "--stages 2 --schedule chimera:1 --microbatches 1", "chimera:1: 2 ranks and 1 microbatches", 2),
    (2, "--stages 2 --schedule no/such.txt", "cannot read the schedule 'no/such.txt': No such file or directory", 2),
    (2, "--stages 2 --microbatches 2 --schedule gpipe --budget 60kB", "rank 0 of gpipe has 2 microbatches of its "
     "stages at 0F1; take more stages", 3),
    (4, "--stages 2 --microbatches 2 --schedule gpipe --budget 38kB", "ranks 0-1 of gpipe have 2 microbatches of "
     "their stages at 0F1; take more stages", 3),
    (2, "--stages 2 --schedule 2f2b", "'2f2b' is no schedule; write gpipe, 1f1b", 2),
    (2, "--stages 2 --mesh net=2", "mesh 'net=2' has 2 ranks, cluster pair/2 has 1 devices", 2),
    (2, "--stages 2 --pin 'tail.*: one=B'", "pin 'tail.*: one=B' matches no parameter and no module", 2),
    (2, "--stages 2 --recompute blocks.9", "blocks.9 is no block of this model.*blocks are blocks.0, blocks.1", 2),
    (2, "--stages 2 --stages-limit -1", "a limit of -1.0 seconds is none: the search over stages", 2),
    (2, "--stages 2 --budget 1kB", "no plan fits", 3),
    (2, "--stages 2 --budget 1kB --relax", "relax prices plans without stages, and stages asks for 2", 2),
    (2, "--stages two", "--stages 'two': whole numbers with commas", 2),
    (2, "--stages 0", "numbers of stages are at least 1", 2)])
def test_stages_that_cannot_be(folder: Path, size: int, options: str, pattern: str, code: int) -> None:
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", options)]
    refused(shell("plan", FACTORY, str(folder / f"{size}.yaml"), "--workers", "1", *words), pattern, code)


@pytest.mark.parametrize(("command", "pattern"), [
    ("show staged --stage 2", "stages 0 to 1, and no stage 2"), ("draw staged -o x.svg --stage 7", "no stage 7"),
    ("explain staged --proof --stage 2", "no stage 2"), ("front staged --stage 2", "no stage 2"),
    ("show plain --stage 0", "no stages, and --stage 0 asks for one: leave it out"),
    ("explain staged", "2 stages, and explain looks at one of them: name it with --stage N, from 0 to 1"),
    ("explain staged --pins", "explain looks at one of them"), ("front staged", "front looks at one of them"),
    ("front staged --devices", "front looks at one of them"),
    ("explain plain --pipeline", "searched without stages: plan with --stages 1,2,4"),
    ("run staged FACTORY --cluster 3.yaml", "another cluster, pair"),
    ("rehearse staged FACTORY --loopback --cluster 3.yaml", "pair has 3 devices, the plan 2 ranks.*a cluster of 2"),
    ("verify staged FACTORY --set width=8", "made for another model"),
    ("verify staged FACTORY --max-ranks 1", "the plan is for 2 ranks.*--max-ranks 2"),
    ("compare-run staged staged.json", "is no record")])
def test_what_a_plan_with_stages_cannot_answer(folder: Path, command: str, pattern: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    places = {"staged": "staged.json", "plain": "plain.json", "FACTORY": FACTORY}
    refused(shell(*(places.get(word, word) for word in command.split())), pattern)
    assert not (folder / "x.svg").exists()


def test_a_proof_that_does_not_hold_is_told(folder: Path) -> None:
    plan = json.loads((folder / "staged.json").read_text())
    proof = plan["source"]["alternatives"][0]["proof"]
    proof["rows"] = json.loads(json.dumps(proof["rows"]), parse_float=lambda text: 1.03 * float(text))
    (folder / "off.json").write_text(json.dumps(plan))
    refused(shell("explain", str(folder / "off.json"), "--proof"),
            r"^autoddl: the plan's proof does not hold: stage \d with \d+ blocks? is said to take .*: plan again")


@pytest.mark.parametrize("function", [question_of, rebuild, foreseen, proved, front_of_bytes])
def test_functions_about_one_mesh_ask_for_a_stage(folder: Path, function) -> None:  # type: ignore[no-untyped-def]
    plan = load_plan(folder / "staged.json")
    with pytest.raises(InputError, match=r"this plan has 2 stages.*take the plan of a stage, from 0 to 1"):
        function(plan)
    assert plan.pipeline is not None and "2 stages, 1f1b" in str(plan)
    assert question_of(plan.pipeline.stages[1].plan).microbatches == 1


def test_what_cannot_be_is_left_out_where_something_can(folder: Path) -> None:
    said = shell("plan", FACTORY, str(folder / "4.yaml"), "--workers", "1", "--stages", "4", "--schedule",
                 "1f1b,interleaved:2", "--microbatches", "2", "--set", "layers=8", "-o", str(folder / "some.json"))
    assert said.code == 0, said
    rows = load_plan(folder / "some.json").source["alternatives"]
    assert [row["schedule"] for row in rows] == ["interleaved:2", "1f1b"]
    assert rows[0]["bound"] is None and "2 microbatches are no multiple of 4 ranks" in rows[0]["detail"]
    told = shell("explain", str(folder / "some.json"), "--pipeline")
    assert told.code == 0 and "no plan" in told.out and "no multiple" in told.out
    assert shell("explain", str(folder / "some.json"), "--proof").code == 0
