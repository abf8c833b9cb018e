"""Compares two plans of one model: in which words and groups they differ, and what each group is worth.

A group is everything that differs in one block, with repeated blocks folded: how parameters are stored, how ops read
and write. On one mesh, its worth is how A's step changes with that group of B's choices and everything else as it was:

    worth(group) = cost_A(A's choice with the group's options taken from B) - cost_A(A's choice)

A negative worth is a saving. A group that cannot stand alone has none: its options meet A's in a forbidden combination,
or they are not open to A. On two meshes, or of two models, only the totals are comparable. Two models count as one if
their parameters and operators are equal. Their sizes may differ, because plans keep the graph of one microbatch.

Of plans with stages, those are compared that have the same ops in both, each like a plan of its own. Seconds of the
ranks that do most, with what they wait for other stages, add up to the step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Tensor, graph_from_text
from autoddl.core.hubs import HUB
from autoddl.core.names import fold_names
from autoddl.core.pipeline import Schedule, sizes_text
from autoddl.core.pipeline_schedules import schedule_title
from autoddl.core.plan import Plan
from autoddl.cost_models import show_bytes
from autoddl.explain.breakdown import block_of
from autoddl.explain.run_seconds import step_as_run
from autoddl.explain.staged_run import foreseen_stages, stage_beginnings
from autoddl.planner.batch_scaling import stretched
from autoddl.planner.pipelines.staged_steps import simulated
from autoddl.planner.question import Rebuilt, rebuild
from autoddl.pricing.space import Choice, Variable

__all__ = ["BlockDifference", "Difference", "difference"]


@dataclass(frozen=True, slots=True)
class BlockDifference:
    """The difference in one block, in words and in numbers.

    With B's choices in this block, A's step would take `seconds` more and need `nbytes` more; None where they cannot
    stand alone.
    """

    block: str
    words: tuple[str, ...]
    seconds: float | None
    nbytes: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two plans; `totals` are (part, A, B, unit) in seconds or bytes.

    Equal plans have no words, equal totals and no groups.
    """

    words: tuple[str, ...]
    totals: tuple[tuple[str, float, float, str], ...]
    groups: tuple[BlockDifference, ...]


def difference(a: Plan, b: Plan) -> Difference:
    """The difference of plans A and B; groups only where both are of one model on one mesh.

    Of plans with stages, groups are those of equal stages, and names begin with the stage.
    """
    parted, sized = _unlike(a, b)
    if a.pipeline is not None or b.pipeline is not None:
        said = (*_words(a, b), *parted, *sized)
        words, groups = _stages(a, b, said, alike=not parted)
        return Difference((*said, *words), tuple(_totals(a, b)), groups)
    alike = a.mesh == b.mesh and not parted and a.source and b.source
    return Difference((*_words(a, b), *parted, *sized), tuple(_totals(a, b)), _groups(a, b) if alike else ())


def _stages(a: Plan, b: Plan, said: tuple[str, ...], alike: bool
            ) -> tuple[tuple[str, ...], tuple[BlockDifference, ...]]:
    """(texts, groups) of the stages of both plans: where they begin, and how equal ones differ, but for what is said.

    Of two models, which are not alike, no stages are equal.
    """
    if a.pipeline is None or b.pipeline is None:
        return tuple(f"stages: {name} has {len(plan.pipeline.stages)}, the other none; only totals are compared"
                     for name, plan in (("the first", a), ("the second", b)) if plan.pipeline is not None), ()
    words: list[str] = []
    groups: list[BlockDifference] = []
    for what, mine, yours in (("stages", len(a.pipeline.stages), len(b.pipeline.stages)),
                              ("ranks of stages", sizes_text(a.pipeline.sizes), sizes_text(b.pipeline.sizes)),
                              ("schedule", *_schedules(a.pipeline.name, b.pipeline.name)),
                              ("cuts", *(", ".join(stage_beginnings(plan)[1:]) for plan in (a, b)))):
        if mine != yours:
            words.append(_both(what, mine, yours))
    theirs = {stage.ops: stage.plan for stage in b.pipeline.stages if alike}
    for k, stage in enumerate(a.pipeline.stages):
        if stage.ops in theirs:
            found = difference(stage.plan, theirs[stage.ops])
            words += [f"stage {k} of the first: {text}" for text in found.words if text not in said]
            groups += [replace(group, block=f"stage {k} of the first: {group.block}") for group in found.groups]
    return tuple(words), tuple(groups)


def _schedules(mine: str, yours: str) -> tuple[str, str]:
    """Both schedules as people read them; in full where both are written and other ones."""
    titles = schedule_title(mine), schedule_title(yours)
    return titles if titles[0] != titles[1] else (mine, yours)


