"""The shell: parse, call one API function, print.

stdout holds the answer, a table or with --json one JSON document; progress, errors and what the user's own code prints
go to stderr.
Exit codes: 0 done, 1 verify or compare-run found a difference, 2 wrong input, 3 no plan fits, 4 a process failed,
130 interrupted before there was an answer.
"""

import atexit
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoddl import report
from autoddl.answer_tables import relaxation_table
from autoddl.capture.factory import Factory, settings
from autoddl.cli_answers import register
from autoddl.cli_draw import register as register_draw
from autoddl.cli_measure import register as register_measure
from autoddl.cli_network import register as register_network
from autoddl.cli_record import NoRecord, RecordPath, record_path
from autoddl.cli_record import register as register_record
from autoddl.cli_rehearse import register as register_rehearse
from autoddl.cli_validate import register as register_validate
from autoddl.core.errors import AutoDDLError, Infeasible, InputError, MachineError
from autoddl.core.files import check_file, check_folder
from autoddl.core.plan import load_plan
from autoddl.launch.launch import leave

if TYPE_CHECKING:
    from autoddl.cost_models import Cluster

__all__ = ["app", "main", "program"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

FactoryText = Annotated[str, typer.Argument(metavar="FILE.py:FACTORY",
                                            help="a function that returns a module, or a module and a sample")]
ClusterPath = Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="the machine")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan, as `plan -o` wrote it")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="argument of the factory")]
Mesh = Annotated[str | None, typer.Option(help="only this mesh, like 'dp=4,tp=2'")]
Pin = Annotated[list[str] | None, typer.Option(metavar="PIN", help="a layout to choose, like 'h.*.attn.*: node=S(0)'")]
Budget = Annotated[str | None, typer.Option(help="bytes a rank may use, like '80 GB'")]
Solver = Annotated[str, typer.Option(help="how to solve")]
MaxAxes = Annotated[int, typer.Option(min=1, help="axes of a mesh at most")]
Microbatches = Annotated[str, typer.Option(metavar="N,N,...", help="parts in which a step may run the batch")]
Workers = Annotated[int | None, typer.Option(min=1, help="processes that search (as many as pay)")]
TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="for solving; the bound tells what is left")]
Compiled = Annotated[bool, typer.Option("--compiled", help="elementwise chains are one kernel, as of torch.compile")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]


