"""Checks the bound of a plan with stages from what its file says, by code that shares nothing with the search.

The file keeps a proof for every candidate of stages, schedule and microbatches. That is the least seconds of stages
that were known, and a tree of boxes over the cuts (`core.pipeline_cuts`). It is checked that there is one for every
candidate that the file says was asked for. Of each it is checked that

    paths     are paths of the schedule's task graph, so that no pipeline is quicker (`search.certify.pipeline_paths`)
    windows   hold every cut: any places of boundaries are in one of them
    boxes     hold every cut of a window, and none is below the bound (`search.certify.pipeline_cuts`)
    floors    forward and backward of every stage are no more than the work of its ops, split evenly over its devices
    messages  a transfer over a boundary is no more than that of what has to cross it, split evenly over a stage's ranks
    prices    pay for the plan's whole budget, where stages of a rank share it
    plan      the plan's own bound is no more than the least of all

Floors and messages are those of the model with a candidate's microbatches. Where the file does not keep that, they are
taken as the file states them.

What was proved of single stages above their floors is stated in the file. `explain --stage K --proof` proves it for the
stages of the plan. The file also says with which numbers of blocks a stage has no plan that fits. That is taken as
stated, but for the stages of the plan. So are candidates without any plan, and the bound of plans without stages, which
are told apart (`stated`). Plans of the stages of a cut are listed too, where they were few. Their
pipelines are run anew, but for those that paths rule out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from autoddl.core.codecs import codecs_of, part_in_flight
from autoddl.core.cost_table import Array
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Tensor
from autoddl.core.hubs import needed_ops
from autoddl.core.pipeline_cuts import CutProblem
from autoddl.core.pipeline_proofs import Window, proofs_from_json
from autoddl.core.pipeline_schedules import chunks_of, schedule_title
from autoddl.core.plan import Plan
from autoddl.core.split_backward import weights_of
from autoddl.core.stages import crossing
from autoddl.cost_models import Cluster, show_seconds
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.part_ranks import Ranks, candidates_asked, part_clusters, ranks_of_parts
from autoddl.planner.pipelines.staged_steps import transfer_seconds
from autoddl.planner.question import Question, split_by_microbatches, whole_question_of
from autoddl.pricing.floors import floor_sums
from autoddl.search.certify.pipeline_cuts import check_pipeline_bound

__all__ = ["ProvedPipeline", "check_pipeline", "not_weighed"]

SAME = 1e-9
"""Relative differences of sums in another order."""


@dataclass(frozen=True, slots=True)
class ProvedPipeline:
    """The result of checking the bound of a plan with stages.

        seconds      those of the plan
        bound        seconds that follow from the proofs
        claimed      the bound that the plan states, in seconds
        candidates   number of candidates with a proof
        paths        number of paths that were walked
        stated       what is taken as the file states it, in words
    """

    seconds: float
    bound: float
    claimed: float
    candidates: int
    paths: int
    stated: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The most by which a better plan could be faster, as a fraction of the plan's seconds."""
        return max(0.0, (self.seconds - self.bound) / self.seconds) if self.seconds else 0.0


def not_weighed(plan: Plan) -> str:
    """Says why a plan has no alternatives with stages."""
    found = "the stages of this plan were given, and no others were weighed" if plan.pipeline else \
        "this plan was searched without stages"
    return f"{found}: plan with --stages 1,2,4, for example"


def check_pipeline(plan: Plan) -> ProvedPipeline:
    """Checks the bound of a plan that was searched with stages. Raises AssertionError where it does not follow."""
    rows = plan.source.get("alternatives")
    if not rows or "graph" not in plan.source:
        raise InputError(not_weighed(plan))
    asked = whole_question_of(plan)
    _check_complete(asked, rows)
    graphs = {one.microbatches: one.graph for one in split_by_microbatches(asked)} | {plan.microbatches: asked.graph}
    bound, paths, cluster = plan.source.get("bound_without_stages") or inf, 0, asked.cluster
    for row in rows:
        if row["proof"] is None:
            bound = min(bound, inf if row["bound"] is None else 0.0)
            continue
        proofs = proofs_from_json(row["proof"])
        if not isinstance(row["bound"], int | float):
            raise InputError("a proof of the plan is of no bound: make the plan again")
        _check_windows([one.window for one in proofs], proofs[0].problem)
        marks, sizes, graph = row["proof"]["places"], tuple(row.get("sizes", ())), graphs.get(row["microbatches"])
        if graph is not None:
            _check_places(graph, marks, asked.options.cut)
            _check_transfers(graph, cluster, proofs[0].problem, marks, sizes, asked.options.compress)
        floors = _floors(graph, cluster, proofs[0].problem, marks, sizes) if graph is not None else []
        is_own = row["microbatches"] == plan.microbatches and _is_own(plan, row)
        for window, problem, proof in proofs:
            _check_floors(floors, problem, window)
            if is_own:
                _check_own(plan, problem, marks)
            assert all(one.budget >= plan.budget * (1 - SAME) for one in problem.priced), \
                f"a proof says that ranks have less memory than the plan's budget of {plan.budget} bytes"
            check_pipeline_bound(problem, proof, row["bound"])
            paths += len(proof.paths)
        bound = min(bound, row["bound"])
    assert plan.bound <= bound * (1 + SAME), f"the plan claims a bound of {plan.bound} s, its proofs give {bound} s"
    stated = tuple(_stated(plan, asked, rows, graphs))
    return ProvedPipeline(plan.predicted.seconds, min(bound, plan.predicted.seconds), plan.bound,
                          sum(row["proof"] is not None for row in rows), paths, stated)


