"""`plan --measure-first N`: the runs that would most narrow the choice between the best plans, and how to make them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from autoddl.capture.factory import Factory
from autoddl.cli.as_run import Machine, as_run
from autoddl.cli.output import progress_bar, show
from autoddl.cli.tables.table_style import columns
from autoddl.core.plan import Plan
from autoddl.cost_models import show_seconds
from autoddl.planner.options import PlanOptions

if TYPE_CHECKING:
    from autoddl.fitting.experiments import BestOfTwo, Worthwhile

__all__ = ["first_path", "show_first"]


def first_path(plan: Path, number: int) -> Path:
    """Where the plan of an experiment lies, beside the plan."""
    return plan.with_suffix(f".first-{number}.json")


def show_first(plan: Plan, place: Machine, made: Factory, output: Path, count: int, options: PlanOptions, as_json: bool
               ) -> None:
    """Prints a plan and up to `count` experiments, and writes the plans of these beside it."""
    from autoddl.fitting.experiments import RUN_STEPS
    from autoddl.fitting.parts import measure_first

    model, sample, _ = made.shaped()
    with progress_bar() as progress:
        choice, found = measure_first(model, place.cluster, sample, place.profile, place.software, count, progress,
                                      {"name": made.name, "factory": made.to_json()}, options.words())
    found = tuple(replace(one, experiment=replace(one.experiment, plan=place.said_by(one.experiment.plan)))
                  for one in found)
    paths = [first_path(output, i) for i in range(1, len(found) + 1)]
    for path, one in zip(paths, found, strict=True):
        one.experiment.plan.save(path)
    commands = [f"autoddl run {path} {made} --steps {RUN_STEPS}" for path in paths]
    table, data = as_run(plan)
    show(Group(table, "", _table(choice, found, commands, place.software)),
         data | {"choice": _choice(choice), "measure_first": [
             {"name": one.experiment.name, "ranks": one.experiment.ranks, "seconds": one.experiment.takes,
              "step_seconds": one.experiment.seconds, "spread_before": one.before, "spread_after": one.after,
              "plan": str(path), "command": command}
             for one, path, command in zip(found, paths, commands, strict=True)]}, as_json)


def _choice(choice: "BestOfTwo | None") -> dict[str, Any] | None:
    """The choice under stable names."""
    return None if choice is None else {
        "best": choice.best.name, "second": choice.second.name, "best_seconds": choice.best.seconds,
        "second_seconds": choice.second.seconds, "spread": choice.spread,
        "model_spread": choice.model, "sure": choice.sure}


def _table(choice: "BestOfTwo | None", found: "Sequence[Worthwhile]", commands: Sequence[str], software: str | None
           ) -> RenderableType:
    """The choice in words, then a row and a command for each experiment; where there is none, why."""
    if choice is None:
        return "one plan alone: there is nothing to choose, and nothing to measure first"
    steps = f"Steps here are as {software} runs them." if software else (
        "Steps here are as they run, with what overlaps; the plan's own step above is a sum, without.")
    said = (f"{steps} "
            f"{choice.best.name} takes {show_seconds(choice.best.seconds)} a step, {choice.second.name} "
            f"{show_seconds(choice.second.seconds)}: {choice.difference:+.1%}. That is give or take "
            f"{choice.spread:.1%} by the machine's constants, and {choice.model:.1%} by what no constant explains. The "
            f"first is the faster one with a probability of {choice.sure:.0%}.")
    if not found:
        return Group(said, "", _nothing_first(choice))
    table = columns("measure first", "devices", "takes about", "leaves of the constants' part")
    for one in found:
        table.add_row(one.experiment.name, str(one.experiment.ranks), show_seconds(one.experiment.takes),
                      f"{one.after:.1%} of {one.before:.1%}")
    last = ("then: autoddl calibrate " + " ".join(f"--ran {command.split()[2]}" for command in commands)
            + " -o profile.yaml, with three runs or more; and plan --profile profile.yaml")
    return Group(said, "", table, *commands, last)


def _nothing_first(choice: "BestOfTwo") -> str:
    """Says why no experiment is named."""
    from autoddl.fitting.experiments import LEAST
    if choice.spread < LEAST:
        return ("nothing needs to be measured first: other constants of the machine would make both steps longer or "
                f"shorter alike, to {choice.spread:.1%}, so that no run tells more of which is the faster one")
    return "nothing needs to be measured first: no run on a part of this cluster, or on all of it, would narrow that"
