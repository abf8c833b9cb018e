"""Reads the names that devices have elsewhere: in shops, in papers, and in `torch.cuda.get_device_name()`.

    NVIDIA H100 80GB HBM3     H100-80GB          without the vendor, the socket and the kind of memory
    A100-SXM4-40GB            A100-40GB
    TPU v6e, B200             TPU-v6e-32GB, B200-180GB, where one device alone has a name that goes on with its memory
"""

import re
from collections.abc import Iterable

__all__ = ["device_meant", "plain_device_name"]

_VENDOR = re.compile(r"^((nvidia|amd|intel|google|cloud|aws|instinct|tesla|geforce)-)+")
_MADE = re.compile(r"-(sxm\d?|hbm\d\w*)(?=-|$)")
"""Matches a socket and a kind of memory, which a model with so much memory has anyway."""


def plain_device_name(name: str) -> str:
    """Returns a name in small letters, with hyphens for spaces, without vendor, socket and kind of memory."""
    return _MADE.sub("", _VENDOR.sub("", re.sub(r"[\s_-]+", "-", name.strip().lower())))


def device_meant(name: str, known: Iterable[str]) -> str:
    """Returns the one of the known devices that a name means; "" where it is none, or could be several."""
    by_lower = {one.lower(): one for one in known}
    for asked in (name.strip().lower(), plain_device_name(name)):
        if asked in by_lower:
            return by_lower[asked]
    longer = re.compile(re.escape(plain_device_name(name)) + r"-\d+gb")
    more = [one for lower, one in by_lower.items() if longer.fullmatch(lower)]
    return more[0] if len(more) == 1 else ""
