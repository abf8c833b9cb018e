"""The search over meshes: the best of all, whatever the number of workers and wherever it is interrupted."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from planmaker import cluster_of
from sampling import parametrize_or_slow
from tasks import graph_of, task_of, with_options
from torch import nn

from autoddl.api import compare_solvers, plan
from autoddl.core.errors import Infeasible, InputError, MachineError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster
from autoddl.cost_models.curves import curves_to_text
from autoddl.planner.candidates import Candidate, bounds, build_problem
from autoddl.planner.mesh_search import ROUGH, Found, _gains_by_roughness, search
from autoddl.planner.meshes import meshes
from autoddl.planner.peaks import Peaks
from autoddl.planner.process_pool import beside, mapper, processor_seconds
from autoddl.planner.question import rebuild
from autoddl.planner.search_jobs import Answer, Job, Jobs
from autoddl.pricing.build_problem import network_of
from autoddl.pricing.floors import floor_seconds
from autoddl.pricing.space import Region, everything
from autoddl.search import Above, large, solve


def candidates(place: Cluster, most: int = 3) -> list[Candidate]:
    return [Candidate(mesh, lambda graph, on: everything) for mesh in meshes(place, most)]


@cache
def tight(name: str, place: Cluster, share: float = 0.3) -> float:
    """A budget between the smallest known peak of any plan and that of the fastest."""
    with pytest.raises(Infeasible) as caught:
        search(task_of(name, place, 1.0), candidates(place))
    free = search(task_of(name, place), candidates(place)).best
    peak = Peaks(network_of(free.pricing, free.variables)).of(free.solution.choice).nbytes
    least = caught.value.reachable
    assert least is not None and least < peak
    return least + share * (peak - least)


PLACE, FOUR = cluster_of("net=2,node=4"), cluster_of("net=2,node=2")
COPY = {"name": "copy", "dtype": "float32", "grid": [[1e3, 1e5]], "work": [1e3, 1e5], "seconds": [1e-6, 1e-5]}


@parametrize_or_slow("name,place", [("bare", FOUR)], [("deep", PLACE)])
def test_the_best_mesh_is_the_best_of_all_meshes_solved_alone(name: str, place: Cluster) -> None:
    budget = tight(name, place)
    task, tried = task_of(name, place, budget, tolerance=0.0), candidates(place)
    alone = []
    for candidate in tried:
        try:
            alone.append(search(task, [candidate]).best.solution.seconds)
        except Infeasible:
            continue
    found = search(task, tried)
    assert found.best.solution.seconds == pytest.approx(min(alone), rel=1e-6)
    assert found.bound <= found.best.solution.seconds
    assert found.best.solution.nbytes <= budget


def test_one_and_two_workers_find_the_same() -> None:
    budget = tight("deep", FOUR)
    found = [search(task_of("deep", FOUR, budget, workers=workers), candidates(FOUR)) for workers in (1, 2, 1)]
    assert len({(f.best.pricing.mesh, f.best.solution, f.bound) for f in found}) == 1


@parametrize_or_slow("name", ["bare"], ["tiny"])
def test_meshes_of_many_axes_are_solved_roughly_before_any_is_to_the_end(name: str, monkeypatch: pytest.MonkeyPatch
                                                                         ) -> None:
    """All candidates are bounded, few are solved, and every rough job comes before the others; what is found is as
    good."""
    place = cluster_of("hall=2,rack=4,node=4")
    task = task_of(name, place, workers=1, tolerance=0.0)
    every = candidates(place, 4)
    tried = [c for n in (2, 3, 4) for c in [c for c in every if len(c.mesh.axes) == n][:3]]
    alone = min(solve(build_problem(task, c)[2]).seconds for c in tried)
    gaps: list[float] = []
    whole = Jobs.answer

    def answer(self: Jobs, job: Job) -> Answer:
        if job[1] is not None:
            gaps.append(job[3])
        return whole(self, job)

    monkeypatch.setattr(Jobs, "answer", answer)
    monkeypatch.setattr(large, "CELLS", 0)
    found = search(task, tried)
    changes: list[dict[str, object]] = [{"solver": "greedy"}, {"time_limit": 60.0}, {"tolerance": ROUGH}]
    other = [with_options(task, **change) for change in changes]
    assert _gains_by_roughness(task, tried) and not any(_gains_by_roughness(one, tried) for one in other)
    assert not _gains_by_roughness(task, [c for c in candidates(place) if len(c.mesh.axes) < 4])
    assert gaps == sorted(gaps, reverse=True) and {*gaps} == {ROUGH, 0.0}
    assert max(gaps.count(ROUGH), gaps.count(0.0)) < len(tried)
    again = search(with_options(task, workers=2), tried)
    assert (again.best.solution, again.bound) == (found.best.solution, found.bound)
    assert found.bound <= alone * (1 + 1e-9)
    assert alone <= found.best.solution.seconds * (1 + 1e-9) <= alone * 1.001


class Stop:
    """A progress that interrupts once there is a plan, or at once."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def __call__(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total and "no plan" in what
        if self.at_once or ("best" in what and not what.startswith("searched")):
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_gives_the_best_plan_so_far_with_a_true_bound(workers: int) -> None:
    whole = search(task_of("deep", PLACE), candidates(PLACE))
    found: Found = search(task_of("deep", PLACE, workers=workers), candidates(PLACE), Stop(False))
    assert found.interrupted and not whole.interrupted
    assert found.bound <= whole.best.solution.seconds <= found.best.solution.seconds
    assert found.bound >= floor_seconds(add_hubs(graph_of("deep")), PLACE) > 0


