"""What a calibration writes and what it changes: curves by hand, other devices refused, a small one end to end."""

import json
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from measured_cluster import COPY, LAPTOP, device, moved, written
from ranks import on_ranks
from shell import shell
from torch.nn import functional as F

from autoddl.calibrate.fits import Point, fit_level, host_of
from autoddl.calibrate.kernel_cases import LARGE, SMALL, Case, Known, cases, kernels
from autoddl.calibrate.kernel_timing import low, spread
from autoddl.calibrate.machine_speed import median_pulse
from autoddl.calibrate.measure import measure, strip_measured
from autoddl.calibrate.rank import measure_on_rank
from autoddl.calibrate.request import Request
from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, Kernel, collective, kernel_seconds, least_seconds, load_cluster
from autoddl.cost_models import parse_cluster as parse
from autoddl.cost_models.collectives import Group
from autoddl.cost_models.curves import curves_to_text, find_curve
from autoddl.launch.launch import launch


def test_between_two_points_the_rate_is_a_line_in_logarithms() -> None:
    assert kernel_seconds(device(), moved(1e4)) == pytest.approx(1e4 / (1e9 * 10**0.5))
    assert kernel_seconds(device(), moved(1e3)) == pytest.approx(1e-6)


def test_outside_the_grid_the_rate_is_that_of_the_border_and_nothing_is_below_the_floor() -> None:
    assert kernel_seconds(device(), moved(1e7)) == pytest.approx(1e-3)
    assert kernel_seconds(device(), moved(1.0)) == kernel_seconds(device(), moved(0.0)) == 1e-6


def test_a_product_is_interpolated_along_every_side() -> None:
    def seconds(m: int, n: int, k: int) -> float:
        return kernel_seconds(device(), Kernel("matmul", (1, m, n, k), 2.0 * m * n * k, 1.0, "float32", "matmul"))

    assert seconds(100, 10, 1000) == pytest.approx(1e-4)
    assert seconds(10, 10, 100) == pytest.approx(2e4 / (2e8 * 2e9 * 2e9 * 2e10) ** 0.25)
    assert seconds(100, 50, 1000) == pytest.approx(5e-4)  # n has one point: its rate is everywhere


def test_a_product_is_no_faster_than_a_copy_of_its_bytes() -> None:
    kernel = Kernel("matmul", (1, 1, 10, 10), 200.0, 1e7, "float32", "matmul")
    assert kernel_seconds(device(), kernel) == kernel_seconds(device(), moved(1e7))


def test_a_dtype_takes_the_curve_of_one_as_wide_or_wider_and_an_unmeasured_kind_the_sheet() -> None:
    assert kernel_seconds(device(), moved(1e4, dtype="int64")) == kernel_seconds(device(), moved(1e4))
    bare = parse(LAPTOP, "x").device
    assert kernel_seconds(device(), moved(1e6, "pool")) == kernel_seconds(bare, moved(1e6, "pool"))


def test_least_seconds_are_below_every_part_of_a_cut() -> None:
    whole = Kernel("matmul", (1, 100, 10, 1000), 2e6, 1.0, "float32", "matmul")
    part = Kernel("matmul", (1, 50, 10, 1000), 1e6, 1.0, "float32", "matmul")
    assert least_seconds(device(), whole, 2) <= kernel_seconds(device(), part)


def test_what_was_measured_round_trips_and_is_part_of_the_fingerprint() -> None:
    cluster = parse(written(), "x")
    assert parse(cluster.to_yaml(), "again") == cluster
    assert cluster.fingerprint != parse(LAPTOP, "x").fingerprint
    assert strip_measured(written()) == LAPTOP


@pytest.mark.parametrize(("changes", "message"), [
    ({"device": {"name": "A100-80GB", "kind": "gpu"}},
     r"measured is of the gpu 'A100-80GB', and the file's device is the cpu 'core'; measure this one with `autoddl me"),
    ({"curves": [COPY | {"seconds": [1e-6]}]}, r"curve 'copy': its grid has 2 points, but there are 1 seconds and 2"),
    ({"curves": [COPY | {"seconds": [1e-6, 0.0]}]}, "seconds and work are above 0"),
    ({"curves": [COPY | {"grid": [[1e5, 1e3]]}]}, "sizes rise and are above 0"),
    ({"curves": [COPY | {"dtype": "float31"}]}, "'float31' is no dtype with a peak"),
    ({"curve": []}, "unknown key 'curve'; did you mean 'curves'"),
    ({"links": [{"level": "rack", "ranks": 2, "bandwidth": 1e9, "latency": 1e-5, "error": 0.1}]},
     "measured has a link of level 'rack', which the file has not; its levels are all"),
])
def test_a_wrong_calibration_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(written(**changes), "x.yaml")


