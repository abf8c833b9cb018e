"""Asks a plan's question again under a changed cluster, and what one per cent of each resource is worth.

    what_if         the whole search, as `plan` makes it, on the changed cluster; both plans side by side
    sensitivities   seconds that a step saves if one resource is one per cent better, all else as it is:

        links, device speed    re-priced: the plan's layouts on the better cluster. A search could only save more
        memory                 re-planned, where the plan's bound was proved under a budget, or the plan has stages;
                               else nothing: the bound holds for any memory

A plan made by `plan` has all devices in its mesh, and some may repeat the work of others. Where a level's size
changes, smaller clusters are searched too: the divisors of the new size, and the size before. So more devices never
give a slower plan. Of equally fast plans the one of fewest devices is taken. A smaller cluster is passed over where all
work split evenly takes longer than the best plan (`floor_seconds`).

The budget follows the memory of the device where it is equal to it, and stays as it is where it is not.

A plan of a program, or with a profile, is planned again with these. What is changed is the cluster of its file; where a
program is named, steps are compared as it runs them (`run_seconds`). A profile of other devices says nothing of a new
one, and that is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, show_bytes, show_rate, show_seconds
from autoddl.explain.assumptions import idle_axes
from autoddl.explain.changed_cluster import Change, changed_cluster, times
from autoddl.explain.diff import Difference, difference
from autoddl.explain.pareto import level_of_size
from autoddl.explain.run_seconds import (
    StepAsRun,
    bare_cluster,
    program_of,
    seconds_as_run,
    step_as_run,
    step_seconds,
    told_like,
    with_program,
)
from autoddl.planner.finish import answer_plan, on_cluster
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pipelines.staged_steps import staged_step
from autoddl.planner.question import Question, repriced, space_of_plan, whole_question_of
from autoddl.pricing.floors import floor_seconds

__all__ = ["Sensitivity", "WhatIf", "sensitivities", "what_if"]

BETTER = 1.01
"""One per cent."""

SAME = 1 + 1e-9
"""Plans whose seconds differ by less are equally fast."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A plan, and the best plan of the same question under a changed cluster."""

    before: Plan
    """The plan as it was."""
    after: Plan
    """The best plan now."""
    changes: tuple[Change, ...]
    """What was changed."""
    devices: int
    """The number of devices of the changed cluster; the plan may use fewer."""
    notes: tuple[str, ...]
    """What the reader should know of the comparison."""
    difference: Difference
    """What differs between the plans."""
    ran: tuple[StepAsRun, StepAsRun] | None = None
    """Both steps as the plan's program runs them; None where no program was named."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The worth of one per cent of a resource: `seconds` of a step, positive where a step gets shorter."""

    resource: str
    """The resource, like `net bandwidth`."""
    value: str
    """What there is of it, as text."""
    seconds: float
    """Seconds that a step of the plan saves."""
    how: str
    """How it was found: `re-priced`, `re-planned` or `not binding`."""


def what_if(plan: Plan, changes: Sequence[str], progress: Progress | None = None) -> WhatIf:
    """The best plan of the question of `plan` under `changes`, like `net.bandwidth=2x` or `budget='40 GB'`.

    Raises InputError for a change that cannot be made, or a device that the plan's profile says nothing of. So it does
    for a plan that does not keep its question. Raises Infeasible where no plan fits.
    """
    if not changes:
        raise InputError("nothing changes: say what, like --set net.bandwidth=2x, or ask for --sensitivity")
    if plan.pipeline is not None and plan.source.get("mine"):
        raise InputError(f"this pipeline is that of your degrees '{plan.source['mine']}', and no other was weighed: "
                         "plan with --mine on the changed cluster, or ask for a plan with --stages")
    asked, bare = whole_question_of(plan), bare_cluster(plan)
    budgets = [text for text in changes if text.partition("=")[0].strip() == "budget"]
    place, made = changed_cluster(bare, [text for text in changes if text not in budgets])
    try:
        changed = with_program(plan, place)
    except InputError as error:
        raise InputError(f"{' '.join(changes)}: {error}") from None
    found, notes = _asked_on(plan, asked, changed)
    for text in budgets:
        found, more = _with_budget(found, text)
        made = (*made, more)
    after = _best(plan, found, place, bare, progress)
    if after.mesh.size < place.size:
        notes.append(f"the fastest plan uses {after.mesh.size} of {place.size} devices: none with more is faster")
    if idle := idle_axes(after):
        notes.append(f"the ranks along {' and '.join(idle)} repeat the same work: fewer devices would be as fast")
    first, second = step_as_run(plan), step_as_run(after)
    return WhatIf(plan, after, made, place.size, tuple(notes), difference(plan, after),
                  None if first is None or second is None else (first, second))


def _asked_on(plan: Plan, asked: Question, place: Cluster) -> tuple[Question, list[str]]:
    """The question on the changed cluster, and notes on what else changes with it, or does not."""
    notes = []
    if plan.predicted.line_seconds is not None:
        here = "the new one by its sum" if program_of(plan) else "here both plans are compared by their sums"
        notes.append(f"the plan was chosen by its time line; {here} of seconds")
    follows = plan.budget == asked.cluster.device.memory
    if not follows and place.device.memory != asked.cluster.device.memory:
        notes.append(f"the plan's budget of {show_bytes(plan.budget)} a rank was given, and stays: "
                     "--set budget='80 GB' changes it")
    sizes = [[level.size for level in one.levels] for one in (asked.cluster, place)]
    mesh = asked.options.mesh
    if mesh is not None and sizes[0] != sizes[1]:
        notes.append(f"the plan was asked for on mesh '{mesh}', which has another size: all meshes are searched")
        mesh = None
    return replace(asked.asking(mesh=mesh, budget=None if follows else plan.budget), cluster=place), notes


