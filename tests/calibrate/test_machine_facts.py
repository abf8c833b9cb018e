"""The cluster file of a machine: what its own files and tools say, as a file that loads."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoddl.calibrate.machine_facts import Accelerator, Card, MachineFacts, Processor, cards, hosts_of, processor
from autoddl.calibrate.written_cluster import cluster_text, known_device_of, linked_groups
from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, load_device, parse_cluster

CPU = Processor("An ordinary server", 32, 2, 2.5e9, 32, 256e9)
ALONE = MachineFacts("host-1", CPU, (), "", (), 1, "")
H100 = Accelerator("NVIDIA H100 80GB HBM3", 85e9, 132)
NVSWITCH = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\n" + "".join(
    f"GPU{i}\t" + "\t".join(" X " if i == k else "NV18" for k in range(4)) + "\tPXB\t0-55\n" for i in range(4))
PAIRS = """\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tNV4\tSYS\tSYS
GPU1\tNV4\t X \tSYS\tSYS
GPU2\tSYS\tSYS\t X \tNV4
GPU3\tSYS\tSYS\tNV4\t X
"""
CUBE = """\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tNV1\tNV2\tNV2
GPU1\tNV1\t X \tNV2\tNV2
GPU2\tNV2\tNV2\t X \tNV1
GPU3\tNV2\tNV2\tNV1\t X
"""


def loaded(facts: MachineFacts) -> Cluster:
    return parse_cluster(cluster_text(facts), "test")


def test_processors_are_read_from_the_files_of_the_system(tmp_path: Path) -> None:
    block = "processor : {n}\nmodel name : Fast CPU\ncpu MHz : 2000.5\nphysical id : {socket}\ncore id : {core}\n" \
            "flags : fpu avx2 fma\n"
    (tmp_path / "proc").mkdir()
    threads = [(n, socket, core) for n, (socket, core) in enumerate([(s, c) for s in (0, 1) for c in range(4)] * 2)]
    (tmp_path / "proc/cpuinfo").write_text("\n".join(block.format(n=n, socket=s, core=c) for n, s, c in threads))
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000000 kB\nMemFree: 5 kB\n")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    assert processor(tmp_path) == Processor("Fast CPU", 8, 2, 2000.5e6, 32, 1.024e9)
    assert processor(tmp_path / "nothing").cores == 1


def test_cards_that_are_up_say_how_fast_they_are(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net"
    for name, speed, state in (("eth0", "10000", "up"), ("eth1", "25000", "down"), ("eth2", "-1", "up")):
        (net / name).mkdir(parents=True)
        (net / name / "speed").write_text(f"{speed}\n")
        (net / name / "operstate").write_text(f"{state}\n")
    assert cards(tmp_path) == (Card("eth0", 1.25e9, "ethernet"),)
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert cards(tmp_path) == (Card("mlx5_0", 25e9, "infiniband"),)


def test_hosts_are_those_of_a_file_or_of_slurm(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nn1 slots=8\nn2  # the new one\n\nn1\n")
    assert hosts_of({}, path) == (2, str(path))
    assert hosts_of({"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}) == (4, "SLURM_JOB_NUM_NODES, n[1-4]")
    assert hosts_of({}) == (1, "")
    path.write_text("# none\n")
    for wrong, says in ((path, "names no host"), (tmp_path / "none", "cannot read the hosts")):
        with pytest.raises(InputError, match=says):
            hosts_of({}, wrong)


def test_a_machine_of_processors_is_cores_in_sockets() -> None:
    found = loaded(ALONE)
    assert [(level.name, level.size) for level in found.levels] == [("core", 16), ("socket", 2)]
    assert found.device.kind == "cpu" and found.device.memory == 8e9 and found.device.peak("float32") == 80e9
    one = loaded(replace(ALONE, processor=replace(CPU, cores=1, nodes=1)))
    assert one.levels == () and one.size == 1
    net = loaded(replace(ALONE, hosts=3, hosts_from="hosts", cards=(Card("eth0", 1.25e9, "ethernet"),))).levels[-1]
    assert (net.name, net.size, net.bandwidth, net.protocol, net.shared_by) == ("net", 3, 1.25e9, "tcp", "socket")


def test_a_machine_of_gpus_has_the_links_that_its_matrix_tells() -> None:
    facts = replace(ALONE, devices=(H100,) * 4, topology=NVSWITCH)
    found = loaded(facts)
    assert found.device == load_device("H100-80GB") and found.backend == "nccl"
    assert [(level.name, level.size, level.bandwidth) for level in found.levels] == [("node", 4, 450e9)]
    fast = tuple(Card(f"mlx5_{i}", 50e9, "infiniband") for i in range(4))
    net = loaded(replace(facts, hosts=2, hosts_from="SLURM_NNODES", cards=fast)).levels[-1]
    assert (net.bandwidth, net.protocol, net.shared_by) == (50e9, "rdma", None)
    shared = loaded(replace(facts, hosts=2, hosts_from="SLURM_NNODES", cards=fast[:1])).levels[-1]
    assert (shared.bandwidth, shared.shared_by) == (50e9, "node")


def test_bridges_join_pairs_and_pcie_the_rest() -> None:
    found = loaded(replace(ALONE, devices=(H100,) * 4, topology=PAIRS))
    assert [(level.name, level.size) for level in found.levels] == [("nvlink", 2), ("pcie", 2)]
    assert found.levels[0].bandwidth == 4 * 25e9
    plain = loaded(replace(ALONE, devices=(H100,) * 2, topology=""))
    assert [(level.name, level.size, level.bandwidth) for level in plain.levels] == [("node", 2, 31.5e9)]


def test_links_of_a_switch_are_told_once_and_others_add_up() -> None:
    assert linked_groups(NVSWITCH, 4) == ([[0, 1, 2, 3]], 18)
    assert linked_groups(PAIRS, 4) == ([[0, 1], [2, 3]], 4)
    assert linked_groups(CUBE, 4) == ([[0, 1, 2, 3]], 5)
    assert linked_groups("", 2) == ([[0], [1]], 0)


@pytest.mark.parametrize(("name", "memory", "known"), [
    ("NVIDIA H100 80GB HBM3", 85e9, "H100-80GB"), ("NVIDIA A100-SXM4-40GB", 42.3e9, "A100-40GB"),
    ("NVIDIA A100-PCIE-40GB", 42.3e9, "A100-PCIe-40GB"), ("NVIDIA A100-SXM4-80GB", 85e9, "A100-80GB"),
    ("Tesla V100-SXM2-16GB", 16.9e9, "V100-16GB"), ("NVIDIA H200", 150e9, "H200-141GB"),
    ("NVIDIA GeForce RTX 4090", 25e9, "RTX-4090-24GB"), ("NVIDIA GeForce GTX 1080 Ti", 11e9, None)])
def test_a_gpu_is_known_by_its_model_and_its_memory(name: str, memory: float, known: str | None) -> None:
    assert known_device_of(Accelerator(name, memory, 100)) == known


def test_an_unknown_gpu_is_written_with_figures_to_be_replaced() -> None:
    text = cluster_text(replace(ALONE, devices=(Accelerator("NVIDIA GeForce GTX 1080 Ti", 11e9, 28),)))
    found = parse_cluster(text, "test")
    assert found.device.name == "NVIDIA-GeForce-GTX-1080-Ti" and found.device.memory == 11e9
    assert text.count("write the vendor's figure") == 2


def test_gpus_that_differ_are_parts_or_named_in_the_error() -> None:
    old = Accelerator("Tesla V100-SXM2-16GB", 16.9e9, 80)
    facts = replace(ALONE, devices=(H100, H100, old, old), hosts=2, hosts_from="hosts")
    assert [(device.name, ranks) for device, ranks in loaded(facts).parts] == [
        ("H100-80GB", 2), ("V100-16GB", 2), ("H100-80GB", 2), ("V100-16GB", 2)]
    with pytest.raises(InputError, match="GeForce is none that is known"):
        cluster_text(replace(facts, devices=(H100, Accelerator("GeForce", 8e9, 20))))


def test_every_value_says_where_it_was_read_or_that_it_is_a_default() -> None:
    for facts in (replace(ALONE, hosts=2, hosts_from="hosts"), replace(ALONE, devices=(H100,) * 4, topology=PAIRS)):
        for line in cluster_text(facts).splitlines()[1:]:
            text = line.partition("#")[0].strip()
            told = "#" in line or text in ("device:", "levels:", "kind: cpu") or text.startswith("- name:")
            assert told, line