def linked(bandwidth: float, latency: float) -> Cluster:
    link = {"level": "all", "ranks": 2, "bandwidth": bandwidth, "latency": latency, "error": 0.1}
    return parse(written(links=[link]), "x")


def test_a_measured_link_changes_what_a_level_reaches() -> None:
    slow, fast = linked(0.5e9, 1e-4).levels[0], linked(3e9, 1e-4).levels[0]
    assert (slow.bandwidth, slow.efficiency, slow.latency) == (1e9, 0.5, 1e-4)
    assert (fast.bandwidth, fast.efficiency) == (3e9, 1.0)


def test_a_link_is_found_again_from_its_own_times() -> None:
    true, group = linked(0.3e9, 2e-4), Group(((2, 1),))
    points = [Point(kind, nbytes, collective(true, kind, group, float(nbytes)).seconds, 0.0)
              for kind in ("all-reduce", "all-gather") for nbytes in (2**12, 2**18, 2**24)]
    found = fit_level(parse(LAPTOP, "x"), "all", points)
    assert found["bandwidth"] == pytest.approx(0.3e9, rel=0.05) and found["latency"] == pytest.approx(2e-4, rel=0.05)
    assert found["error"] < 0.02


def test_what_hosts_take_is_part_of_a_price() -> None:
    """No collective is faster than its host, nor than its links; only where gloo runs and the host was timed."""
    group, host = Group(((2, 1),)), {"call": 1e-3, "message": 2e-3, "byte": 1e-8}
    plain, timed = parse(written(), "x"), parse(written(host=host), "x")
    small, large = (collective(timed, "all-reduce", group, nbytes) for nbytes in (4.0, 1e6))
    assert collective(plain, "all-reduce", group, 4.0).host == 0.0
    assert small.seconds == small.host == pytest.approx(5e-3, rel=1e-4)
    assert large.seconds == large.host == pytest.approx(5e-3 + 1e-8 * 1e6)
    wire = collective(parse(written(host=host | {"byte": 0.0}), "x"), "all-reduce", group, 1e9)
    assert wire.seconds > 10 * wire.host == pytest.approx(0.05) and wire.busy == 0
    slow = parse(written(host=host | {"byte": 0.0, "busy": 2e-3}), "x")
    assert [collective(slow, "all-reduce", group, nbytes).busy for nbytes in (4.0, 1e9)] == pytest.approx([4e-3, 4e-3])
    drag = parse(written(host=host | {"drag": 2e-9}), "x")
    assert collective(drag, "all-reduce", group, 1e6) == replace(large, drag=2e-9 * 1e6)
    assert collective(slow, "all-reduce", Group(((2, 1),)), 1e9).seconds == wire.seconds
    assert parse(timed.to_yaml(), "y") == timed != plain
    idle = parse(written(host=host | {"wait": 1e-3}), "x")
    assert [collective(idle, "all-reduce", group, nbytes).seconds for nbytes in (4.0, 1e9)] == pytest.approx(
        [small.seconds + 2e-3, collective(timed, "all-reduce", group, 1e9).seconds + 2e-3])
    assert collective(idle, "all-reduce", group, 4.0).host == small.host
    turned = parse(written(host=host | {"turn": 4e-3}), "x")
    chosen = [collective(turned, "all-reduce", group, nbytes).algorithm for nbytes in (4.0, 1e9)]
    assert chosen == ["level rings", "ring"]
    assert collective(timed, "all-reduce", group, 4.0).algorithm == "ring"
    late = parse(written(host=host | {"late": 0.02}), "x")
    assert late.device.host is not None and late.device.host.late == 0.02 and parse(late.to_yaml(), "y") == late


def test_what_hosts_take_is_found_again_from_its_own_times() -> None:
    points = [Point(kind, nbytes, used + (2e-3 + 3e-4 * many if nbytes == 4 else 1.0), 0.0, used, 4)
              for kind, many in (("all-reduce", 6), ("all-gather", 3)) for nbytes in (4, 2**24)
              for used in [1e-3 + 2e-4 * many + 1e-9 * nbytes * many / 4]]
    found = host_of(points)
    assert found is not None and found == pytest.approx((1e-3, 2e-4, 1e-9, 3e-4), rel=1e-4)
    assert host_of([]) is None


def test_low_ends() -> None:
    assert (low([5, 1, 2, 3, 4, 9]), spread([1.0, 2.0, 4.0, 5.0, 3.0, 9.0])) == (2, 1.5)


