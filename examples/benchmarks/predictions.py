"""Predicted step times against measured ones: sudo python examples/benchmarks/predictions.py [NAME=VALUE ...]

    models=gpt-8k,llama,vgg,vit,mixture   clusters=4x1-200,2x2-200,8x1-200,2racks   rounds=5   random=3   seconds=60
    folder=FOLDER (where measured cluster files and plans are kept)   out=FILE (a line of JSON for every plan, added)
    again=FILE (nothing runs: what `out` wrote with this `folder`, predicted anew)

Of every model on every cluster: the found plan (by its time line; by its sum too, if that is another), data parallel,
ZeRO-3, tensor parallel, the best grid, and random valid plans of fixed seeds take turns in one world (`arena`).
Measured is the median over the quiet rounds of the slowest rank's seconds until gradients are there, in the second step
of a turn; predicted the time line, which knows of overlap, and the sum of all parts, which does not. Before, the
cluster is measured with all ranks running, by kernels that know of no model, for `seconds` (`calibrated`; 0: as the
file says). The machine is faster in one minute than in the next: the time line is that of the pulse which was taken
beside the steps (`pulse`: over that of the calibration), the sum is not.

    error     predicted / measured - 1, its size's median and 90th percentile
    tau       Kendall's rank correlation in a group (model, cluster); pairs measured within 5 % are ties and left out
    regret    how much slower the predicted best of a group ran than its measured best
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from math import ceil
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "support"))

from arena import CLUSTERS, contest
from calibrated import calibrated
from random_plans import random_plan
from small_models import made

from autoddl.api import compare, plan
from autoddl.capture.capture import capture
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import Cluster, load_cluster
from autoddl.cost_models.measured import scale_to_pulse
from autoddl.planner.bucket_size import best_buckets
from autoddl.planner.meshes import meshes
from autoddl.schedule.timeline import predict_timeline

DEFAULTS = {"models": "gpt-8k,llama,vgg,vit,mixture", "clusters": "4x1-200,2x2-200,8x1-200,2racks", "rounds": "5",
            "random": "3", "seconds": "60", "folder": "", "out": "", "again": ""}
TIE = 0.05
LONGEST = 10.0
"""Times the sum of the found plan: a random plan that is predicted slower runs only where too few are faster."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: seconds of a step."""

    model: str
    cluster: str
    plan: str
    line: float
    total: float
    measured: float
    load: float
    pulse: float = 1.0

    def error(self, of: str = "line") -> float:
        return float(getattr(self, of)) / self.measured - 1


def plans_of(model: str, cluster: Cluster, count: int) -> tuple[dict[str, Plan], Graph]:
    """Found with what is hidden counted, and by the sum; named strategies at their best, then `count` random plans;
    and the planned graph."""
    module, batch = made(model)
    found = {"found": plan(module, cluster, batch, name=model, overlap=True)}
    for one in compare(module, cluster, batch, name=model):
        if one.plan is not None and (one.name != "found" or _chosen(one.plan) != _chosen(found["found"])):
            found["least sum" if one.name == "found" else one.name] = one.plan
    captured, longest = capture(module, batch), LONGEST * found["found"].predicted.seconds
    graph, every = add_hubs(captured.graph), meshes(cluster, 3)
    tried = [random_plan(captured, seed, str(every[seed % len(every)]), cluster) for seed in range(20 * count)]
    order = sorted(range(len(tried)), key=lambda seed: (max(longest, tried[seed].predicted.seconds), seed))
    for seed in order[:count]:
        made_up = replace(tried[seed], source={"cluster": cluster.to_yaml()})  # it says which collectives run
        found[f"random {seed}"] = best_buckets(made_up, graph, cluster)
    return found, graph


def _chosen(plan: Plan) -> tuple[object, ...]:
    return plan.mesh, plan.decisions, plan.stored, plan.bucket_bytes


def kept(folder: Path, model: str, cluster: str, plan: str) -> Path:
    """Where a plan is kept."""
    return folder / f"{cluster}-{model}-{plan.replace(' ', '-')}.json"


def again(file: str, folder: Path) -> Iterator[Row]:
    """The rows of `file`, of whose plans and clusters `folder` has kept the files, as predicted now."""
    graphs: dict[str, Graph] = {}
    for row in (Row(**json.loads(line)) for line in Path(file).read_text(encoding="utf-8").splitlines()):
        if row.model not in graphs:
            graphs[row.model] = add_hubs(capture(*made(row.model)).graph)
        place, chosen = load_cluster(folder / f"{row.cluster}.yaml"), load_plan(
            kept(folder, row.model, row.cluster, row.plan))
        there = scale_to_pulse(place, row.pulse * place.measurements["pulse"])
        yield replace(row, line=predict_timeline(chosen, graphs[row.model], there).step.seconds)


