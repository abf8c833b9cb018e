"""Answers as people read them."""

import math
from collections.abc import Sequence

from rich.console import Group as Lines
from rich.console import RenderableType

from autoddl.cli.tables.table_style import columns, grid
from autoddl.core.names import fold_names
from autoddl.core.plan import Plan
from autoddl.cost_models.units import show_bytes, show_seconds
from autoddl.explain.diff import BlockDifference, Difference
from autoddl.explain.explain import Explained, Named, Other, PinPrice, Proved
from autoddl.explain.pareto import DevicePoint, PointOfBytes
from autoddl.explain.relax import Relaxation

__all__ = ["bytes_table", "devices_table", "difference_table", "difference_words", "explained_table",
           "pins_table", "proof_table", "relaxation_table", "stages_table"]


def explained_table(said: Explained) -> RenderableType:
    """Blocks, axes and operators without rules; or, where names were asked for, only these."""
    if said.named:
        return Lines(*(line for one in said.named for line in (*_named(one, said.seconds), "")))
    blocks = columns("block", "seconds", "share", "compute", "conversions", "bytes")
    for share in said.blocks:
        blocks.add_row(share.block, show_seconds(share.seconds), _part(share.seconds, said.seconds),
                       show_seconds(share.compute), show_seconds(share.conversions), show_bytes(share.nbytes))
    axes = columns("axis", "seconds", "share", "sent")
    for name, seconds, sent in said.axes:
        axes.add_row(name, show_seconds(seconds), _part(seconds, said.seconds), show_bytes(sent))
    added = (f"{show_seconds(said.added)}, {_part(said.added, said.seconds)} of the step, to add gradients of "
             "microbatches up", "") if said.added else ()
    where, most = said.moment
    peak = (f"{show_bytes(said.nbytes)} at the peak of {show_bytes(said.budget)} a rank; blocks' bytes are those at "
            f"`{where}`, {show_bytes(most)}")
    over: RenderableType = axes if said.axes else "nothing is sent"
    return Lines(blocks, "", over, *said.switches, "", *added, peak, "", _unruled(said), *_tried(said))


def stages_table(said: Sequence[tuple[int, Explained]]) -> RenderableType:
    """What was asked for by name, in every stage that has it; seconds are those of the stage's own work in a step."""
    return Lines(*(line for k, one in said for line in (
        f"stage {k}, whose own work takes {show_seconds(one.seconds)} a step", explained_table(one))))


def _unruled(said: Explained) -> RenderableType:
    if not said.unruled:
        return "every operator has a rule"
    reasons = dict(said.untried)
    table = columns("replicated for want of a rule", "seconds", "share", *(["tried on pieces"] * bool(reasons)))
    for target, seconds in said.unruled:
        reason = [reasons.get(target, "")] * bool(reasons)
        table.add_row(target, show_seconds(seconds), _part(seconds, said.seconds), *reason)
    return table


def _tried(said: Explained) -> list[RenderableType]:
    """The rules that were found by trying."""
    if not said.tried:
        return []
    table = columns("found by trying", "dims that may be split")
    for target, text in said.tried:
        table.add_row(target, text)
    return ["", table]


def _named(one: Named, seconds: float) -> list[RenderableType]:
    """One parameter or op: its choice, then the others by what the whole plan would cost with them."""
    table = columns("  choice", "best plan with it", "more")
    possible = [other for other in one.others if other.seconds is None or math.isfinite(other.seconds)]
    exact = [other for other in possible if other.seconds is not None]
    for other in exact:
        chosen = other.layouts == one.chosen
        table.add_row(("* " if chosen else "  ") + other.layouts, show_seconds(other.seconds or 0.0),
                      _more(other, seconds, "as planned" if chosen else "as fast"))
    rest = possible[len(exact):]
    if rest:
        table.add_row(_others(len(rest)), f"at least {show_seconds(min(other.bound for other in rest))}", "")
    never = len(one.others) - len(possible)
    if never:
        table.add_row(_others(never), "no plan fits", "")
    names = dict.fromkeys(name.partition(" (")[0] for name in one.alike)
    alike = f"; alike: {', '.join(fold_names(names))}" if names else ""
    return [f"{one.name}  {one.target}{alike}", table]


def _others(count: int) -> str:
    return f"  {count} other{'s' * (count > 1)}"


def _more(other: Other, seconds: float, equal: str) -> str:
    more = (other.seconds or 0.0) - seconds
    if abs(more) < 5e-5 * seconds:
        return equal if abs(more) <= 1e-9 * seconds else "less than 0.01%"
    return f"{more / seconds:+.2%}"


