"""On shaped links a switch adds up in its own namespace: the same bits in every run, and never a part of a sum."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from shaping import cluster, owned_by, shaping
from shell import FACTORY, shell

from autoddl.core.record import read_record
from autoddl.cost_models import Group, collective
from autoddl.launch.launch import launch
from autoddl.launch.places import network_places
from autoddl.launch.shaped_network import plan_network, shape_links
from autoddl.launch.switches import start_switches

REDUCES = ", efficiency: 0.97, reduces: true"


def test_a_switch_that_reduces_has_an_address_of_its_own_on_its_bridge() -> None:
    two = cluster(2, 3, "10 MB/s", REDUCES)
    built = plan_network(two, "x")
    assert [(one.level, one.first, one.ranks, one.namespace, one.address) for one in built.reducing] == [
        ("net", 0, 6, "x-s1.0", "10.99.201.1")]
    plain = replace(two, levels=tuple(replace(level, reduces=None) for level in two.levels))
    assert plan_network(plain, "x").reducing == ()


WORKER = """
import json, os, pathlib, random, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from autoddl.core.layout import Mesh
from autoddl.runtime.collectives.process_groups import Groups
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, found = dist.get_rank(), sys.argv[2]
groups = Groups(Mesh.parse("net=3"), [(0,)], timedelta(seconds=10), open(sys.argv[1]).read())
given = torch.randn(100_000, generator=torch.Generator().manual_seed(rank))
every = [torch.randn(100_000, generator=torch.Generator().manual_seed(k)) for k in range(3)]
truth, same = (every[0] + every[1]) + every[2], []
for _ in range(20):
    time.sleep(random.random() / 50)
    buffer = given.clone()
    groups.start("all-reduce", (0,), buffer, buffer, asynchronous=False)
    same.append(torch.equal(buffer, truth))
pathlib.Path(found, str(rank)).write_text(json.dumps([groups.algorithm("all-reduce", (0,), 400_000), same]))
dist.barrier()
big = torch.ones(20_000_000)
began = time.monotonic()
try:
    groups.start("all-reduce", (0,), big, big).wait()
except RuntimeError as error:
    pathlib.Path(found, f"late-{rank}").write_text(json.dumps([time.monotonic() - began, str(error)]))
os._exit(0)  # torch's teardown aborts now and then
"""


def kill_in(namespace: str) -> None:
    for pid in subprocess.run(("ip", "netns", "pids", namespace), capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)


@shaping
def test_twenty_runs_give_one_sum_and_a_switch_that_dies_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """The last sum would take 8 s, and its switch is killed after 1 s."""
    slow, text = cluster(1, 3, "10 MB/s", REDUCES), tmp_path / "cluster.yaml"
    text.write_text(slow.to_yaml())
    killed = list[bool]()
    with shape_links(slow) as built, start_switches(slow, built) as switches:
        assert switches is not None and switches.levels[0].addresses[0][0] == built.reducing[0].address

        def kill() -> None:
            done = [path for path in tmp_path.iterdir() if path.name.isdecimal()]
            if len(done) == 3 and time.time() - max(path.stat().st_mtime for path in done) > 1 and not killed:
                kill_in(built.reducing[0].namespace)
                killed.append(True)

        launch(3, [sys.executable, "-c", WORKER, str(text), str(tmp_path)],
               places=network_places(built, switches), timeout=100, tick=kill)
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)] == [["switch tree", [True] * 20]] * 3
    for rank in range(3):
        seconds, said = json.loads((tmp_path / f"late-{rank}").read_text())
        assert seconds < 10 and "the switch of net" in said
    assert owned_by(os.getpid()) == []


TIMED = """
import json, os, pathlib, random, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from autoddl.core.layout import Mesh
from autoddl.runtime.collectives.process_groups import Groups
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=300))
rank, ranks, folder = dist.get_rank(), dist.get_world_size(), pathlib.Path(sys.argv[1])
forms = {name: Groups(Mesh.parse(f"net={ranks}"), [(0,)], timedelta(seconds=300), (folder / name).read_text())
         for name in ("rings", "trees")}
