"""Cuts of chains into pipeline stages: the best of all cuts, bounds that are proved, and proofs that are refused."""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from math import inf
from operator import le
from typing import Any

import numpy as np
import pytest
from random_pipelines import NAMES, draw_schedule, draw_transfers, makespan
from sampling import parametrize_or_slow

from autoddl.core.cost_table import Array
from autoddl.core.errors import InputError
from autoddl.core.pipeline_cuts import (
    BlockLimit,
    CutNode,
    CutProblem,
    CutProof,
    CutSolution,
    ListedPlans,
    PathBound,
    StageSeconds,
    WeighedPath,
)
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models.timelines.pipeline_bounds import closed_paths, critical_path, trace_cut, trace_mean
from autoddl.search import cut_boxes, pipeline_cuts
from autoddl.search.certify.pipeline_cuts import check_pipeline_bound
from autoddl.search.certify.pipeline_paths import PathWalk
from autoddl.search.certify.pipeline_runs import run_pipeline
from autoddl.search.cut_boxes import least_cut, single_stages
from autoddl.search.cut_planes import CutPlanes, blended
from autoddl.search.path_tables import NEXT_TO_NOTHING, KnownTerms, best_blend, least_implied, path_tables
from autoddl.search.pipeline_cuts import bound_of_paths, least_over_cuts

CLOSE = 1e-9


def draw_problem(seed: int) -> CutProblem | None:
    """A chain of at most 8 blocks in at most 4 ranks, of blocks that cost about the same; some sizes do not fit.

    In one of three stages end at some places alone, and transfers depend on where their boundaries lie.
    """
    rng = random.Random(seed)
    schedule = draw_schedule(rng, NAMES[seed % len(NAMES)], 2 if "v" in NAMES[seed % len(NAMES)] else 4)
    stages, once = schedule.stages, rng.random() < 0.5
    if stages > 8:
        return None
    blocks = rng.randint(stages, 8)
    table = np.zeros((stages, blocks, 6))
    for s in range(stages):
        table[s, :, :3] = np.cumsum([[rng.uniform(0.8, 1.2) for _ in range(3)] for _ in range(blocks)], axis=0)
        table[s, :, :3] += [rng.choice((0.0, rng.uniform(0.0, 1.0))) for _ in range(3)]
        table[s, :, 3:] = [once * rng.uniform(0.0, 2.0) for _ in range(3)]
    if blocks > stages and rng.random() < 0.3:
        table[rng.randrange(stages), blocks // stages + 1:] = np.inf
    problem = CutProblem(schedule, table, tuple(draw_transfers(rng, stages)))
    return placed(problem, seed) if rng.random() < 1 / 3 else problem


def placed(problem: CutProblem, seed: int) -> CutProblem:
    """The problem, where stages end at some places alone, and transfers depend on where their boundaries lie."""
    rng, blocks = np.random.default_rng(seed), problem.blocks
    ends = rng.random((problem.schedule.stages, blocks + 1)) < 0.8
    ends[:, [0, blocks]] = True
    more = np.cumsum(rng.choice((0.0, 0.5), (len(problem.transfers), blocks + 1, blocks + 1)), axis=2)
    made = replace(problem, ends=ends, sent=np.array(problem.transfers)[:, None, None] + more)
    return made if cuts_of(made) else problem


def cuts_of(problem: CutProblem) -> list[tuple[int, ...]]:
    stages, blocks = problem.schedule.stages, problem.blocks
    ends = ((0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1))
    cuts = (tuple(b - a for a, b in pairwise(at)) for at in ends)
    return [cut for cut in cuts if problem.allows(cut) and np.isfinite([
        problem.seconds[s, n - 1] for s, n in enumerate(cut)]).all()]


def seconds_of(problem: CutProblem, cut: tuple[int, ...]) -> float:
    stages = [StageSeconds(*problem.seconds[s, n - 1].tolist()) for s, n in enumerate(cut)]
    return makespan(problem.schedule, stages, problem.sent_at(cut))


def solve(problem: CutProblem, tolerance: float = 1e-10, effort: int = 100, ceiling: float = inf, blends: bool = False
          ) -> CutSolution:
    """The least cut; boxes of cuts are bounded by mixtures of paths, or by `blends`."""
    schedule, once = problem.schedule, ("gather", "reduce", "update") if problem.seconds[:, :, 3:].any() else ()
    return least_over_cuts(problem, closed_paths(schedule, once), partial(trace_cut, problem), tolerance=tolerance,
                           effort=effort, ceiling=ceiling, mean=partial(trace_mean, problem),
                           stages=partial(critical_path, schedule) if blends else None)


def chain(name: str, blocks: int, ranks: int, microbatches: int) -> CutProblem:
    """Equal blocks with an embedding of 0.15 and a head of 0.9 blocks."""
    schedule = generate(name, ranks, microbatches)
    table = np.zeros((schedule.stages, blocks, 6))
    table[:, :, :3] = np.arange(1, blocks + 1)[None, :, None] * [0.33, 0.34, 0.33]
    table[0, :, :3] += np.array([0.33, 0.34, 0.33]) * 0.15
    table[-1, :, :3] += np.array([0.33, 0.34, 0.33]) * 0.9
    return CutProblem(schedule, table, (0.03,) * (schedule.stages - 1))


def check_chain(seed: int) -> int:
    """The best cut is the best of all cuts, its proof holds, and one of 1 % more is refused.

    The bound of the closed paths alone is no more than the best, and its proof holds too. A search under a ceiling ends
    there, with a proof of that.
    """
    problem = draw_problem(seed)
    if problem is None:
        return 0
    found, best = solve(problem), min(seconds_of(problem, cut) for cut in cuts_of(problem))
    assert found.seconds == pytest.approx(best, rel=CLOSE) and found.bound == pytest.approx(best, rel=CLOSE)
    assert seconds_of(problem, found.cut) == pytest.approx(best, rel=CLOSE) and found.bound <= best * (1 + 1e-12)
    check_pipeline_bound(problem, found.proof, found.bound)
    if seed % 4 == 0:
        blended = solve(problem, blends=True)
        assert blended.bound == pytest.approx(best, rel=CLOSE) and blended.bound <= best * (1 + 1e-12)
        check_pipeline_bound(problem, blended.proof, blended.bound)
        with pytest.raises(AssertionError):
            check_pipeline_bound(problem, blended.proof, blended.bound * 1.01)
    once = ("gather", "reduce", "update") if problem.seconds[:, :, 3:].any() else ()
    below = solve(problem, ceiling=0.9 * best)
    assert below.bound == pytest.approx(0.9 * best)
    check_pipeline_bound(problem, below.proof, below.bound)
    for mean in (None, partial(trace_mean, problem)):
        first, proof = bound_of_paths(problem, closed_paths(problem.schedule, once), mean)
        assert first <= best
        check_pipeline_bound(problem, proof, first)
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, found.proof, found.bound * 1.01)
    return 1