def proof_table(checked: Proved) -> RenderableType:
    """Returns the checked bound of a plan: its cost, its gap, and the inequalities that prove it."""
    table = grid()
    table.add_row("bound", f"no plan on {_on(checked.meshes)} takes less than {show_seconds(checked.bound)}, "
                           "under the model")
    table.add_row("cost", f"this one takes {show_seconds(checked.seconds)}")
    table.add_row("gap", f"{checked.gap:.4%}; the plan's own bound, over all its meshes, is "
                         f"{show_seconds(checked.claimed)}")
    table.add_row("checked", f"{checked.inequalities:,} inequalities, {checked.distinct:,} of them distinct")
    priced = sorted({f"{lam:.3g}" for lam in checked.multipliers if lam}, key=float)
    if priced:
        table.add_row("memory", f"{len(checked.multipliers)} pieces, a byte at "
                                f"{' to '.join(dict.fromkeys((priced[0], priced[-1])))} s")
    return table


def _on(meshes: tuple[str, ...]) -> str:
    if len(meshes) == 1:
        return f"mesh '{meshes[0]}'"
    kinds = (("microbatch", "numbers of microbatches"), ("recompute", "policies of recomputation"))
    others = [name for word, name in kinds if any(word in mesh for mesh in meshes)]
    return f"any of {len(meshes)} {' and '.join(['meshes', *others])}"


def pins_table(plan: Plan, rows: Sequence[PinPrice]) -> RenderableType:
    """Returns a row per pin: the seconds of the best plan without it, and the price of the pin."""
    if not rows:
        return "this plan has no pins"
    table = columns("without", "seconds", "the pin costs", "mesh")
    for row in rows:
        table.add_row(row.pin, show_seconds(row.seconds),
                      f"{show_seconds(row.price)} ({_part(row.price, plan.predicted.seconds)})", row.mesh)
    return table


def bytes_table(plan: Plan, points: Sequence[PointOfBytes]) -> RenderableType:
    """Returns a row per memory budget: the seconds of the best plan and its bound."""
    table = columns("bytes a rank", "seconds", "no less than", "")
    for point in points:
        here = abs(point.seconds - plan.predicted.seconds) <= 1e-9 * point.seconds
        table.add_row(show_bytes(point.nbytes), show_seconds(point.seconds),
                      "" if point.bound is None else show_seconds(point.bound), "this plan" if here else "")
    return table


def devices_table(points: Sequence[DevicePoint]) -> RenderableType:
    """Returns a row per number of devices: seconds, memory and mesh of the best plan, or the reason for none."""
    table = columns("devices", "seconds", "memory", "mesh", "device-seconds")
    for point in points:
        if point.seconds is None:
            table.add_row(str(point.devices), "-", f"needs {show_bytes(point.nbytes)}" if point.nbytes else "-",
                          point.detail, "-")
        else:
            table.add_row(str(point.devices), show_seconds(point.seconds), show_bytes(point.nbytes), point.mesh,
                          show_seconds(point.seconds * point.devices))
    return table


def relaxation_table(rows: Sequence[Relaxation]) -> RenderableType:
    """Returns a row per change of the question under which a plan would fit."""
    table = columns("it would fit with", "seconds", "memory", "")
    for row in rows:
        seconds = "-" if row.seconds is None else show_seconds(row.seconds)
        table.add_row(row.what, seconds, show_bytes(row.nbytes) if row.nbytes else "-", row.detail)
    return table


def difference_table(found: Difference) -> RenderableType:
    """Returns the totals of two plans side by side, and the groups of decisions in which they differ."""
    totals = columns("part", "first", "second")
    for part, a, b, unit in found.totals:
        show = show_seconds if unit == "s" else show_bytes
        totals.add_row(part, show(a), show(b))
    words, *groups = difference_words(found)
    return Lines(words, "", totals, *groups)


def difference_words(found: Difference) -> list[RenderableType]:
    """The words on how two plans differ, then each group of decisions with its worth."""
    same = not found.words and not found.groups
    return ["the plans decide alike" if same else "\n".join(found.words),
            *(line for group in found.groups for line in _group(group))]


def _group(group: BlockDifference) -> list[RenderableType]:
    if group.seconds is None or group.nbytes is None:
        worth = "cannot stand alone in the first plan"
    else:
        sign = "saves" if group.seconds < 0 else "costs"
        worth = (f"in the first plan {sign} {show_seconds(abs(group.seconds))} and "
                 f"{'frees' if group.nbytes < 0 else 'takes'} {show_bytes(abs(group.nbytes))}")
    return ["", f"{group.block}: {worth}", *(f"  {text}" for text in group.words)]


def _part(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else ""
