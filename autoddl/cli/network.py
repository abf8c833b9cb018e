"""The verb that tables what communication takes of a data parallel step, or what networks cost: network."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from autoddl.capture.factory import Factory, settings
from autoddl.cli.options import AsJson, ClusterPath, Set
from autoddl.cli.output import progress_bar, show
from autoddl.cli.tables.network_prices import choices_data, choices_table, networks_data, networks_table, read_prices
from autoddl.cli.tables.pipeline_tables import without_stages
from autoddl.cli.tables.table_style import columns
from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan
from autoddl.cost_models import Cluster, load_cluster, parse_quantity, show_seconds
from autoddl.cost_models.links import PROTOCOLS
from autoddl.cost_models.network_prices import Prices
from autoddl.cost_models.units import with_unit

if TYPE_CHECKING:
    from autoddl.explain.communication_share import Share
    from autoddl.explain.data_parallel_work import Traced

__all__ = ["network_verb"]


BUILT_IN = ("gpt2-medium", "t5-large")
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}

Model = Annotated[str | None, typer.Option(metavar="FILE.py:FACTORY", help=f"or {', '.join(BUILT_IN)}")]
Protocol = Annotated[list[str] | None, typer.Option(
    metavar="NAME[=LINK]", help="protocol of the network, on another link where one is named; all on the file's link")]
Ranks = Annotated[str | None, typer.Option(metavar="N,N,...", help="ranks that share the batch (powers of two)")]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="send gradients beside backward, or after it")]
Gradient = Annotated[str | None, typer.Option(metavar="DTYPE", help="in which gradients are sent (the parameters')")]
Cost = Annotated[bool, typer.Option("--cost", help="what networks that join the cluster's ports cost, and reach")]
PricesPath = Annotated[Path | None, typer.Option("--prices", metavar="FILE.yaml", help=(
    "dollars of the parts: ports, switch, copper, optical (list prices of 2022)"))]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="with --cost: its best on every network")]
Deadline = Annotated[str | None, typer.Option(metavar="TIME", help="with --plan: the cheapest within it, like '2 s'")]
Host = Annotated[str, typer.Option(help="of the host per operator, which a fast device waits for")]


def network_verb(cluster: ClusterPath, model: Model = None, set_: Set = None, protocol: Protocol = None,
                 ranks: Ranks = None, overlap: Overlap = True, gradient: Gradient = None, host: Host = "100 us",
                 cost: Cost = False, prices: PricesPath = None, plan: PlanFile = None, deadline: Deadline = None,
                 as_json: AsJson = False) -> None:
    """Table what communication takes of a data parallel step, or what networks cost."""
    place = load_cluster(cluster)
    if cost or prices or plan or deadline:
        return _costs(place, read_prices(prices), plan, deadline, as_json)
    if model is None:
        raise InputError("name a model with --model, whose step is tabled, or ask with --cost what networks cost")
    build = _builder(model, set_ or [])
    width, waits = _width(gradient), float(parse_quantity(host, "seconds"))
    from autoddl.explain.communication_share import Network, shares
    networks = [Network.parse(text) for text in protocol or [name for name, p in PROTOCOLS.items() if p.network]]
    counts = _counts(ranks)
    with progress_bar() as progress:
        progress("capturing the model", 0, 1)
        from autoddl.explain.data_parallel_work import traced
        one = traced(*build())
        found = shares(one, place, networks, counts or _powers(one, place), overlap=overlap, gradient=width,
                       host=waits)
    show(_table(found), _data(model, one, overlap, found), as_json)


def _costs(place: Cluster, prices: Prices, plan: Path | None, deadline: str | None, as_json: bool) -> None:
    """Prints what networks cost, and with a plan what a step takes on each."""
    if plan is None:
        if deadline is not None:
            raise InputError("--deadline is of a step: give its plan with --plan")
        return show(networks_table(place, prices), networks_data(place, prices), as_json)
    limit = None if deadline is None else with_unit(deadline, "seconds")
    from autoddl.explain.network_choice import cheapest_within, networks_of_plan
    with progress_bar() as progress:
        read = without_stages(load_plan(plan), "network")
        found = networks_of_plan(read, place, prices, progress)
    best = None if limit is None else cheapest_within(found, limit)
    return show(choices_table(found, best, read.source.get("software")), choices_data(found, best), as_json)


def _builder(model: str, texts: list[str]) -> Callable[[], tuple[Any, Any]]:
    """The function that makes the model and its sample."""
    arguments = settings(texts)
    if model not in BUILT_IN:
        if ":" not in model:
            raise InputError(f"{model!r} is no model; write FILE.py:FACTORY, or one of {', '.join(BUILT_IN)}")
        return Factory.parse(model, arguments).build
    batch = arguments.pop("batch", 16)
    if arguments or not isinstance(batch, int) or batch < 1:
        raise InputError(f"{model} has one argument, batch, a whole number from 1 on; set it with --set batch=16")

    def build() -> tuple[Any, Any]:
        from autoddl.validation.share_models import MODELS
        return MODELS[model](batch)

    return build


def _width(gradient: str | None) -> int:
    if gradient is not None and gradient not in WIDTHS:
        raise InputError(f"gradients in {gradient!r} are not known; they are sent in {', '.join(WIDTHS)}")
    return WIDTHS[gradient] if gradient else 0


def _counts(text: str | None) -> tuple[int, ...]:
    """`2,4,8` as numbers."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--ranks {text!r}: whole numbers with commas between them, like 2,4,8") from None


def _powers(one: "Traced", place: Cluster) -> tuple[int, ...]:
    """Powers of two among which the batch can be cut, on whole nodes where they are more than one."""
    powers = tuple(n for k in range(1, place.size.bit_length()) if (n := 2**k) <= place.size and one.batch % n == 0
                   and all(n % unit == 0 or unit % n == 0 for unit in place.units[:-1]))
    if not powers:
        raise InputError(f"a batch of {one.batch} is cut among no power of two of the {place.size} ranks; name some "
                         "with --ranks, or give a larger batch")
    return powers


def _table(found: "tuple[Share, ...]") -> RenderableType:
    table = columns("protocol", "ranks", "batch of a rank", "computes", "communicates", "exposed", "step", "share")
    for one in found:
        seconds = (one.compute, one.communication, one.exposed, one.step)
        table.add_row(str(one.network), str(one.ranks), str(one.batch), *map(show_seconds, seconds),
                      f"{one.share:.2f}")
    return table


def _data(model: str, one: "Traced", overlap: bool, found: "tuple[Share, ...]") -> dict[str, Any]:
    rows = [{"protocol": cell.network.protocol, "link": cell.network.link or None, "ranks": cell.ranks,
             "rank_batch": cell.batch, "compute_seconds": cell.compute, "communication_seconds": cell.communication,
             "exposed_seconds": cell.exposed, "step_seconds": cell.step, "share": cell.share} for cell in found]
    return {"model": model, "parameters": one.parameters, "batch": one.batch, "overlap": overlap, "rows": rows}