def test_chains_against_every_cut() -> None:
    assert sum(map(check_chain, range(40))) > 30


@pytest.mark.slow
def test_two_hundred_chains_against_every_cut() -> None:
    assert sum(map(check_chain, range(40, 310))) >= 200


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "chimera:1", "zb-v"])
def test_the_tree_of_boxes_finds_the_best_of_many_cuts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small chain, cut through the tree alone; boxes with few cuts are divided down to one."""
    monkeypatch.setattr("autoddl.search.pipeline_cuts.FEW", 1)
    problem = chain(name, 10, 4 if name != "zb-v" else 2, 8)
    found = solve(problem, 1e-6, effort=2000)
    best = min(seconds_of(problem, cut) for cut in cuts_of(problem))
    assert found.seconds == pytest.approx(best, rel=2e-6) and found.bound >= best * (1 - 2e-6)
    check_pipeline_bound(problem, found.proof, found.bound)


@parametrize_or_slow("name", ["1f1b", "zb-h2"], ["chimera:1", "zb-v"])
def test_eighty_blocks_in_eight_stages(name: str) -> None:
    problem = chain(name, 80, 8, 32)
    found = solve(problem, 1e-3)
    assert found.bound >= found.seconds * (1 - 1e-3 - 1e-9)
    stages = problem.schedule.stages
    assert found.seconds <= seconds_of(problem, (80 // stages,) * stages)
    check_pipeline_bound(problem, found.proof, found.bound)
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, found.proof, found.bound * 1.01)


def test_paths_of_mean_seconds_bound_interleaved_stages_more() -> None:
    """A path that is critical at no cut may say most of all of them."""
    problem = chain("interleaved:2", 32, 4, 16)
    most, paths = seconds_of(problem, (4,) * 8), closed_paths(problem.schedule)
    alone, with_means = (bound_of_paths(problem, paths, mean) for mean in (None, partial(trace_mean, problem)))
    assert 1.03 * alone[0] < with_means[0] <= most
    check_pipeline_bound(problem, with_means[1], with_means[0])
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, with_means[1], with_means[0] * 1.01)


def test_a_blend_says_more_than_its_paths_where_more_is_known_of_whole_stages() -> None:
    """Forward and backward may each take less, though not both: of each path by itself the least counts."""
    problem, cut = chain("interleaved:2", 32, 4, 16), (4,) * 8
    less = replace(problem, seconds=problem.seconds * 0.5, whole=problem.seconds[:, :, :3].sum(axis=2))
    most, part, _ = best_blend(less, [(s,) for s in range(8)], [np.array([[n]]) for n in cut],
                               closed_paths(problem.schedule), partial(critical_path, problem.schedule))
    paths = [*(path for path, _ in part.blend), blended(part.blend)]
    *single, value = (table[range(8), cut].sum() + sum(n * 0.03 for n in path.transfers)
                      for table, path in zip(path_tables(KnownTerms(less), paths), paths, strict=True))
    assert 1.004 * max(single) < value == pytest.approx(most) and value <= seconds_of(problem, cut) * (1 + 1e-9)


def chain_of_plans(seed: int) -> tuple[CutProblem, Array]:
    """A chain whose blocks have one of three plans in a stage, known by the least of each term and by two sums.

    Returns [plan, term] the seconds of a block too.
    """
    rng = random.Random(seed)
    schedule, m = generate(("1f1b", "gpipe", "zb-h1")[seed % 3], 3, 4), 4.0
    plans = np.array([[rng.uniform(0.3, 1.0) for _ in range(3)] + [rng.uniform(0.5, 5.0) for _ in range(3)]
                      for _ in range(3)])
    blocks = np.arange(1, 13)[None, :, None]
    known = tuple((weights, blocks[0, :, 0] * (plans @ weights).min() * np.ones((3, 1)))
                  for weights in ((m, m, m, 1.0, 1.0, 1.0), (m, m, m, 0.0, 0.0, 0.0)))
    return CutProblem(schedule, blocks * plans.min(axis=0) * np.ones((3, 1, 1)), (0.1, 0.1), None, known), plans


def test_what_is_known_of_a_blends_own_counts_bounds_every_choice_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoddl.search.pipeline_cuts.FEW", 1)
    raised = needless = 0
    for seed in range(9):
        problem, plans = chain_of_plans(seed)

        def exact(cut: tuple[int, ...], problem: CutProblem = problem, plans: Array = plans) -> float:
            return min(makespan(problem.schedule, [StageSeconds(*(n * x)) for n, x in zip(cut, chosen, strict=True)],
                                problem.transfers) for chosen in product(plans, repeat=3))

        paths = closed_paths(problem.schedule, ("gather", "reduce", "update"))
        least, bounds = min(map(exact, cuts_of(problem))), list[float]()
        for _ in range(4):
            found = least_over_cuts(problem, paths, partial(trace_cut, problem), exact, tolerance=1e-10, effort=1,
                                    stages=partial(critical_path, problem.schedule))
            check_pipeline_bound(problem, found.proof, found.bound)
            bounds.append(found.bound)
            directions = [(row, np.arange(1, 13) * (plans @ row).min() * np.ones((3, 1)))
                          for row in (found.blend.stages if found.blend else ())]
            problem = replace(problem, directions=(*problem.directions, *directions))
        assert max(bounds) <= least * (1 + CLOSE)
        raised += bounds[-1] > 1.005 * bounds[0]
        with suppress(AssertionError):
            check_pipeline_bound(replace(problem, directions=()), found.proof, found.bound)
            needless += 1
    assert raised >= 5 and needless <= 4


def known_by_sums(seed: int) -> CutProblem:
    """A chain of 24 blocks of three plans for 1F1B, of which the least of seven random sums of terms is known."""
    rng, schedule = np.random.default_rng(seed), chain("1f1b", 24, 4, 8).schedule
    plans, blocks = rng.uniform(0.5, 1.5, (3, 6)), np.arange(1, 25)[:, None]
    sums = [tuple(rng.integers(0, 9, 6).astype(float).tolist()) for _ in range(7)]
    known = tuple((row, np.arange(1, 25) * (plans @ np.array(row)).min() * np.ones((4, 1))) for row in sums)
    return CutProblem(schedule, blocks * plans.min(axis=0) * np.ones((4, 1, 1)), (0.1,) * 3, None, known)


def weighed(problem: CutProblem) -> tuple[CutPlanes, int, int, float]:
    """(paths, the number of a blend, that of it with what its linear program knows, what that says of the even cut)."""
    planes = CutPlanes(problem, partial(trace_cut, problem), None, 1e-9)
    most, part, _ = best_blend(problem, [(s,) for s in range(4)], [np.array([[6]])] * 4,
                               closed_paths(problem.schedule, ("gather", "reduce", "update")),
                               partial(critical_path, problem.schedule))
    return planes, *planes.add_part(part), most


def test_blends_are_bounded_by_all_that_their_linear_program_knows() -> None:
    """Put together in orders, what is known of sums of terms says less than the linear program does."""
    more = 0
    for seed in range(8):
        planes, number, own, most = weighed(known_by_sums(seed))
        values = planes.at([(6,) * 4])[:, 0]
        assert values[own] == pytest.approx(most, rel=NEXT_TO_NOTHING)
        more += values[own] > 1.001 * values[number]
    assert more >= 4


def test_what_counts_more_often_than_on_its_path_is_rejected() -> None:
    problem = known_by_sums(0)
    planes, _, own, _ = weighed(problem)
    table, fixed, sent = planes.mixed(((own, 1.0),))
    bound = least_cut(single_stages(planes.possible), table, sent)[0] + fixed
    proof = CutProof(tuple(planes.trails), (), tuple((s,) for s in range(4)), CutNode((((own, 1.0),),)))
    check_pipeline_bound(problem, proof, bound)
    path = proof.paths[own]
    assert isinstance(path, WeighedPath) and any(path.known)
    with pytest.raises(AssertionError, match="cuts are left"):
        check_pipeline_bound(problem, proof, 1.001 * bound)
    for more, times, why in ((0, 1.1, "more than is on the path"), (0, -1.0, "less than never"), (7, 1.0, "not known")):
        wrong = replace(path, known=tuple(tuple((k + more, x * times) for k, x in one) for one in path.known))
        trails = (*proof.paths[:own], wrong, *proof.paths[own + 1:])
        with pytest.raises(AssertionError, match=why):
            check_pipeline_bound(problem, replace(proof, paths=trails), bound)


def test_a_search_that_ends_early_has_a_bound_that_is_proved() -> None:
    problem = chain("interleaved:2", 32, 4, 16)
    found = solve(problem, 1e-3, effort=2)
    assert 0.9 < found.bound / found.seconds < 0.999
    check_pipeline_bound(problem, found.proof, found.bound)
    assert solve(problem, 1e-3).bound >= found.bound


@pytest.mark.parametrize("others,questions", [(1, 10**6), (100, 0), (100, 4)])
def test_a_box_that_is_left_early_has_a_bound_that_is_proved(others: int, questions: int,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """After one other cut, or where the time is over in the midst of a box: then fewer cuts are traced.

    Cuts are likely to take more than is known of their stages, so that none is ruled out.
    """
    rng, fewer = np.random.default_rng(0), 0
    for name in ("1f1b", "zb-h1", "gpipe"):
        problem = chain(name, 14, 4, 8)
        problem = replace(problem, seconds=problem.seconds + rng.uniform(0.0, 0.6, problem.seconds.shape))
        likely = replace(problem, seconds=1.5 * problem.seconds)
        search = partial(least_over_cuts, problem, closed_paths(problem.schedule, ("gather", "reduce", "update")),
                         partial(trace_cut, likely), tolerance=1e-10)
        whole, asked = search(), map(partial(le, questions), range(10**6))
        with monkeypatch.context() as patch:
            patch.setattr(pipeline_cuts, "OTHERS", others)
            left = search(late=partial(next, asked))
        assert left.bound <= min(seconds_of(problem, cut) for cut in cuts_of(problem)) * (1 + CLOSE)
        assert left.bound <= whole.bound * (1 + CLOSE) and left.traces <= whole.traces
        check_pipeline_bound(problem, left.proof, left.bound)
        fewer += left.traces < whole.traces
    assert fewer


def blended_search(problem: CutProblem, paths: Sequence[PathBound] = (), **options: Any) -> CutSolution:
    schedule = problem.schedule
    return least_over_cuts(problem, paths or closed_paths(schedule), partial(trace_cut, problem), tolerance=1e-9,
                           mean=partial(trace_mean, problem), stages=partial(critical_path, schedule), **options)


def test_a_search_goes_on_where_another_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes are divided by blocks of stages; what is known more of the stages since then raises the bound."""
    monkeypatch.setattr(pipeline_cuts, "FEW", 1)
    problem = chain("interleaved:2", 32, 4, 16)
    first = blended_search(problem, effort=6)
    assert first.proof.root.split == "blocks" and first.bound < 0.999 * first.seconds
    again = blended_search(problem, first.paths, effort=0, before=first.boxes)
    on = blended_search(problem, first.paths, effort=6, before=first.boxes)
    more = blended_search(replace(problem, seconds=1.1 * problem.seconds), effort=0, before=first.boxes)
    assert 0.995 * first.bound <= again.bound <= on.bound and 1.05 * first.bound < more.bound
    for question, found in ((problem, first), (problem, again), (problem, on)):
        check_pipeline_bound(question, found.proof, found.bound)
        with pytest.raises(AssertionError):
            check_pipeline_bound(question, found.proof, found.bound * 1.01)


