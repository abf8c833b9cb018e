"""Links are as slow as their cluster says, a plan sends over them what it planned, and nothing of them stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shaping import cluster, owned_by, shaping, spaces
from shell import FACTORY, shell

from autoddl.core.errors import InputError, MachineError
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import Place, launch
from autoddl.launch.shaped_network import check_machine, commands, plan_network, remove_stale, shape_links
from autoddl.schedule.uplink_bytes import leaving_bytes

CLUSTERS = Path(__file__).parent.parent.parent / "examples" / "clusters"


def test_a_network_has_a_namespace_per_node_and_nested_uplinks() -> None:
    racks = plan_network(load_cluster(CLUSTERS / "rehearsal-2racks.yaml"), "x")
    assert [(node.first, node.ranks, node.address) for node in racks.nodes] == [
        (rank, 1, f"10.99.0.{rank + 1}") for rank in range(4)]
    assert [(u.level, u.first, u.ranks, u.rate, u.namespace, u.parent) for u in racks.uplinks] == [
        *(("rack", k, 1, 50e6, f"x-n{k}", f"x-s1.{k // 2}") for k in range(4)),
        *(("spine", 2 * k, 2, 12.5e6, f"x-s1.{k}", "x-s2.0") for k in range(2))]
    assert [node.ranks for node in plan_network(cluster(2, 2, "25 MB/s"), "x").nodes] == [2, 2]


@pytest.mark.parametrize("name, ranks, nodes", [("4x1-200", 1, 4), ("4x1-400", 1, 4), ("2x2-200", 2, 2),
                                                ("2racks", 1, 4), ("8x1-200", 1, 8)])
def test_the_clusters_for_rehearsals_have_links_to_shape(name: str, ranks: int, nodes: int) -> None:
    built = plan_network(load_cluster(CLUSTERS / f"rehearsal-{name}.yaml"), "x")
    assert [node.ranks for node in built.nodes] == [ranks] * nodes
    assert all(12.5e6 <= uplink.rate <= 50e6 for uplink in built.uplinks)


@pytest.mark.ranks
def test_a_rank_starts_in_its_place(tmp_path: Path) -> None:
    script = f"import os; open(f'{tmp_path}/' + os.environ['RANK'], 'w').write(os.environ['WORD'])"
    launch(2, [sys.executable, "-c", script], places=[Place(("env", "WORD=before")), Place((), {"WORD": "around"})])
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["before", "around"]


def test_a_port_for_each_rank_adds_up_and_a_shared_one_does_not() -> None:
    alone, shared, thin = (plan_network(cluster(2, 2, "25 MB/s", more), "x").uplinks[0].rate
                           for more in ("", ", shared_by: node", ", oversubscription: 4"))
    assert (alone, shared, thin) == (50e6, 25e6, 12.5e6)


def test_what_cannot_be_shaped_is_refused() -> None:
    with pytest.raises(InputError, match=r"has uplinks of 100 GB/s.*write a cluster with scaled bandwidths"):
        plan_network(cluster(1, 4, "100 GB/s"), "x")
    with pytest.raises(InputError, match=r"no links to shape: its ranks share one node"):
        plan_network(cluster(4, 1, "25 MB/s"), "x")
    with pytest.raises(InputError, match=r"bandwidth"):
        cluster(1, 4, "0 MB/s")


def test_no_root_and_no_tc_are_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MachineError, match=r"needs root.*--loopback"):
        check_machine()
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(MachineError, match=r"needs tc: install iproute2"):
        check_machine()


def test_a_ring_leaves_a_unit_once_and_pairs_leave_it_as_often_as_they_are_apart() -> None:
    group, node = (0, 1, 2, 3), range(2)
    assert [leaving_bytes("all-reduce", 8.0, group, rank, node) for rank in node] == [0.0, 12.0]
    assert [leaving_bytes("all-gather", 8.0, group, rank, node) for rank in node] == [0.0, 6.0]
    assert [leaving_bytes("all-to-all", 8.0, group, rank, node) for rank in node] == [4.0, 4.0]
    assert leaving_bytes("all-reduce", 8.0, (0, 1), 1, node) == 0.0


RECEIVER = """
import socket, time
listening = socket.create_server(("", 7000))
print("ready", flush=True)
taken, _ = listening.accept()
for _ in range(3):
    got = 0
    while got < 1_000_000: got += len(taken.recv(1 << 18))
    start, got = time.perf_counter(), 0
    while got < 9_000_000: got += len(taken.recv(1 << 18))
    print(got / (time.perf_counter() - start), flush=True)
