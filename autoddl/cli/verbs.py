"""The verbs plan, show, compare, run and verify."""

import sys
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autoddl.capture.factory import Factory, settings
from autoddl.cli.as_run import Machine, as_run, with_ties
from autoddl.cli.compare_run import NoRecord, RecordPath, record_path
from autoddl.cli.measure_first import show_first
from autoddl.cli.options import (
    AsJson,
    ClusterPath,
    Compiled,
    FactoryText,
    Messages,
    PlanPath,
    ProfilePath,
    Set,
    SoftwareName,
    StageNumber,
    takes_options,
)
from autoddl.cli.output import progress_bar, show
from autoddl.cli.tables import plan_tables
from autoddl.cli.tables.answer_tables import relaxation_table
from autoddl.cli.tables.message_tables import with_messages
from autoddl.cli.tables.own_rules_text import operator_table
from autoddl.cli.tables.pipeline_tables import stage_of
from autoddl.cli.way_out import ways_out
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.files import check_file, check_folder
from autoddl.core.plan import Plan, load_plan
from autoddl.core.processes import term_interrupts
from autoddl.cost_models import load_cluster, show_seconds
from autoddl.launch.launch import leave
from autoddl.planner.options import PlanOptions

__all__ = ["compare_verb", "plan_verb", "run_verb", "show_verb", "verify_verb"]


@takes_options()
def plan_verb(factory: FactoryText, cluster: ClusterPath, options: PlanOptions, set_: Set = None,
         output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan here")] = None,
         relax: Annotated[bool, typer.Option(help="if nothing fits, price what would")] = False,
         spares: Annotated[int, typer.Option(min=0, metavar="N", help="plan for when up to N devices are lost too, "
                                             "beside -o")] = 0,
         measure: Annotated[int, typer.Option("--measure-first", min=0, metavar="N", help="name the N cheapest runs "
                                              "that would most narrow the choice, their plans beside -o")] = 0,
         samples: Annotated[str | None, typer.Option(metavar="FILE.py:FACTORY", help="a function that returns a list "
                                                     "of batches of other shapes that will come")] = None,
         compiled: Compiled = False, software: SoftwareName = None, profile: ProfilePath = None,
         as_json: AsJson = False) -> None:
    """Find the best configuration of a model on a cluster."""
    check_file(output)
    for asked, option in ((spares, "--spares"), (measure, "--measure-first")):
        if asked and output is None:
            raise InputError(f"{option} writes plans beside the plan: say where, with -o PLAN")
    if spares and spares >= load_cluster(cluster).size:
        raise InputError(f"--spares {spares} is for as many lost devices, and {cluster} has "
                         f"{load_cluster(cluster).size}: take fewer")
    if relax:
        from autoddl.explain.relax import check_relaxable
        check_relaxable(options)
    made = Factory.parse(factory, settings(set_ or ()))
    with progress_bar() as progress, term_interrupts():
        from autoddl.api import plan as find
        place = Machine.read(cluster, compiled, software, profile)
        model, sample = _shaped(made)
        try:
            found = find(model, place.cluster, sample, name=made.name, factory=made.to_json(), progress=progress,
                         samples=_batches(samples), **options.words())
        except Infeasible as error:
            if relax:
                from autoddl.explain.relax import relaxations
                rows = relaxations(model, place.cluster, sample, reachable=error.reachable, progress=progress,
                                   **options.words())
                Console(stderr=True).print(relaxation_table(rows))
                raise
            raise _with_way_out(error, model, place, sample, options, progress) from None
    found = place.said_by(found)
    if output is not None:
        found.save(output)
        _save_spares(found, spares, output)
        if measure:
            return show_first(found, place, made, output, measure, options, as_json)
    show(*as_run(found), as_json)


def _batches(text: str | None) -> list[Any]:
    """The batches that the function of `--samples` returns. Raises InputError where it returns no list."""
    if text is None:
        return []
    found = Factory.parse(text).function()()
    if not isinstance(found, list | tuple) or not found:
        raise InputError(f"--samples {text} returned {type(found).__name__}: it returns a list of batches, each as the "
                         "factory of the model gives its own")
    return list(found)


