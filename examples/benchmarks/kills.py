"""Does training survive whatever dies? python examples/benchmarks/kills.py [kills] [ranks] [seed] [folder] [warm]

Two layers with dropout, in float64, on 4 ranks (or as many as given), a checkpoint every 5 of 150 steps. Again and
again the run is started with --resume and hit at a random moment. That is one of the whole run, its start included, or,
three times in four, one after its first checkpoint. A last start finishes it. A hit is one of

    rank        SIGKILL to a random rank                 two         to two ranks
    save        to a random rank while a checkpoint is being written
    launcher    SIGKILL to the launcher                  parent      to the process that forks the ranks
    hangup, terminate, interrupt                         a signal to the launcher, which ends the ranks

Training is cut into rounds, each with a folder of its own, up to 8 hits and 200 s. It passes if

    end         every hit run ends within 10 s, with one line or none, no traceback, and no process is left
    kept        no hit loses the last checkpoint that was there
    losses      those of the run that was hit are equal to the bit to those of one that was not
    other       those of one that another plan finishes, of half of the ranks, are equal to 1e-6

With a folder the plan, the losses and all hits so far stay in it, and further calls add to them. With `warm` runs are
forks of this process, which has imported what they need (`warm_runs`): eight ranks start on two cores in seconds.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from warm_runs import WarmRun, is_warm, warm

from autoddl.runtime.checkpoints.checkpoint_series import kept_steps

ROOT = Path(__file__).parent.parent.parent
PROGRAM = [sys.executable, "-P", "-m", "autoddl.cli"]
CLUSTER = """
name: slow
device: {{name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {{float32: 10 MFLOP/s, float64: 10 MFLOP/s}}}}
levels:
  - {{name: net, size: {ranks}, bandwidth: 100 MB/s, latency: 100 us}}
"""
EVERY, STEPS, HITS, LIMIT, ROUND = 5, 150, 8, 10.0, 200.0
KINDS = ("rank", "two", "save", "launcher", "parent", "hangup", "terminate", "interrupt")
SIGNALS = {"hangup": signal.SIGHUP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}

PROGRESS = re.compile(r"autoddl: \d+ s: ")
"""How a line begins that says how far a run is."""

Process = subprocess.Popen[str] | WarmRun


class Small(nn.Module):
    """Two layers with dropout between them, which are captured in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 64), nn.Linear(64, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(self.dropout(self.up(x).relu())), y)


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model that is trained, in float64, so that other sums differ by far less than 1e-6."""
    return Small().double(), (torch.randn(32, 16, dtype=torch.float64), torch.randn(32, 8, dtype=torch.float64))


@dataclass(frozen=True)
class Hit:
    """One hit: what kind, after how many seconds, whether training had begun, and what is wrong with the end."""

    kind: str
    after: float
    begun: bool
    ended: float
    kept: tuple[int, ...]
    wrong: tuple[str, ...]


def children(pid: int) -> list[int]:
    """All descendants of a process, the launcher's child first, then the ranks."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def planned(folder: Path, ranks: int) -> Path:
    """A plan for so many ranks, made if it is not there."""
    plan, cluster = folder / f"plan-{ranks}.json", folder / f"cluster-{ranks}.yaml"
    if not plan.exists():
        cluster.write_text(CLUSTER.format(ranks=ranks))
        words = ["plan", f"{Path(__file__).resolve()}:small", str(cluster), "-o", str(plan)]
        subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
    return plan


def words(plan: Path, folder: Path | None, *more: str) -> list[str]:
    """The command that trains, from the last checkpoint of `folder`."""
    saving = [] if folder is None else ["--checkpoint", str(folder), "--every", str(EVERY), "--resume"]
    return [*PROGRAM, "run", str(plan), f"{Path(__file__).resolve()}:small", "--steps", str(STEPS), "--no-record",
            "--json", *saving, *more]


def started(command: Sequence[str], **environment: str) -> Process:
    if is_warm() and list(command[:len(PROGRAM)]) == PROGRAM:
        return WarmRun(command[len(PROGRAM):], environment)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONHASHSEED": "0", **environment})