def test_a_case_is_named_and_counted_by_the_planner() -> None:
    forward, backward = kernels(Case("aten.linear", F.linear, ((4, 8), (16, 8))), torch.float32, {})
    assert (forward.name, forward.sizes, forward.work) == ("matmul", (4.0, 16.0, 8.0), 1024.0)
    assert [(one.name, one.sizes) for one in backward] == [("matmul input", (4.0, 8.0, 16.0)),
                                                           ("matmul weight", (8.0, 16.0, 4.0))]
    assert len({case.target for case in cases(SMALL)}) == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_case_of_a_gpu_is_named_and_has_a_grid(dtype: torch.dtype) -> None:
    found, known = dict[str, set[tuple[float, ...]]](), Known()
    for case in cases(LARGE):
        forward, backward = kernels(case, dtype, known)
        for one in {forward, *backward}:
            found.setdefault(one.name, set()).add(one.sizes)
    for name, points in found.items():
        assert len(points) == prod(len({at[i] for at in points}) for i in range(len(min(points)))), name


def on_a_rank(file: str) -> None:
    """Does what `autoddl.calibrate.rank` does with its job, on a rank that runs already or in this process alone."""
    job = json.loads(Path(file).read_text())
    request = Request(**{key: value for key, value in job.items() if key != "folder"})
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(job["folder"], f"result-{rank}.json").write_text(json.dumps(measure_on_rank(request)))


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Lets `measure` use ranks that run already, which have imported all they need."""
    def launched(ranks: int, command: Sequence[str], **_: object) -> None:
        if ranks > 1:
            on_ranks(ranks, on_a_rank, command[-1])
        else:
            on_a_rank(command[-1])

    monkeypatch.setattr("autoddl.calibrate.measure.launch", launched)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_are_started_measure(tmp_path: Path) -> None:
    """As the ranks of the next test, which run already."""
    path = tmp_path / "two.yaml"
    path.write_text(LAPTOP)
    found = measure(path, ranks=2, seconds=0.1, small=True)
    assert found is not None and load_cluster(path).measurements == found.measured


@pytest.mark.ranks
def test_a_short_measurement_writes_a_file_that_prices(tmp_path: Path, running: None) -> None:
    path, out = tmp_path / "two.yaml", tmp_path / "measured.yaml"
    path.write_text(LAPTOP)
    found = measure(path, output=out, ranks=2, seconds=0.005, small=True)
    assert found is not None and path.read_text() == LAPTOP and out.read_text().startswith("# A machine.")
    cluster = load_cluster(out)
    assert cluster.measurements == found.measured and set(found.measured["versions"]) == {"python", "torch"}
    kernel = Kernel("matmul", (1, 32, 32, 32), 2.0 * 32**3, 12288.0, "float32", "matmul weight")
    assert find_curve(cluster.device.curves, "exponential backward", "float32") is not None
    assert 0 < kernel_seconds(cluster.device, kernel) != kernel_seconds(load_cluster(path).device, kernel)
    assert [point["kind"] for point in found.measured["links"][0]["points"]][::2] == [
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
    assert measure(out, ranks=1, seconds=0.005, small=True) is not None
    assert "links" not in load_cluster(out).measurements and out.read_text().count("measured:") == 1


@pytest.mark.ranks
def test_a_machine_without_the_device_and_other_mistakes_are_answered(tmp_path: Path, running: None) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(LAPTOP)
    with pytest.raises(InputError, match="cluster two has 2 devices, not 3: measure with 2 ranks, or with one"):
        measure(path, ranks=3)
    with pytest.raises(InputError, match="has 2 devices, not 3"):
        measure(path, ranks=3, shaped=True)
    with pytest.raises(InputError, match="0 seconds, 1 threads, 1 ranks"):
        measure(path, seconds=0.0)
    path.write_text(LAPTOP.replace("kind: cpu", "kind: gpu"))
    answer = shell("measure", str(path))
    assert answer.code == 2 and "its device core is a gpu, and this machine has none" in answer.err


def test_text_of_is_canonical() -> None:
    assert curves_to_text([COPY], "x") == curves_to_text([dict(reversed(COPY.items()))], "x")


@pytest.mark.ranks
def test_ranks_keep_what_a_step_frees() -> None:
    names = "'MALLOC_MMAP_MAX_', 'MALLOC_TRIM_THRESHOLD_'"
    check = f"import os, sys; sys.exit([os.environ[n] for n in ({names})] != ['0', '{2**40}'])"
    launch(1, [sys.executable, "-c", check])


def test_a_row_of_pulses_settles() -> None:
    """The first are slower; each begins where all meet."""
    met, beats = list[int](), iter([5.0, 4.0, *[1.0] * 6])
    assert median_pulse(lambda: next(beats), lambda: met.append(1)) == 1.0 and len(met) == 8