def _save_spares(found: Plan, lost: int, output: Path) -> None:
    """Writes plans for when up to `lost` devices are lost, each named by its ranks, and says so on stderr."""
    if not lost:
        return
    from autoddl.explain.run_seconds import step_seconds
    from autoddl.explain.spares import spare_plans
    from autoddl.launch.elastic import spare_path
    with progress_bar() as progress:
        for one in spare_plans(found, lost, progress):
            path = spare_path(output, one.mesh.size)
            one.save(path)
            print(f"autoddl: {path} is for {one.mesh.size} ranks, {show_seconds(step_seconds(one))} a step",
                  file=sys.stderr)


def _with_way_out(error: Infeasible, model: Any, place: Machine, sample: Any, options: PlanOptions, progress: Any
                  ) -> Infeasible:
    """The error, with the cheap ways out that fit; where parameters alone do not, none is looked for."""
    if options.stages != (1,) or error.budget == inf or error.detail:
        return error
    from autoddl.explain.run_seconds import step_seconds
    found = ways_out(model, place.cluster, sample, seconds=lambda made: step_seconds(place.said_by(made)),
                     progress=progress, **options.words())
    if not found:
        detail = ("none was found with all blocks recomputed or with up to 8 times the microbatches either: use more "
                  "devices, a smaller batch or a larger budget")
        return Infeasible(error.needed, error.budget, detail, error.reachable)
    said = " or ".join(f"{words} (a plan fits, at {show_seconds(seconds)} a step or less)" for words, seconds in found)
    detail = f"add {said}; or use more devices, a smaller batch or a larger budget"
    return Infeasible(error.needed, error.budget, detail, error.reachable)


def _shaped(factory: Factory) -> tuple[Any, Any]:
    """The model and the sample of a factory, without memory for parameters; where that cannot be, a line says why."""
    model, sample, line = factory.shaped()
    if line:
        print(line, file=sys.stderr)
    return model, sample


def show_verb(plan: PlanPath, stage: StageNumber = None, messages: Messages = False, as_json: AsJson = False) -> None:
    """Print a plan."""
    read = stage_of(load_plan(plan), stage)
    table, data = as_run(read)
    show(*with_messages(table, data, read) if messages else (table, data), as_json)


@takes_options("overlap", compares=True)
def compare_verb(factory: FactoryText, cluster: ClusterPath, options: PlanOptions, set_: Set = None,
            solvers: Annotated[bool, typer.Option("--solvers", help="compare the solvers on the plan's mesh")] = False,
            compiled: Compiled = False, software: SoftwareName = None, profile: ProfilePath = None,
            as_json: AsJson = False) -> None:
    """Set the plan beside data parallel, grids, ZeRO-3 ..."""
    if solvers and (options.solver, options.microbatches) != ("exact", (1,)):
        raise InputError("--solvers sets all solvers beside each other, with the whole batch: drop --solver and "
                         "--microbatches, or drop --solvers")
    if solvers and software is not None:
        raise InputError(f"--software {software} says which plans of a comparison tie, and --solvers sets no plans "
                         "beside each other: drop one of them")
    made = Factory.parse(factory, settings(set_ or ()))
    with progress_bar() as progress, term_interrupts():
        from autoddl.api import compare as compare_plans
        from autoddl.api import compare_solvers
        place = Machine.read(cluster, compiled, software, profile)
        model, sample = _shaped(made)
        if solvers:
            words = options.words()
            if options.time_limit is None:
                del words["time_limit"]
            raced = compare_solvers(model, place.cluster, sample, progress=progress, **words)
            table, data = plan_tables.raced_table(raced), plan_tables.raced_rows(raced)
            problem = raced[0].problem if all(row.problem for row in raced) else None
        else:
            found = compare_plans(model, place.cluster, sample, name=made.name, factory=made.to_json(),
                                  progress=progress, **options.words())
            ran = place.steps_of(found)
            found = with_ties(found, ran)
            table, data = plan_tables.comparison_table(found, ran), plan_tables.comparison_rows(found, ran)
            problem = found[0].problem
    show(table, data, as_json)
    if problem is not None:
        raise problem


