"""Windows of cuts: where units differ, each has what is known of stages that lie in it, and together they have all."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from itertools import combinations
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from every_pipeline import CLUSTER, Chain

import autoddl
from autoddl.core.errors import InputError
from autoddl.core.pipeline_proofs import Window, proofs_from_json
from autoddl.core.pipeline_schedules import splits_backward
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.explain.pipeline_proof import check_pipeline
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines import pipeline_candidate
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.cut_problems import CutWindow, KnownStages
from autoddl.planner.pipelines.pipeline_candidate import MOST_WINDOWS, CutSearch
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.tried_cuts import try_cut
from autoddl.planner.task import task_of

SLOW = CLUSTER.format(flops=1, fast=20, slow=10, latency=1)


def widths(seed: int) -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.default_rng(seed).choice((64, 96, 160, 224), 9))


def part_of(seed: int, schedule: str) -> StageParts:
    torch.manual_seed(0)
    own = widths(seed)
    task = task_of(Chain(own), parse_cluster(SLOW, "slow"), torch.randn(64, own[0]),
                   PlanOptions(microbatches=(4,), max_axes=1, workers=1), "chain", None)
    places = places_of(task.variant(4).original, ())
    pipes = Staged(places[:3], schedule, 4).pipes
    return StageParts(task, 4, 2, 4, places, pipes, splits=splits_backward(schedule))


@pytest.mark.slow
@pytest.mark.parametrize("seed,schedule", [(4, "interleaved:2"), (7, "interleaved:2"), (6, "zb-v"), (7, "zb-v")])
def test_windows_prove_more_and_nothing_that_is_not_so(seed: int, schedule: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(seed, schedule)
    every = [try_cut(part, schedule, cut).seconds for cut in combinations(range(1, part.units), 3)]
    found = []
    for most in (MOST_WINDOWS, 1):
        monkeypatch.setattr(pipeline_candidate, "MOST_WINDOWS", most)
        search = CutSearch(part_of(seed, schedule), schedule, lambda _: None)
        while not search.is_done:
            search.advance()
        assert search.proof and search.bound <= min(search.seconds, *every) * (1 + 1e-9)
        found.append((search.bound, len(search.windows)))
    (divided, windows), (whole, one) = found
    assert windows > one == 1 and divided > whole * (1 + 1e-6)


def test_halves_of_windows_have_every_cut_once() -> None:
    part = part_of(3, "interleaved:2")
    staged = Staged(part.places[:3], "interleaved:2", 4)
    known = KnownStages(part, staged.schedule(), staged.flights)
    rng, cuts = np.random.default_rng(0), [*combinations(range(1, part.units), 3)]
    windows: list[Window] = [()]
    for _ in range(30):
        one = windows.pop(int(rng.integers(len(windows))))
        inside = [cut for cut in cuts if known.problem(one).allows(sizes(part, cut))]
        halves = known.halves(one, inside[int(rng.integers(len(inside)))]) if inside else None
        windows += halves or [one]
    problems = [known.problem(one) for one in windows]
    assert len(windows) > 10
    for cut in cuts:
        assert sum(problem.allows(sizes(part, cut)) for problem in problems) == 1


def sizes(part: StageParts, cut: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.diff([0, *(part.ends[k] for k in cut), part.ends[-1]]).tolist())


@lru_cache(maxsize=1)
def planned() -> Plan:
    torch.manual_seed(0)
    own = widths(7)
    return autoddl.plan(Chain(own), parse_cluster(SLOW, "slow"), torch.randn(64, own[0]), stages=(2,),
                        microbatches=(4,), schedule=("interleaved:2",), max_axes=1, workers=1)


def leave_one_out(proof: dict[str, Any]) -> None:
    del proof["windows"][1]


def move(proof: dict[str, Any]) -> None:
    """Says of a window what is known of another: what is left out is in none then."""
    proof["windows"][0]["window"] = proof["windows"][1]["window"]


def raise_floors(proof: dict[str, Any]) -> None:
    for number in proof["windows"][-1]["seconds"]:
        proof["rows"][number] = [[1e3 * x + 1.0 for x in pair] for pair in proof["rows"][number]]


def say_impossible(proof: dict[str, Any]) -> None:
    """Says that stages can have no numbers of blocks: then no cut is left that could be below a bound."""
    proof["rows"].append([])
    for one in proof["windows"]:
        one["sizes"] = [[] for _ in one["sizes"]]
        for table in (one["seconds"], one["whole"], *(values for _, values in (*one["known"], *one["directions"])),
                      *(price["values"] for price in one["priced"])):
            table[:] = [len(proof["rows"]) - 1] * len(table)


@pytest.mark.parametrize("change,said", [(leave_one_out, "no window of the proof"), (move, "no window of the proof"),
                                         (raise_floors, "its ops take"), (say_impossible, "are impossible")])
def test_a_proof_whose_windows_are_wrong_is_rejected(change: Callable[[dict[str, Any]], None], said: str) -> None:
    plan = planned()
    check_pipeline(plan)
    wrong = deepcopy(plan)
    [row] = [row for row in wrong.source["alternatives"] if row["proof"] and len(row["proof"]["windows"]) > 1]
    change(row["proof"])
    with pytest.raises(AssertionError, match=said):
        check_pipeline(wrong)


def swap(proof: dict[str, Any], where: str, value: object) -> None:
    """Puts a value at a place of a proof, like `windows.0.window`."""
    *way, last = (int(key) if key.isdigit() else key for key in where.split("."))
    at: Any = proof
    for key in way:
        at = at[key]
    at[last] = value


@pytest.mark.parametrize("where,value", [
    ("windows", []), ("windows.0.window", [[-1, 4]]), ("windows.0.window", [[-1, 4]] * 3), ("windows.0.sizes", [[1]]),
    ("windows.0.window", [[0, 10**9]] * 3), ("windows.0.window", [[5, 4]] * 3), ("schedule", 5), ("transfers", [0.1]),
    ("transfers", ["a"] * 3), ("windows.0.sizes.0.0", 0), ("windows.0.sizes.0.0", 10**30),
    ("windows.0.seconds.0", -1), ("windows.0.seconds.0", 10**6), ("windows.0.seconds", []), ("rows", None)])
def test_a_proof_of_another_form_asks_for_a_new_plan(where: str, value: object) -> None:
    [row] = [row for row in planned().source["alternatives"] if row["proof"] and len(row["proof"]["windows"]) > 1]
    proof = deepcopy(row["proof"])
    assert len(proofs_from_json(proof)) > 1
    swap(proof, where, value)
    with pytest.raises(InputError, match="make the plan again"):
        proofs_from_json(proof)


def test_a_candidate_no_cut_of_which_is_possible_says_so() -> None:
    """Each of its windows ends so: it has no bound and no proof, and the plan is another one's."""
    part = part_of(7, "interleaved:2")
    search = CutSearch(part, "interleaved:2", lambda _: None)
    search.advance()
    search.windows = [CutWindow(((1, 1), (1, 1), (1, 1))), CutWindow(((2, 2), (1, 1), (1, 1)))]
    search._least_known(1)
    assert search.bound == inf and search.proof == () and search.ended and search.row.to_json()["proof"] is None
