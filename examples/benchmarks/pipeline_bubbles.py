"""Bubbles of pipelines, measured: sudo python examples/benchmarks/pipeline_bubbles.py [NAME=VALUE ...]

    cluster=4x1-200   rounds=3   unit=30 (milliseconds of a product)   only=TEXT+TEXT (parts of contestants' names)
    out=FILE (a line of JSON for every contestant)

Four ranks behind shaped links train a chain of eight blocks, whose products *sleep*: each takes the same time however
many cores there are, and none is taken from another rank. Ranks run in real time, so each wakes up when it wants to.
A forward of a block is one product. Its backward is two, of the gradient of its input and of that of its weight. So
F = B = W where a schedule splits them, and every rank has two blocks. Where `halved`, products of a backward take half
as long, so that a whole backward takes as long as a forward.

Ours are plans of every schedule, torch's are those of `torch.distributed.pipelining` that run the same stages in the
same way. All take turns in the same processes, round by round: a turn is a step from a barrier to when the slowest rank
is done. Of each it is told

    bubble      1 - (seconds in products, mean of the ranks) / (seconds of the step), median of the rounds
    simulated   the same of the time line with products of the length that they took in the first steps
    ratio       ours / torch's, median of the rounds' ratios
"""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, parted
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_schedules import chunks_of
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import launch
from autoddl.launch.places import network_places
from autoddl.launch.shaped_network import shape_links
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.stage_plans import pipeline_plan
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import simulated, staged_step
from autoddl.planner.pipelines.uniform_pipelines import uniform_cuts
from autoddl.planner.task import task_of
from autoddl.runtime.parallelize import parallelize

CLUSTERS = Path(__file__).parent.parent / "clusters"
RANKS, BLOCKS, WIDTH, ROWS = 4, 8, 128, 64
"""Rows are those of a microbatch: other than the width, so that a product says by its shape what it is of."""
WARM = 1
AGREE = 1e-5
TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved:2": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v", "dualpipe-v", "chimera:1")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A schedule of ours, or `torch`'s, with m microbatches; `halved`: a whole backward takes as long as a forward."""

    schedule: str
    microbatches: int
    halved: bool = False
    torch: bool = False

    @property
    def name(self) -> str:
        return f"{'torch ' * self.torch}{self.schedule}, {self.microbatches}{', F = B' * self.halved}"


def contestants() -> list[Contestant]:
    """All of them; torch's stand beside ours."""
    every = [Contestant(name, 8, False, own) for name in SCHEDULES for own in (False, True)[:1 + (name in TORCH)]]
    return [*every, Contestant("1f1b", 4, True), Contestant("1f1b", 4, True, True), Contestant("chimera:1", 4, True)]


class Block(nn.Module):
    """A product and its tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Blocks in a row, behind a scale whose gradient makes the first block compute that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Part(nn.Module):
    """The blocks of one stage, for torch."""

    def __init__(self, chain: Chain, stage: int, stages: int) -> None:
        super().__init__()
        each = BLOCKS // stages
        self.scale = chain.scale if stage == 0 else None
        self.blocks = nn.ModuleList(list(chain.blocks)[stage * each:(stage + 1) * each])

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def made(microbatches: int) -> tuple[Chain, Tensor]:
    torch.manual_seed(0)
    return Chain(), torch.randn(microbatches * ROWS, WIDTH)


class Products:
    """Products that take as long as is said: in a forward, and in a backward. Notes how long each took."""

    def __init__(self) -> None:
        self.seconds, self.took = (0.0, 0.0), list[float]()
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl("mm", self._product, "CPU")

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        start = time.perf_counter()
        found = torch.bmm(a[None], b[None])[0]
        wanted = self.seconds[0 if torch.is_grad_enabled() else 1]
        time.sleep(max(0.0, start + wanted - time.perf_counter()))
        self.took.append(time.perf_counter() - start)
        return found


def planned(one: Contestant, cluster: Path) -> Plan:
    """Our plan of a schedule, with equally many blocks in every stage."""
    model, batch = made(one.microbatches)
    task = task_of(model, cluster, batch, PlanOptions(microbatches=(one.microbatches,), workers=1, optimizer="sgd"),
                   "chain", None)
    cuts = uniform_cuts(task.variant(one.microbatches).original, RANKS * chunks_of(one.schedule))
    return pipeline_plan(task, Staged(cuts, one.schedule, one.microbatches))


def foreseen(one: Contestant, cluster: Path, forward: float, backward: float) -> float:
    """Seconds of the step with products of such lengths; messages are those of the plan, on the cluster's links."""
    plan = planned(one, cluster)
    graph, each = _captured(one.microbatches).graph, BLOCKS // (RANKS * chunks_of(one.schedule))
    step = staged_step(plan, graph, load_cluster(cluster))
    stages = [stage._replace(forward=each * forward, backward=each * backward, weight=each * backward, update=0.0)
              for stage in step.stages]
    assert plan.pipeline is not None
    return simulated(Schedule.parse(plan.pipeline.schedule), stages, step.transfers).makespan