def _check_complete(asked: Question, rows: Sequence[Mapping[str, Any]]) -> None:
    """Asserts that every candidate which was asked for has its row: none is left out of the bound."""
    there = {(row["stages"], tuple(row.get("sizes", ())), row["microbatches"], row["schedule"]) for row in rows}
    for d, sizes, m, name in candidates_asked(asked.cluster, asked.options):
        assert (d * chunks_of(name), sizes, m, name) in there, (
            f"the plan was asked to weigh {d} stages, schedule {schedule_title(name)} and {m} microbatches, and has no "
            "row of them")


def _stated(plan: Plan, asked: Question, rows: Sequence[Mapping[str, Any]], graphs: Mapping[int, Graph]
            ) -> Iterator[str]:
    """Yields in words what no proof of the file says, and is taken as stated."""
    if 1 in asked.options.stages:
        known = plan.source.get("bound_without_stages")
        yield f"plans without stages take {show_seconds(known)} or more" if known else "no plan without stages fits"
    for row in rows:
        name = f"{row['stages']} stages, schedule {schedule_title(row['schedule'])}, {row['microbatches']} microbatches"
        if row["proof"] is None and row["bound"] is None:
            yield f"{name}: no plan ({row['detail']})"
        elif row["proof"] is not None and row["microbatches"] not in graphs:
            yield f"{name}: what ops and messages take at least"


def _check_places(graph: Graph, marks: Sequence[int | None], cuts: Sequence[str]) -> None:
    """Asserts that stages may end at every place where the graph may be cut: no cut is left out."""
    places = [place for place in marks if place is not None]
    assert places == list(places_of(graph, cuts)), "a proof is of other places at which the graph may be cut"


def _check_windows(windows: Sequence[Window], problem: CutProblem) -> None:
    """Asserts that any places of the boundaries lie in a window: so all cuts do."""
    def uncovered(box: Window) -> Window | None:
        """A part of a box of places in no window, which the edges of windows divide no more; None where none is."""
        near = [one for one in windows if all(low <= most and least <= high for (low, high), (least, most) in zip(
            box, one, strict=False))]
        if any(all(least <= low and high <= most for (low, high), (least, most) in zip(box, one, strict=False))
               for one in near):
            return None
        for k, (low, high) in enumerate(box):
            for end in (end for one in near for end in (one[k][0] - 1, one[k][1]) if low <= end < high):
                halves = ((*box[:k], own, *box[k + 1:]) for own in ((low, end), (end + 1, high)))
                return next((found for half in halves if (found := uncovered(half)) is not None), None)
        return box

    boundaries = len(problem.transfers)
    left = uncovered(((0, problem.blocks),) * boundaries)
    assert left is None, f"no window of the proof has the cuts whose boundaries lie behind {left} blocks"


def _is_own(plan: Plan, row: Mapping[str, Any]) -> bool:
    """Whether a candidate has as many stages as the plan, its schedule, and parts of as many ranks."""
    if plan.pipeline is None:
        return False
    parts = [end - first for first, end in plan.pipeline.ranks]
    return (row["stages"], row["schedule"], [*row.get("sizes", ())] or parts[:1] * len(parts)) == (
        len(plan.pipeline.stages), plan.pipeline.name, parts)


def _check_own(plan: Plan, problem: CutProblem, marks: Sequence[int | None]) -> None:
    """Asserts that a problem whose windows hold the plan's own cut does not say that its stages are impossible."""
    assert plan.pipeline is not None
    ends = [*(marks.index(cut) + 1 for cut in plan.pipeline.cuts), problem.blocks]
    sizes = np.diff([0, *ends])
    if problem.allows(sizes.tolist()):
        is_there = np.isfinite(problem.seconds[np.arange(len(sizes)), sizes - 1]).all(axis=1)
        assert is_there.all(), f"a proof says that stages of {sizes.tolist()} blocks are impossible: the plan's own"


@dataclass(frozen=True, slots=True)
class _Floor:
    """The work of the ops of some stages with as many blocks.

        before    blocks before each
        seconds   [stage, term] of forward, backward and W, split evenly over the ranks of its part
    """

    before: Array
    seconds: Array