def hit(plan: Path, folder: Path, kind: str, draw: random.Random, usual: float) -> Hit | None:
    """Starts the run and hits it; None where it was over before."""
    before, began, process = kept_steps(folder), time.monotonic(), started(words(plan, folder))
    wait(process, folder, before, kind, draw, usual)
    after, below = time.monotonic() - began, children(process.pid)
    if process.poll() is not None:
        process.communicate()
        return None
    shot, ranks = time.monotonic(), below[1:]
    targets = {"rank": draw.sample(ranks, min(1, len(ranks))), "save": draw.sample(ranks, min(1, len(ranks))),
               "two": draw.sample(ranks, min(2, len(ranks))), "parent": below[:1]}.get(kind, [])
    for pid in targets or [process.pid]:
        os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
    said, ended = ending(process, shot)
    until = time.monotonic() + 2
    while any(alive(pid) for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    wrong = faults(ended, said, below, before, folder)
    return Hit(kind, after, bool(ranks), ended, kept_steps(folder), tuple(wrong))


def wait(process: Process, folder: Path, before: tuple[int, ...], kind: str, draw: random.Random, usual: float
         ) -> None:
    """Waits for the moment of the hit."""
    began, later = time.monotonic(), draw.random() < 0.75
    while later and kept_steps(folder) == before and process.poll() is None and time.monotonic() - began < 120:
        time.sleep(0.005)
    after = time.monotonic() + draw.uniform(0, 0.5 if later else usual)
    while time.monotonic() < after and process.poll() is None:
        time.sleep(0.01)
    while kind == "save" and not [*folder.glob("*.writing")] and process.poll() is None:
        time.sleep(0.002)


def ending(process: Process, since: float) -> tuple[str, float]:
    """What a run says at its end, and how many seconds after `since` that is."""
    try:
        _, said = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    return said, time.monotonic() - since


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def faults(ended: float, said: str, below: list[int], before: tuple[int, ...], folder: Path, limit: float = LIMIT
           ) -> list[str]:
    """What is wrong with the end of a run that was hit."""
    lines, kept = [line for line in said.splitlines() if not PROGRESS.match(line)], kept_steps(folder)
    found = [f"ended after {ended:.1f} s"] if ended > limit else []
    found += ["a traceback"] if "Traceback" in said else [f"{len(lines)} lines: {lines[:3]}"] if len(lines) > 1 else []
    found += [f"{count} processes are left"] if (count := sum(map(alive, below))) else []
    return found + ([f"checkpoints {before} -> {kept}"] if before and (not kept or kept[-1] < before[-1]) else [])


def losses(command: Sequence[str]) -> list[float]:
    """The losses of a run that nothing happens to; where others have the memory that it needs, it is started again."""
    for _ in range(20):
        process = started(command)
        out, said = process.communicate(timeout=600)
        if "are free here" not in said:
            break
        time.sleep(15)
    if process.returncode:
        raise SystemExit(f"the run failed ({process.returncode}): {said}")
    found: list[float] = json.loads(out.splitlines()[-1])["losses"]
    return found


def uninterrupted(folder: Path, ranks: int) -> tuple[list[float], float]:
    """The losses of a run that is not hit, and its seconds; measured if they are not there."""
    path, began = folder / f"whole-{ranks}.json", time.monotonic()
    if not path.exists():
        path.write_text(json.dumps([losses(words(planned(folder, ranks), None)), time.monotonic() - began]))
    found, seconds = json.loads(path.read_text())
    return found, seconds


def finished(folder: Path, ranks: int, checkpoints: Path) -> list[str]:
    """What is wrong with the losses of a round that is finished here, and in a copy by another plan."""
    whole, _ = uninterrupted(folder, ranks)
    copy = checkpoints.with_name(f"{checkpoints.name}-other")
    shutil.copytree(checkpoints, copy) if checkpoints.exists() else None
    wrong = [] if losses(words(planned(folder, ranks), checkpoints)) == whole else ["other losses"]
    other = losses(words(planned(folder, ranks // 2), copy))
    furthest = max(abs(a - b) / abs(b) for a, b in zip(other, whole, strict=True))
    return wrong + ([f"losses of another mesh differ by {furthest:.1e}"] if furthest > 1e-6 else [])


def round_of_hits(folder: Path, ranks: int, most: int, draw: random.Random) -> tuple[list[Hit], list[str]]:
    """Hits a run as often as it takes, up to `most`; returns the hits and what is wrong with its losses."""
    _, usual = uninterrupted(folder, ranks)
    plan, hits, until = planned(folder, ranks), list[Hit](), time.monotonic() + ROUND
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for kind in draw.sample(KINDS, len(KINDS))[:most]:
            found = hit(plan, Path(name, "kept"), kind, draw, usual)
            if found is None:
                break
            hits.append(found)
            print(f"{found.kind:10} after {found.after:5.1f} s, ended in {found.ended:4.1f} s, kept {found.kept} "
                  f"{'; '.join(found.wrong)}", flush=True)
            if time.monotonic() > until:
                break
        return hits, finished(folder, ranks, Path(name, "kept"))


def main() -> None:
    kills, ranks, seed = [*map(int, sys.argv[1:4]), *(40, 4, 0)[len(sys.argv[1:4]):]]
    draw = random.Random(seed)
    if sys.argv[5:] == ["warm"]:
        warm()
    for number in SIGNALS.values():  # jobs in the background ignore some, under nohup too, and so would runs
        signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(sys.argv[4] if len(sys.argv) > 4 else name)
        folder.mkdir(exist_ok=True)
        left = kills
        while left:
            hits, wrong = round_of_hits(folder, ranks, min(HITS, left), draw)
            left -= len(hits)
            print(f"round: {'; '.join(wrong) or 'losses equal to the bit, by another mesh to 1e-6'}", flush=True)
            with (folder / f"rounds-{ranks}.jsonl").open("a") as file:
                file.write(json.dumps({"hits": list(map(asdict, hits)), "wrong": wrong}) + "\n")
        rounds = [json.loads(line) for line in (folder / f"rounds-{ranks}.jsonl").read_text().splitlines()]
    sys.exit(summary(ranks, rounds))


def summary(ranks: int, rounds: Sequence[dict[str, Any]]) -> bool:
    """Prints all rounds in a line, and returns whether anything was wrong."""
    hits = [one for every in rounds for one in every["hits"]]
    wrong, differ = sum(bool(one["wrong"]) for one in hits), sum(bool(one["wrong"]) for one in rounds)
    counts = Counter(one["kind"] for one in hits)
    print(f"{len(hits)} hits on {ranks} ranks ({', '.join(f'{kind} {n}' for kind, n in sorted(counts.items()))}), "
          f"{sum(one['begun'] for one in hits)} after the ranks had started, {sum(bool(one['kept']) for one in hits)} "
          f"with a checkpoint; slowest end {max((one['ended'] for one in hits), default=0.0):.1f} s; {wrong} wrong; "
          f"{differ} of {len(rounds)} rounds with other losses")
    return bool(wrong or differ)


if __name__ == "__main__":
    main()
