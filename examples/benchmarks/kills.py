"""Does training survive whatever dies? python examples/benchmarks/kills.py [kills] [ranks] [seed]

A small GPT with dropout on 4 ranks (or as many as given), a checkpoint every 5 of 60 steps. Again and again the run is
started with --resume and hit at a random moment; a last start finishes it. A hit is one of

    rank        SIGKILL to a random rank                 two         to two ranks
    save        to a random rank while a checkpoint is being written
    launcher    SIGKILL to the launcher                  parent      to the process that forks the ranks
    hangup, terminate, interrupt                         a signal to the launcher, which ends the ranks

Training is cut into rounds, each with a folder of its own and 8 hits. It passes if

    end         every hit run ends within 10 s, with one line or none, no traceback, and no process is left
    kept        no hit loses the last checkpoint that was there
    losses      those of the run that was hit are equal to the bit to those of one that was not
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import autoddl
from autoddl.runtime.checkpoints.checkpoint_series import kept_steps

ROOT = Path(__file__).parent.parent.parent
FACTORY = [f"{ROOT / 'examples' / 'gpt.py'}:gpt", "--set", "layers=2", "--set", "width=32", "--set", "heads=4",
           "--set", "context=16", "--set", "dropout=0.1"]
PROGRAM = [sys.executable, "-P", "-m", "autoddl.cli"]
CLUSTER = """
name: slow
device: {{name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {{float32: 10 MFLOP/s}}}}
levels:
  - {{name: net, size: {ranks}, bandwidth: 100 MB/s, latency: 100 us}}
"""
EVERY, STEPS, HITS, LIMIT = 5, 60, 8, 10.0
KINDS = ("rank", "two", "save", "launcher", "parent", "hangup", "terminate", "interrupt")
SIGNALS = {"hangup": signal.SIGHUP, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}


@dataclass(frozen=True)
class Hit:
    """One hit: what kind, after how many seconds, whether training had begun, and what is wrong with the end."""

    kind: str
    after: float
    begun: bool
    ended: float
    wrong: tuple[str, ...]


def children(pid: int) -> list[int]:
    """All descendants of a process, the launcher's child first, then the ranks."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def started(plan: Path, folder: Path | None) -> "subprocess.Popen[str]":
    saving = [] if folder is None else ["--checkpoint", str(folder), "--every", str(EVERY), "--resume"]
    words = ["run", str(plan), *FACTORY, "--steps", str(STEPS), "--no-record", "--json", *saving]
    return subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONHASHSEED": "0"})


def hit(plan: Path, folder: Path, kind: str, draw: random.Random, usual: float) -> Hit | None:
    """Starts the run and hits it; None where it was over before."""
    before, begun = kept_steps(folder), time.monotonic()
    process = started(plan, folder)
    after = draw.uniform(0, usual)
    while time.monotonic() - begun < after and process.poll() is None:
        time.sleep(0.01)
    if kind == "save":
        while not [*folder.glob("*.writing")] and process.poll() is None and time.monotonic() - begun < 120:
            time.sleep(0.002)
    below = children(process.pid) if process.poll() is None else []
    if process.poll() is not None:
        process.communicate()
        return None
    shot, ranks = time.monotonic(), below[1:]
    targets = {"rank": draw.sample(ranks, min(1, len(ranks))), "save": draw.sample(ranks, min(1, len(ranks))),
               "two": draw.sample(ranks, min(2, len(ranks))), "parent": below[:1]}.get(kind, [])
    for pid in targets or [process.pid]:
        os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
    try:
        _, said = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    ended = time.monotonic() - shot
    until = time.monotonic() + 2
    while any(alive(pid) for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    return Hit(kind, after, bool(ranks), ended, tuple(faults(ended, said, below, before, folder)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def faults(ended: float, said: str, below: list[int], before: tuple[int, ...], folder: Path) -> list[str]:
    """What is wrong with the end of a run that was hit."""
    lines, kept = said.strip().splitlines(), kept_steps(folder)
    found = [f"ended after {ended:.1f} s"] if ended > LIMIT else []
    found += ["a traceback"] if "Traceback" in said else [f"{len(lines)} lines: {lines[:3]}"] if len(lines) > 1 else []
    found += [f"{count} processes are left"] if (count := sum(map(alive, below))) else []
    return found + ([f"checkpoints {before} -> {kept}"] if before and (not kept or kept[-1] < before[-1]) else [])


def losses(process: "subprocess.Popen[str]") -> list[float]:
    out, said = process.communicate(timeout=600)
    if process.returncode:
        raise SystemExit(f"the run failed: {said}")
    found: list[float] = json.loads(out.splitlines()[-1])["losses"]
    return found


def main() -> None:
    kills, ranks, seed = [*map(int, sys.argv[1:4]), *(40, 4, 0)[len(sys.argv) - 1:]]
    draw, hits, differ, rounds = random.Random(seed), list[Hit](), 0, 0
    with tempfile.TemporaryDirectory() as name:
        plan, cluster = Path(name, "plan.json"), Path(name, "cluster.yaml")
        cluster.write_text(CLUSTER.format(ranks=ranks))
        words = ["plan", FACTORY[0], str(cluster), *FACTORY[1:], "-o", str(plan)]
        subprocess.run([*PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
        print(f"plan: {autoddl.load_plan(plan).mesh}", flush=True)
        begun = time.monotonic()
        whole = losses(started(plan, None))
        usual = time.monotonic() - begun
        while len(hits) < kills:
            folder, rounds = Path(name, f"round-{rounds}"), rounds + 1
            order = draw.sample(KINDS, len(KINDS))
            for kind in order[:min(HITS, kills - len(hits))]:
                found = hit(plan, folder, kind, draw, usual)
                if found is None:
                    break
                hits.append(found)
                print(f"{len(hits):4} {found.kind:10} after {found.after:5.1f} s, ended in {found.ended:4.1f} s, kept "
                      f"{kept_steps(folder)} {'; '.join(found.wrong)}", flush=True)
            same = losses(started(plan, folder)) == whole
            differ += not same
            print(f"     round {rounds}: losses {'equal to the bit' if same else 'DIFFER'}", flush=True)
    wrong = [one for one in hits if one.wrong]
    counts = Counter(one.kind for one in hits)
    print(f"{len(hits)} hits on {ranks} ranks ({', '.join(f'{kind} {n}' for kind, n in counts.items())}), "
          f"{sum(one.begun for one in hits)} of them after the ranks had started; slowest end "
          f"{max(one.ended for one in hits):.1f} s; {len(wrong)} wrong; {differ} of {rounds} rounds with other losses")
    sys.exit(bool(wrong or differ))


if __name__ == "__main__":
    main()
