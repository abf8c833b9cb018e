"""The range of devices and links that are sold: what lies far outside is a mistake, or a number without its unit.

Of links: 1 Gb/s Ethernet to NVLink 5. Of devices: a core of a CPU to a B300.
"""

__all__ = ["SOLD", "how_far"]

FAR = 100.0
"""How far from what is sold a value is odd."""
SOLD = {"memory": (1e9, 3e11), "bandwidth of memory": (5e9, 8e12), "peak": (1e10, 2e16), "bandwidth": (1.25e8, 1.8e12),
        "latency": (1e-7, 1e-3)}
"""The least and the most of each figure, in base units."""


def how_far(what: str, value: float) -> float:
    """By how much a figure exceeds what is sold, or is below it (negative), where that is more than FAR; else 0."""
    least, most = SOLD[what]
    if value > most * FAR:
        return value / most
    return -least / value if 0 < value < least / FAR else 0.0