def _with_budget(asked: Question, text: str) -> tuple[Question, Change]:
    """The question under another budget."""
    value, before = text.partition("=")[2].strip(), asked.options.limit(asked.cluster)
    try:
        factor = times(value)
        given: float | str = value if factor is None else factor * before
        found = asked.asking(budget=given)
    except InputError as error:
        raise InputError(f"{text}: {error}") from None
    return found, Change("budget", show_bytes(before), show_bytes(found.options.limit(asked.cluster)))


def _best(plan: Plan, asked: Question, place: Cluster, before: Cluster, progress: Progress | None) -> Plan:
    """The fastest plan on a cluster, or on a part of it where its sizes are not those of `before`.

    Both are without the plan's program and constants, with which it is planned."""
    best: Plan | None = None
    problem: AutoDDLError | None = None
    graph = add_hubs(asked.graph)
    for bare in _parts(place, before):
        part = with_program(plan, bare)
        floor = floor_seconds(graph, part) * asked.microbatches
        if best is not None and floor > best.predicted.seconds * SAME:
            break  # those that follow have fewer devices
        try:
            found = told_like(plan, answer_plan(replace(asked, cluster=part), plan, progress), bare)
        except Infeasible as error:
            problem = problem or error
            continue
        except InputError:
            if part == asked.cluster:
                raise
            continue  # stages are no equal parts of this smaller one
        if best is None or found.predicted.seconds <= best.predicted.seconds * SAME:
            best = found
    if best is None:
        raise problem or InputError("no part of this cluster has a plan")
    return best


def _parts(place: Cluster, before: Cluster) -> Iterator[Cluster]:
    """Yields the cluster, then the smaller ones to try, those with many devices first; only where a size changed."""
    yield place
    olds = [level.size for level in before.levels]
    if olds == [level.size for level in place.levels]:
        return
    choices = [sorted({n for n in range(1, level.size + 1) if level.size % n == 0} | {min(old, level.size)})
               for level, old in zip(place.levels, olds, strict=True)]
    smaller = []
    for sizes in product(*choices):
        try:
            levels = tuple(level_of_size(level, n) for level, n in zip(place.levels, sizes, strict=True))
        except InputError:  # a torus of another size is no part of this one
            continue
        if levels != place.levels:
            smaller.append(replace(place, levels=levels))
    yield from sorted(smaller, key=lambda one: -one.size)


def sensitivities(plan: Plan, progress: Progress | None = None, searching: bool = True) -> tuple[Sensitivity, ...]:
    """The worth of one per cent of each resource, the most first; a latency is one per cent shorter.

    Where a program is named, the step is that which it runs.
    Without `searching` the worth of memory is left out where it takes a search.
    Raises InputError for a plan that does not keep its question.
    """
    place, tell = whole_question_of(plan).cluster, progress or (lambda what, done, total: None)
    asked, step = [*_resources(place)], step_seconds(plan)
    found = []
    for i, (resource, change, value) in enumerate(asked):
        tell(f"pricing {resource}", i, len(asked) + 1)
        saved = step - _again(plan, changed_cluster(place, [change])[0])
        saved = 0.0 if abs(saved) < (SAME - 1) * step else saved
        found.append(Sensitivity(resource, value, saved, "re-priced"))
    tell("planning with more memory", len(asked), len(asked) + 1)
    if searching or _is_free(plan):
        found.append(_memory(plan, progress))
    return tuple(sorted(found, key=lambda row: -row.seconds))


def _again(plan: Plan, place: Cluster) -> float:
    """Seconds of the plan on another cluster; one with stages keeps its conversions too."""
    software = program_of(plan)
    if software is not None:
        here = on_cluster(plan, *space_of_plan(plan, place), place) if plan.pipeline is None else plan
        return seconds_as_run(here, software, place)
    if plan.pipeline is None:
        return repriced(plan, place)
    return staged_step(plan, graph_from_text(plan.source["graph"]), place).timeline.makespan


def _is_free(plan: Plan) -> bool:
    """Whether the plan's bound holds for any memory."""
    return plan.pipeline is None and not plan.source["row"]


def _resources(place: Cluster) -> Iterator[tuple[str, str, str]]:
    """Yields (resource, change that makes it one per cent better, value) of the links and of the device's speed."""
    for level in place.levels:
        if level.size > 1:
            yield f"{level.name} bandwidth", f"{level.name}.bandwidth={BETTER}x", show_rate(level.bandwidth)
            if level.latency:
                yield f"{level.name} latency", f"{level.name}.latency={1 / BETTER!r}x", show_seconds(level.latency)
    device = place.device
    yield "device speed", f"device.speed={BETTER}x", device.name
    if not device.curves:
        yield "device peak", f"device.peak={BETTER}x", f"{show_rate(max(p for _, p in device.peaks), 'FLOP')} at most"
        yield "device memory bandwidth", f"device.bandwidth={BETTER}x", show_rate(device.bandwidth)


def _memory(plan: Plan, progress: Progress | None) -> Sensitivity:
    """One per cent more bytes in the budget of a rank."""
    value = f"{show_bytes(plan.budget)} a rank"
    if _is_free(plan):
        return Sensitivity("memory", value, 0.0, "not binding")
    more = answer_plan(whole_question_of(plan).asking(budget=BETTER * plan.budget), plan, progress)
    saved = step_seconds(plan) - step_seconds(told_like(plan, more, None))
    return Sensitivity("memory", value, max(0.0, saved), "re-planned")
