"""Finds the best pipeline of a small chain by trying every cut and every layout of every stage.

Of the choices of a stage that give and take its tensors in the same layouts only those matter that fit the budget and
that no other is below in all seconds: no makespan gets shorter where a second gets longer.

Where a schedule splits backward, the seconds of W are those of the plan of each choice (`schedule.stage_seconds`).
Where stages have copies, what these exchange is a part of what a choice reduces (`stage_ports.CopyMessages`).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf, prod

import numpy as np
import torch
from torch import Tensor, nn

from autoddl.core.graph import RECEIVE, Op
from autoddl.core.pipeline import Flight, flights_of
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import SEND, StageGraph, cut_graph
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.candidates import Candidate, build_network
from autoddl.planner.peaks import Peaks, draft_of
from autoddl.planner.pins import allowed_meshes, region_of
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.part_ranks import part_clusters
from autoddl.planner.pipelines.stage_plans import stage_task
from autoddl.planner.pipelines.stage_ports import CopyMessages
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import boundary_seconds, simulated
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import CostNetwork
from autoddl.pricing.price import Counts
from autoddl.schedule.stage_seconds import stage_seconds
from autoddl.search.exhaustive import score_every_choice

CLUSTER = """
name: random
device: {{name: cpu, kind: cpu, memory: 16 GB, bandwidth: 10 GB/s, peak: {{float32: {flops} GFLOP/s}}, launch: 1 us}}
levels:
- {{name: in, size: 2, bandwidth: {fast} MB/s, latency: {latency} us}}
- {{name: out, size: 2, bandwidth: {slow} MB/s, latency: {latency} us}}
"""

LIMIT = 100_000
"""Choices of a stage that are tried at most."""

DIGITS = 15
"""Decimals of seconds, so that equal choices are equal; far below what a bound is held to."""

PARTS = [Counts(*(float(i == k) for i in range(5))) for k in range(5)]
"""Counts that leave one of a stage's seconds each."""


class Block(nn.Module):
    """A product and its tanh."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Blocks of some widths in a row, with a mean of squares as the loss."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, widths, widths[1:]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A chain, a cluster of two parts of two ranks, and how its pipeline runs."""

    widths: tuple[int, ...]
    batch: int
    microbatches: int
    schedule: str
    cluster: Cluster


def random_case(seed: int, blocks: int = 2, schedule: str = "") -> Case:
    """A chain and a cluster, whose work, messages and latencies weigh more or less; a schedule of two, or this one."""
    rng = random.Random(seed)
    slow = rng.choice((1, 10, 100, 1000))
    text = CLUSTER.format(flops=rng.choice((0.1, 1, 10)), fast=2 * slow, slow=slow, latency=rng.choice((1, 10, 60)))
    widths = tuple(rng.choice((8, 16, 64, 128)) for _ in range(blocks + 1))
    batch, microbatches, drawn = rng.choice((16, 32)), rng.choice((2, 4)), rng.choice(("1f1b", "gpipe"))
    return Case(widths, batch, microbatches, schedule or drawn, parse_cluster(text, "random"))


def best_pipeline(task: PlanTask, case: Case, sizes: tuple[int, ...] = ()) -> float:
    """Seconds of the fastest pipeline of two stages, or of some on so many ranks each, that fits the budget.

    They are infinite where none does.
    """
    graph, best, stages = task.variant(case.microbatches).original, inf, len(sizes) or 2
    parts = part_clusters(case.cluster, stages, sizes)
    for cuts in combinations(places_of(graph, ()), stages - 1):
        staged = Staged(cuts, case.schedule, case.microbatches, sizes=sizes)
        schedule = staged.schedule()
        copies = CopyMessages(case.cluster, schedule.placement) if schedule.pipes > 1 else None
        every = [list(_choices(replace(task, copies=copies), stage, part, case.microbatches // schedule.pipes, flight,
                               staged.splits)) for stage, part, flight in
                 zip(cut_graph(graph, staged.cuts), parts, flights_of(schedule), strict=True)]
        for chosen in product(*every):
            between = boundary_seconds(case.cluster, [plan for plan, _ in chosen], staged, graph)
            for each in product(*[seconds for _, seconds in chosen]):
                if max(one.forward + one.backward + one.weight for one in each) * case.microbatches / schedule.pipes \
                        < best:
                    best = min(best, simulated(schedule, each, between).makespan)
    return best


def _choices(task: PlanTask, stage: StageGraph, part: Cluster, microbatches: int, flight: Flight, splits: bool
             ) -> Iterator[tuple[Plan, list[StageSeconds]]]:
    """For each way to give and take tensors a plan, and the seconds of the choices that no other is below."""
    own = stage_task(task, stage, part, microbatches)
    for mesh in allowed_meshes(part, own.options):
        candidate = Candidate(mesh, region_of(own.options), microbatches, in_flight=flight.in_flight,
                              waiting=flight.waiting, later=flight.later)
        network = build_network(own, candidate)
        if prod(network.sizes) > LIMIT:
            raise ValueError(f"{prod(network.sizes)} choices are too many to try")
        parts = [score_every_choice(build_network(replace(own, counts=counts), candidate).problem(None))[0]
                 for counts in PARTS]
        seconds = np.insert(np.round(np.stack(parts, axis=1), DIGITS), 2, 0.0, axis=1)
        legal = np.flatnonzero(np.isfinite(seconds).all(axis=1))
        for at in legal.tolist() if splits else ():
            drawn = draft_of(network, choice_at(network, at))
            seconds[at, 2] = round(stage_seconds(drawn, network.pricing.graph, part, True).weight, DIGITS)
            seconds[at, 1] -= seconds[at, 2]
        groups = port_layouts(network, legal)
        for group in np.unique(groups):
            least = _least(network, seconds, legal[groups == group], task.budget)
            if least:
                yield draft_of(network, choice_at(network, least[0])), [StageSeconds(*row) for row in seconds[least]]


def choice_at(network: CostNetwork, at: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(at, network.sizes))


def port_layouts(network: CostNetwork, legal: np.ndarray) -> np.ndarray:
    """A number for each choice, equal where tensors are given and taken in the same layouts."""
    found, options = np.zeros(len(legal), dtype=int), np.unravel_index(legal, network.sizes)
    for v, variable in enumerate(network.variables):
        if isinstance(variable.item, Op) and variable.item.target in (SEND, RECEIVE):
            layouts = [str((*choice.inputs, *choice.outputs)) for choice in variable.choices]
            found = found * len(layouts) + np.array([layouts.index(one) for one in layouts])[options[v]]
    return found


def _least(network: CostNetwork, seconds: np.ndarray, among: np.ndarray, budget: float
           ) -> list[int]:
    """The choices that fit and that no other that fits is below or equal to in all seconds."""
    kept, peaks = list[int](), Peaks(network)
    for at in among[np.lexsort(seconds[among].T[::-1])].tolist():
        if not any((seconds[one] <= seconds[at]).all() for one in kept) \
                and (budget == inf or peaks.of(choice_at(network, at)).nbytes <= budget):
            kept.append(at)
    return kept