def test_an_interrupt_before_there_is_a_plan_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        search(task_of("deep", PLACE, 1.0), candidates(PLACE), Stop(True))


@parametrize_or_slow("name,place", [("bare", FOUR)], [("tiny", FOUR), ("deep", FOUR), ("deep", PLACE)])
def test_no_plan_names_the_least_bytes_of_all_meshes(name: str, place: Cluster) -> None:
    needed = []
    for candidate in candidates(place):
        with pytest.raises(Infeasible) as alone:
            search(task_of(name, place, 1.0), [candidate])
        needed.append(alone.value.needed)
    for workers in (1, 2):
        with pytest.raises(Infeasible) as caught:
            search(task_of(name, place, 1.0, workers=workers), candidates(place))
        assert caught.value.needed == pytest.approx(min(needed))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.needed) == (str(caught.value), caught.value.needed)


def test_the_floor_is_below_every_plan() -> None:
    for name in ("tiny", "gpt", "vgg"):
        for mesh in meshes(PLACE, 2):
            problem = build_problem(task_of(name, PLACE), Candidate(mesh, lambda graph, on: everything))[2]
            assert floor_seconds(add_hubs(graph_of(name)), PLACE) <= solve(replace(problem, budget=None)).bound


def test_a_ceiling_below_the_optimum_is_answered_with_a_bound() -> None:
    task = task_of("deep", PLACE)
    free = build_problem(task, candidates(PLACE)[-1], {f"backward {task.graph.ops[-1].name}": 1.0})[2]
    problem = replace(free, budget=0.7 * solve(free).nbytes)
    best = solve(problem)
    assert best.price
    with pytest.raises(Above) as caught:
        solve(problem, ceiling=0.5 * best.seconds, price=best.price)
    assert 0.5 * best.seconds <= caught.value.bound <= best.seconds
    assert solve(problem, ceiling=2 * best.seconds, price=best.price).seconds == pytest.approx(best.seconds, rel=1e-3)


def _dies(argument: int) -> int:
    sys.exit(1)


def test_workers_keep_the_order_and_pass_errors_on() -> None:
    def doubled(x: int) -> int:
        if x < 0:
            raise InputError("negative")
        return 2 * x

    for workers in (1, 2, 3):
        with mapper(doubled, workers) as run:
            assert list(run(range(7))) == [0, 2, 4, 6, 8, 10, 12]
            assert list(run([])) == []
            with pytest.raises(InputError, match="negative"):
                list(run([1, -1, 2]))
    with mapper(_dies, 2) as run, pytest.raises(MachineError, match="one worker"):
        list(run([1, 2]))


def test_processor_seconds_are_those_of_this_process_and_its_workers_not_of_a_clock() -> None:
    def work(seconds: float) -> float:
        began = time.process_time()
        while time.process_time() - began < seconds:
            pass
        return seconds

    began = processor_seconds()
    time.sleep(0.1)
    assert processor_seconds() - began < 0.09
    with mapper(work, 2) as run:
        began = processor_seconds()
        list(run([0.05, 0.05]))
    assert processor_seconds() - began > 0.09


@pytest.mark.ranks
def test_workers_do_not_outlive_who_is_killed() -> None:
    script = ("import os, time, sys\n"
              "from autoddl.planner.process_pool import mapper\n"
              "def stay(_):\n    os.write(1, b'%d\\n' % os.getpid())\n    time.sleep(60)\n"
              "with mapper(stay, 2) as run:\n    list(run([1, 2]))\n")
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            children = [int(parent.stdout.readline()) for _ in range(2)]
            parent.send_signal(number)
            assert parent.stdout.read() == ""  # until nobody holds it any more
            assert parent.wait() == (-number if number == signal.SIGKILL else 128 + number)
        assert not any(Path(f"/proc/{child}/cwd").exists() for child in children)