def slower(problem: CutProblem, cut: tuple[int, ...]) -> float:
    """Seconds of a cut half as long again as is known of it, so that no search ends."""
    return 1.5 * trace_cut(problem, cut)[0]


def test_boxes_that_were_left_are_told_what_is_known_since() -> None:
    """Once sums of terms are known, boxes say more on the paths of before, and no more than is checked."""
    for seed in range(4):
        sums = known_by_sums(seed)
        before = replace(sums, known=())
        exact = partial(slower, before)
        first = blended_search(before, effort=6, evaluate=exact)
        told = replace(before, directions=sums.known)
        again = blended_search(told, effort=0, before=first.boxes, evaluate=exact)
        assert again.bound > 1.001 * first.bound
        check_pipeline_bound(told, again.proof, again.bound)
        with pytest.raises(AssertionError):
            check_pipeline_bound(before, again.proof, again.bound)


@pytest.mark.parametrize("seed", range(4))
def test_what_known_counts_imply_of_others_is_between_what_is_known_and_the_least_of_plans(seed: int) -> None:
    """It is the dual of the least seconds that agree with all that is known: no plan that does is below it."""
    rng = np.random.default_rng(seed)
    plans, weights = rng.uniform(0.5, 1.5, (5, 6)), rng.integers(0, 9, (9, 6)).astype(float)
    known = [(tuple(row), float((plans @ row).min())) for row in weights[:8]]
    for counts in (*weights[:8], weights[8], weights[8] + weights[0]):
        most = least_implied(known, counts.tolist())
        assert most <= (plans @ counts).min() * (1 + 1e-9)
        assert most >= max((seconds * min(counts[k] / row[k] for k in range(6) if row[k] > 0)
                            for row, seconds in known)) * (1 - 1e-9)
    assert least_implied([], [1.0] * 6) == 0.0


