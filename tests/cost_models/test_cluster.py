"""Units and cluster files: what is written is what is meant, and what is wrong is answered."""

import pickle
import random
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml

from autoddl.core.errors import InputError
from autoddl.core.layout import Mesh
from autoddl.cost_models import Kernel, kernel_seconds
from autoddl.cost_models.cluster import device_names, load_cluster, load_device, parse_cluster, weakest_device
from autoddl.cost_models.links import LINKS_FILE, PROTOCOLS
from autoddl.cost_models.units import bytes_above, parse_quantity, show_bytes, show_rate, show_seconds
from autoddl.planner.meshes import meshes

CLUSTERS = sorted((Path(__file__).parent.parent.parent / "examples" / "clusters").glob("*.yaml"))
TWO_RACKS = """
name: two-racks
device: {name: A100-80GB, memory: 80 GB, bandwidth: 2.0 TB/s, peak: {bfloat16: 312 TFLOP/s, float32: 19.5 TFLOP/s}}
levels:
  - {name: node, size: 8,  bandwidth: 300 GB/s, latency: 3 us,  topology: switch}
  - {name: rack, size: 16, bandwidth: 25 GB/s,  latency: 8 us,  topology: fat-tree, shared_by: node}
  - {name: pod,  size: 2,  bandwidth: 12.5 GB/s, latency: 12 us, topology: torus, shared_by: node, oversubscription: 4}
"""


