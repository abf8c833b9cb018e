"""The verbs about the machine that they run on: doctor and init."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import AsJson
from autoddl.cli.output import show
from autoddl.cli.tables.table_style import columns
from autoddl.core.errors import InputError
from autoddl.core.files import check_file, write_atomically

__all__ = ["doctor_verb", "init_verb"]

CANNOT = 4
"""Exit code where planning cannot work here."""


def doctor_verb(as_json: AsJson = False) -> None:
    """Say what this machine has, and what each lack prevents."""
    from autoddl.launch.doctor import able_to_plan, examine
    checks = examine()
    table = columns("", "there is", "its lack prevents")
    for one in checks:
        table.add_row(one.what, one.found, one.prevents)
    show(table, {"plans": able_to_plan(checks), "checks": [asdict(one) for one in checks]}, as_json)
    if not able_to_plan(checks):
        raise typer.Exit(CANNOT)


def init_verb(output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.yaml", help="the cluster file")
                                ] = Path("cluster.yaml"),
              hosts: Annotated[Path | None, typer.Option(metavar="FILE", help="the hosts, one a line; else SLURM's")
                               ] = None,
              force: Annotated[bool, typer.Option("--force", help="write over a file")] = False) -> None:
    """Write the cluster file of this machine."""
    from autoddl.calibrate.machine_facts import machine_facts
    from autoddl.calibrate.written_cluster import cluster_text
    if output.exists() and not force and (output.is_file() or output.is_dir()):
        raise InputError(f"{output} exists: --force writes over it, -o FILE takes another")
    check_file(output)
    write_atomically(output, cluster_text(machine_facts(hosts)))
    print(f"written: {output}; `autoddl measure {output}` times what is a default in it")
