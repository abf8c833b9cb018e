"""Seconds of one kernel by its shape: a roofline whose efficiency follows from how the kernel covers the device.

    matmul     min over tiles (a, b) and splits s of the contraction of
                   waves * 2 a b (k/s + PROLOGUE) / (peak e r / units)
               with waves = ceil(batch ceil(m/a) ceil(n/b) s / units)
    attention  waves of query blocks: blocks = batch heads * ceil(queries / BLOCK), each over the keys it sees;
               and half a block more, whose loads, exponentials and stores nothing hides (on an H100 FlashAttention-2
               reaches 0.84 with 512 keys of what it does with 8,192, and 3 reaches 0.72: Shah et al. 2024, figure 5);
               lengths count as multiples of LEAST;
               a score takes (x + (1 - x) d / HEAD) times what it takes in heads of width d = HEAD, d at most HEAD
    memory     bytes / (bandwidth * elementwise efficiency)
    all        max(compute, bytes) + launch

with

    peak     peak of the dtype, flop/s
    e        fraction of the peak that the largest products reach on the device
    r        rate of a tile as a fraction of the largest tile's
    x        part of the seconds of attention that go by scores: one exponential each, whatever the width of a head
    units    multiprocessors that share the peak

A wave takes as long with one tile as with one for each unit (NVIDIA, "Matrix multiplication background user's guide",
tile and wave quantisation). Every tile starts and ends with loads and stores that no multiplication hides: PROLOGUE
elements of k. The price of no way to cut a kernel among ranks is below `least_seconds`.

Every CPU, and any other device whose `units` are not known, has the plain roofline with a launch floor:

    seconds = max(flops / (peak * efficiency), nbytes / (bandwidth * memory_efficiency)) + launch
              nbytes / (bandwidth * elementwise_efficiency) + launch          norms, softmax, activations

Roofline: Williams, Waterman & Patterson 2009. The efficiencies belong to the device and are those of large kernels.
Matmuls in bfloat16 reach 794 of 989 TFLOP/s on an H100, and 270 of 312 on an A100. nbytes counts reads and writes
together. A kernel that only moves bytes comes nearer to the bandwidth than one that reduces rows or computes functions
of the elements.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil, isfinite

from autoddl.core.errors import InputError
from autoddl.cost_models import curves
from autoddl.cost_models.curves import Kernel
from autoddl.cost_models.machine import ITEMSIZE_OF_PEAK, Device

__all__ = ["KINDS", "Kernel", "compute_seconds", "copy_seconds", "dtype_as_run", "elementwise_seconds",
           "kernel_seconds", "least_seconds"]

KINDS = ("matmul", "convolution", "attention", "attention backward", "memory")

TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
"""Rows, columns, and rate as a fraction of the largest tile's. NVIDIA's guide lists the tiles. The rates are assumed,
not measured: a smaller tile reuses less of what it loads."""
SPLITS = (1, 2, 4, 8)
"""Parts of the contraction that different units may add up (split-K)."""
PROLOGUE = 128.0
"""Elements of k that it costs to fill and drain the pipeline of a tile; assumed to be 4 stages of 32."""
PLAIN_PROLOGUE = 16.0
"""The same without tensor cores: 2 stages of 8 (CUTLASS, default_gemm_configuration.h, OpClassSimt)."""
CONTRACTED = ((4, 0.29), (16, 0.54), (32, 0.89))
WRITTEN = ((4, 0.28), (16, 0.67))
"""(bytes, fraction of their rate that tensor cores reach): the first of which a row's bytes are no multiple counts. The
row is of the contracted dim, or of the columns that are written. Others reach all. Measured in float16 on an A100
(EleutherAI/cookbook, sizing/results: vocab_v_sweep.out, vocab_h_sweep.out, mm/ksweep_low/a100.out; Anthony et al.
2024), and assumed of other dtypes and devices: a V100 lost less there."""
BLOCK = 128
"""Queries and keys of a block of fused attention (Dao 2023, "FlashAttention-2", section 3.3)."""
LEAST = 64
"""Queries, and keys, that one instruction of tensor cores multiplies at least: 64 rows on Hopper (PTX, wgmma), and the
least block of FlashAttention-2's kernels (flash_fwd_launch_template.h). What is beyond the last is computed too."""
HEAD = 128
"""Width of the heads at which a device reaches its efficiency of attention; the mean of keys' and values' width."""


