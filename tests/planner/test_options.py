"""The options of planning: one value, whose fields Python, the shell and the plan's question know alike."""

import inspect
from dataclasses import fields, replace

import pytest
import tiny
import typer
from shell import LAPTOP

import autoddl
from autoddl.cli.main import app
from autoddl.core.errors import InputError
from autoddl.planner.options import Options, PlanOptions
from autoddl.planner.question import question_of

NAMES = [one.name for one in fields(PlanOptions)]


def test_every_option_is_a_keyword_of_plan_with_its_help() -> None:
    assert [*Options.__annotations__] == NAMES
    shown = inspect.signature(autoddl.plan).parameters
    text = autoddl.plan.__doc__ or ""
    for one in fields(PlanOptions):
        assert shown[one.name].default == one.default and str(one.metadata["help"]) in text


def test_every_option_is_one_of_the_shell() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for verb, without in (("plan", set()), ("compare", {"overlap"})):
        assert {parameter.name for parameter in commands[verb].params} >= {*NAMES} - without, verb


def test_a_plan_knows_its_options_again() -> None:
    asked = PlanOptions(pins=("head.weight: pair=B",), budget=1e9, optimizer="sgd", tolerance=0.01, max_axes=2,
                        microbatches=(2, 1), recompute=("none", "first-1"))
    made = autoddl.plan(tiny.tiny(1, batch=8), LAPTOP, **asked.words())
    assert question_of(made).options == replace(asked, solver="exact") and asked.microbatches == (1, 2)


@pytest.mark.parametrize("wrong, words", [
    ({"optimizer": "lion"}, "optimizer 'lion' is not known; known are sgd.*like '12 B'"),
    ({"solver": "luck"}, "no solver 'luck'"),
    ({"tolerance": 1.0}, "a tolerance of 1.0 is none"), ({"budget": 0}, "above 0 bytes, not 0"),
    ({"budget": "-3 GB"}, "no quantity"), ({"budget": "40"}, "40 has no unit"),
    ({"budget": "12 parsecs"}, "'parsecs' is no unit"),
    ({"microbatches": ()}, "at least 1"), ({"microbatches": (0, 2)}, "at least 1"),
    ({"recompute": ("some",)}, "no recomputation 'some'"), ({"recompute": ()}, "name one, like 'none'")])
def test_what_no_option_is_is_refused(wrong: Options, words: str) -> None:
    with pytest.raises(InputError, match=words):
        PlanOptions.of(wrong)


def test_a_comparison_of_time_lines_is_refused() -> None:
    for compare in (autoddl.compare, autoddl.api.compare_solvers):
        with pytest.raises(InputError, match="leave overlap out"):
            compare(tiny.tiny(1), LAPTOP, overlap=True)