def test_a_blend_of_one_path_is_that_path() -> None:
    """What is known of directions is for blends of several: the check gives a path none of it."""
    problem = chain("1f1b", 8, 2, 4)
    known = problem.seconds[:, :, :3].sum(axis=2) * 2.0
    told = replace(problem, directions=(((1.0, 1.0, 1.0, 0.0, 0.0, 0.0), known),))
    planes = CutPlanes(told, partial(trace_cut, told), None, 1e-9, stages=partial(critical_path, told.schedule))
    path = closed_paths(told.schedule)[0]
    number = planes.add_blend(((path, 1.0),))
    assert planes.trails[number] == path.path
    assert np.array_equal(planes.tables[number], path_tables(KnownTerms(told), [path])[0])


def refuse_fewer_parts(problem: CutProblem, found: CutSolution, words: str) -> None:
    """A proof without the first or the last part of all cuts is refused."""
    root = found.proof.root
    assert len(root.children) > 1
    for kept in (slice(1, None), slice(0, -1)):
        less = replace(found.proof, root=replace(root, keys=root.keys[kept], children=root.children[kept]))
        with pytest.raises(AssertionError, match=words):
            check_pipeline_bound(problem, less, found.bound)


def test_parts_by_blocks_hold_every_cut() -> None:
    problem = chain("interleaved:2", 32, 4, 16)
    found = blended_search(problem, effort=6)
    assert found.proof.root.split == "blocks"
    refuse_fewer_parts(problem, found, "there are cuts in none of its parts")