def _unlike(a: Plan, b: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(texts that tell the models apart, texts of the sizes in which one model differs)."""
    same = a.fingerprints.get("model") == b.fingerprints.get("model")
    if same and a.microbatches == b.microbatches:
        return (), ()
    if "graph" not in a.source or "graph" not in b.source:
        return () if same else ("the models differ in structure, shapes or names of parameters",), ()
    x, y = (graph_from_text(plan.source["graph"]) for plan in (a, b))
    sized = _texts("inputs", _inputs(x, a.microbatches), _inputs(y, b.microbatches))
    if same:
        return (), sized
    parted = (*_texts("parameters", _parameters(x), _parameters(y)), *_texts("operators", _operators(x), _operators(y)))
    stretches = stretched(x, a.microbatches, y, b.microbatches, a.microbatches) is not None
    if not parted and not sized and not stretches:
        sized = _texts("arguments", _arguments(x), _arguments(y))
    return parted, sized


def _inputs(graph: Graph, microbatches: int) -> dict[str, str]:
    """The inputs of a step by name: all rows of the batch."""
    return {t.fqn: f"{t.dtype}{[n * (1 if d else microbatches) for d, n in enumerate(t.shape)]}"
            for t in graph.tensors if t.kind is Kind.INPUT}


def _parameters(graph: Graph) -> dict[str, str]:
    return {t.fqn: f"{t.dtype}{list(t.shape)}{'' if t.trained else ', not trained'}"
            for t in graph.tensors if t.kind is Kind.PARAMETER}


def _operators(graph: Graph) -> dict[str, str]:
    """By name of an op, its operator and the names of the tensors that it reads."""
    names = [t.name for t in graph.tensors]
    return {op.name: f"{op.target} of {', '.join(names[t] for t in op.inputs) or 'nothing'}" for op in graph.ops}


def _arguments(graph: Graph) -> dict[str, str]:
    return {op.name: ", ".join(f"{name}={value}" for name, value in op.args) for op in graph.ops}


def _texts(what: str, mine: Mapping[str, str], yours: Mapping[str, str]) -> tuple[str, ...]:
    """A text of the first name with different values in A and B, and how many more there are; empty if none."""
    names = [name for name in dict.fromkeys((*mine, *yours)) if mine.get(name) != yours.get(name)]
    if not names:
        return ()
    a, b = (texts.get(names[0], "none") for texts in (mine, yours))
    more = f"; {len(names) - 1} more differ" if len(names) > 1 else ""
    return (f"{what}: {names[0]} is {a} in the first, {b} in the second{more}",)


def _words(a: Plan, b: Plan) -> Iterator[str]:
    """Yields texts of what differs once per plan: model, cluster, mesh, options."""
    pins = ["; ".join(plan.source.get("pins", ())) or "none" for plan in (a, b)]
    for what, mine, yours in (("model", a.model, b.model), ("cluster", a.cluster, b.cluster), ("mesh", a.mesh, b.mesh),
                              ("microbatches", a.microbatches, b.microbatches),
                              ("optimizer", a.source.get("optimizer"), b.source.get("optimizer")), ("pins", *pins),
                              ("program", *(plan.source.get("software", "none named") for plan in (a, b)))):
        if mine != yours:
            yield _both(what, mine, yours)
    if a.cluster == b.cluster:
        yield from _clusters(a, b)
    for what, size, other in (("budget", a.budget, b.budget), ("bytes in a bucket", a.bucket_bytes, b.bucket_bytes)):
        if size != other:
            yield _both(what, *(f"{show_bytes(n)}{' a rank' * (what == 'budget')}" for n in (size, other)))
    steps = [sum(map(len, ((*c.forward, *c.backward) for c in plan.conversions))) for plan in (a, b)]
    if a.conversions != b.conversions and a.pipeline is None and b.pipeline is None:
        yield _both("conversions", *(f"{count:,} steps on {len(plan.conversions):,} edges"
                                     for count, plan in zip(steps, (a, b), strict=True)))


def _both(what: str, mine: object, yours: object) -> str:
    """A text of what both plans have."""
    return f"{what}: {mine} in the first, {yours} in the second"


def _clusters(a: Plan, b: Plan) -> Iterator[str]:
    """Yields a text of how clusters of one name differ, as far as the plans keep them."""
    if "cluster" not in a.source or "cluster" not in b.source:
        prints = [plan.fingerprints.get("cluster") for plan in (a, b)]
        if all(prints) and prints[0] != prints[1]:
            yield f"cluster: the plans were made for different ones, both of the name {a.cluster}"
        return
    mine, yours = (plan.source["cluster"].splitlines() for plan in (a, b))
    lines = [(x.strip(" -"), y.strip(" -")) for x, y in zip_longest(mine, yours, fillvalue="nothing") if x != y]
    if lines:
        more = f"; {len(lines) - 1} more differ" if len(lines) > 1 else ""
        yield _both(f"cluster {a.cluster}", *lines[0]) + more


def _totals(a: Plan, b: Plan) -> Iterator[tuple[str, float, float, str]]:
    """Yields (part, A, B, unit) for the seconds and bytes of both plans; first the steps as their programs run them."""
    ran = [step_as_run(plan) for plan in (a, b)]
    if ran[0] is not None and ran[1] is not None:
        yield "step as run", ran[0].seconds, ran[1].seconds, "s"
    yield "step", a.predicted.seconds, b.predicted.seconds, "s"
    yield "compute", a.predicted.compute, b.predicted.compute, "s"
    yield "update", a.predicted.update, b.predicted.update, "s"
    for what, x, y, unit in (("communication", a.predicted.communication, b.predicted.communication, "s"),
                             ("stages:", _waiting(a), _waiting(b), "s"),
                             ("bytes of", a.predicted.nbytes, b.predicted.nbytes, "B")):
        for part in dict.fromkeys((*x, *y)):
            yield f"{what} {part}", x.get(part, 0.0), y.get(part, 0.0), unit


def _waiting(plan: Plan) -> dict[str, float]:
    """The rest of a step with stages, on the ranks that do most: seconds by name, less than 0 of what runs beside.

    Messages are what the step takes longer by them. Without them, ranks still wait for others: the bubbles.
    """
    if plan.pipeline is None or not {"graph", "cluster"} <= plan.source.keys():
        return {}
    predicted, step = plan.predicted, foreseen_stages(plan)
    free = simulated(Schedule.parse(plan.pipeline.schedule), step.stages, [0.0] * len(step.transfers)).makespan
    rest = free - predicted.compute - predicted.update - sum(predicted.communication.values())
    return {"bubbles": max(rest, 0.0), "messages": predicted.seconds - free} | (
        {"collectives that run beside": rest} if rest < 0 else {})


def _groups(a: Plan, b: Plan) -> tuple[BlockDifference, ...]:
    """The blocks in which the plans choose differently, the one that is worth most first."""
    mine, yours = rebuild(a), rebuild(b)
    chosen = {_key(v): v.choices[k] for v, k in zip(yours.variables, yours.choice, strict=True)}
    if set(chosen) != set(map(_key, mine.variables)):
        raise InputError("the plans are of one model but name its ops differently: make both again with this AutoDDL")
    theirs = [chosen[_key(v)] for v in mine.variables]
    differing = [i for i, v in enumerate(mine.variables) if v.choices[mine.choice[i]] != theirs[i]]
    blocks: dict[str, list[int]] = {}
    for i in differing:
        blocks.setdefault(block_of(mine.variables[i].item), []).append(i)
    found = []
    for name, members in fold_names(blocks).items():
        changed = [i for block in members for i in blocks[block]]
        options = {i: _position(mine, i, theirs[i]) for i in changed}
        found.append(BlockDifference(name, _said(mine, changed, theirs), *_worth(mine, options)))
    return tuple(sorted(found, key=lambda g: (g.seconds is None, -abs(g.seconds or 0.0), g.block)))


def _key(variable: Variable) -> tuple[bool, str]:
    """A key of a variable in both plans; a parameter may have the name of an op."""
    return isinstance(variable.item, Tensor), variable.name


def _position(made: Rebuilt, i: int, choice: Choice) -> int | None:
    choices = made.variables[i].choices
    return choices.index(choice) if choice in choices else None


def _worth(made: Rebuilt, options: dict[int, int | None]) -> tuple[float | None, float | None]:
    """Seconds and bytes that A's plan gains with `options` in place of its own."""
    if any(k is None for k in options.values()):
        return None, None
    changed = [options.get(i, k) for i, k in enumerate(made.choice)]
    choice = tuple(k for k in changed if k is not None)
    seconds = made.problem.cost(choice)
    if math.isinf(seconds):
        return None, None
    return seconds - made.problem.cost(made.choice), made.problem.nbytes(choice) - made.problem.nbytes(made.choice)


def _said(made: Rebuilt, changed: list[int], theirs: Sequence[Choice]) -> tuple[str, ...]:
    """One sentence for each kind of difference in a block: parameters by name, ops by what they are."""
    said: dict[str, list[str]] = {}
    for i in changed:
        item, own = made.variables[i].item, made.variables[i].choices[made.choice[i]]
        if isinstance(item, Tensor):
            said.setdefault(_both("{}", own, theirs[i]), []).append(item.fqn)
        else:
            target = item.target.removeprefix("aten.").removesuffix(".default")
            what = "a shared tensor" if item.target == HUB else target
            said.setdefault(_both(f"{{}} {what}", own, theirs[i]), []).append(item.module or item.name)
    return tuple(text.format(name) for text, names in said.items() for name in fold_names(dict.fromkeys(names)))
