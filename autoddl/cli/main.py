"""The shell: parse, call one API function, print.

stdout holds the answer, a table or with --json one JSON document; progress, errors and what the user's own code prints
go to stderr.
Exit codes:

    0     done
    1     verify or compare-run found a difference
    2     wrong input
    3     no plan fits
    4     a process failed
    130   interrupted before there was an answer
"""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from autoddl.cli import (
    calibrate,
    cluster,
    compare_run,
    draw,
    explain,
    export,
    machine,
    measure,
    network,
    rehearse,
    report,
    schedule,
    validate,
    verbs,
    what_if,
)
from autoddl.core.errors import AutoDDLError, Infeasible, MachineError
from autoddl.launch.launch import leave

__all__ = ["app", "main", "program"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _version(asked: bool) -> None:
    if asked:
        print(f"autoddl {version('autoddl')}, torch {version('torch')}, Python {sys.version.partition(' ')[0]}")
        raise typer.Exit


@app.callback(epilog="Example: autoddl plan examples/gpt.py:gpt cluster.yaml -o plan.json")
def _root(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
          which: Annotated[bool, typer.Option("--version", help="show the versions and end", callback=_version,
                                              is_eager=True)] = False) -> None:
    """Finds, proves and runs the fastest way to train a PyTorch model on a cluster."""


VERBS: dict[str, Callable[..., None]] = {
    "plan": verbs.plan_verb, "show": verbs.show_verb, "compare": verbs.compare_verb, "run": verbs.run_verb,
    "verify": verbs.verify_verb, "explain": explain.explain_verb, "front": explain.front_verb,
    "diff": explain.diff_verb, "what-if": what_if.what_if_verb, "rehearse": rehearse.rehearse_verb,
    "cluster": cluster.cluster_verb,
    "measure": measure.measure_verb, "validate": validate.validate_verb, "calibrate": calibrate.calibrate_verb,
    "network": network.network_verb,
    "compare-run": compare_run.compare_run_verb, "draw": draw.draw_verb, "report": report.report_verb,
    "init": machine.init_verb, "doctor": machine.doctor_verb, "schedule": schedule.schedule_verb,
    "export": export.export_verb, "import": export.import_verb,
}
"""The function of every verb, in the order of `autoddl --help`."""

FOREIGN = {"import": {"ignore_unknown_options": True}}
"""Settings of verbs that read the options of other programs."""

for name, verb in VERBS.items():
    app.command(name, context_settings=FOREIGN.get(name))(verb)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program `autoddl`; an error becomes one line and an exit code, and a traceback only with --debug."""
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
    """Runs `main` as a process of its own, and ends without freeing objects one by one, which takes Python seconds."""
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
