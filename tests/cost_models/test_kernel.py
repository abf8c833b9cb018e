"""Kernels by shape: hand-computed waves, tiles and alignment; the floor; what has no price."""

from dataclasses import replace

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import Device, Kernel, compute_seconds, kernel_seconds, least_seconds, load_device
from autoddl.cost_models.curves import curves_to_text
from autoddl.cost_models.kernel import PLAIN_PROLOGUE, PROLOGUE

TOY = Device("toy", "gpu", memory=1e9, bandwidth=1e15, peaks=(("bfloat16", 1e12),), launch=1e-6, efficiency=0.5,
             units=10, kernels=(("attention", 0.25),))


def matmul(m: int, n: int, k: int, batch: int = 1) -> Kernel:
    moved = 2.0 * batch * (m * k + k * n + m * n)
    return Kernel("matmul", (batch, m, n, k), 2.0 * batch * m * n * k, moved, "bfloat16")


def tile_seconds(k: int) -> float:
    """256 x 128 x k at a tenth of half of 1 TFLOP/s."""
    return 2 * 256 * 128 * (k + PROLOGUE) / (1e12 * 0.5 / 10)


def test_ten_tiles_are_one_wave_and_eleven_are_two() -> None:
    one, two = matmul(2560, 128, 8192), matmul(2816, 128, 8192)
    assert kernel_seconds(TOY, one) == pytest.approx(tile_seconds(8192) + 1e-6)
    assert kernel_seconds(TOY, one) < kernel_seconds(TOY, two) <= 2 * tile_seconds(8192) + 1e-6