@lru_cache(maxsize=500_000)
def kernel_seconds(device: Device, kernel: Kernel) -> float:
    """Seconds of `kernel` alone on `device`. Raises InputError where its kind or dtype has no price."""
    if kernel.kind not in KINDS:
        raise InputError(f"{kernel.kind!r} is no kind of kernel; the kinds are {', '.join(KINDS)}")
    if device.curves and (measured := curves.curve_seconds(device.curves, kernel)) is not None:
        return measured * _idle(device, kernel)
    kernel = _as_run(kernel)
    plain = _roofline(device, 0.0 if device.units else _equivalent(device, kernel), kernel.nbytes, kernel)
    if kernel.kind == "memory" or not device.units or not kernel.flops:
        return plain
    compute = _attention if kernel.kind.startswith("attention") else _matmul
    return max(plain, compute(device, kernel) + device.launch)


def _idle(device: Device, kernel: Kernel) -> float:
    """Times its measured seconds, where a kernel has fewer blocks of queries than units; its curve fills them all."""
    if not device.units or not kernel.kind.startswith("attention"):
        return 1.0
    heads, queries, *_ = kernel.shape
    return max(1.0, device.units / (heads * ceil(queries / BLOCK)))


def least_seconds(device: Device, kernel: Kernel, ranks: int) -> float:
    """A lower bound on the seconds of each part of an even cut among `ranks`.

    It counts no waves and no tiles, and takes the best efficiency of the kernel's kind.
    """
    if device.curves and (measured := curves.curve_lower_bound(device.curves, kernel, ranks)) is not None:
        return measured
    kernel = _as_run(kernel)
    flops = 0.0 if kernel.kind == "memory" else _equivalent(device, kernel)
    return _roofline(device, flops / ranks, kernel.nbytes / ranks, kernel)


def dtype_as_run(kind: str, dtype: str, name: str = "") -> str:
    """Returns the dtype whose peak a kernel of a kind, a name and a dtype runs at.

    cuDNN convolves float32 as TF32 where a device has it (torch.backends.cudnn.allow_tf32, by default), and multiplies
    so in recurrent layers."""
    return "tf32" if dtype == "float32" and (kind == "convolution" or name.endswith(" recurrent")) else dtype


def _as_run(kernel: Kernel) -> Kernel:
    return replace(kernel, dtype=dtype_as_run(kernel.kind, kernel.dtype, kernel.name))


def _equivalent(device: Device, kernel: Kernel) -> float:
    """Flops that take, at the device's efficiency, the time of the kernel's flops at the efficiency of its kind."""
    return kernel.flops * device.efficiency / _efficiency(device, kernel) if kernel.flops else 0.0


def _roofline(device: Device, flops: float, nbytes: float, kernel: Kernel) -> float:
    """The longer of computing and moving bytes, at the efficiencies of kernels that compute."""
    name = kernel.name.removesuffix(" backward")
    return max(compute_seconds(device, flops, 0.0, kernel.dtype),
               elementwise_seconds(device, nbytes, name, kernel.dtype))


def _efficiency(device: Device, kernel: Kernel) -> float:
    """e: the fraction of the peak that the largest kernels of this kind, or of this dtype, reach."""
    if kernel.kind.startswith("attention"):
        return _of_heads(device, device.efficiency_of(kernel.kind), kernel)
    if kernel.kind in dict(device.kernels):
        return device.efficiency_of(kernel.kind)
    return device.efficiency_of(device.runs_as(kernel.dtype))