@cache
def _captured(microbatches: int) -> Captured:
    model, batch = made(microbatches)
    return capture(model, parted(Sample((batch,), {}), microbatches))


def ours(path: str, one: Contestant) -> Callable[[], float]:
    """A step of a plan on this rank; it returns the loss."""
    model, batch = made(one.microbatches)
    parallel = parallelize(model, load_plan(path), captured=_captured(one.microbatches), timeout=120.0)
    pieces = parallel.local_batch(batch)

    def step() -> float:
        parallel.zero_grad()
        return float(parallel.step(pieces))

    return step


def theirs(one: Contestant) -> Callable[[], float]:
    """A step of torch's schedule on this rank, with the same stages; it returns the loss where the last stage is."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    (model, batch), rank, m = made(one.microbatches), dist.get_rank(), one.microbatches
    stages = RANKS * chunks_of(one.schedule)
    own = [rank] if stages == RANKS else [rank, stages - 1 - rank if one.schedule == "zb-v" else rank + RANKS]
    example, parts = torch.empty(ROWS, WIDTH, requires_grad=True), [Part(model, s, stages) for s in own]
    made_stages = [PipelineStage(part, s, stages, torch.device("cpu"), input_args=(example,), output_args=(example,))
                   for part, s in zip(parts, own, strict=True)]
    schedule: Any = get_schedule_class(TORCH[one.schedule])(
        made_stages if len(own) > 1 else made_stages[0], m, loss_fn=lambda x, _: x.square().mean())

    def step() -> float:
        losses: list[Tensor] = []
        for part in parts:
            part.zero_grad()
        last = {"target": batch, "losses": losses} if stages - 1 in own else {}
        schedule.step(*((batch,) if 0 in own else ()), **last)
        return fmean(map(float, losses)) if losses else float("nan")

    return step


def awake() -> None:
    """Lets this rank run as soon as its sleep is over, whatever else the cores do: of all threads, in real time."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def rank_main(job: dict[str, Any]) -> None:
    """What a rank runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    products, unit = Products(), job["unit"]
    every = [Contestant(**row) for row in job["contestants"]]
    steps = [theirs(one) if one.torch else ours(path, one) for one, path in zip(every, job["plans"], strict=True)]
    rows: list[dict[str, list[float]]] = [{"seconds": [], "busy": [], "losses": []} for _ in every]
    lengths: dict[bool, list[float]] = {False: [], True: []}
    awake()
    for turn in range(WARM + job["rounds"]):
        for one, step, row in zip(every, steps, rows, strict=True):
            products.seconds, products.took = (unit, unit / 2 if one.halved else unit), []
            dist.barrier()
            start = time.perf_counter()
            loss = step()
            told = torch.tensor([time.perf_counter() - start, loss], dtype=torch.float64).nan_to_num(-1.0)
            dist.all_reduce(told, dist.ReduceOp.MAX)
            busy = torch.tensor([sum(products.took), float(len(products.took))], dtype=torch.float64)
            dist.all_reduce(busy)
            assert busy[1] == 3 * BLOCKS * one.microbatches, f"{one.name}: {busy[1]} products"
            if turn < WARM:
                lengths[one.halved].append(float(busy[0] / busy[1]))
            else:
                row["seconds"].append(float(told[0]))
                row["busy"].append(float(busy[0]) / RANKS)
            row["losses"].append(float(told[1]))
    if dist.get_rank() == 0:
        mean = {str(halved): fmean(found) for halved, found in lengths.items() if found}
        Path(job["folder"], "rows.json").write_text(json.dumps({"rows": rows, "mean": mean}), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def measured(cluster: Path, every: Sequence[Contestant], rounds: int, unit: float) -> dict[str, Any]:
    """The seconds, the seconds in products, and the losses of all contestants' steps."""
    with tempfile.TemporaryDirectory(prefix="autoddl-bubbles-") as folder, \
            shape_links(load_cluster(cluster)) as built:
        paths = [str(Path(folder, f"{k}.json")) for k in range(len(every))]
        for one, path in zip(every, paths, strict=True):
            if not one.torch:
                planned(one, cluster).save(path)
        job = {"folder": folder, "plans": paths, "contestants": [asdict(one) for one in every], "rounds": rounds,
               "unit": unit}
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        launch(RANKS, [sys.executable, "-W", "ignore", __file__, "rank", str(Path(folder, "job.json"))],
               places=network_places(built))
        found: dict[str, Any] = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
        return found


