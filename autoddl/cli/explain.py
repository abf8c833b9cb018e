"""The verbs that answer questions about plans: explain, front, diff. They need a plan, not its model, and no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from autoddl.cli.options import AsJson, PlanPath, StageNumber
from autoddl.cli.output import progress_bar, show
from autoddl.cli.tables import pipeline_outcomes, pipeline_tables
from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan

__all__ = ["diff_verb", "explain_verb", "front_verb"]


Other = Annotated[Path, typer.Argument(metavar="PLAN", help="another")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME ...]",
                                                   help="parameters, modules or ops, like 'h.*.weight'")]


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON; what is infinite, because no plan fits, is null."""
    def finite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: finite(inner) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [finite(inner) for inner in part]
        return None if isinstance(part, float) and isinf(part) else part
    found: dict[str, Any] = finite(asdict(value))
    return found


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Says which claim of a file's proof does not hold, as wrong input: the file is what was checked."""
    try:
        yield
    except AssertionError as error:
        raise InputError(f"the plan's proof does not hold: {error}; its bound is not to be trusted: plan again, and "
                         "report it where a file that was not changed says so") from error


def explain_verb(plan: PlanPath, names: Names = None,
            proof: Annotated[bool, typer.Option("--proof", help="prove the bound and check the proof")] = False,
            everywhere: Annotated[bool, typer.Option("--every-mesh", help="prove it for all meshes")] = False,
            pins: Annotated[bool, typer.Option("--pins", help="what each pin costs")] = False,
            pipeline: Annotated[bool, typer.Option("--pipeline", help="what became of other stages")] = False,
            stage: StageNumber = None,
            best: Annotated[int, typer.Option(min=1, help="exact alternatives of each name")] = 3,
            as_json: AsJson = False) -> None:
    """Say why a plan is as it is, and what else there is."""
    from autoddl.cli.tables import answer_tables
    from autoddl.explain import explain
    from autoddl.explain.pipeline_proof import check_pipeline
    questions = {"NAME": names, "--proof": proof or everywhere, "--pins": pins, "--pipeline": pipeline}
    asked = [word for word, given in questions.items() if given]
    if len(asked) > 1:
        raise InputError(f"explain answers one question at a time, not {' and '.join(asked)}: ask them one by one")
    read = load_plan(plan)
    if pipeline:
        show(pipeline_outcomes.alternatives_table(read), pipeline_outcomes.alternatives_of(read), as_json)
        return
    if (proof or everywhere) and read.pipeline is not None and stage is None:
        with _told_in_one_line():
            known = check_pipeline(read)
        show(pipeline_tables.proof_table(known), plain(known) | {"gap": known.gap}, as_json)
        return
    if names and read.pipeline is not None and stage is None:
        said = [(k, explain.explain(read.pipeline.stages[k].plan, own, best))
                for k, own in explain.stages_with(read, names).items()]
        show(answer_tables.stages_table(said), [{"stage": k} | plain(one) for k, one in said], as_json)
        return
    read = pipeline_tables.without_stages(pipeline_tables.stage_of(read, stage), "explain")
    with progress_bar() as progress:
        table: RenderableType
        data: Any
        if proof or everywhere:
            checked = explain.proved(read, everywhere)
            table, data = answer_tables.proof_table(checked), plain(checked) | {"gap": checked.gap}
        elif pins:
            rows = explain.price_of_pins(read, progress)
            table, data = answer_tables.pins_table(read, rows), [plain(row) for row in rows]
        else:
            answer = explain.explain(read, tuple(names or ()), best)
            table, data = answer_tables.explained_table(answer), plain(answer)
    show(table, data, as_json)


def front_verb(plan: PlanPath,
          devices: Annotated[bool, typer.Option("--devices", help="against the number of devices")] = False,
          stage: StageNumber = None, as_json: AsJson = False) -> None:
    """Seconds against bytes a device, or devices."""
    from autoddl.cli.tables import answer_tables
    from autoddl.explain import pareto
    read = pipeline_tables.without_stages(pipeline_tables.stage_of(load_plan(plan), stage), "front")
    with progress_bar() as progress:
        if devices:
            counted = pareto.front_of_devices(read, progress)
            table, data = answer_tables.devices_table(counted), [plain(point) for point in counted]
        else:
            points = pareto.front_of_bytes(read, progress=progress)
            table, data = answer_tables.bytes_table(read, points), [plain(point) for point in points]
    show(table, data, as_json)


def diff_verb(a: PlanPath, b: Other, as_json: AsJson = False) -> None:
    """Say what differs between two plans, and its worth."""
    from autoddl.cli.tables import answer_tables
    from autoddl.explain import diff
    found = diff.difference(load_plan(a), load_plan(b))
    show(answer_tables.difference_table(found), plain(found), as_json)