def _floors(graph: Graph, cluster: Cluster, problem: CutProblem, marks: Sequence[int | None], sizes: Sequence[int]
            ) -> list[dict[int, _Floor]]:
    """By stage and number of blocks, what its ops take wherever it may begin.

    `marks` are the positions behind 1, 2, .. blocks, None where no stage ends; `sizes` the ranks of every stage, none
    where all have as many.
    """
    stages, blocks = problem.seconds.shape[:2]
    alive = replace(graph, ops=needed_ops(graph), outputs=graph.outputs[:1])
    flows, parts = alive.differentiable(), part_clusters(cluster, len(problem.schedule.actions), sizes)
    splits = any(action.kind == "W" for action in problem.schedule)
    weights = weights_of(alive) if splits else frozenset[int]()
    real = {0: 0} | {n: place for n, place in enumerate(marks, start=1) if place is not None} | {blocks: len(alive.ops)}
    ends = sorted(real)
    every = {part: dict(zip(ends, map(np.array, floor_sums(alive, part, flows, weights, [real[n] for n in ends])),
                            strict=True)) for part in dict.fromkeys(parts)}
    found = []
    for s, at in enumerate(problem.schedule.placement[0]):
        sums, last = every[parts[at]], len(ends) - 1 - (stages - 1 - s)
        own = dict[int, list[tuple[int, Array]]]()
        for a in ends[:1] if s == 0 else ends[s:last]:
            for b in ends[-1:] if s == stages - 1 else ends[s + 1:last + 1]:
                own.setdefault(b - a, []).append((a, sums[b] - sums[a]))
        found.append({n: _Floor(np.array([a for a, _ in rows]), np.array([row for _, row in rows]))
                      for n, rows in own.items()})
    return found


def _check_floors(floors: Sequence[Mapping[int, _Floor]], problem: CutProblem, window: Window) -> None:
    """Asserts that no stage is said to need more seconds than its ops do at the least, wherever in a window it lies."""
    anywhere = (0, problem.blocks)
    sides = [anywhere, *(window or (anywhere,) * len(problem.transfers)), anywhere]
    for s, own in enumerate(floors):
        for n in range(1, problem.blocks + 1):
            claimed, one = problem.seconds[s, n - 1, :3], own.get(n)
            if one is None or not np.isfinite(claimed).all():
                continue
            (first, last), (least, most) = sides[s:s + 2]
            here = (one.before >= first) & (one.before <= last) & (one.before + n >= least) & (one.before + n <= most)
            floor = one.seconds[here].min(axis=0, initial=inf)
            assert (claimed <= floor * (1 + SAME) + 1e-15).all(), \
                f"stage {s} with {n} blocks is said to take {claimed.tolist()} s, its ops take {floor.tolist()} s"


def _check_transfers(graph: Graph, cluster: Cluster, problem: CutProblem, marks: Sequence[int | None],
                     sizes: Sequence[int], compress: Sequence[str]) -> None:
    """Asserts that no transfer over a boundary is said to take longer than it does at the least where it lies.

    `marks` are those of `_check_floors`. `compress` are the messages that may be coded.
    """
    places = [place for place in marks if place is not None]
    ops, at = needed_ops(graph), problem.schedule.placement[0]
    ranks = ranks_of_parts(cluster, len(problem.schedule.actions), sizes)
    ends, boundaries, crosses = (*places, len(ops)), len(problem.transfers), crossing(graph)
    real = [*(n for n, place in enumerate(marks, start=1) if place is not None), problem.blocks]
    for b, claimed in enumerate(problem.transfers):
        for k in range(b, len(places) - (boundaries - 1 - b)):
            near = {t for op in ops[ends[k - 1] if k else 0:ends[k]] for t in op.outputs}
            taken, read = 0.0, set[int]()
            for j in range(k + 1, len(ends)) if b < boundaries - 1 else [len(places)]:
                new = (crosses[ends[k] - 1] & {t for op in ops[ends[k]:ends[j]] for t in op.inputs}) - read
                read |= new
                taken += sum(_least_seconds(graph.tensors[t], cluster, ranks, at[b:b + 1] if t in near else at[:b + 1],
                                            at[b + 1], compress) for t in new)
                said = claimed if problem.sent is None else float(problem.sent[b, real[k], real[j] - real[k]])
                assert max(said, claimed) <= taken * (1 + SAME), (
                    f"a transfer from stage {b} to the next behind {real[k]} blocks is said to take {said} s, what "
                    f"crosses takes {taken} s")


def _least_seconds(tensor: Tensor, cluster: Cluster, ranks: Sequence[Ranks], sources: Sequence[int], target: int,
                   compress: Sequence[str]) -> float:
    """Least seconds of a tensor that comes to part `target` from one of `sources`: each rank sends or receives a piece.
    """
    part = part_in_flight(codecs_of(compress, "pipeline", tensor.dtype), tensor.itemsize)
    nbytes, counts = part * tensor.nbytes, [end - first for first, end in ranks]
    return min(transfer_seconds(cluster, ranks, source, target, nbytes / min(counts[source], counts[target]))
               for source in sources)
