"""A profile changes the constants of a machine, round-trips as text, and is refused where it says nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import Group, collective, elementwise_seconds, kernel_seconds, load_cluster, parse_cluster
from autoddl.cost_models.curves import Kernel
from autoddl.cost_models.machine import Cluster
from autoddl.cost_models.profile import CONSTANTS, SHIPPED, Profile, least_factors, load_profile, parse_profile
from autoddl.cost_models.software import SOFTWARE, run_by, software_named

CLUSTERS = Path(__file__).parent.parent.parent / "examples" / "clusters"
MATMUL = Kernel("matmul", (1, 8192, 8192, 8192), 2.0 * 8192**3, 6.0 * 8192**2, "bfloat16")
ATTENTION = Kernel("attention", (512, 4096, 4096, 128, 1), 2e13, 1e9, "bfloat16")


@pytest.fixture
def cluster() -> Cluster:
    return parse_cluster("""
name: two nodes
device: A100-80GB
levels:
  - {name: node, size: 8, bandwidth: 300 GB/s, latency: 3 us}
  - {name: net, size: 2, bandwidth: 25 GB/s, latency: 8 us}
""", "here")


@pytest.mark.parametrize(("constant", "longer"), [("matmul", "matmul"), ("attention", "attention"),
                                                  ("memory", "copy"), ("inner_links", "node"), ("outer_links", "net")])
def test_a_constant_makes_its_own_seconds_longer_and_no_others(cluster: Cluster, constant: str, longer: str) -> None:
    def seconds(place: Cluster) -> dict[str, float]:
        return {"matmul": kernel_seconds(place.device, MATMUL), "attention": kernel_seconds(place.device, ATTENTION),
                "copy": elementwise_seconds(place.device, 1e9),
                "node": collective(place, "all-reduce", Group(((8, 1),)), 1e9).seconds,
                "net": collective(place, "all-reduce", Group(((2, 8),)), 1e9).seconds}

    before, after = seconds(cluster), seconds(SHIPPED.times(constant, 1.1).on(cluster))
    assert after[longer] / before[longer] == pytest.approx(1.1, rel=0.02)
    assert {name for name in before if after[name] != pytest.approx(before[name], rel=1e-9)} == {longer}


def test_latency_launch_and_host_are_longer_too(cluster: Cluster) -> None:
    slow = SHIPPED.times("latency", 3.0).times("launch", 2.0).times("host", 2.0)
    tiny = Group(((8, 1),))
    place = slow.on(cluster)
    assert collective(place, "all-reduce", tiny, 8).seconds > collective(cluster, "all-reduce", tiny, 8).seconds
    assert place.device.launch == 2 * cluster.device.launch
    assert slow.by(software_named("eager")).host == 2 * software_named("eager").host


def test_the_package_itself_is_a_profile_that_changes_nothing(cluster: Cluster) -> None:
    assert SHIPPED.on(cluster) is cluster


def test_a_changed_cluster_is_one_that_its_text_reads_back_as(cluster: Cluster) -> None:
    place = replace(SHIPPED, factors=tuple(1.0 + 0.1 * i for i in range(len(CONSTANTS)))).on(cluster)
    assert parse_cluster(place.to_yaml(), "again") == place


def test_what_was_measured_of_a_machine_is_changed_with_it() -> None:
    text = (CLUSTERS / "laptop.yaml").read_text()
    plain = load_cluster(CLUSTERS / "laptop.yaml")
    name, level = plain.device.name, plain.levels[0].name
    text += f"""
measured:
  date: '2026-11-26'
  versions: {{}}
  device: {{name: {name}, kind: cpu}}
  curves:
    - {{name: linear, dtype: float32, grid: [[64, 4096], [64, 4096], [64, 4096]], work: {[1e6] * 8},
        seconds: {[1e-3] * 8}}}
  links: [{{level: {level}, ranks: 2, bandwidth: 1.0e9, latency: 1.0e-4, error: 0.1}}]
"""
    before = parse_cluster(text, "measured")
    after = SHIPPED.times("matmul", 2.0).times("inner_links", 2.0).on(before)
    assert parse_cluster(after.to_yaml(), "again") == after
    kernel = Kernel("matmul", (1, 512, 512, 512), 1e9, 1e6, "float32", "linear")
    assert kernel_seconds(after.device, kernel) == pytest.approx(2 * kernel_seconds(before.device, kernel))
    pair = Group(((2, 1),))
    assert collective(after, "all-reduce", pair, 1e8).seconds == pytest.approx(
        2 * collective(before, "all-reduce", pair, 1e8).seconds, rel=0.05)


def test_no_kernel_is_above_its_peak(cluster: Cluster) -> None:
    least = dict(zip(CONSTANTS, least_factors(cluster), strict=True))
    assert least["matmul"] == cluster.device.efficiency and least["host"] == 0.5
    assert SHIPPED.times("matmul", least["matmul"]).on(cluster).device.efficiency == 1.0
    with pytest.raises(InputError, match=r"efficiency of A100-80GB is 1\.64 of its peak"):
        SHIPPED.times("matmul", 0.5).on(cluster)


def test_a_profile_of_one_device_says_nothing_of_another(cluster: Cluster) -> None:
    with pytest.raises(InputError, match="fitted on H100-80GB and says nothing of A100-80GB"):
        Profile(devices=("H100-80GB",)).on(cluster)


def test_text_reads_back_as_the_value() -> None:
    one = replace(SHIPPED.times("memory", 1.25), residual=0.04, runs=7, devices=("A100-80GB",), software="nemo")
    assert parse_profile(one.to_yaml(), "here") == one


@pytest.mark.parametrize(("text", "said"), [
    ("constants: {matmull: 1.1}", "there is no constant 'matmull'; the constants are matmul"),
    ("constants: {matmul: -1}", "constants.matmul is -1; .* write a number above 0"),
    ("constant: {matmul: 1}", "unknown key 'constant'; did you mean 'constants'"),
    ("software: nemoo\nconstants: {}", "did you mean 'nemo'"),
    ("[1, 2]", "expected keys with values"), ("{", "this is no YAML")])
def test_a_wrong_profile_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_profile(text, "here")


def test_a_profile_that_is_not_there_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the profile .*autoddl calibrate"):
        load_profile(tmp_path / "none.yaml")


def test_attention_of_few_keys_may_be_above_the_peak_by_itself_but_not_by_the_profile() -> None:
    """A window makes attention shorter, which an efficiency above 1 says (`run_by`)."""
    plain = load_cluster(Path(__file__).parents[2] / "examples" / "clusters" / "h100-8x8.yaml")
    windowed = run_by(plain, SOFTWARE["modern"], 0.5)
    before = windowed.device.efficiency_of("attention")
    assert before > 1 and SHIPPED.times("matmul", 1.1).on(windowed).device.efficiency_of("attention") == before
    with pytest.raises(InputError, match=r"attention of H100-80GB is .* of its peak"):
        SHIPPED.times("attention", 0.5).on(windowed)