def run_verb(plan: PlanPath, factory: FactoryText, set_: Set = None,
        steps: Annotated[int, typer.Option(min=1, help="steps in all, with those before a checkpoint")] = 10,
        lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 1e-3,
        save: Annotated[Path | None, typer.Option(help="checkpoint at the end, in this folder")] = None,
        cluster: Annotated[Path | None, typer.Option(help="refuse a plan made for another cluster")] = None,
        checkpoint: Annotated[Path | None, typer.Option(metavar="FOLDER", help="keep checkpoints here")] = None,
        every: Annotated[int | None, typer.Option(min=1, help="steps from one checkpoint to the next, else 100")
                         ] = None,
        keep: Annotated[int | None, typer.Option(min=1, help="checkpoints that are kept, the last ones, else 2")
                        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint, if there is one")
                          ] = False,
        elastic: Annotated[list[str] | None, typer.Option(metavar="PLAN", help="when ranks are lost, go on by this "
                                                          "plan; auto: one of `plan --spares`, or a new one")] = None,
        timeout: Annotated[float, typer.Option(min=1, help="seconds that a rank waits for the others")] = 600.0,
        record: RecordPath = None, no_record: NoRecord = False, as_json: AsJson = False) -> None:
    """Train under a plan: here, or within torchrun or srun."""
    from autoddl.launch.elastic import read_elastic
    from autoddl.launch.run import Checkpoints
    read, kept = load_plan(plan), record_path(plan, record, no_record)
    check_folder(save)
    asked = {"--resume": resume, "--elastic": elastic, "--every": every, "--keep": keep}
    about = [name for name, given in asked.items() if given]
    if checkpoint is None and about:
        raise InputError(f"{about[0]} is about checkpoints: say where they are kept, with --checkpoint FOLDER")
    others = read_elastic(plan, read, elastic) if elastic else None
    kept_in = Checkpoints(checkpoint, every or 100, keep or 2, resume) if checkpoint else None
    made = Factory.parse(factory, settings(set_ or ())).with_defaults(read.factory)
    with progress_bar() as progress:
        from autoddl.launch.run import run as train
        ran = train(plan, read, made, steps=steps, lr=lr, save=save, cluster=cluster, record=kept, checkpoints=kept_in,
                    elastic=others, timeout=timeout, progress=progress)
    if ran is not None:
        show(plan_tables.training_table(ran), ran.to_json(), as_json)
    leave(0)


def verify_verb(plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="a plan")] = None,
           factory: Annotated[str | None, typer.Argument(metavar="FILE.py:FACTORY", help="its model")] = None,
           set_: Set = None,
           max_ranks: Annotated[int | None, typer.Option(min=1, help="ranks to start here at most, else 8")] = None,
           operator: Annotated[str | None, typer.Option(help="instead try the rule of this operator, library::name, or "
                                                             "of a Function's class")] = None,
           sample: Annotated[str | None, typer.Option(metavar="FILE.py:FACTORY",
                                                      help="a function that returns the operator's arguments")] = None,
           as_json: AsJson = False) -> None:
    """Run a plan on local ranks and compare with one process, or try every signature of an operator's rule."""
    if operator is not None and max_ranks is not None:
        raise InputError(f"--operator {operator} tries a rule in this process, and --max-ranks is about the ranks of a "
                         "plan: drop one of them")
    if operator is not None or sample is not None:
        return _verify_operator(operator, sample, plan, settings(set_ or ()), as_json)
    if plan is None or factory is None:
        raise InputError("verify takes PLAN and FILE.py:FACTORY, or --operator and --sample")
    read = load_plan(plan)
    made = Factory.parse(factory, settings(set_ or ())).with_defaults(read.factory)
    with progress_bar() as progress:
        from autoddl.launch.verify import verify as check
        checked = check(read, made, max_ranks=max_ranks or 8, progress=progress)
    show(plan_tables.verification_table(checked), checked.to_json(), as_json)
    if not checked.passed:
        raise typer.Exit(1)


def _verify_operator(operator: str | None, sample: str | None, plan: Path | None, given: dict[str, Any],
                     as_json: bool) -> None:
    if operator is None or sample is None or plan is not None:
        raise InputError("--operator NAME goes with --sample FILE.py:FACTORY, and without a plan")
    from autoddl.launch.verify_operator import verify_operator
    checked = verify_operator(operator, Factory.parse(sample, given))
    show(operator_table(checked), checked.to_json(), as_json)
    if not checked.passed:
        raise typer.Exit(1)