every = [torch.randn(625_000, generator=torch.Generator().manual_seed(k)) for k in range(ranks)]
truth, same, seconds, left = sum(every[1:], every[0]), [], {"rings": [], "trees": []}, {}

def add_up(name, size):
    buffer = every[rank][:size].clone()
    forms[name].start("all-reduce", (0,), buffer, buffer, asynchronous=False)
    return buffer

def sent():
    (card,) = [line for line in open("/proc/net/dev") if line.split()[0] == "eth0:"]
    return int(card.split()[9])

for _ in range(20):
    time.sleep(random.random() / 50)
    same.append(torch.equal(add_up("trees", 100_000), truth[:100_000]))
for _ in range(4):
    for name in forms:
        dist.barrier()
        start, before = time.perf_counter(), sent()
        add_up(name, 625_000)
        seconds[name].append(time.perf_counter() - start)
        left[name] = sent() - before
(folder / f"{rank}.json").write_text(json.dumps([same, seconds, left]))
dist.barrier()
os._exit(0)  # torch's teardown aborts now and then
"""


@pytest.mark.slow
@shaping
@pytest.mark.parametrize(("ranks", "faster"), [(4, 1.25), (8, 1.4)])
def test_a_switch_adds_up_faster_than_a_ring_as_priced_in_any_order_of_arrival(ranks: int, faster: float,
                                                                            tmp_path: Path) -> None:
    """Sums of 2.5 MB by links of 20 Mbit/s; the least of four times, since other work of the machine only adds."""
    slow = cluster(1, ranks, "2.5 MB/s", REDUCES)
    plain, size = replace(slow, levels=tuple(replace(level, reduces=None) for level in slow.levels)), 2.5e6
    (tmp_path / "trees").write_text(slow.to_yaml())
    (tmp_path / "rings").write_text(plain.to_yaml())
    with shape_links(slow) as built, start_switches(slow, built) as switches:
        launch(ranks, [sys.executable, "-c", TIMED, str(tmp_path)], places=network_places(built, switches), timeout=900)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(same == [True] * 20 for same, _, _ in found)
    took = {name: min(max(times) for times in zip(*(seconds[name] for _, seconds, _ in found), strict=True))
            for name in ("rings", "trees")}
    assert took["rings"] / took["trees"] >= faster, took
    for name, priced, nbytes in (("rings", plain, 2 * (ranks - 1) / ranks * size), ("trees", slow, size)):
        model = collective(priced, "all-reduce", Group(((ranks, 1),)), size).seconds
        assert took[name] == pytest.approx(model, rel=0.15)
        assert all(nbytes <= left[name] <= 1.06 * nbytes + 20_000 for _, _, left in found)


@pytest.mark.slow
@shaping
def test_a_rehearsal_runs_a_plan_through_its_switches_and_loopback_by_rings(tmp_path: Path) -> None:
    path, plan = tmp_path / "cluster.yaml", tmp_path / "plan.json"
    path.write_text(cluster(1, 3, "10 MB/s", REDUCES, peak="1 GFLOP/s").to_yaml())
    shell("plan", FACTORY, str(path), "-o", str(plan), "--mine", "dp=3", "--set", "batch=12")
    found = json.loads(shell("rehearse", str(plan), FACTORY, "--set", "batch=12", "--steps", "3", "--json").out)
    assert found["collective_mismatches"] == 0 and not found["note"]
    assert all(row["planned"] <= row["left"] < 1.1 * row["planned"] + 20_000 for row in found["uplinks"])
    events = [event for step in read_record(found["record"]).steps for event in step.events]
    assert "switch tree" in {event.algorithm for event in events}
    looped = json.loads(shell("rehearse", str(plan), FACTORY, "--set", "batch=12", "--steps", "2", "--loopback",
                              "--json").out)
    assert looped["note"] == "on loopback, not shaped; no switch of level net reduces here: rings take their place"
    assert looped["losses"][0] == pytest.approx(found["losses"][0], rel=1e-5)
