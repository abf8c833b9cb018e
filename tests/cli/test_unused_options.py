"""An option that would have no effect beside the others is refused in one line: none is dropped in silence."""

import re

import pytest
from shell import FACTORY, LAPTOP, ROOT, shell
from tiny import tiny

import autoddl
from autoddl.core.errors import InputError
from autoddl.planner.options import PlanOptions
from autoddl.planner.unused_options import check_used, given_options

WITHOUT_EFFECT = {
    "--schedule gpipe": "schedule gpipe is of plans with stages, and none is asked for.*--stages 1,2,4",
    "--schedule 1f1b": "schedule 1f1b is of plans with stages",
    "--stage-ranks any": "stage ranks any are of plans with stages, and none is asked for",
    "--stages-limit 5": "a stages limit of 5.0 s ends the search over stages, and none is asked for",
    "--stages 1 --compress pipeline=int8": "compress pipeline=int8 is about what stages send each other, and none is",
    "--expert-load 1.3": "an expert load of 1.3 is about layers of experts, and this model has none: leave it out",
    "--recompute none,first-99": "recompute first-99 counts 99 blocks, and this model has 2, blocks.0 to blocks.1",
    "--recompute every-3": "recompute every-3 counts 3 blocks, and this model has 2",
    "--max-axes 3 --mesh machine=2,pair=2": "mesh 'machine=2,pair=2' says which axes there are, and at most 3 are",
    "--max-axes 2 --mine dp=4": "mine 'dp=4' says which axes there are, and at most 2 are asked for: give one",
    "--mine pp=2 --cut blocks.1": "mine 'pp=2' has stages of equally many blocks.*leave cut out",
    "--mine pp=2 --stage-ranks even": "mine 'pp=2' has stages.*leave stage ranks even",
    "--mine pp=2 --stages-limit 5": "mine 'pp=2' has stages.*leave the limit out",
    "--mine pp=2 --pin head.weight:dp=B": "mine 'pp=2' has stages.*leave head.weight:dp=B out, or pin without mine",
    "--spares 4 -o x.json": "--spares 4 is for as many lost devices, and .*laptop.yaml has 4: take fewer"}


def refused(pattern: str, *words: str) -> None:
    said = shell(*words)
    assert (said.code, said.out) == (2, "") and len(said.err.strip().splitlines()) == 1, said
    assert re.search(pattern, said.err), said.err


@pytest.mark.parametrize("options", WITHOUT_EFFECT)
def test_an_option_of_plan_without_effect_is_refused(options: str) -> None:
    refused(WITHOUT_EFFECT[options], "plan", FACTORY, LAPTOP, "--workers", "1", *options.split())


@pytest.mark.parametrize(("options", "pattern"), [
    ("--schedule gpipe", "schedule gpipe is of plans with stages"),
    ("--solvers --software torchtitan", "--software torchtitan says which plans.*drop one"),
    ("--solvers --recompute none,full", "recompute none, full ask for 2: give one of them"),
    ("--solvers --mine pp=2", "solvers are compared on one problem, that of a plan without stages")])
def test_an_option_of_compare_without_effect_is_refused(options: str, pattern: str) -> None:
    refused(pattern, "compare", FACTORY, LAPTOP, "--workers", "1", *options.split())


def test_options_of_run_and_verify_without_effect_are_refused() -> None:
    plan = str(ROOT / "tests" / "plans" / "gpt-laptop.json")
    refused("--keep is about checkpoints.*--checkpoint FOLDER", "run", plan, FACTORY, "--keep", "3")
    refused("--record x writes a record, and --no-record writes none", "run", plan, FACTORY, "--record", "x",
            "--no-record")
    refused("--operator a::b tries a rule in this process.*--max-ranks", "verify", "--operator", "a::b", "--sample",
            FACTORY, "--max-ranks", "2")


def test_python_is_refused_what_the_shell_is() -> None:
    with pytest.raises(InputError, match="schedule gpipe is of plans with stages"):
        autoddl.plan(tiny(), LAPTOP, schedule=("gpipe",))
    with pytest.raises(InputError, match=r"an expert load of 2\.0 is about layers of experts"):
        autoddl.compare(tiny(), LAPTOP, expert_load=2.0)


@pytest.mark.parametrize("used", [
    PlanOptions(stages=(1, 2), schedule=("gpipe",), stages_limit=5.0, compress=("pipeline=int8",)),
    PlanOptions(cut=("blocks.1",), schedule=("gpipe",)), PlanOptions(mine="pp=2", schedule=("gpipe",)),
    PlanOptions(compress=("hybrid",)), PlanOptions(error=1e-3), PlanOptions(mine="dp=4", pins=("head.weight: dp=B",))])
def test_options_that_have_an_effect_are_taken(used: PlanOptions) -> None:
    check_used(used, given_options(used))


def test_what_other_rows_of_a_comparison_use_is_taken() -> None:
    asked = PlanOptions(mine="dp=4", max_axes=2)
    check_used(asked, given_options(asked), compares=True)
