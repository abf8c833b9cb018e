"""The verbs that speak to other trainers: export, import."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from autoddl.cli.options import AsJson, PlanPath, Set
from autoddl.cli.output import progress_bar, show
from autoddl.cli.tables.table_style import columns, grid
from autoddl.core.errors import InputError
from autoddl.core.files import check_file, write_atomically
from autoddl.cost_models.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from autoddl.core.plan import Plan
    from autoddl.export.configuration import Configuration
    from autoddl.export.exported import Exported, Imported

__all__ = ["export_verb", "import_verb"]

WRITTEN, READ = "torchtitan, megatron, deepspeed, accelerate or fsdp2", "torchtitan, megatron, deepspeed or accelerate"
To = Annotated[str, typer.Option("--to", metavar="TARGET", show_default=False, help=WRITTEN)]
From = Annotated[str, typer.Option("--from", metavar="TARGET", show_default=False, help=READ)]
Out = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="write the configuration here")]
Text = Annotated[list[str], typer.Argument(metavar="TEXT", help="the configuration, or a file that holds it")]


def export_verb(plan: PlanPath, to: To = "", output: Out = None, as_json: AsJson = False) -> None:
    """Say a plan in the configuration of another trainer."""
    from autoddl.core.plan import load_plan
    from autoddl.export.exported import export_plan, target_of
    _check_given(to, "--to", WRITTEN)
    target_of(to)
    check_file(output)
    read = load_plan(plan)
    with progress_bar() as progress:
        made = export_plan(read, to, progress)
    if output is not None:
        write_atomically(output, made.text)
    show(_exported_table(read, made, output), made.to_json(), as_json)


def _check_given(target: str, option: str, targets: str) -> None:
    """Raises InputError where the option that names a target was left out."""
    if not target:
        raise InputError(f"whose configuration it is has to be said: add {option} with {targets}, like {option} "
                         "megatron")


def _exported_table(plan: "Plan", made: "Exported", output: Path | None) -> RenderableType:
    """Returns what was written, what was lost, and what to expect."""
    table, best = grid(), made.plan.predicted
    table.add_row("nearest", str(made.configuration))
    table.add_row("step", f"{show_seconds(best.seconds)} predicted, {show_seconds(made.seconds)} of the plan "
                          f"({_times(best.seconds, made.seconds)})")
    table.add_row("memory", f"{show_bytes(best.peak_bytes)} at the peak, {show_bytes(made.nbytes)} of the plan; the "
                            f"budget is {show_bytes(plan.budget)}")
    if made.most_bytes > best.peak_bytes:
        fits = "" if made.most_bytes <= plan.budget else ", which is above the budget"
        table.add_row("", f"at most {show_bytes(made.most_bytes)} there, if all is kept that its selective "
                          f"recomputation may keep{fits}")
    for i, line in enumerate(made.lost or ("nothing that a configuration says",)):
        table.add_row("" if i else "lost", line)
    for i, line in enumerate(made.notes):
        table.add_row("" if i else "differs", line)
    if output is not None:
        table.add_row("written", str(output))
        return table
    return Group(table, "", made.text.rstrip())


def _times(seconds: float, other: float) -> str:
    ratio = seconds / other if other else 1.0
    return f"{ratio:.2f} times as long" if abs(ratio - 1) >= 0.005 else "as fast"


def import_verb(text: Text, from_: From = "",
                cluster: Annotated[Path | None, typer.Option(help="the machine that it runs on")] = None,
                devices: Annotated[int | None, typer.Option(min=1, help="ranks, where no cluster is given")] = None,
                factory: Annotated[str | None, typer.Option("--factory", metavar="FILE.py:FACTORY",
                                                            help="price it for this model, beside the found plan")
                                   ] = None,
                set_: Set = None,
                output: Annotated[Path | None, typer.Option("-o", "--output", help="write its plan here")] = None,
                as_json: AsJson = False) -> None:
    """Read another trainer's configuration: options, price."""
    from autoddl.cost_models import load_cluster
    from autoddl.export.exported import import_text, options_of, price_import
    check_file(output)
    _check_given(from_, "--from", READ)
    place = load_cluster(cluster) if cluster is not None else None
    if place is not None and devices not in (None, place.size):
        raise InputError(f"--devices {devices}, and cluster {place.name} has {place.size} devices: leave --devices out")
    if (factory is not None or output is not None) and (place is None or factory is None):
        raise InputError("a configuration is priced for a model on a cluster: give both --factory and --cluster")
    read = import_text(_content(" ".join(text)), from_, place.size if place is not None else devices)
    data: dict[str, Any] = {"configuration": dict(read.to_json())}
    if factory is None or place is None:
        options = options_of(read, place)
        show(_read_table(read, options), data | {"options": list(options)}, as_json)
        return
    from autoddl.capture.factory import Factory, settings
    made = Factory.parse(factory, settings(set_ or ()))
    with progress_bar() as progress:
        model, sample = made.build()
        found = price_import(read, model, place, sample, name=made.name, factory=made.to_json(), progress=progress)
    if output is not None and found.plan is not None and found.problem is None:
        found.plan.save(output)
    show(Group(_read_table(read, found.options), "", _imported_table(found)), data | found.to_json(), as_json)
    if found.problem is not None:
        raise found.problem


def _read_table(read: "Configuration", options: Sequence[str]) -> Table:
    """A configuration as it was read, and the options of `autoddl plan` that say it."""
    table = grid()
    table.add_row("reads", str(read))
    table.add_row("options", shlex.join(options))
    return table


LONGEST_PATH = 250
"""Characters of a text that may be the name of a file; systems take 255."""


def _content(text: str) -> str:
    """The text, or that of the file of this name."""
    path, named = Path(text), len(text) < LONGEST_PATH and "--" not in text
    try:
        return path.read_text(encoding="utf-8") if named and path.is_file() else text
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {text!r}: {error}") from None


def _imported_table(found: "Imported") -> RenderableType:
    """The configuration beside the found plan."""
    table = columns("", "step", "ratio", "memory", "mesh", "")
    for name, plan, problem in (("the configuration", found.plan, found.problem), ("the found plan", found.best, None)):
        why = str(problem or "")
        if plan is None:
            table.add_row(name, "-", "-", "-", "-", why)
            continue
        table.add_row(name, show_seconds(plan.predicted.seconds),
                      f"{plan.predicted.seconds / found.best.predicted.seconds:.2f}",
                      show_bytes(plan.predicted.peak_bytes), str(plan.mesh), "does not fit" if why else "")
    return table


