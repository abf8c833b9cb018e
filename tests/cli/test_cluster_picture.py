"""What was understood of a cluster file, as a picture in text: ports, sharers, what leaves a unit, effective rates."""

import json
from pathlib import Path

import pytest
from shell import FACTORY, ROOT, shell

from autoddl.core.errors import InputError
from autoddl.cost_models import Group, collective, load_cluster
from autoddl.explain.cluster_facts import level_facts
from autoddl.runtime.world import device_of

FILES = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))
SHARED = """
name: two-racks
device: A100-80GB
levels:
  - {name: node, size: 8, bandwidth: 300 GB/s, latency: 3 us}
  - {name: rack, size: 16, bandwidth: 25 GB/s, latency: 8 us, topology: fat-tree, shared_by: node}
  - {name: pod, size: 2, bandwidth: 12.5 GB/s, latency: 12 us, topology: fat-tree, shared_by: node, oversubscription: 4}
"""


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_cluster_has_a_line_for_each_level_and_device(path: Path) -> None:
    said, place = shell("cluster", str(path)), load_cluster(path)
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{place.name}: {place.size} rank")
    named = [line.split("└─ ")[1].partition(" ")[0] for line in lines if "└─ " in line]
    assert named[:len(place.levels)] == [level.name for level in reversed(place.levels)]
    assert set(named[len(place.levels):]) == {"rank:"}


def test_the_picture_says_who_shares_and_what_leaves_a_unit(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text(SHARED)
    out = shell("cluster", str(tmp_path / "shared.yaml")).out
    assert "rack of 16 nodes: 8 ranks share a port of 25 GB/s each way, 3.12 GB/s a rank where all send" in out
    assert "pod of 2 racks: 8 ranks share a port of 12.5 GB/s each way" in out
    assert "50 GB/s out of a rack of 128 ranks; fat-tree, trunk 4 times thinner" in out
    assert "node of 8 ranks: every rank has a port of 300 GB/s each way; switch, 3 us a message" in out
    (tmp_path / "boxes.yaml").write_text(SHARED.replace("node", "box"))
    assert "rack of 16 boxes: 8 ranks share" in shell("cluster", str(tmp_path / "boxes.yaml")).out
    assert "A100-80GB, 80 GB of memory at" in out and "one rank of each node, 8 such groups at once" in out


def test_effective_rates_are_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text(SHARED)
    place = load_cluster(tmp_path / "shared.yaml")
    rack = level_facts(place)[1]
    assert rack.across == collective(place, "all-reduce", Group(((16, 8),)), 1e9).seconds
    assert rack.inside == collective(place, "all-reduce", Group(((128, 1),)), 1e9).seconds
    data = json.loads(shell("cluster", str(tmp_path / "shared.yaml"), "--json").out)
    assert data["levels"][1]["across_rate"] == pytest.approx(1e9 / rack.across)
    assert data["ranks"] == 256 and data["unusual"] == []


def test_what_looks_like_a_mistake_is_said(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(SHARED.replace("300 GB/s", "300 B/s"))
    assert "unusual: level node: a bandwidth of 300 B/s is less" in shell("cluster", str(tmp_path / "odd.yaml")).out


def test_a_plan_over_a_library_that_nothing_runs_over_says_so(tmp_path: Path) -> None:
    place, out = tmp_path / "gaudi.yaml", tmp_path / "plan.json"
    place.write_text("name: two-gaudi\ndevice: Gaudi3-128GB\n"
                     "levels: [{name: node, size: 2, bandwidth: 100 GB/s, latency: 3 us}]\n")
    assert "2 ranks over hccl" in shell("cluster", str(place)).out
    said = shell("plan", FACTORY, str(place), "-o", str(out), "--workers", "1", "--set", "layers=1")
    assert "nothing was run or measured over hccl: messages are priced as NCCL's" in said.out, said
    with pytest.raises(InputError, match=r"talk by hccl, over which no plan runs yet, only over gloo and nccl.*verify"):
        device_of("hccl")
    assert device_of("hccl", "cpu").type == "cpu"
    changed = shell("what-if", str(out), "--set", "device=H100-80GB", "--json")
    assert changed.code == 0, changed
