"""A machine that is faster in one minute than in the next, and ranks that are measured on slow links."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from measured_cluster import LAPTOP, device, moved, written
from sampling import parametrize_or_slow
from shaping import shaping

from autoddl.calibrate.machine_speed import correct_for_pulses, pulse
from autoddl.calibrate.measure import measure
from autoddl.core.errors import InputError
from autoddl.cost_models import kernel_seconds, load_cluster
from autoddl.cost_models import parse_cluster as parse
from autoddl.cost_models.machine import Host
from autoddl.cost_models.measured import scale_to_pulse


def test_a_pulse_is_the_time_of_a_fixed_work() -> None:
    ticks = iter((0.0, 1.0, 5.0, 7.0))
    beat = pulse(lambda: next(ticks))
    assert beat() == 2.0


def test_times_of_a_slow_minute_are_steadied_by_the_pulses_around_them() -> None:
    """One minute in three is twice as slow, and so is the kernel in it."""
    beats = [*[1.0] * 20, *[2.0] * 20, *[1.0] * 20]
    taken = [(at, 0.3 * beat) for at, beat in enumerate(beats)]
    found = correct_for_pulses(taken, beats)
    assert found[5] == found[30] == found[55] == pytest.approx(0.3)
    odd = list(chain(beats[:5], [9.0], beats[6:]))
    assert correct_for_pulses(taken, odd) == pytest.approx(found)


def test_a_cluster_at_another_pace_computes_slower_and_its_links_stay() -> None:
    host = {"call": 1e-3, "message": 2e-3, "byte": 1e-8, "late": 0.02}
    usual = parse(written(pulse=0.01, host=host), "x")
    slow = scale_to_pulse(usual, 0.02)
    assert kernel_seconds(slow.device, moved(1e4)) == pytest.approx(2 * kernel_seconds(device(), moved(1e4)))
    assert slow.device.host == Host(2e-3, 4e-3, 2e-8, late=0.02) and slow.levels == usual.levels
    assert scale_to_pulse(usual, 0.01) == replace(usual, device=scale_to_pulse(usual, 0.01).device)
    for cluster, beat in ((parse(written(), "x"), 0.01), (usual, 0.0)):
        with pytest.raises(InputError, match="no pulse to compare"):
            scale_to_pulse(cluster, beat)


def test_shaped_links_are_for_ranks_that_start_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(LAPTOP)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x",
                        "MASTER_PORT": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="measure outside torchrun"):
        measure(path, shaped=True)


@parametrize_or_slow("inside", [1], [2])
@shaping
def test_on_shaped_links_the_host_is_measured_and_links_stay_as_written(tmp_path: Path, inside: int) -> None:
    """On two nodes of one rank or two."""
    path, out = tmp_path / "slow.yaml", tmp_path / "measured.yaml"
    node = f"  - {{name: node, size: {inside}, bandwidth: 1 GB/s, latency: 60 us}}\n"
    path.write_text(LAPTOP.replace("name: all, size: 2, bandwidth: 1 GB/s", "name: net, size: 2, bandwidth: 25 MB/s")
                    .replace("levels:\n", f"levels:\n{node}"))
    found = measure(path, output=out, seconds=0.1, shaped=True, small=True)
    assert found is not None and [link["level"] for link in found.measured["links"]] == ["node"] * (inside > 1)
    assert found.measured["pulse"] > 0 and found.measured["device"]["ranks"] == 2 * inside
    before, after = load_cluster(path), load_cluster(out)
    assert after.levels[1] == before.levels[1] and after.device.host is not None
    assert after.device.host.call >= 0 and after.device.host.turn > 0