@pytest.mark.parametrize(("text", "dimension", "value"), [
    ("80 GB", "bytes", 80e9), ("80GB", "bytes", 80e9), ("1 GiB", "bytes", 2**30), ("4 kB", "bytes", 4000.0),
    ("2.0 TB/s", "bytes/s", 2e12), ("10 Gb/s", "bytes/s", 1.25e9), ("200 Mb/s", "bytes/s", 25e6),
    ("100 Gbit/s", "bytes/s", 12.5e9), ("1 GiB/s", "bytes/s", 2**30), ("3 us", "seconds", 3e-6),
    ("1.5 ms", "seconds", 1.5e-3), ("312 TFLOP/s", "flop/s", 312e12), ("2e9", "bytes", 2e9), (7, "seconds", 7.0),
])
def test_quantities_are_read_in_base_units(text: str | int, dimension: str, value: float) -> None:
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("text", "dimension", "message"), [
    ("80 gb", "bytes", "did you mean 'GB'"), ("80 GB", "bytes/s", "did you mean 'GB/s'"),
    ("3 mus", "seconds", "did you mean 'us'|did you mean 'ms'"), ("312 TFLOPs", "flop/s", "did you mean 'TFLOP/s'"),
    ("-3 us", "seconds", "no quantity"), ("fast", "bytes/s", "like '25 GB/s'"), ("1.2.3 s", "seconds", "no quantity"),
    ("nan", "bytes", "no quantity"), ("1e999 s", "seconds", "no quantity"), ("3 m", "metres", "no dimension"),
])
def test_wrong_quantities_name_the_way_out(text: str, dimension: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_quantity(text, dimension)


def test_numbers_print_with_three_digits() -> None:
    assert [show_seconds(x) for x in (1.5, 0.0123, 3.4e-6, 0.9999)] == ["1.5 s", "12.3 ms", "3.4 us", "1 s"]
    assert [show_bytes(x) for x in (80e9, 1234.0, 999.6)] == ["80 GB", "1.23 kB", "1 kB"]
    assert [show_rate(25e9), show_rate(312e12, "FLOP"), show_rate(5)] == ["25 GB/s", "312 TFLOP/s", "5 B/s"]


def test_bytes_that_are_offered_are_enough() -> None:
    assert [bytes_above(x) for x in (12.34e9, 12.36e9, 12.3e9, 9.991e9, 999.1e6, 1.0, 0.0)] == [
        "12.4 GB", "12.4 GB", "12.3 GB", "10 GB", "1 GB", "1 B", "0 B"]
    for seed in range(1000):
        nbytes = 10 ** random.Random(seed).uniform(0, 15)
        assert nbytes <= parse_quantity(bytes_above(nbytes), "bytes") <= 1.01 * nbytes + 1


@pytest.mark.parametrize("name", ["NVL-72", "_x", "rack.two", "Fläche"])
def test_every_mesh_of_a_level_reads_back(name: str) -> None:
    for mesh in meshes(parse_cluster(TWO_RACKS.replace("name: rack", f"name: {name}"), "x")):
        assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(("name", "better"), [
    ("GPU node", "GPU_node"), ("8gpu", "level_8gpu"), ("a+b", "a_b"), ("a,b=2", "a_b_2"), ("", "level_"),
    ("-x", "level_-x"),
])
def test_a_level_that_no_mesh_can_be_named_after_is_refused(name: str, better: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_cluster(TWO_RACKS.replace("name: rack", f"name: {name!r}"), "x.yaml")
    said = str(caught.value)
    assert said.startswith(f"x.yaml: levels.1.name: {name!r} is no name of a level: ")
    assert "begins with a letter of a-z or _" in said and said.endswith(f"write {better!r}")
    assert parse_cluster(TWO_RACKS.replace("name: rack", f"name: {better}"), "x.yaml").levels[1].name == better


def test_a_cluster_file_means_what_it_says() -> None:
    cluster = parse_cluster(TWO_RACKS, "two-racks.yaml")
    assert (cluster.size, cluster.units, cluster.backend) == (256, (1, 8, 128, 256), "nccl")
    assert [cluster.sharers(index) for index in range(3)] == [1, 8, 8]
    assert (cluster.levels[1].bandwidth, cluster.levels[2].oversubscription) == (25e9, 4)
    assert cluster.device.launch == 5e-6


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_shipped_cluster_loads_and_round_trips(path: Path) -> None:
    cluster = load_cluster(path)
    again = parse_cluster(cluster.to_yaml(), "again")
    assert cluster.name == path.stem
    assert again == cluster and hash(again) == hash(cluster) and again.fingerprint == cluster.fingerprint
    assert pickle.loads(pickle.dumps(cluster)) == cluster


@pytest.mark.parametrize("name", device_names())
def test_a_cluster_of_every_device_round_trips(name: str) -> None:
    cluster = parse_cluster(f"name: one\ndevice: {name}\nbackend: nccl\nlevels: [{{name: node, size: 2, bandwidth: "
                            "100 GB/s, latency: 5 us}]", "one")
    assert parse_cluster(cluster.to_yaml(), "again") == cluster


def test_the_example_clusters_are_there() -> None:
    names = {path.stem for path in CLUSTERS}
    assert names >= {"a100-4x8", "frontier", "h100-16x8", "laptop", "piz-daint", "two-racks-10g"}


def test_a_value_that_no_short_unit_holds_round_trips() -> None:
    cluster = parse_cluster(TWO_RACKS.replace("300 GB/s", "123456789.125"), "x")
    assert parse_cluster(cluster.to_yaml(), "again") == cluster


@pytest.mark.parametrize(("line", "place", "example"), [
    ("  - {name: n, size: 2, bandwidth: 300, latency: 3 us}", "levels.0.bandwidth: 300", "25 GB/s"),
    ("  - {name: n, size: 2, bandwidth: 3 GB/s, latency: 3}", "levels.0.latency: 3", "3 us"),
    ("  - {name: n, size: 2, bandwidth: 3e3, latency: 0}", "levels.0.bandwidth: 3e3", "25 GB/s")])
def test_a_file_without_units_is_refused(tmp_path: Path, line: str, place: str, example: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"name: x\ndevice: V100-16GB\nlevels:\n{line}\n")
    said = f"{path}: {place} has no unit: write it with one, like '{example}'"
    with pytest.raises(InputError, match=re.escape(said)):
        load_cluster(path)


def test_what_a_program_wrote_in_base_units_is_read(tmp_path: Path) -> None:
    path, cluster = tmp_path / "cluster.yaml", parse_cluster(TWO_RACKS.replace("300 GB/s", "123456789.125"), "x")
    path.write_text(cluster.to_yaml())
    assert load_cluster(path) == cluster


@pytest.mark.parametrize("name", yaml.safe_load(LINKS_FILE.read_text()))
def test_every_link_stands_for_its_figures(name: str) -> None:
    text = f"name: x\ndevice: V100-16GB\nlevels: [{{name: net, size: 4, link: {name.lower()}}}]\n"
    level = parse_cluster(text, "x").levels[0]
    assert level.bandwidth > 1e8 and 0 < level.latency < 1e-4 and level.protocol in PROTOCOLS
    assert parse_cluster(parse_cluster(text, "x").to_yaml(), "x") == parse_cluster(text, "x")


def test_what_is_written_beside_a_link_wins() -> None:
    text = "name: x\ndevice: V100-16GB\nlevels: [{name: n, size: 2, link: NVLink3, bandwidth: 2e9, protocol: tcp}]\n"
    level = parse_cluster(text, "x").levels[0]
    assert level.bandwidth == 2e9 and level.latency == pytest.approx(3.4e-6)
    assert (level.protocol, level.efficiency) == ("tcp", None)  # the efficiency was that of the link's own protocol


@pytest.mark.parametrize("keys", [
    "topology: torus, dims: [2, 4]", "topology: hammingmesh, dims: [2, 1], board: 2", "topology: dragonfly, leaf: 4",
    "topology: hybrid-cube-mesh, group_bandwidth: {2: 22.6 GB/s, 8: 135 GB/s}", "in_network_efficiency: 0.7",
])
def test_every_key_of_a_topology_round_trips(keys: str) -> None:
    text = f"name: x\ndevice: V100-16GB\nlevels: [{{name: n, size: 8, bandwidth: 1 GB/s, latency: 1 us, {keys}}}]\n"
    cluster = parse_cluster(text, "x")
    assert parse_cluster(cluster.to_yaml(), "again") == cluster and hash(cluster)


def test_measurements_travel_untouched_and_change_the_fingerprint() -> None:
    text = "measured: {date: '2026-11-20', versions: {torch: 2.13.0}, device: {name: A100-80GB, kind: gpu}}\n"
    plain, measured = parse_cluster(TWO_RACKS, "x"), parse_cluster(TWO_RACKS + text, "x")
    assert measured.measurements["versions"] == {"torch": "2.13.0"} and plain.measurements == {}
    assert parse_cluster(measured.to_yaml(), "x") == measured and measured.fingerprint != plain.fingerprint


def test_fingerprint_ignores_how_a_number_is_written() -> None:
    assert parse_cluster(TWO_RACKS.replace("25 GB/s", "200 Gb/s"), "x").fingerprint == \
        parse_cluster(TWO_RACKS, "y").fingerprint


def test_a_cluster_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        parse_cluster(TWO_RACKS, "x").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("levels", ["[]", "[{name: one, size: 1, bandwidth: 1 GB/s, latency: 1 us}]"])
def test_one_device_is_a_cluster(levels: str) -> None:
    assert parse_cluster(f"name: one\ndevice: v100-16gb\nlevels: {levels}\n", "one.yaml").size == 1


@pytest.mark.parametrize("name", device_names())
def test_every_shipped_device_loads_by_any_case(name: str) -> None:
    device = load_device(name.lower())
    assert device.name == name and device.peak("bfloat16") >= device.peak("float32") >= device.peak("float64")


def test_each_blackwell_says_its_units_and_what_its_measured_attention_gives_for_exponentials() -> None:
    """TFLOP/s of cuDNN 9.19, forward and backward, heads of 128 and of 64: x is their ratio less 1, and at most 1."""
    measured = {"GB200-186GB": ((1598, 1311), (609, 646)), "GB300-279GB": ((1887, 1385), (718, 668))}
    for name, (usual, narrow) in measured.items():
        assert load_device(name).exponentials == min(1.0, *(a / b - 1 for a, b in zip(usual, narrow, strict=True)))
    assert [load_device(name).units for name in ("B200-180GB", "B300-288GB", *measured)] == [148, 148, 152, 152]


def test_narrow_heads_of_a_hopper_are_as_slow_as_published() -> None:
    """FlashAttention-3 on an H100, 8,192 tokens, heads of 128 and 64 (Shah et al. 2024, figure 5)."""
    for name in ("H100-80GB", "H100-96GB", "H200-141GB"):
        assert load_device(name).exponentials == pytest.approx(646 / 496 - 1, abs=0.01)


MIXED = """
name: mixed
parts: [{device: A100-80GB, ranks: 8}, {device: V100-16GB, ranks: 8}]
levels: [{name: node, size: 8, bandwidth: 150 GB/s, latency: 3 us}, {name: net, size: 2, link: InfiniBand-EDR}]
"""


def test_parts_with_other_devices_are_priced_by_the_weakest() -> None:
    cluster = parse_cluster(MIXED, "mixed.yaml")
    assert (cluster.device.memory, cluster.device.peak("float16")) == (16e9, 125e12)
    assert [cluster.device_of(rank).name for rank in (0, 7, 8, 15)] == ["A100-80GB"] * 2 + ["V100-16GB"] * 2
    assert parse_cluster(cluster.to_yaml(), "again") == cluster
    with pytest.raises(InputError, match="has no rank 16; its ranks are 0 to 15"):
        cluster.device_of(16)


@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize("kind", ["attention", "attention backward"])
def test_the_weakest_device_is_no_faster_than_any_part_for_any_width_of_heads(kind: str, head: int) -> None:
    parts = [load_device("H100-80GB"), load_device("B200-180GB")]
    kernel = Kernel(kind, (1024, 8192, 8192, head, 0), 4.0 * 1024 * 8192 * head * 8192, 1.0, "bfloat16")
    assert kernel_seconds(weakest_device(parts), kernel) >= max(kernel_seconds(part, kernel) for part in parts)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("V100-16GB, ranks: 8", "V100-16GB, ranks: 4", "parts have 12 ranks, but the levels multiply to 16"),
    ("V100-16GB", "cpu-core", r"mix kinds of devices, A100-80GB \(gpu\), cpu-core \(cpu\)"),
    ("name: mixed", "name: mixed\ndevice: V100-16GB", "and not both"),
    ("ranks: 8}]", "rank: 8}]", "unknown key 'rank'; did you mean 'ranks'"),
])
def test_parts_that_do_not_fit_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_cluster(MIXED.replace(old, new, 1), "mixed.yaml")


