"""The range of devices and links that are sold: what lies outside is a mistake, or a number with the wrong unit.

Of links: 1 Gb/s Ethernet to NVLink 5. Of devices: a core of a CPU to a B300; of GPUs alone a narrower range.
A slip is a figure for which a likely one is known:

    thousands    outside the range, and inside of it times 1000 or 1000000, or divided by them: ms for us, GFLOP/s
    bits         a network's number of Gbit/s written as GB/s, or a device link's number of GB/s written as Gbit/s
    directions   a device link's number for both directions together, where a port has it in each
"""

from autoddl.cost_models.links import link_rates
from autoddl.cost_models.units import show_rate

__all__ = ["FAR", "SOLD", "how_far", "link_slip", "thousands_slip"]

FAR = 100.0
"""How far from what is sold a value is odd."""
SOLD = {"memory": (1e9, 3e11), "bandwidth of memory": (5e9, 8e12), "peak": (1e10, 2e16), "bandwidth": (1.25e8, 1.8e12),
        "latency": (1e-7, 1e-3)}
"""The least and the most of each figure, in base units."""
SOLD_GPU = {"memory": (4e9, 3e11), "bandwidth of memory": (1e11, 8e12), "peak": (5e11, 2e16)}
"""The same of GPUs."""


def how_far(what: str, value: float) -> float:
    """By how much a figure exceeds what is sold, or is below it (negative), where that is more than FAR; else 0."""
    least, most = SOLD[what]
    if value > most * FAR:
        return value / most
    return -least / value if 0 < value < least / FAR else 0.0


def thousands_slip(what: str, value: float, kind: str = "cpu") -> float | None:
    """The figure that was likely meant: thousands of times more or less, where that is sold; None where there is none.

    What is less than is sold is a slip of a GPU's figures alone, until it is FAR from that: others are slow on purpose.
    """
    least, most = SOLD_GPU.get(what, SOLD[what]) if kind == "gpu" else SOLD[what]
    slow = value < least and not (kind == "gpu" and what in SOLD_GPU) and not how_far(what, value)
    if least <= value <= most or value <= 0 or slow:
        return None
    return next((better for factor in (1e3, 1e-3, 1e6, 1e-6) if least <= (better := value * factor) <= most), None)


def link_slip(bandwidth: float, network: bool, device: str = "") -> str:
    """Says what was likely meant by a level's bandwidth: bits for bytes, or one direction for both; "" for none.

    `network` says whether the level leaves the host (`links.is_network`). A rate that is sold as it is written is none.
    So it is of networks, or of the links that the device called `device` has.
    """
    networks, links = link_rates(True), link_rates(False, device)
    if network and (name := _same(bandwidth / 8, networks)) and not _same(bandwidth, networks):
        bits = bandwidth / 1e9
        return _slip("network", bandwidth, f"the {bits:,g} Gb/s of {name} were meant, write {bits:g} Gb/s")
    if _same(bandwidth, networks | links):
        return ""
    if name := _same(bandwidth * 8, links):
        rate = show_rate(bandwidth * 8)
        return _slip("link of such a device", bandwidth, f"the {rate} of {name} were meant, write {rate}")
    if name := _same(bandwidth / 2, links):
        both = f"both directions of {name} were meant, write one, {show_rate(bandwidth / 2)}"
        return _slip("link of such a device", bandwidth, both)
    return ""


def _slip(what: str, bandwidth: float, meant: str) -> str:
    return f"no {what} that is sold has {show_rate(bandwidth)} in each direction; if {meant}"


def _same(rate: float, rates: dict[str, float]) -> str:
    """The name of the link that has a rate; "" where none has."""
    return next((name for name, known in rates.items() if abs(known / rate - 1) < 1e-6), "")