def test_a_product_of_few_tiles_splits_its_contraction() -> None:
    alone = matmul(256, 128, 1 << 20)
    assert kernel_seconds(TOY, alone) == pytest.approx(tile_seconds((1 << 20) // 8) + 1e-6, rel=0.05)


@pytest.mark.parametrize(("n", "k", "part"), [
    (128, 8191, 0.29), (128, 8188, 0.54), (128, 8184, 0.89), (128, 8176, 1.0), (127, 8192, 0.28), (124, 8192, 0.67),
    (120, 8192, 1.0), (124, 8188, 0.54)])
def test_rows_that_are_no_multiple_of_some_bytes_are_slower(n: int, k: int, part: float) -> None:
    """By what is measured of rows of the contracted dim, and of those that are written; the slower of both counts."""
    even = matmul(2560, 128, 8192)
    assert kernel_seconds(TOY, matmul(2560, n, k)) == pytest.approx(kernel_seconds(TOY, even) / part, rel=0.01)


def test_products_of_float32_load_rows_of_any_bytes() -> None:
    even, odd = matmul(2560, 128, 8192), matmul(2560, 128, 8191)
    assert kernel_seconds(replace(TOY, peaks=(("float32", 1e12),)), replace(odd, dtype="float32")) == pytest.approx(
        kernel_seconds(TOY, even), rel=0.01)


def test_products_without_tensor_cores_start_and_end_sooner() -> None:
    """Float32 where tensor cores take TF32; where they take float32 itself, a tile starts as it does elsewhere."""
    one = replace(matmul(2560, 128, 64), dtype="float32", nbytes=1.0)
    alike, apart = (replace(TOY, peaks=peaks) for peaks in ((("float32", 1e12),), (("float32", 1e12), ("tf32", 8e12))))
    assert kernel_seconds(alike, one) == pytest.approx(tile_seconds(64) + 1e-6)
    assert kernel_seconds(apart, one) == pytest.approx(
        tile_seconds(64) * (64 + PLAIN_PROLOGUE) / (64 + PROLOGUE) + 1e-6)


def test_causal_attention_computes_the_diagonal_whole() -> None:
    flops = 4.0 * 80 * 1024 * 128 * 1024
    whole = Kernel("attention", (80, 1024, 1024, 128, 0), flops, 1.0, "bfloat16")
    causal = Kernel("attention", (80, 1024, 1024, 128, 1), flops / 2, 1.0, "bfloat16")
    assert kernel_seconds(TOY, whole) == pytest.approx(flops * (1024 + 64) / 1024 / (1e12 * 0.25) + 1e-6)
    assert kernel_seconds(TOY, causal) == pytest.approx(flops / 2 * (1024 + 2 * 128) / 1024 / (1e12 * 0.25) + 1e-6)


def test_attention_is_computed_in_whole_blocks() -> None:
    """257 queries and keys take what 320 do."""
    def seconds(length: int) -> float:
        kernel = Kernel("attention", (800, length, length, 64, 0), 4.0 * 800 * length * 64 * length, 1.0, "bfloat16")
        return kernel_seconds(TOY, kernel) - TOY.launch

    assert seconds(257) == pytest.approx(seconds(320)) and seconds(256) < 0.9 * seconds(257)


@pytest.mark.parametrize(("length", "head", "published"), [
    (512, 64, 333), (1024, 64, 392), (8192, 64, 496), (512, 128, 467), (1024, 128, 565), (8192, 128, 646)])
def test_attention_of_a_hopper_is_as_fast_as_published(length: int, head: int, published: float) -> None:
    """FlashAttention-3 on an H100, forward, TFLOP/s (Shah et al. 2024, figure 5); in training less is
    reached, and with short sequences FlashAttention-2 loses less."""
    device, heads = load_device("H100-80GB"), 16384 // length * 2048 // head
    kernel = Kernel("attention", (heads, length, length, head, 0), 4.0 * heads * length * head * length, 1.0, "float16")
    assert 0.88 < kernel.flops / kernel_seconds(device, kernel) / (published * 1e12) < 1.2


def test_narrow_heads_take_as_long_for_a_score_as_their_exponentials_say() -> None:
    """On a device where they decide alone, half the width is half the rate; wide heads reach the usual one."""
    device = replace(TOY, exponentials=1.0)

    def rate(head: int) -> float:
        flops = 4.0 * 80 * 1024 * head * 1024
        kernel = Kernel("attention", (80, 1024, 1024, head, 0), flops, 1.0, "bfloat16")
        assert least_seconds(device, kernel, 2) <= kernel_seconds(device, kernel) / 2 + device.launch
        return flops / (kernel_seconds(device, kernel) - device.launch)

    assert [rate(head) for head in (64, 128, 256, 512)] == pytest.approx(
        [share * 1024 / (1024 + 64) for share in (0.125e12, 0.25e12, 0.25e12, 0.25e12)])


def test_memory_is_bytes_and_a_device_without_units_is_a_roofline() -> None:
    moved = Kernel("memory", (), 0.0, 8.5e14, "bfloat16")
    assert kernel_seconds(TOY, moved) == pytest.approx(1 + 1e-6)
    plain, kernel = replace(TOY, units=0), matmul(2816, 128, 8192)
    assert kernel_seconds(plain, kernel) == compute_seconds(plain, kernel.flops, kernel.nbytes, "bfloat16")


def test_a_kind_of_kernel_has_its_efficiency_on_a_device_without_units_too() -> None:
    device = replace(TOY, units=0, efficiency=0.8, kernels=(("attention", 0.4),))
    kernel = Kernel("attention", (80, 1024, 1024, 128, 0), 1e12, 1.0, "bfloat16")
    without = kernel_seconds(replace(device, kernels=()), kernel)
    assert kernel_seconds(device, kernel) == pytest.approx(2 * without, rel=1e-4)
    assert least_seconds(device, kernel, 1) <= kernel_seconds(device, kernel)


@pytest.mark.parametrize("name", ["A100-80GB", "H100-80GB", "V100-32GB", "cpu-core"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_part_is_faster_than_the_floor(name: str, ranks: int) -> None:
    device = load_device(name)
    for m, n, k in ((8192, 4096, 4096), (512, 512, 512), (100, 7, 33), (8192, 128256, 4096), (4096, 4096, 65536)):
        kernel = replace(matmul(m, n, k), dtype="float32" if name == "cpu-core" else "float16")
        for part in (replace(matmul(-(-m // ranks), n, k), dtype=kernel.dtype),
                     replace(matmul(m, n, -(-k // ranks)), dtype=kernel.dtype)):
            assert least_seconds(device, kernel, ranks) <= kernel_seconds(device, part) * (1 + 1e-12)


def test_efficiency_of_large_products_is_that_of_the_device() -> None:
    device, kernel = load_device("A100-80GB"), matmul(16384, 16384, 16384)
    reached = kernel.flops / kernel_seconds(device, kernel) / device.peak("bfloat16")
    assert 0.95 * device.efficiency < reached <= device.efficiency


def test_float32_is_convolved_at_the_peak_of_tf32_where_there_is_one() -> None:
    convolution = Kernel("convolution", (1, 200_704, 512, 4608), 2.0 * 200_704 * 512 * 4608, 1e9, "float32")
    product = replace(convolution, kind="matmul")
    seconds = [kernel_seconds(load_device(name), kernel) for name in ("H100-80GB", "V100-32GB")
               for kernel in (convolution, product)]
    assert seconds[1] > 3 * seconds[0]
    assert seconds[3] == pytest.approx(seconds[2])
    assert least_seconds(load_device("H100-80GB"), convolution, 1) <= seconds[0]


def test_attention_of_few_heads_leaves_units_idle_on_a_measured_device_too() -> None:
    curve = {"name": "attention full", "dtype": "bfloat16", "grid": [[128.0, 256.0], [64.0, 128.0]],
             "work": [1e9] * 4, "seconds": [1e-3] * 4}
    device = replace(TOY, units=100, curves=curves_to_text([curve], "toy"))
    full = kernel_seconds(device, Kernel("attention", (100, 128, 128, 64, 0), 1e9, 1.0, "bfloat16", "attention full"))
    half = kernel_seconds(device, Kernel("attention", (50, 128, 128, 64, 0), 1e9, 1.0, "bfloat16", "attention full"))
    assert half == pytest.approx(2 * full)


def test_what_is_no_kernel_raises() -> None:
    with pytest.raises(InputError, match="'product' is no kind of kernel; the kinds are matmul"):
        kernel_seconds(TOY, Kernel("product", (), 1.0, 1.0, "bfloat16"))
    with pytest.raises(InputError, match="flops = -1"):
        kernel_seconds(replace(TOY, units=0), Kernel("matmul", (1, 1, 1, 1), -1.0, 1.0, "bfloat16"))