@app.callback(epilog="Example: autoddl plan examples/gpt.py:gpt cluster.yaml -o plan.json")
def _root(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    """Finds, proves and runs the fastest way to train a PyTorch model on a cluster."""


@app.command("plan")
def _plan(factory: FactoryText, cluster: ClusterPath, set_: Set = None, mesh: Mesh = None, pin: Pin = None,
          budget: Budget = None, solver: Solver = "exact", max_axes: MaxAxes = 3, time_limit: TimeLimit = None,
          microbatches: Microbatches = "1", workers: Workers = None,
          output: Annotated[Path | None, typer.Option("-o", "--output", help="write the plan here")] = None,
          relax: Annotated[bool, typer.Option(help="if nothing fits, price what would")] = False,
          overlap: Annotated[bool, typer.Option("--overlap", help="the shortest time line of several plans")] = False,
          compiled: Compiled = False, as_json: AsJson = False) -> None:
    """Find the best configuration of a model on a cluster."""
    check_file(output)
    made = Factory.parse(factory, settings(set_ or ()))
    asked: dict[str, Any] = {"mesh": mesh, "pins": tuple(pin or ()), "budget": budget, "max_axes": max_axes,
                             "microbatches": _numbers(microbatches)}
    with _progress() as progress:
        from autoddl.api import plan as find
        place = _place(cluster, compiled)
        model, sample = made.build()
        try:
            found = find(model, place, sample, solver=solver, time_limit=time_limit, name=made.name,
                         factory=made.to_json(), progress=progress, workers=workers, overlap=overlap, **asked)
        except Infeasible as error:
            if relax:
                from autoddl.explain.relax import relaxations
                rows = relaxations(model, place, sample, needed=error.needed, progress=progress, **asked)
                Console(stderr=True).print(relaxation_table(rows))
            raise
    if output is not None:
        found.save(output)
    _print(report.plan_table(found), report.summary(found), as_json)


def _place(path: Path, compiled: bool) -> "Cluster":
    """The machine, whose programs are perhaps compiled."""
    from autoddl.cost_models import load_cluster
    from autoddl.operators.fusion import as_compiled

    return as_compiled(load_cluster(path)) if compiled else load_cluster(path)


def _numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--microbatches {text!r}: whole numbers with commas between them, like 1,2,4") from None


@app.command("show")
def _show(plan: PlanPath, as_json: AsJson = False) -> None:
    """Print a plan."""
    read = load_plan(plan)
    _print(report.plan_table(read), report.summary(read), as_json)


@app.command("compare")
def _compare(factory: FactoryText, cluster: ClusterPath, set_: Set = None, budget: Budget = None,
             solver: Solver = "exact", max_axes: MaxAxes = 3, time_limit: TimeLimit = None,
             microbatches: Microbatches = "1", workers: Workers = None,
             solvers: Annotated[bool, typer.Option("--solvers", help="compare the solvers on the plan's mesh")] = False,
             compiled: Compiled = False, as_json: AsJson = False) -> None:
    """Set the plan beside data parallel, grids, ZeRO-3 ..."""
    if solvers and (solver, microbatches) != ("exact", "1"):
        raise InputError("--solvers sets all solvers beside each other, with the whole batch: drop --solver and "
                         "--microbatches, or drop --solvers")
    made = Factory.parse(factory, settings(set_ or ()))
    with _progress() as progress:
        from autoddl.api import compare, compare_solvers
        place = _place(cluster, compiled)
        model, sample = made.build()
        if solvers:
            raced = compare_solvers(model, place, sample, budget=budget, max_axes=max_axes,
                                    time_limit=60.0 if time_limit is None else time_limit, progress=progress,
                                    workers=workers)
            table, data = report.raced_table(raced), report.raced_rows(raced)
            problem = raced[0].problem if all(row.problem for row in raced) else None
        else:
            found = compare(model, place, sample, budget=budget, solver=solver, max_axes=max_axes,
                            time_limit=time_limit, name=made.name, factory=made.to_json(), progress=progress,
                            workers=workers, microbatches=_numbers(microbatches))
            table, data = report.comparison_table(found), report.comparison_rows(found)
            problem = found[0].problem
    _print(table, data, as_json)
    if problem is not None:
        raise problem


@app.command("run")
def _run(plan: PlanPath, factory: FactoryText, set_: Set = None,
         steps: Annotated[int, typer.Option(min=1, help="training steps")] = 10,
         lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 1e-3,
         save: Annotated[Path | None, typer.Option(help="checkpoint at the end, in this folder")] = None,
         cluster: Annotated[Path | None, typer.Option(help="refuse a plan made for another cluster")] = None,
         record: RecordPath = None, no_record: NoRecord = False, as_json: AsJson = False) -> None:
    """Train under a plan: here, or within torchrun or srun."""
    read, kept = load_plan(plan), record_path(plan, record, no_record)
    check_folder(save)
    made = Factory.parse(factory, settings(set_ or ())).with_defaults(read.factory)
    with _progress() as progress:
        from autoddl.launch.run import run
        ran = run(plan, read, made, steps=steps, lr=lr, save=save, cluster=cluster, record=kept, progress=progress)
    if ran is not None:
        _print(report.run_table(ran), ran.to_json(), as_json)
    leave(0)


@app.command("verify")
def _verify(plan: PlanPath, factory: FactoryText, set_: Set = None,
            max_ranks: Annotated[int, typer.Option(min=1, help="ranks to start here at most")] = 8,
            as_json: AsJson = False) -> None:
    """Run a plan on local ranks and compare with one process."""
    read = load_plan(plan)
    made = Factory.parse(factory, settings(set_ or ())).with_defaults(read.factory)
    with _progress() as progress:
        from autoddl.launch.verify import verify
        checked = verify(read, made, max_ranks=max_ranks, progress=progress)
    _print(report.verification_table(checked), checked.to_json(), as_json)
    if not checked.passed:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program `autoddl`: one line and a code for what went wrong, a traceback only with --debug."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app(args=[word for word in given if word != "--debug"], prog_name="autoddl")
    except AutoDDLError as error:
        if debug:
            traceback.print_exc()
        Console(stderr=True).print(f"autoddl: {' '.join(str(error).split())}", style="red", markup=False,
                                   highlight=False, soft_wrap=True)
        leave(_code(error))
    except KeyboardInterrupt:
        print("autoddl: interrupted", file=sys.stderr)
        sys.exit(130)


def program() -> NoReturn:
    """`main` as a process of its own. The operating system takes back what a plan was made of; Python would take it
    apart object by object, for seconds."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    if threading.active_count() == 1 and (code is None or isinstance(code, int)):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)  # type: ignore[arg-type]


def _code(error: AutoDDLError) -> int:
    match error:
        case Infeasible():
            return 3
        case MachineError():
            return 4
    return 2


def _print(table: RenderableType, data: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(data, ensure_ascii=False))
    else:
        print(report.text(table))


class _Bar:
    """progress(what, done, total) as one line."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.task = bar, bar.add_task("starting", total=None)

    def __call__(self, what: str, done: int, total: int) -> None:
        self.bar.update(self.task, description=what, completed=done, total=total)


@contextmanager
def _progress() -> Iterator[_Bar]:
    """Progress on stderr while something long runs; gone when it ends, silent where stderr is no terminal. What is
    printed meanwhile, by the user's code, goes there too."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())
    with (Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
          redirect_stdout(sys.stderr)):
        yield _Bar(bar)


register(app, _print, _progress)
register_rehearse(app, _print, _progress)
register_measure(app, _print, _progress)
register_validate(app, _print, _progress)
register_network(app, _print, _progress)
register_record(app, _print, _progress)
register_draw(app)

if __name__ == "__main__":
    program()