def _of_heads(device: Device, usual: float, kernel: Kernel) -> float:
    """The fraction that attention reaches with heads of its width: with wide ones the usual one.

    On a GB200 heads of 192 and 128 (queries, values) reach 0.95 of what those of 128 reach (NVIDIA, cudnn-frontend,
    gb200_919_only_cudnn: causal, 8,192 tokens).
    """
    if not device.exponentials or len(kernel.shape) < 4 or kernel.shape[3] >= HEAD:
        return usual
    return usual / (device.exponentials * HEAD / kernel.shape[3] + 1 - device.exponentials)


def _matmul(device: Device, kernel: Kernel) -> float:
    """min over tiles and splits of waves * seconds of a tile."""
    batch, m, n, k = kernel.shape
    rate = device.peak(kernel.dtype) * _efficiency(device, kernel) * _aligned(device, kernel) / device.units
    best, prologue = float("inf"), PLAIN_PROLOGUE if _is_plain(device, kernel) else PROLOGUE
    for rows, columns, share in TILES:
        area = rows * columns
        tiles = batch * min(ceil(m / rows) * ceil(n / columns), ceil(m / columns) * ceil(n / rows))
        for split in SPLITS:
            waves = ceil(tiles * split / device.units)
            best = min(best, waves * 2 * area * (k / split + prologue) / (rate * share))
    return best


def _aligned(device: Device, kernel: Kernel) -> float:
    """The fraction of their rate that tensor cores reach with rows of these bytes."""
    width, (_, _, n, k) = ITEMSIZE_OF_PEAK[device.runs_as(kernel.dtype)], kernel.shape
    return 1.0 if width > 2 else min(
        next((part for nbytes, part in parts if size * width % nbytes), 1.0)
        for size, parts in ((k, CONTRACTED), (n, WRITTEN)))


def _is_plain(device: Device, kernel: Kernel) -> bool:
    """Whether no tensor core multiplies: float32 where a device lists TF32, which its tensor cores take instead."""
    return device.runs_as(kernel.dtype) == "float32" and "tf32" in dict(device.peaks)


def _attention(device: Device, kernel: Kernel) -> float:
    """Waves of blocks of queries; a block at the diagonal, and one at an end, is computed whole."""
    heads, queries, keys, _, causal = kernel.shape
    blocks = heads * ceil(queries / BLOCK)
    seen = (_whole(keys) + BLOCK * (2 if causal else 0.5)) / keys  # of a causal one, half the keys and half a block
    waves = blocks / device.units
    full = max(1.0, waves) if causal else float(ceil(waves))
    rate = device.peak(kernel.dtype) * _efficiency(device, kernel)
    return kernel.flops * _whole(queries) / queries * seen * full / waves / rate


def _whole(length: int) -> int:
    """The length of as many whole blocks as hold `length`."""
    return ceil(length / LEAST) * LEAST


def compute_seconds(device: Device, flops: float, nbytes: float, dtype: str) -> float:
    """Seconds of one kernel by the plain roofline, with its launch."""
    peak = device.peak(dtype)
    return max(_amount(flops, "flops") / (peak * device.efficiency), _memory_seconds(device, nbytes)) + device.launch


def copy_seconds(device: Device, nbytes: float) -> float:
    """Seconds of a kernel that only moves bytes: nbytes / (bandwidth * memory_efficiency) + launch."""
    return _memory_seconds(device, nbytes) + device.launch


def elementwise_seconds(device: Device, nbytes: float, name: str = "", dtype: str = "") -> float:
    """Seconds of a kernel that computes on every byte: nbytes / (bandwidth * elementwise_efficiency) + launch.

    Kernels of some names and dtypes reach another fraction of the bandwidth (`Device.bandwidth_of`).
    """
    return _amount(nbytes, "nbytes") / device.bandwidth_of(name, dtype) + device.launch


def _memory_seconds(device: Device, nbytes: float) -> float:
    return _amount(nbytes, "nbytes") / (device.bandwidth * device.memory_efficiency)


def _amount(value: float, what: str) -> float:
    if value < 0 or not isfinite(value):
        raise InputError(f"{what} = {value}: work is a finite number of at least 0; "
                         "check the shapes it was counted from")
    return value
