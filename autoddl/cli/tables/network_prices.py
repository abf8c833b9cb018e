"""Prints what networks for a cluster cost, and what they reach: `autoddl network CLUSTER --cost`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Group, RenderableType

from autoddl.cli.tables.table_style import columns
from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, show_seconds
from autoddl.cost_models.network_prices import NETWORKS, PRICES, Bill, Prices, bill, ports_of, prices_of, shares

if TYPE_CHECKING:
    from autoddl.explain.network_choice import NetworkChoice

__all__ = ["choices_data", "choices_table", "networks_data", "networks_table", "read_prices"]


def read_prices(path: Path | None) -> Prices:
    """The prices of a YAML file, or those of 2022."""
    if path is None:
        return PRICES
    try:
        return prices_of(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise InputError(f"the table of prices {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no table of prices: {str(error).splitlines()[0]}") from None


def _rows(cluster: Cluster, prices: Prices) -> list[dict[str, Any]]:
    ports, links = ports_of(cluster)
    rows = []
    for name in NETWORKS:
        found, reached = bill(name, ports, links, prices), shares(name, ports)
        row: dict[str, Any] = {"network": name}
        if isinstance(found, Bill):
            total = found.dollars(prices)
            row |= {"planes": found.planes, "switches": found.planes * found.switches,
                    "copper_cables": found.planes * found.copper, "optical_cables": found.planes * found.optical,
                    "dollars": total, "dollars_per_device": total / cluster.size}
        else:
            row["not_built"] = found
        rows.append(row | {"all_reduce_share": reached and reached[0], "all_to_all_share": reached and reached[1]})
    return rows


def networks_data(cluster: Cluster, prices: Prices) -> dict[str, Any]:
    """The table as JSON."""
    ports, links = ports_of(cluster)
    return {"ports": ports, "links_per_port": links, "devices": cluster.size, "rows": _rows(cluster, prices)}


def networks_table(cluster: Cluster, prices: Prices) -> RenderableType:
    """The table, with what it assumes in front."""
    ports, links = ports_of(cluster)
    table = columns("network", "planes", "switches", "copper", "optical", "dollars", "per device", "all-reduce",
                    "all-to-all")
    for row in _rows(cluster, prices):
        if "not_built" in row:
            table.add_row(row["network"], f"not built: {row['not_built']}")
            continue
        reached = [f"{100 * row[key]:.1f} %" if row[key] else "-" for key in ("all_reduce_share", "all_to_all_share")]
        table.add_row(row["network"], *(f"{row[key]:,}" for key in ("planes", "switches", "copper_cables",
                                                                   "optical_cables")),
                      f"{row['dollars'] / 1e6:,.2f} M", f"{row['dollars_per_device']:,.0f}", *reached)
    what = (f"{ports} ports of {links} x 400 Gb/s join {cluster.size} devices. Switches of {prices.ports} ports at "
            f"${prices.switch:,.0f}, copper cables ${prices.copper:,.0f}, optical ${prices.optical:,.0f}.")
    if links < 4:
        what += " Networks on boards have 4 links a device."
    said = "All-reduce and all-to-all: the part of a port's bandwidth that all ports together reach."
    return Group(what, said, table)


def choices_table(choices: "tuple[NetworkChoice, ...]", best: "NetworkChoice | None", software: str | None
                  ) -> RenderableType:
    """Tables what a step takes on every network, and the cheapest within the deadline, if one is asked for."""
    table = columns("network", "dollars", f"best plan, as run by {software}" if software else "best plan", "")
    for one in choices:
        table.add_row(one.name, f"{one.dollars / 1e6:,.2f} M", show_seconds(one.seconds) if one.seconds else "-",
                      one.why or ("<- the cheapest within the deadline" if one is best else ""))
    return table


def choices_data(choices: "tuple[NetworkChoice, ...]", best: "NetworkChoice | None") -> dict[str, Any]:
    """Gives the same as JSON."""
    rows = [{"network": one.name, "dollars": one.dollars, "seconds": one.seconds, "why": one.why or None}
            for one in choices]
    return {"rows": rows, "cheapest": best.name if best else None}
