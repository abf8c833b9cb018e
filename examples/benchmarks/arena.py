"""Contestants in one world: the ranks of a cluster start once, and all contestants take turns in them, round by round.

A turn is one training step of one contestant, from a barrier to when the slowest rank is done; so what disturbs the
machine for a second touches all alike, and the ratio of two in the same round says more than each alone. Contestants
are plans (a file) and torch's own ways (`torch_rivals`), each with a small copy of the same model on the same batch.

With `ahead`, each turn is of so many steps more, of which the last counts: in training a step follows one of the same
plan, whose pages and caches are warm. Then a fixed product runs before and after the turn (`probes`, the slower of the
two, on the slowest rank): where it takes longer than at other times, something else had the cores. And the pulse is
taken (`pulses`, the mean of both and of the ranks), which says how fast the processors are by themselves.

With `pace`, products of all contestants take as long as on a device of so many FLOP/s (`paced`). With `hopeless`, one
whose first step takes so many times as long as the fastest first step by then plays no further.

`contest` starts the ranks, on shaped links. With `tuning` rounds, the two of each family that were fastest when warm
play them, and the faster one goes on. A contestant that cannot be built says why, and the others go on.
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paced import Pace, in_real_time
from small_models import made
from torch import Tensor
from torch_rivals import RATE, Rival, stepper

from autoddl.calibrate.kernel_timing import clock_of
from autoddl.calibrate.machine_speed import median_pulse, pulse
from autoddl.core.plan import load_plan
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import launch
from autoddl.launch.places import network_places
from autoddl.launch.shaped_network import shape_links
from autoddl.runtime.parallelize import parallelize

__all__ = ["CLUSTERS", "Turns", "contest"]

CLUSTERS = Path(__file__).parent.parent / "clusters"
WARM = 2
"""Steps before the first turn: connections, and buckets that are built anew after a first step."""
TUNED = 2
"""Settings of a family that are worth tuning rounds."""
PRODUCTS, QUIET = 60, 1.25
"""Of a probe, and how much longer than usual one may take."""
TIMEOUT = 300.0
HOPELESS = "its first step takes {:.2f} s, where another takes {:.2f}"


@dataclass(frozen=True, slots=True)
class Turns:
    """Of one contestant: seconds of every round, the slowest rank's, and the loss of every step that it trained."""

    name: str
    family: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    tuned: float | None = None
    failure: str = ""
    probes: tuple[float, ...] = ()
    pulses: tuple[float, ...] = ()

    def quiet(self, usual: float) -> list[tuple[float, float]]:
        """Seconds and pulse of the rounds in which the probes took little more than usual, or least."""
        least = max(QUIET * usual, min(self.probes))
        every = zip(self.seconds, self.pulses, self.probes, strict=True)
        return [(took, beat) for took, beat, probe in every if probe <= least]


def contest(cluster: Path, model: str, plans: dict[str, Path], rivals: Sequence[Rival], rounds: int,
            tuning: int = 0, update: bool = True, ahead: int = 0, pace: float = 0.0,
            hopeless: float = 0.0) -> list[Turns]:
    """One process start: `tuning` rounds of all, then `rounds` of the best of each family. Plans are families alone;
    without `update`, theirs end when the gradients are there, as a plan predicts it."""
    place = load_cluster(cluster)
    with tempfile.TemporaryDirectory(prefix="autoddl-arena-") as folder, shape_links(place) as built:
        job = {"folder": folder, "model": model, "plans": {name: str(path) for name, path in plans.items()},
               "rivals": [asdict(rival) for rival in rivals], "rounds": rounds, "tuning": tuning,
               "update": update, "ahead": ahead, "pace": pace, "hopeless": hopeless}
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job), encoding="utf-8")
        launch(place.size, [sys.executable, "-W", "ignore", __file__, str(path)], places=network_places(built))
        return [Turns(**row) for row in json.loads(Path(folder, "turns.json").read_text())]


@dataclass(slots=True)
class _Seat:
    """A contestant in a rank."""

    name: str
    family: str
    step: Callable[[], Tensor]
    seconds: list[float]
    losses: list[Tensor]
    tuned: float | None = None
    failure: str = ""
    probes: list[float] = field(default_factory=list)
    pulses: list[float] = field(default_factory=list)

    def turn(self, ahead: int = 0) -> float:
        """The slowest rank's seconds of the last step."""
        for _ in range(ahead):
            self.losses.append(self.step())
        dist.barrier()
        start = time.perf_counter()
        self.losses.append(self.step())
        return _slowest(start)


