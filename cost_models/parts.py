"""Devices that differ between parts of a cluster: what all of them can do.

    memory, bandwidth, peak per dtype, efficiencies    the least of any part
    launch                                             the longest
    units                                              the fewest

An even split waits for the slowest rank and must fit the smallest, so this device prices it.
"""

from collections.abc import Sequence

from autoddl.core.errors import InputError
from autoddl.cost_models.machine import Device

__all__ = ["weakest"]


def weakest(devices: Sequence[Device]) -> Device:
    """One device that each of `devices` can stand in for; of one kind, and with a peak where all list one."""
    first = devices[0]
    if any(device.kind != first.kind for device in devices):
        raise InputError(f"the parts mix kinds of devices, {', '.join(f'{d.name} ({d.kind})' for d in devices)}; "
                         "describe a cluster of one kind")
    shared = set.intersection(*({dtype for dtype, _ in device.peaks} for device in devices))
    if not shared:
        raise InputError(f"the parts {', '.join(d.name for d in devices)} list no peak in common; add one to each")
    kernels = sorted({name for device in devices for name, _ in device.kernels})
    return Device(name="+".join(dict.fromkeys(device.name for device in devices)), kind=first.kind,
                  memory=min(device.memory for device in devices),
                  bandwidth=min(device.bandwidth for device in devices),
                  peaks=tuple((dtype, min(dict(d.peaks)[dtype] for d in devices)) for dtype in sorted(shared)),
                  launch=max(device.launch for device in devices),
                  efficiency=min(device.efficiency for device in devices),
                  memory_efficiency=min(device.memory_efficiency for device in devices),
                  elementwise_efficiency=min(d.elementwise_efficiency or d.memory_efficiency for d in devices),
                  units=min(device.units for device in devices),
                  kernels=tuple((name, min(device.reached(name) for device in devices)) for name in kernels),
                  compiled=all(device.compiled for device in devices))
