"""Seconds of work on one device: a roofline and a launch floor.

    seconds = max(flops / (peak * efficiency), nbytes / (bandwidth * memory_efficiency)) + launch
            nbytes / (bandwidth * elementwise_efficiency) + launch          norms, softmax, activations

Roofline: Williams, Waterman & Patterson 2009. The efficiencies are what large kernels reach and belong to the device:
794 of 989 TFLOP/s in bfloat16 matmuls of an H100, 270 of 312 on an A100. nbytes counts reads and writes together. What
only moves bytes comes nearer to the bandwidth than what reduces rows or computes functions of the elements.
"""

from math import isfinite

from autoddl.core.errors import InputError
from autoddl.cost_models.machine import Device

__all__ = ["compute_seconds", "copy_seconds", "elementwise_seconds"]


def compute_seconds(device: Device, flops: float, nbytes: float, dtype: str) -> float:
    """The roofline of one kernel, and its launch."""
    peak = device.peak(dtype)
    return max(_amount(flops, "flops") / (peak * device.efficiency), _memory_seconds(device, nbytes)) + device.launch


def copy_seconds(device: Device, nbytes: float) -> float:
    """A kernel that only moves bytes: nbytes / (bandwidth * memory_efficiency) + launch."""
    return _memory_seconds(device, nbytes) + device.launch


def elementwise_seconds(device: Device, nbytes: float) -> float:
    """The bytes of a kernel that computes with them: nbytes / (bandwidth * elementwise_efficiency) + launch."""
    reached = device.elementwise_efficiency or device.memory_efficiency
    return _amount(nbytes, "nbytes") / (device.bandwidth * reached) + device.launch


def _memory_seconds(device: Device, nbytes: float) -> float:
    return _amount(nbytes, "nbytes") / (device.bandwidth * device.memory_efficiency)


def _amount(value: float, what: str) -> float:
    if value < 0 or not isfinite(value):
        raise InputError(f"{what} = {value}: work is a finite number of at least 0; "
                         "check the shapes it was counted from")
    return value