def measured(model: str, cluster: Path, folder: Path, count: int, rounds: int) -> Iterator[Row]:
    """Every plan of the group; they are kept in `folder`."""
    place = load_cluster(cluster)
    plans, graph = plans_of(model, place, count)
    paths = {name: kept(folder, model, place.name, name) for name in plans}
    for name, each in plans.items():
        each.save(paths[name])
    turns = contest(cluster, model, paths, (), rounds, update=False, ahead=1)
    usual = min((probe for one in turns for probe in one.probes), default=0.0)
    for one in turns:
        if one.failure:
            print(f"{model} on {place.name}: {one.name} did not run: {one.failure}", file=sys.stderr)
            continue
        chosen = plans[one.name]
        seconds, beat = map(statistics.median, zip(*one.quiet(usual), strict=True))
        beaten = place.measurements.get("pulse", 0.0)
        line = predict_timeline(chosen, graph, scale_to_pulse(place, beat) if beaten else place).step.seconds
        yield Row(model, place.name, one.name, line, chosen.predicted.seconds, seconds, os.getloadavg()[0],
                  beat / beaten if beaten else 1.0)


def tau(rows: Sequence[Row], of: str) -> float | None:
    """Concordant less discordant pairs, over all that are no ties."""
    signs = [(a.measured < b.measured) == (getattr(a, of) < getattr(b, of)) for a, b in combinations(rows, 2)
             if abs(a.measured - b.measured) >= TIE * min(a.measured, b.measured)]
    return (2 * sum(signs) - len(signs)) / len(signs) if signs else None


def regret(rows: Sequence[Row], of: str) -> float:
    chosen = min(rows, key=lambda row: float(getattr(row, of)))
    return chosen.measured / min(row.measured for row in rows) - 1


def summary(name: str, rows: Sequence[Row], of: str) -> str:
    """One line of the table."""
    sizes = sorted(abs(row.error(of)) for row in rows)
    signed = statistics.median(row.error(of) for row in rows)
    groups = [[row for row in rows if (row.model, row.cluster) == key]
              for key in dict.fromkeys((row.model, row.cluster) for row in rows)]
    ranks = [value for value in (tau(group, of) for group in groups) if value is not None]
    losses = [regret(group, of) for group in groups]
    nine, order = sizes[ceil(0.9 * len(sizes)) - 1], statistics.fmean(ranks) if ranks else float("nan")
    return (f"| {name} | {of} | {len(rows)} | {statistics.median(sizes):.1%} | {nine:.1%} | {signed:+.1%} | "
            f"{order:.2f} | {statistics.fmean(losses):.1%} | {max(losses):.1%} |")


def main(arguments: Sequence[str]) -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options["folder"] or temporary)
        if options["again"]:
            return show([*again(options["again"], folder)])
        clusters = [CLUSTERS / f"rehearsal-{place}.yaml" for place in options["clusters"].split(",")]
        clusters = list(calibrated(clusters, folder, float(options["seconds"])))
        for cluster, model in product(clusters, options["models"].split(",")):
            for row in measured(model, cluster, folder, int(options["random"]), int(options["rounds"])):
                rows.append(row)
                print(f"{row.model:9}{row.cluster:20}{row.plan:20}{row.line:8.3f} line{row.total:8.3f} sum"
                      f"{row.measured:8.3f} measured {row.error():+.1%}  pulse {row.pulse:.2f}  load {row.load:.1f}",
                      flush=True)
                if options["out"]:
                    with open(options["out"], "a", encoding="utf-8") as file:
                        print(json.dumps(asdict(row)), file=file)
    show(rows)


def show(rows: Sequence[Row]) -> None:
    print(f"\ntorch {torch.__version__}, {os.cpu_count()} cores\n")
    print("| | predicted | plans | median error | 90 % | signed | tau | regret | worst |\n" + "|---" * 9 + "|")
    for key in ("model", "cluster"):
        for value in dict.fromkeys(getattr(row, key) for row in rows):
            print(summary(value, [row for row in rows if getattr(row, key) == value], "line"))
    print(summary("all", rows, "line"))
    print(summary("all", rows, "total"))


if __name__ == "__main__":
    main(sys.argv[1:])