"""
SENDER = """
import socket, sys
to = socket.create_connection((sys.argv[1], 7000))
to.sendall(bytes(32_000_000))
to.recv(1)
"""


@shaping
def test_a_link_carries_its_rate() -> None:
    with shape_links(cluster(1, 2, "12.5 MB/s")) as built:
        def inside(node: int, *words: str) -> "subprocess.Popen[str]":
            command = ("ip", "netns", "exec", built.nodes[node].namespace, sys.executable, "-c", *words)
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

        with inside(1, RECEIVER) as receiver:
            assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
            with inside(0, SENDER, built.nodes[1].address):
                rates = [float(line) for line in receiver.stdout]
    payload = (9000 - 52) / (9000 + 14)
    assert max(rates) / (12.5e6 * payload) == pytest.approx(1.0, abs=0.03)
    assert not owned_by(os.getpid())


def test_a_thin_uplink_has_a_queue_for_what_comes_from_behind_it() -> None:
    """What a full one drops is sent again, over the links before it."""
    racks = plan_network(load_cluster(CLUSTERS / "rehearsal-2racks.yaml"), "x")
    words = [line for line in commands(racks) if line[0] == "tc"]
    assert {(line[line.index("rate") + 1], line[-1]) for line in words} == {
        ("400000000bit", "250000"), ("100000000bit", "250000")}


@shaping
def test_an_error_inside_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), shape_links(cluster(2, 2, "25 MB/s")) as built:
        words = ("ip", "netns", "exec", built.nodes[0].namespace, "sh", "-c", "echo inside; exec sleep 600")
        sleeper = subprocess.Popen(words, stdout=subprocess.PIPE)
        output = sleeper.stdout
        assert output is not None and output.read(7) == b"inside\n"
        assert len(owned_by(os.getpid())) == 3
        raise ZeroDivisionError
    assert sleeper.wait(10) == -signal.SIGKILL
    if output is not None:
        output.close()
    assert not owned_by(os.getpid())


OWNER = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup, or as a job in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
from autoddl.cost_models import load_cluster
from autoddl.launch.shaped_network import shape_links
with shape_links(load_cluster(sys.argv[1])) as built:
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def another_owner() -> Iterator["subprocess.Popen[str]"]:
    """A process that has a network of its own."""
    words = (sys.executable, "-c", OWNER, str(CLUSTERS / "rehearsal-4x1-200.yaml"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
            assert len(owned_by(owner.pid)) == 5
            yield owner
        finally:
            owner.kill()


@shaping
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_owner_that_is_asked_to_end_removes_its_network(number: signal.Signals) -> None:
    with another_owner() as owner:
        owner.send_signal(number)
        owner.wait(30)
        assert not owned_by(owner.pid)


@shaping
def test_what_a_killed_owner_left_is_removed_and_nothing_else() -> None:
    other = f"autoddl-test-{os.getpid()}"
    subprocess.run(("ip", "netns", "add", other), check=True)
    try:
        with another_owner() as living, another_owner() as dying:
            left = owned_by(dying.pid)
            sleeper = subprocess.Popen(("ip", "netns", "exec", left[0], "sleep", "600"))
            time.sleep(0.2)
            dying.kill()
            dying.wait()
            assert owned_by(dying.pid) == left
            assert set(left) <= set(remove_stale())
            assert sleeper.wait(10) == -signal.SIGKILL
            assert not owned_by(dying.pid) and len(owned_by(living.pid)) == 5 and other in spaces()
    finally:
        subprocess.run(("ip", "netns", "del", other), check=True)


@shaping
def test_a_rehearsal_sends_what_its_plan_says(tmp_path: Path) -> None:
    machine, plan = tmp_path / "slow.yaml", str(tmp_path / "plan.json")
    machine.write_text(cluster(1, 2, "25 MB/s").to_yaml())
    sizes = ("--set", "width=256", "--set", "batch=64")
    assert shell("plan", FACTORY, str(machine), *sizes, "--mesh", "net=2", "-o", plan).code == 0
    said = shell("rehearse", plan, FACTORY, "--steps", "3", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["collective_mismatches"] == 0 and len(found["step_seconds"]) == len(found["losses"]) == 3
    assert len(found["uplinks"]) == 2 and not owned_by(os.getpid())
    for row in found["uplinks"]:
        assert row["planned"] > 1e6
        assert row["left"] / row["planned"] == pytest.approx(1.02, abs=0.03)
        assert row["entered"] / row["planned"] == pytest.approx(1.02, abs=0.03)
    assert min(found["step_seconds"]) > max(row["planned"] for row in found["uplinks"]) / 25e6
