"""Our plan against torch's own ways, on shaped links: sudo python examples/benchmarks/rivals.py [NAME=VALUE ...]

    models=gpt-512,gpt-8k,gpt-32k,vgg,llama,vit,mixture   clusters=4x1-200,2x2-200,8x1-200,2racks   tuning=2
    stages=1   microbatches=1   schedule=1f1b (with more, ours may have stages; several with + between)
    rounds=5 (a start)   starts=2   seconds=60   folder=FOLDER (where measured cluster files are kept)
    out=FILE (a line of JSON for every model and cluster, added)

Ours is the plan for the cluster whose device was measured with all ranks running (`calibrated`).

Every rival is tuned (`torch_rivals`) in rounds of their own, in the first start; then all contestants take turns, each
round one step of each. Of a ratio, ours over theirs, the median of the rounds' ratios, and the interval in which the
median lies for 95 % of 10000 resamples of the rounds. All losses must agree to 1e-4 at every step.
"""

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from arena import CLUSTERS, Turns, contest
from calibrated import calibrated
from small_models import made
from torch_rivals import rivals

from autoddl.api import plan
from autoddl.core.plan import Plan
from autoddl.cost_models import load_cluster

OURS = "ours"
SHARDED, CUT, PIPED = ("ddp", "fsdp", "hsdp"), ("tp", "grid"), ("pipe",)
AGREE = 1e-4
RESAMPLES = 10000
DEFAULTS = {"models": "gpt-512,gpt-8k,gpt-32k,vgg,llama,vit,mixture",
            "clusters": "4x1-200,2x2-200,8x1-200,2racks", "rounds": "5", "starts": "2",
            "tuning": "2", "seconds": "60", "folder": "", "out": "",
            "stages": "1", "microbatches": "1", "schedule": "1f1b"}


def planned(model: str, cluster: Path, options: Mapping[str, str]) -> Plan:
    """Ours, with stages where these are asked for."""
    module, batch = made(model)
    if options["stages"] == "1":
        return plan(module, cluster, batch, name=model, overlap=True)
    stages, parts = (tuple(map(int, options[name].split("+"))) for name in ("stages", "microbatches"))
    return plan(module, cluster, batch, name=model, stages=stages, microbatches=parts, workers=1,
                schedule=tuple(options["schedule"].split("+")), stages_limit=90.0)


def played(model: str, cluster: Path, ours: Plan, rounds: int, starts: int, tuning: int) -> list[Turns]:
    """All contestants over all starts: the first tunes the rivals."""
    candidates = list(rivals(model, load_cluster(cluster).size))
    joined: dict[str, Turns] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        ours.save(path)
        for start in range(starts):
            found = contest(cluster, model, {OURS: path}, candidates, rounds, tuning if start == 0 else 0)
            _check(model, found)
            joined |= {one.name: _after(joined.get(one.name), one) for one in found}
            best = {one.name for one in found if one.seconds}
            candidates = [one for one in candidates if one.name in best]
    return list(joined.values())


def _check(model: str, found: Sequence[Turns]) -> None:
    """That ours ran in this start, and all that did have its losses."""
    ours = next(one for one in found if one.name == OURS)
    if ours.failure:
        raise SystemExit(f"{model}: ours did not run: {ours.failure}")
    disagree = [one.name for one in found if not one.failure and not _agree(one, ours)]
    if disagree:
        raise SystemExit(f"{model}: the losses of {', '.join(disagree)} are not ours to {AGREE:g}")


def _after(known: Turns | None, one: Turns) -> Turns:
    """The turns of the starts before and of this one; who fails in one has none that count."""
    if known is None:
        return one
    return replace(known, failure=one.failure, seconds=() if one.failure else known.seconds + one.seconds)


def _agree(one: Turns, other: Turns) -> bool:
    return all(abs(a - b) <= AGREE * abs(b) for a, b in zip(one.losses, other.losses, strict=False))


def interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high) of the paired ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def row(found: Sequence[Turns], families: Sequence[str]) -> str:
    """Ours against the fastest of `families`: its name and seconds, and the reduction of step time."""
    ours = next(one for one in found if one.name == OURS)
    playing = [one for one in found if one.family in families and one.seconds]
    if not playing:
        return "none ran"
    best = min(playing, key=lambda one: statistics.median(one.seconds))
    middle, low, high = interval(ours.seconds, best.seconds)
    return f"{best.name} {statistics.median(best.seconds):.3f}: {middle:.3f} [{low:.3f}, {high:.3f}]"


def main(arguments: Sequence[str]) -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in arguments)
    rounds, starts, tuning = (int(options[name]) for name in ("rounds", "starts", "tuning"))
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {rounds} rounds in each of {starts} starts\n")
    columns = ("model", "cluster", "ours s", "data parallel", "sharded", "Megatron-style", "torch pipelining",
               "best rival", "load")
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    with tempfile.TemporaryDirectory() as temporary:
        clusters = [CLUSTERS / f"rehearsal-{name}.yaml" for name in options["clusters"].split(",")]
        files = list(calibrated(clusters, Path(options["folder"] or temporary), float(options["seconds"])))
        for cluster, model in product(files, options["models"].split(",")):
            ours = planned(model, cluster, options)
            print(ours, file=sys.stderr)
            show(model, cluster, played(model, cluster, ours, rounds, starts, tuning), options["out"])


def show(model: str, cluster: Path, found: Sequence[Turns], out: str) -> None:
    """One line of the table, and one of JSON in the file `out`."""
    ours, load = next(one for one in found if one.name == OURS), os.getloadavg()[0]
    cells = [row(found, families) for families in (
        SHARDED[:1], SHARDED[1:], CUT, PIPED, SHARDED + CUT + PIPED)]
    name, middle = cluster.stem.removeprefix("rehearsal-"), statistics.median(ours.seconds)
    print(f"| {model} | {name} | {middle:.3f} | {' | '.join(cells)} | {load:.1f} |", flush=True)
    for one in found:
        if one.failure:
            print(f"{model} on {name}: {one.name} did not run: {one.failure}", file=sys.stderr)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            print(json.dumps({"model": model, "cluster": name, "load": load, "turns": [asdict(one) for one in found]}),
                  file=file)


if __name__ == "__main__":
    main(sys.argv[1:])
