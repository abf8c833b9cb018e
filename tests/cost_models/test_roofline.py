"""The roofline: hand-computed kernels, peaks by dtype, and what has no price."""

from dataclasses import replace

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import (
    Device,
    Kernel,
    compute_seconds,
    copy_seconds,
    elementwise_seconds,
    kernel_seconds,
    least_seconds,
    load_device,
)

DEVICE = Device("toy", "gpu", memory=1e9, bandwidth=1e9, peaks=(("bfloat16", 4e12), ("float32", 1e12)), launch=1e-6,
                efficiency=0.5, memory_efficiency=0.8)


def test_a_kernel_is_bound_by_compute_or_by_memory() -> None:
    assert compute_seconds(DEVICE, 1e12, 1e6, "float32") == pytest.approx(1 / 0.5 + 1e-6)
    assert compute_seconds(DEVICE, 1e6, 1e9, "float32") == pytest.approx(1 / 0.8 + 1e-6)
    assert compute_seconds(DEVICE, 1e12, 1e6, "bfloat16") == pytest.approx(0.25 / 0.5 + 1e-6)


def test_nothing_is_free() -> None:
    assert compute_seconds(DEVICE, 0, 0, "float32") == copy_seconds(DEVICE, 0) == DEVICE.launch


def test_a_copy_moves_bytes() -> None:
    assert copy_seconds(DEVICE, 8e8) == pytest.approx(1 + 1e-6)


@pytest.mark.parametrize(("dtype", "peak"), [("bfloat16", 4e12), ("float16", 1e12), ("float32", 1e12), ("int64", 1e12)])
def test_a_missing_peak_is_that_of_the_next_wider_dtype(dtype: str, peak: float) -> None:
    assert DEVICE.peak(dtype) == peak


def test_float64_without_a_peak_runs_at_a_stated_share_of_float32() -> None:
    assert DEVICE.peak("float64") == 0.5 * DEVICE.peak("float32") and DEVICE.runs_as("float64") == "float32"
    with pytest.raises(InputError, match="lists no peak for float64 or a wider dtype, only for bfloat16"):
        replace(DEVICE, peaks=(("bfloat16", 4e12),)).peak("float64")


def test_what_has_no_price_raises() -> None:
    with pytest.raises(InputError, match="'float8' is no dtype with a price"):
        compute_seconds(DEVICE, 1, 1, "float8")
    with pytest.raises(InputError, match=r"flops = -1: .* check the shapes"):
        compute_seconds(DEVICE, -1, 1, "float32")
    with pytest.raises(InputError, match="nbytes = inf"):
        copy_seconds(DEVICE, float("inf"))


def test_shipped_devices_order_as_their_generations() -> None:
    names = ("P100-16GB", "V100-32GB", "A100-80GB", "H100-80GB")
    seconds = [compute_seconds(load_device(name), 1e13, 1e9, "float16") for name in names]
    assert seconds == sorted(seconds, reverse=True)
    assert compute_seconds(load_device("H200-141GB"), 0, 1e9, "float16") < copy_seconds(load_device("H100-80GB"), 1e9)


def test_kernels_that_compute_reach_their_own_share_of_the_bandwidth() -> None:
    slow = replace(DEVICE, elementwise_efficiency=0.4)
    assert elementwise_seconds(DEVICE, 8e8) == copy_seconds(DEVICE, 8e8) == copy_seconds(slow, 8e8)
    assert elementwise_seconds(slow, 8e8) == pytest.approx(2 + 1e-6)
    moved = Kernel("memory", (), 0.0, 8e8, "float32")
    assert kernel_seconds(slow, moved) == elementwise_seconds(slow, 8e8) == least_seconds(slow, moved, 1)
    for name in ("A100-80GB", "H100-80GB", "V100-32GB"):
        known = load_device(name)
        assert known.elementwise_efficiency is not None and known.elementwise_efficiency < known.memory_efficiency