def test_a_cpu_talks_gloo_unless_told_otherwise() -> None:
    text = "name: c\ndevice: cpu-core\nlevels: []\n"
    assert parse_cluster(text, "x").backend == "gloo"
    assert parse_cluster(text + "backend: nccl\n", "x").backend == "nccl"


@pytest.mark.parametrize(("old", "new", "message"), [
    ("latency: 8 us", "latancy: 8 us", r"rack.yaml: levels.1: unknown key 'latancy'; did you mean 'latency'"),
    ("name: two-racks", "nam: two-racks", r"rack.yaml: unknown key 'nam'; did you mean 'name'\? The keys are name"),
    ("25 GB/s", "25 gB/s", r"levels.1.bandwidth: 'gB/s' is no unit of bytes/s; did you mean 'GB/s'"),
    ("size: 16", "size: 0", r"levels.1.size: Input should be greater than or equal to 1, not 0"),
    ("size: 16", "size: many", r"levels.1.size: .*integer"),
    ("latency: 8 us, ", "", r"levels.1.latency: this key is missing"),
    ("name: rack", "name: node", r"two levels are called 'node'"),
    ("fat-tree, shared_by: node}", "fat-tree, shared_by: pod}", r"shared_by 'pod', which is no level inside it"),
    ("topology: switch", "topology: web", r"'web' is no topology; it is one of switch, fat-tree, ring"),
    ("float32: 19.5", "float31: 19.5", r"'float31' is no dtype with a peak; it is one of float64, float32"),
    ("memory: 80 GB, ", "", r"device: memory: this key is missing"),
    ("bandwidth: 25 GB/s,  latency: 8 us", "link: NVLinc3", r"'NVLinc3' is no known link; did you mean 'NVLink3'"),
    ("latency: 8 us,", "latency: 8 us, protocol: rmda,", r"levels.1.protocol: 'rmda' is no protocol; it is one of"),
    ("topology: torus", "topology: torus, dims: [2, 2]", r"rack.yaml: level 'pod': dims \[2, 2\] make 4 children"),
    ("topology: torus", "topology: hammingmesh", r"a hammingmesh has dims: \[x, y\]"),
    ("topology: fat-tree", "topology: fat-tree, leaf: 3", r"leaf 3 does not divide the size 16"),
    ("topology: fat-tree", "topology: hybrid-cube-mesh", r"has 2 to 8 children, not 16"),
    ("oversubscription: 4", "oversubscription: 0.5", r"greater than or equal to 1, not 0.5"),
    ("bandwidth: 25 GB/s", "bandwidth: 0 GB/s", r"levels.1.bandwidth: Input should be greater than 0"),
    ("name: two-racks", "name: two-racks\nbackend: mpi", r"'mpi' is no backend; it is one of gloo, nccl, hccl"),
    ("name: node, ", "name: node: ", r"rack.yaml, line 5: this is no YAML"),
])
def test_a_mistake_is_answered_with_its_place(old: str, new: str, message: str) -> None:
    assert old in TWO_RACKS
    with pytest.raises(InputError, match=message):
        parse_cluster(TWO_RACKS.replace(old, new, 1), "rack.yaml")