def nodes_of(node: CutNode) -> list[CutNode]:
    return [node, *(below for child in node.children for below in nodes_of(child))]


@parametrize_or_slow("name,ranks,microbatches", [("interleaved:2", 3, 6), ("interleaved:4", 2, 4)],
                     [("interleaved:3", 2, 8), ("interleaved:2", 2, 4), ("interleaved:3", 3, 6)])
def test_all_blocks_of_a_rank_are_halved_where_its_stages_are_in_several_groups(
        name: str, ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of parts pay in mixtures, so they prove the best of all cuts, and nothing of other parts."""
    monkeypatch.setattr(pipeline_cuts, "FEW", 1)
    monkeypatch.setattr(cut_boxes, "MOST_OPTIONS", 1)
    problem = chain(name, 12, ranks, microbatches)
    found, best = blended_search(problem, effort=3000), min(seconds_of(problem, cut) for cut in cuts_of(problem))
    assert all(len(group) == 1 for group in found.proof.groups)
    assert found.seconds == pytest.approx(best, rel=CLOSE) and best * (1 - 2e-9) < found.bound <= best * (1 + 1e-12)
    check_pipeline_bound(problem, found.proof, found.bound)
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, found.proof, found.bound * 1.01)
    assert found.proof.root.split == "total" and any(isinstance(one, BlockLimit) for one in found.proof.paths)
    refuse_fewer_parts(problem, found, "are in none of its parts")
    limited = next(node for node in nodes_of(found.proof.root) if any(len(one) > 1 for one in node.mixtures))
    for root in (replace(found.proof.root, mixtures=limited.mixtures), replace(limited, children=(), split="")):
        with pytest.raises(AssertionError, match="a limit holds elsewhere"):
            check_pipeline_bound(problem, replace(found.proof, root=root), found.bound)


@pytest.mark.parametrize("stages", [(0,) * 13, (0, -4) * 7, (9,)])
def test_parts_in_total_are_of_stages_each_once(stages: tuple[int, ...]) -> None:
    """Else they could leave out every cut."""
    problem = chain("1f1b", 12, 4, 8)
    parts = CutNode((), "total", ((-1, (stages, (0, 12))),), (CutNode((), "every"),))
    with pytest.raises(AssertionError, match="are not stages, each once"):
        check_pipeline_bound(problem, replace(solve(problem).proof, singles=(), root=parts), 1e4)


def test_a_search_goes_on_with_all_blocks_of_a_rank_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_cuts, "FEW", 1)
    monkeypatch.setattr(cut_boxes, "MOST_OPTIONS", 1)
    problem = chain("interleaved:3", 40, 4, 16)
    first = blended_search(problem, effort=6)
    again = blended_search(problem, effort=0, before=first.boxes)
    on = blended_search(problem, effort=20, before=first.boxes)
    assert first.proof.root.split == again.proof.root.split == "total"
    assert 0.995 * first.bound <= again.bound <= on.bound
    for found in (first, again, on):
        check_pipeline_bound(problem, found.proof, found.bound)


def test_cuts_whose_plans_are_listed() -> None:
    """Of each stage plans take long forward or long backward: no bound of sums knows what both take together."""
    problem, cut = chain("gpipe", 2, 2, 4), (1, 1)
    some = tuple(StageSeconds(*row) for row in ((1.0, 3.0, 0.0, 0, 0, 0), (3.0, 1.0, 0.0, 0, 0, 0.0)))
    alike = ((some, some[:1]), (some,))
    sent = (((0, 0), (0.5,)), ((1, 0), (0.25,)))
    seconds = min(makespan(problem.schedule, stages, between) for (a, b), between in sent
                  for stages in product(alike[0][a], alike[1][b]))
    less = replace(problem, seconds=np.minimum(problem.seconds, 1.0) * [1, 1, 0, 1, 1, 1])
    told = replace(less, listed=(ListedPlans(cut, alike, sent, seconds),))
    found, without = solve(told), solve(less)
    assert without.bound < found.bound == pytest.approx(seconds) == found.seconds
    check_pipeline_bound(told, found.proof, found.bound)
    with pytest.raises(AssertionError, match="no path of the proof rules out"):
        check_pipeline_bound(told, found.proof, found.bound * 1.001)
    for false, words in ((replace(told.listed[0], transfers=sent[:1]), "or are not listed"),
                         (replace(told.listed[0], plans=(alike[0], ((),))), "a stage has no plan"),
                         (replace(told.listed[0], plans=(alike[0], ((StageSeconds(0, 9, 0),),))), "less than its ops")):
        with pytest.raises(AssertionError, match=words):
            check_pipeline_bound(replace(told, listed=(false,)), found.proof, found.bound)
    with pytest.raises(AssertionError):
        check_pipeline_bound(less, found.proof, found.bound)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_pipeline_that_the_check_runs_takes_as_long_as_the_models(first: int) -> None:
    for problem in filter(None, map(draw_problem, range(first, 60, 4))):
        for cut in cuts_of(problem)[:3]:
            stages = [StageSeconds(*problem.seconds[s, n - 1].tolist()) for s, n in enumerate(cut)]
            assert run_pipeline(problem.schedule, stages, problem.transfers) == pytest.approx(
                makespan(problem.schedule, stages, problem.transfers), rel=1e-12)


def test_exact_seconds_may_be_above_the_least_of_the_stages() -> None:
    """The bound is that of the stages; cuts that cannot be the best are not evaluated."""
    problem, asked = chain("1f1b", 12, 4, 8), []

    def evaluate(cut: tuple[int, ...]) -> float:
        asked.append(cut)
        return seconds_of(problem, cut) * 1.05

    found = least_over_cuts(problem, closed_paths(problem.schedule), partial(trace_cut, problem), evaluate)
    best = min(seconds_of(problem, cut) for cut in cuts_of(problem))
    assert found.seconds == pytest.approx(1.05 * best, rel=1e-3) and found.bound == pytest.approx(best, rel=1e-3)
    assert len(asked) == len(found.evaluations) < 20
    check_pipeline_bound(problem, found.proof, found.bound)


def test_least_seconds_of_a_whole_stage_raise_the_bound() -> None:
    problem = chain("1f1b", 12, 4, 8)
    more = replace(problem, whole=problem.seconds[:, :, :3].sum(axis=2) * 1.1)
    found = least_over_cuts(more, closed_paths(problem.schedule), partial(trace_cut, problem),
                            lambda cut: 1.1 * seconds_of(problem, cut))
    assert solve(problem).seconds * 1.05 < found.bound <= found.seconds
    check_pipeline_bound(more, found.proof, found.bound)
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, found.proof, found.bound)


def test_chains_that_cannot_be_cut() -> None:
    with pytest.raises(InputError, match="3 blocks for 4 stages: no cut gives each stage"):
        solve(chain("1f1b", 3, 4, 8))


def test_proofs_that_prove_nothing() -> None:
    problem = chain("zb-h2", 32, 4, 16)
    found = solve(problem, 1e-3)
    empty = replace(found.proof, singles=(), root=CutNode(()))
    with pytest.raises(AssertionError, match="cuts are left below"):
        check_pipeline_bound(problem, empty, found.bound)
    with pytest.raises(AssertionError, match="no one group"):
        check_pipeline_bound(problem, replace(found.proof, groups=found.proof.groups[1:]), found.bound)
    negative = replace(found.proof, singles=(((0, 2.0), (1, -1.0)),))
    with pytest.raises(AssertionError, match="weights are at least 0"):
        check_pipeline_bound(problem, negative, found.bound)
    heavy = replace(found.proof, singles=tuple(((q, 100 * w),) for ((q, w),) in found.proof.singles))
    check_pipeline_bound(problem, heavy, found.bound)  # weights are made to sum to 1
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, heavy, found.bound * 1.01)


@pytest.mark.parametrize("blends", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved:2", "zb-v"])
def test_long_chains_whose_stages_end_at_few_places_are_proved(name: str, blends: bool) -> None:
    """Where ranks have several stages, the least cut of a box may end stages where they may not."""
    problem, rng = chain(name, 48, 4, 8), np.random.default_rng(1)
    ends, before, behind = rng.random((len(problem.seconds), 49)) < 0.5, np.arange(49)[:, None] > 24, np.arange(49) > 2
    ends[:, [0, 48]] = True
    problem = replace(problem, ends=ends, sent=np.array(problem.transfers)[:, None, None] + 0.1 * (before & behind))
    found = solve(problem, tolerance=1e-3, effort=30, blends=blends)
    assert problem.allows(found.cut) and found.seconds == pytest.approx(seconds_of(problem, found.cut))
    assert 0.9 * found.seconds <= found.bound <= found.seconds
    check_pipeline_bound(problem, found.proof, found.bound)


def test_transfers_that_take_less_with_more_behind_them_prove_nothing() -> None:
    problem = placed(chain("1f1b", 6, 3, 4), 0)
    found = solve(problem)
    assert problem.sent is not None and problem.ends is not None and not problem.ends.all()
    check_pipeline_bound(problem, found.proof, found.bound)
    with pytest.raises(AssertionError, match="fewer blocks behind"):
        check_pipeline_bound(replace(problem, sent=problem.sent[:, :, ::-1]), found.proof, found.bound)
    everywhere = replace(problem, ends=np.ones_like(problem.ends), sent=None)
    with pytest.raises(AssertionError):
        check_pipeline_bound(everywhere, found.proof, found.bound)


@pytest.mark.parametrize("weight", [inf, float("nan")])
def test_a_weight_that_is_no_number_proves_nothing(weight: float) -> None:
    problem = chain("1f1b", 6, 2, 4)
    found = solve(problem)
    with pytest.raises(AssertionError, match="finite"):
        check_pipeline_bound(problem, replace(found.proof, singles=(((0, weight),),)), 2 * found.bound)
    with pytest.raises(AssertionError, match="are left"):
        check_pipeline_bound(problem, found.proof, float("nan"))


def test_stages_of_a_rank_may_have_more_blocks_together_than_there_are() -> None:
    """Such options are no cut: the check leaves them out of a proof that drops no sizes of single stages."""
    problem = chain("chimera:1", 9, 2, 4)
    bound, proof = bound_of_paths(problem, closed_paths(problem.schedule))
    together = replace(proof, groups=((0, 1),))
    check_pipeline_bound(problem, together, bound)
    with pytest.raises(AssertionError):
        check_pipeline_bound(problem, together, 1.01 * solve(problem).seconds)


def test_children_hold_every_cut() -> None:
    problem = chain("interleaved:2", 32, 4, 16)
    found = solve(problem, 1e-3)
    assert found.proof.root.split == "load"
    refuse_fewer_parts(problem, found, "no child where group")


def test_every_path_of_the_cost_model_is_walked_alike() -> None:
    for seed in range(60):
        problem = draw_problem(seed)
        if problem is not None:
            once = ("gather", "reduce", "update")
            walk = PathWalk(problem.schedule, True)
            for path in closed_paths(problem.schedule, once):
                stages, transfers = walk.count(path.path)
                assert (tuple(map(tuple, stages)), tuple(transfers)) == (path.stages, path.transfers)


@pytest.mark.parametrize(("path", "words"), [
    (("1F0", "1B0", "0B1"), "0B1 does not wait for 1B0"), (("0F0 to 1", "1F1"), "1F1 does not wait for 0F0 to 1"),
    (("0F1", "0F0"), "0F0 does not wait for 0F1"), (("0F0 to 2",), "not sent there"), (("0B0 to 1",), "no reader"),
    (("2F0",), "no such action"), (("1B0", "0B0 to 1"), "no reader"), (("update 0 on 1",), "the stage is not there"),
    (("reduce 0", "reduce 1"), "reduce 1 does not wait for reduce 0"), (("reduce 5",), "no such stage"),
    (("gather 1", "0F0"), "0F0 does not wait for gather 1"), (("1B0", "update 0 on 0"), "does not wait for 1B0"),
])
def test_paths_that_are_none(path: tuple[str, ...], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        PathWalk(generate("1f1b", 2, 2), True).count(path)


def test_a_path_over_reductions_needs_them() -> None:
    with pytest.raises(AssertionError, match="no stage is reduced"):
        PathWalk(generate("1f1b", 2, 2), False).count(("0B1", "reduce 0"))
