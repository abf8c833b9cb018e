"""The verb that shows what was understood of a cluster file: cluster."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from autoddl.cli.options import AsJson, ClusterPath
from autoddl.cli.output import show
from autoddl.cli.tables.assumption_rows import over_text
from autoddl.cli.tables.table_style import columns
from autoddl.cost_models import Cluster, Device, load_cluster, show_bytes, show_rate, show_seconds
from autoddl.cost_models.backends import EXECUTABLE
from autoddl.cost_models.machine import Switch
from autoddl.explain.assumptions import odd_values
from autoddl.explain.cluster_facts import GIGABYTE, LevelFacts, level_facts

__all__ = ["cluster_verb"]


def cluster_verb(cluster: ClusterPath, as_json: AsJson = False) -> None:
    """Show what was understood of a cluster file.

    Bandwidths are per port and direction; both directions work at once.
    """
    place = load_cluster(cluster)
    facts = level_facts(place)
    data = {"name": place.name, "ranks": place.size, "device": place.device.name, "backend": place.backend,
            "levels": [one.to_json() for one in facts], "unusual": list(odd_values(place))}
    show(Group(Text("\n".join(_picture(place, facts)), no_wrap=True), "", _rates(place, facts)), data, as_json)


def _picture(place: Cluster, facts: Sequence[LevelFacts]) -> list[str]:
    """The levels as a tree, the outermost first."""
    lines = [f"{place.name}: {place.size} rank{'s' * (place.size > 1)} over {place.backend}"]
    for depth, one in enumerate(reversed(facts)):
        branch = "   " * depth + "└─ "
        lines.append(f"{branch}{one.name} of {_count(one.size, one.child)}: {_links(one)}")
    devices = place.parts or ((place.device, place.size),)
    for device, ranks in devices:
        each = f"{ranks} x " if len(devices) > 1 else ""
        lines.append("   " * len(facts) + f"└─ rank: {each}{_device(device)}")
    lines += [f"not run: {over_text(place.backend)}"] * (place.backend not in EXECUTABLE)
    return [*lines, *(f"unusual: {text}" for text in odd_values(place))]


def _links(one: LevelFacts) -> str:
    """The ports of a level in words."""
    whose = "every rank has a port" if one.sharers == 1 else f"{one.sharers} ranks share a port"
    shared = f", {show_rate(one.rank)} a rank where all send" if one.sharers > 1 else ""
    unit = f", {show_rate(one.unit)} out of a {one.child} of {one.child_ranks} ranks" if one.child_ranks > 1 else ""
    thin = f", trunk {one.thinner:g} times thinner" if one.thinner > 1 else ""
    return (f"{whose} of {show_rate(one.port)} each way{shared}{unit}; {one.topology}{thin}, "
            f"{show_seconds(one.latency)} a message{_reduces(one.switch, one.no_room)}")


def _reduces(switch: Switch | None, no_room: str) -> str:
    """Says in words what the switches of a level reduce with."""
    if switch is None:
        return ""
    rate = f" at {show_rate(switch.rate)}" if isfinite(switch.rate) else " at line rate"
    room = f", with room for {show_bytes(switch.memory)}" if isfinite(switch.memory) else ""
    but = f"; but {no_room}" if no_room else ""
    return f"; its switches reduce{rate}, in blocks of {show_bytes(switch.block)}{room}{but}"


def _device(device: Device) -> str:
    peaks = ", ".join(f"{dtype} {show_rate(peak, 'FLOP')}" for dtype, peak in sorted(device.peaks, key=lambda p: -p[1]))
    return f"{device.name}, {show_bytes(device.memory)} of memory at {show_rate(device.bandwidth)}; {peaks}"


def _count(size: int, child: str) -> str:
    if size == 1:
        return f"1 {child}"
    return f"{size} {child}{'es' if child.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def _rates(place: Cluster, facts: Sequence[LevelFacts]) -> RenderableType:
    """Returns what an all-reduce of a gigabyte takes, by the ranks that take part."""
    table = columns("all-reduce of 1 GB over", "ranks", "seconds", "of the tensor", "by")
    for i, one in enumerate(facts):
        rows = [(f"all ranks of a {one.name}", place.units[i + 1], one.inside, one.by[1])]
        if i:
            rows.insert(0, (f"one rank of each {one.child}, {one.child_ranks} such groups at once", one.size,
                            one.across, one.by[0]))
        for words, ranks, seconds, by in rows:
            if seconds is not None:
                table.add_row(words, str(ranks), show_seconds(seconds), show_rate(GIGABYTE / seconds), by)
    return table