@pytest.mark.ranks
def test_a_signal_ends_a_worker_that_is_not_ready_and_none_of_its_parents_code_runs_in_it() -> None:
    script = ("import os, signal\n"
              "from autoddl.planner.process_pool import beside\n"
              "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
              "try:\n    with beside(abs, -1) as result:\n        result()\n"
              "except BaseException as error:\n    print(type(error).__name__)\n")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "MachineError\n"


def test_what_runs_beside_is_waited_for_and_its_error_passed_on() -> None:
    """And the process is gone where the result is not wanted."""
    before = set(multiprocessing.active_children())
    with beside(_other, 3) as result:
        pid, found = result()
    assert found == 9 and pid != os.getpid()
    with pytest.raises(ValueError, match="0 has no inverse"), beside(_other, 0) as result:
        result()
    with beside(_dies, 1):
        pass
    assert set(multiprocessing.active_children()) <= before


def _other(n: int) -> tuple[int, int]:
    if n == 0:
        raise ValueError("0 has no inverse")
    return os.getpid(), n * n


@parametrize_or_slow("layers", [0], [1])
def test_microbatches_fit_where_nothing_else_does_and_cost_more(layers: int) -> None:
    model = tiny.tiny(layers, batch=16)
    with pytest.raises(Infeasible) as caught:
        plan(model, PLACE, max_axes=1, budget=1.0)
    budget = 0.999 * caught.value.needed
    with pytest.raises(Infeasible):
        plan(model, PLACE, max_axes=1, budget=budget)
    found = plan(model, PLACE, max_axes=1, budget=budget, microbatches=(1, 2, 4))
    whole, parts = plan(model, PLACE, max_axes=1), plan(model, PLACE, max_axes=1, microbatches=(2,))
    assert found.microbatches > 1 and found.predicted.peak_bytes <= budget
    assert found.sample["args"][0]["tensor"][0] == 16 // found.microbatches
    assert whole.microbatches == 1 and parts.microbatches == 2
    assert whole.predicted.seconds <= parts.predicted.seconds <= found.predicted.seconds * 1.001
    of_all = plan(model, PLACE, max_axes=1, microbatches=(1, 2, 4))
    assert of_all.fingerprint() == replace(whole, candidates=3 * whole.candidates).fingerprint()
    assert rebuild(found).problem.cost(rebuild(found).choice) == pytest.approx(found.predicted.seconds)
    one, two = (plan(model, PLACE, max_axes=1, microbatches=(1, 3), workers=workers)  # 3 is hopeless
                for workers in (1, 2))
    assert one.to_json() == two.to_json()
    with pytest.raises(InputError, match="3 microbatches cut dim 0"):
        plan(model, PLACE, max_axes=1, microbatches=(3,))


def test_all_solvers_on_one_problem() -> None:
    rows = {row.name: row for row in compare_solvers(tiny.tiny(0), PLACE, mesh="net=2,node=4", time_limit=20.0)}
    best = rows["exact"].seconds
    assert best is not None and rows["exact"].bound == pytest.approx(best)
    for row in rows.values():
        assert (row.seconds is None) == (row.bound is None)
        if row.seconds is not None and row.bound is not None:
            assert row.bound <= best * (1 + 1e-9) and row.seconds >= best * (1 - 1e-9), row
    assert rows["exhaustive"].seconds is None and "use the solver 'exact'" in rows["exhaustive"].detail


def test_a_number_of_microbatches_bounds_its_multiples_in_one_region() -> None:
    def other(graph: Graph, on: Mesh) -> Region:
        return everything

    task = task_of("deep", PLACE)
    whole, *_ = candidates(PLACE)
    two, four, six = (replace(whole, microbatches=n) for n in (2, 4, 6))
    assert bounds(task, whole, two) and bounds(task, two, four) and not bounds(task, four, six)
    assert not bounds(task, whole, replace(whole, microbatches=8))  # one row each
    assert not bounds(task, whole, replace(two, region=other))
    device = replace(PLACE.device, curves=curves_to_text([COPY], "a test"))
    assert not bounds(replace(task, cluster=replace(PLACE, device=device)), whole, two)


class Two(nn.Module):
    """Long rows, only two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.ids = tiny.tiny(1), torch.zeros(2, 64, dtype=torch.int64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(ids, labels)
        return loss

    def example_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.ids


def test_microbatches_of_one_row_are_searched_though_fewer_are_slower() -> None:
    """A reshape leaves their second dim whole, which then can be split over all devices."""
    near = cluster_of("node=4")
    slow = replace(near, levels=tuple(replace(level, bandwidth=1e5) for level in near.levels))
    whole, parts, found = (plan(Two(), slow, mesh="node=4", microbatches=counts) for counts in ((1,), (2,), (1, 2)))
    assert found.microbatches == 2 and found.predicted.seconds == parts.predicted.seconds < whole.predicted.seconds
    assert found.bound <= parts.predicted.seconds