def main(arguments: Sequence[str]) -> None:
    options = {"cluster": "4x1-200", "rounds": "3", "unit": "30", "only": "", "out": ""} | dict(
        argument.split("=", 1) for argument in arguments)
    cluster, unit = CLUSTERS / f"rehearsal-{options['cluster']}.yaml", float(options["unit"]) / 1e3
    every = [one for one in contestants() if any(text in one.name for text in options["only"].split("+"))]
    found = measured(cluster, every, int(options["rounds"]), unit)
    errors, by_name = [], {}
    print("| schedule, microbatches | step s | predicted s | bubble | simulated | ours / torch |\n" + "|---" * 6 + "|")
    for one, row in zip(every, found["rows"], strict=True):
        by_name[one] = row["seconds"]
        agree = [abs(a - b) <= AGREE * abs(b) for a, b in zip(row["losses"], found["rows"][0]["losses"], strict=True)]
        assert one.microbatches != every[0].microbatches or all(agree), f"{one.name}: other losses"
        bubble = median(1 - busy / took for busy, took in zip(row["busy"], row["seconds"], strict=True))
        cells, seconds = [one.name, f"{median(row['seconds']):.3f}", "", f"{bubble:.3f}", "", ""], 0.0
        if not one.torch:
            mean = found["mean"][str(one.halved)]
            forward, backward = (1.5 * mean, 0.75 * mean) if one.halved else (mean, mean)
            seconds = foreseen(one, cluster, forward, backward)
            ideal = one.microbatches * (forward + 2 * backward) * BLOCKS / RANKS
            errors.append(abs(seconds / median(row["seconds"]) - 1))
            cells[2], cells[4] = f"{seconds:.3f}", f"{1 - ideal / seconds:.3f}"
        else:
            mine = by_name[Contestant(one.schedule, one.microbatches, one.halved)]
            cells[5] = f"{median(a / b for a, b in zip(mine, row['seconds'], strict=True)):.3f}"
        print(f"| {' | '.join(cells)} |", flush=True)
        if options["out"]:
            with open(options["out"], "a", encoding="utf-8") as file:
                print(json.dumps(asdict(one) | row | {"predicted": seconds, "load": os.getloadavg()[0]}), file=file)
    print(f"\npredictions are off by {median(errors):.1%} in the median, at most {max(errors):.1%}; load "
          f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
    else:
        main(sys.argv[1:])