def _slowest(start: float) -> float:
    """Seconds since `start`, on the slowest rank."""
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _probe() -> float:
    """Seconds of the same work, whatever is timed."""
    square = torch.ones(256, 256)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        square @ square
    return _slowest(start)


def _planned(path: str, model: str, update: bool) -> Callable[[], Tensor]:
    module, batch = made(model)
    parallel = parallelize(module, load_plan(path), batch, timeout=TIMEOUT)
    optimizer = torch.optim.SGD(parallel.parameters(), RATE)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = parallel.step(batch)
        if update:
            optimizer.step()
        return loss

    return step


def _seated(job: dict[str, Any]) -> list[_Seat]:
    """All contestants, warm; one that all ranks failed alike is seated with what it said."""
    makers: list[tuple[str, str, Callable[[], Callable[[], Tensor]]]] = [
        (name, name, partial(_planned, path, job["model"], job["update"])) for name, path in job["plans"].items()]
    makers += [(one.name, one.family, partial(stepper, one)) for one in (Rival(**r) for r in job["rivals"])]
    seats, least = list[_Seat](), math.inf
    for name, family, maker in makers:
        seat = _Seat(name, family, torch.zeros, [], [])
        try:
            seat.step = maker()
            if job["pace"]:
                in_real_time(True)
            seat.tuned = seat.turn()
            least = min(least, seat.tuned)
            if job["hopeless"] and seat.tuned > job["hopeless"] * least:
                seat.failure = HOPELESS.format(seat.tuned, least)
            else:
                seat.seconds = [seat.turn() for _ in range(WARM - 1)][-1:]
        except (RuntimeError, NotImplementedError, ValueError, AssertionError, TypeError) as error:
            seat.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if job["pace"]:
            in_real_time(False)
            if dist.get_rank() == 0:
                print(f"{name}: {seat.failure or f'{seat.tuned:.2f}, then {seat.seconds[-1]:.2f} s'}", file=sys.stderr)
        seats.append(seat)
    return seats


def _play(seats: Sequence[_Seat], rounds: int, ahead: int = 0) -> None:
    clock = clock_of(torch.device("cpu"), 1, max(1.0, dist.get_world_size() / (os.cpu_count() or 1)))
    beat = pulse(clock)
    for seat in seats:
        seat.seconds, seat.probes, seat.pulses = [], [], []
    for _ in range(rounds):
        for seat in seats:
            if not ahead:
                seat.seconds.append(seat.turn())
                continue
            probe, first = _probe(), _mean(median_pulse(beat, dist.barrier))
            seat.seconds.append(seat.turn(ahead))
            seat.probes.append(max(probe, _probe()))
            seat.pulses.append((first + _mean(median_pulse(beat, dist.barrier))) / 2)


def _mean(value: float) -> float:
    """Over the ranks."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(shared)
    return float(shared) / dist.get_world_size()


def _best(seats: Sequence[_Seat], count: int) -> list[_Seat]:
    """The `count` fastest of each family."""
    families: dict[str, list[_Seat]] = {}
    for seat in seats:
        seat.tuned = statistics.median(seat.seconds)
        families.setdefault(seat.family, []).append(seat)
    return [seat for many in families.values() for seat in sorted(many, key=lambda one: one.tuned or 0.0)[:count]]


def rank_main(job: dict[str, Any]) -> None:
    """What a rank of the world runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    pace = Pace() if job["pace"] else None
    if pace:
        pace.start(job["pace"])
    seats = _seated(job)
    if pace:
        in_real_time(True)
    playing = [seat for seat in seats if not seat.failure]
    if job["tuning"]:
        playing = _best(playing, TUNED)
        _play(playing, job["tuning"])
        playing = _best(playing, 1)
    _play(playing, job["rounds"], job["ahead"])
    rows = []
    for seat in seats:
        losses = torch.stack(seat.losses).double() if seat.losses else torch.zeros(0, dtype=torch.float64)
        dist.all_reduce(losses)
        mean, seconds = (losses / dist.get_world_size()).tolist(), seat.seconds if seat in playing else []
        rows.append(asdict(Turns(seat.name, seat.family, tuple(seconds), tuple(mean), seat.tuned, seat.failure,
                                 tuple(seat.probes[:len(seconds)]), tuple(seat.pulses[:len(seconds)]))))
    if dist.get_rank() == 0:
        Path(job["folder"], "turns.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    rank_main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
