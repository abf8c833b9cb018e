"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "Budget", "ClusterPath", "Compiled", "FactoryText", "MaxAxes", "Mesh", "Microbatches", "Pin",
           "PlanPath", "Set", "Solver", "TimeLimit", "Workers"]

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
