"""Plans with stages, and of mixtures, against torch's own ways: sudo python staged_rivals.py [NAME=VALUE ...]

    cases=4x1,2racks,8x1,quick,experts-2x2,experts-8x1   rounds=5   tuning=2   limit=60 (CPU seconds of a search)
    out=FILE (a line of JSON for every case, added)   only=TEXT+TEXT (parts of rivals' names)
    plans=FOLDER (where plans are kept; those that are there serve again)

Products of all contestants take as long as on a device of a few GFLOP/s (`paced`), links are shaped. So the cores of
this machine are mostly idle, and what else they do changes little. Models, devices and links are those of `CASES`:

    4x1       four nodes behind links of 20 Mbit/s; a GPT of 8 blocks, 8 rows of 256 tokens
    2racks    two racks of two nodes: 40 Mbit/s to a node, 10 Mbit/s to a rack; the same GPT
    8x1       eight nodes of half the speed behind links of 20 Mbit/s; the same GPT
    quick     four nodes behind links of 2 Gbit/s; the same GPT, for which stages do not pay
    experts-2x2, experts-8x1   two nodes of two ranks, and eight nodes of half the speed, behind links of 200 Mbit/s; a
              mixture of 8 experts, 16 rows of 64 tokens, planned without stages

Ours is what `plan` finds, with and without stages, over all schedules. Rivals are `torch_rivals.staged_rivals`: DDP,
FSDP2, tensor parallel and grids of them, torch's pipelining with each of its schedules, and pipelining with DDP, FSDP2
or tensor parallel inside its stages. Those of a mixture are `expert_rivals`: transformers' own expert parallel, and
what has no stages. As many blocks are in each of their stages. Two settings of each family that are
fastest when warm play `tuning` rounds, and the faster one the others; what takes three times as long as another at its
first step does not. Of a ratio, ours over theirs, the median of the rounds' ratios is told. All losses must agree to
1e-4 at every step; a rival with others is named, and counts as not run.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from arena import Turns, contest
from rivals import AGREE, OURS, interval
from small_models import made
from torch_rivals import expert_rivals, staged_rivals

from autoddl.api import plan
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import load_cluster

HOPELESS = 3.0
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved:2")
NET = "  - {{name: net, size: {}, bandwidth: {} MB/s, latency: 100 us, efficiency: 0.97}}\n"
NODES = NET.format(2, 25).replace("efficiency", "shared_by: node, efficiency")
RACKS = """\
  - {name: rack, size: 2, bandwidth: 5 MB/s, latency: 100 us, efficiency: 0.97}
  - {name: spine, size: 2, bandwidth: 1.25 MB/s, latency: 100 us, shared_by: rack, efficiency: 0.97}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A model of `small_models`, GFLOP/s of a device, and the levels of a cluster behind its nodes of `node` ranks.

    A mixture has no stages, and is one microbatch."""

    model: str
    speed: float
    levels: str
    node: int = 1

    @property
    def experts(self) -> bool:
        """Whether it is a mixture."""
        return self.model.startswith("mixture")

    def write(self, name: str, folder: str) -> Path:
        """Writes the cluster file; returns its path."""
        path = Path(folder, f"{name}.yaml")
        path.write_text(
            f"name: {name}\ndevice: {{name: paced, kind: cpu, memory: 2 GB, bandwidth: 5 GB/s, efficiency: 1.0,\n"
            f"         peak: {{float32: {self.speed} GFLOP/s}}}}\nlevels:\n"
            f"  - {{name: node, size: {self.node}, bandwidth: 1 GB/s, latency: 60 us, topology: fully-connected}}\n"
            f"{self.levels}", encoding="utf-8")
        return path


CASES = {"4x1": Case("gpt-long", 4, NET.format(4, 2.5)), "2racks": Case("gpt-long", 4, RACKS),
         "8x1": Case("gpt-long", 2, NET.format(8, 2.5)), "quick": Case("gpt-long", 4, NET.format(4, 250)),
         "experts-2x2": Case("mixture-sent", 4, NODES, 2),
         "experts-8x1": Case("mixture-sent", 2, NET.format(8, 25))}


def planned(case: Case, cluster: Path, limit: float) -> Plan:
    """Ours: the fastest of all numbers of stages, one included, all schedules and numbers of microbatches."""
    (module, batch), ranks = made(case.model), load_cluster(cluster).size
    if case.experts:
        return plan(module, cluster, batch, name=case.model, optimizer="sgd", workers=1, overlap=True)
    rows = len(batch.args[0])
    return plan(module, cluster, batch, name=case.model, optimizer="sgd", workers=1, schedule=SCHEDULES,
                stages=tuple(n for n in (1, 2, 4, 8) if n <= ranks), microbatches=(1, rows // 2, rows),
                stages_limit=limit)


def kept(name: str, case: Case, cluster: Path, options: Mapping[str, str]) -> Plan:
    """The plan of `plans`, or a new one, which is kept there."""
    path = Path(options["plans"], f"{name}.json")
    if options["plans"] and path.exists():
        return load_plan(path)
    found = planned(case, cluster, float(options["limit"]))
    if options["plans"]:
        found.save(path)
    return found


def played(case: Case, cluster: Path, ours: Plan, options: Mapping[str, str]) -> list[Turns]:
    """All contestants; a rival whose losses are not ours has a failure."""
    listed = expert_rivals if case.experts else staged_rivals
    every = [one for one in listed(case.model, load_cluster(cluster).size)
             if any(text in one.name for text in options["only"].split("+"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        ours.save(path)
        found = contest(cluster, case.model, {OURS: path}, every, int(options["rounds"]), int(options["tuning"]),
                        pace=case.speed * 1e9, hopeless=HOPELESS)
    mine = next(one for one in found if one.name == OURS)
    if mine.failure:
        raise SystemExit(f"{cluster.stem}: ours did not run: {mine.failure}")
    return [one if one.failure or _agree(one, mine) else replace(one, failure="other losses", seconds=())
            for one in found]


def _agree(one: Turns, other: Turns) -> bool:
    return all(abs(a - b) <= AGREE * abs(b) for a, b in zip(one.losses, other.losses, strict=False))


def show(name: str, ours: Plan, found: Sequence[Turns], out: str) -> None:
    """The best of each family, and why others did not play; a line of JSON in `out`."""
    mine = next(one for one in found if one.name == OURS)
    middle, load = statistics.median(mine.seconds), os.getloadavg()[0]
    print(f"\n{name}: ours {middle:.3f} s, predicted {ours.predicted.seconds:.3f}; "
          f"{str(ours).splitlines()[0]}; load {load:.1f}\n\n| rival | s | ours / theirs |\n|---|---|---|")
    for one in sorted(found, key=lambda one: statistics.median(one.seconds) if one.seconds else 0.0):
        if one.seconds and one is not mine:
            ratio, low, high = interval(mine.seconds, one.seconds)
            print(f"| {one.name} | {statistics.median(one.seconds):.3f} | {ratio:.3f} [{low:.3f}, {high:.3f}] |")
    for one in found:
        if not one.seconds:
            print(f"{one.name}: {one.failure or f'{one.tuned:.3f} s when tuned'}", file=sys.stderr)
    sys.stdout.flush()
    if out:
        row = {"case": name, "load": load, "predicted": ours.predicted.seconds, "plan": str(ours)}
        with open(out, "a", encoding="utf-8") as file:
            print(json.dumps(row | {"turns": [asdict(one) for one in found]}), file=file)


def main(arguments: Sequence[str]) -> None:
    options = {"cases": ",".join(CASES), "rounds": "5", "tuning": "2", "limit": "60", "out": "", "only": "",
               "plans": ""} | dict(
        argument.split("=", 1) for argument in arguments)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        for name in options["cases"].split(","):
            cluster = CASES[name].write(name, folder)
            ours = kept(name, CASES[name], cluster, options)
            print(ours, file=sys.stderr, flush=True)
            show(name, ours, played(CASES[name], cluster, ours, options), options["out"])


if __name__ == "__main__":
    main(sys.argv[1:])