def test_other_mistakes_are_answered_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read cluster file .*missing.yaml.*give the path"):
        load_cluster(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="expected keys with values"):
        parse_cluster("- just\n- a list\n", "x")
    with pytest.raises(InputError, match="'A100-81GB' is no known device; did you mean 'A100-80GB' "):
        parse_cluster("name: x\ndevice: A100-81GB\nlevels: []\n", "x")
    with pytest.raises(InputError, match="'abacus' is no known device; there are A100-40GB"):
        parse_cluster("name: x\ndevice: abacus\nlevels: []\n", "x")


@pytest.mark.parametrize(("written", "device"), [
    ("B200", "B200-180GB"), ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("A100-SXM4-40GB", "A100-40GB"),
    ("TPU v6e", "TPU-v6e-32GB"), ("h200-141gb", "H200-141GB"), ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB")])
def test_a_device_is_known_by_a_name_that_it_alone_has(written: str, device: str) -> None:
    assert parse_cluster(f"name: x\ndevice: {written}\nlevels: []\n", "x").device == load_device(device)


@pytest.mark.parametrize(("written", "said"), [
    ("device: H100", r"'H100' is no known device; did you mean 'H100-80GB' \(.*\) or 'H100-96GB'"),
    ("device: cpu", "did you mean 'cpu-core'"), ("device: MI250X", "did you mean 'MI250X-GCD'")])
def test_a_device_whose_name_leaves_a_choice_is_asked_for(written: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_cluster(f"name: x\n{written}\nlevels: []\n", "x")


@pytest.mark.parametrize(("link", "said"), [
    ("Spectrum-X", r"did you mean 'RoCE-400G' \(400 Gb/s\) or 'RoCE-800G' \(800 Gb/s\)\? Known are"),
    ("Infinity Fabric", r"did you mean 'xGMI3' \(448 GB/s\) or 'xGMI4'"), ("NVL72", "did you mean 'NVLink5'"),
    ("slingshot", r"did you mean 'Slingshot10' \(100 Gb/s\) or 'Slingshot11'"),
    ("abacus", "'abacus' is no known link; known are NVLink2")])
def test_a_family_of_links_is_answered_with_its_members(link: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_cluster(f"name: x\ndevice: B200\nlevels: [{{name: node, size: 8, link: {link}}}]\n", "x")


@pytest.mark.parametrize(("device", "library"), [
    ("Gaudi3-128GB", "hccl"), ("TPU-v5p-95GB", "xla"), ("TPU-v6e-32GB", "xla"), ("Trainium2-96GB", "nccom"),
    ("MI300X-192GB", "nccl"), ("H100-80GB", "nccl"), ("cpu-core", "gloo")])
def test_a_device_has_its_own_library_of_collectives(device: str, library: str) -> None:
    text = f"name: x\ndevice: {device}\nlevels: [{{name: node, size: 8, bandwidth: 100 GB/s, latency: 3 us}}]\n"
    read = parse_cluster(text, "x")
    assert read.backend == library and parse_cluster(read.to_yaml(), "x") == read
    assert parse_cluster(text + "backend: nccl\n", "x").backend == "nccl"


def test_parts_with_different_libraries_are_refused() -> None:
    text = ("name: x\nparts: [{device: H100-80GB, ranks: 1}, {device: Gaudi3-128GB, ranks: 1}]\n"
            "levels: [{name: node, size: 2, bandwidth: 1 GB/s, latency: 3 us}]\n")
    with pytest.raises(InputError, match="x: the parts talk by nccl and hccl, and a group of ranks by one of them"):
        parse_cluster(text, "x")


def test_a_device_without_its_memory_is_answered_with_all_that_it_may_be() -> None:
    with pytest.raises(InputError) as caught:
        load_device("H100")
    assert "'H100-80GB' (80 GB at 3.35 TB/s) or 'H100-96GB' (96 GB at " in str(caught.value)
    with pytest.raises(InputError, match=r"'A100-40GB' \(.*\), 'A100-80GB' \(.*\) or 'A100-PCIe-40GB' \("):
        load_device("a100")
