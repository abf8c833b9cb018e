"""Reads quantities as people write them, and writes them: `number unit` -> base units.

    bytes     B, kB ... EB (powers of 1000), KiB ... EiB (powers of 1024)
    bytes/s   those per second, and bits: Gb/s = Gbit/s = 1e9 / 8 bytes per second (lower-case b is a bit)
    seconds   s, ms, us, ns
    flop/s    FLOP/s with k, M, G, T, P, E in front

A bare number is already in base units; people write units (`with_unit`). Everything
inside the package is in base units; only printing converts.
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.core.names import near_names

__all__ = ["UNITS", "bytes_above", "format_quantity", "parse_quantity", "show_bytes", "show_rate", "show_seconds",
           "with_unit"]

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", start=1)}
_BYTES = {f"{prefix}B": factor for prefix, factor in {**_DECIMAL, "K": 1e3, **_BINARY}.items()}
_BITS = {f"{prefix}{bit}": factor / 8 for prefix, factor in _DECIMAL.items() for bit in ("b", "bit")}

UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType({
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in {**_BYTES, **_BITS}.items()},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "flop/s": {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()},
})
"""Dimension -> unit -> how many base units it is."""

_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*")


def parse_quantity(text: str | int | float, dimension: str) -> float:
    """The number of base units of `dimension` in a text `number unit`; InputError where it cannot be read."""
    if dimension not in UNITS:
        raise InputError(f"{dimension!r} is no dimension; the dimensions are {', '.join(UNITS)}")
    match = _QUANTITY.fullmatch(str(text))
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise InputError(f"{text!r} is no quantity; write a number and a unit, like {_example(dimension)!r}")
    return value * _factor(match[2], dimension) if match[2] else value


def with_unit(text: str | int | float, dimension: str) -> float:
    """As `parse_quantity`; InputError for a number without a unit, unless it is 0."""
    value, match = parse_quantity(text, dimension), _QUANTITY.fullmatch(str(text))
    if value and match is not None and not match[2]:
        raise InputError(f"{text} has no unit: write it with one, like {_example(dimension)!r}")
    return value


def _factor(unit: str, dimension: str) -> float:
    """Base units in one `unit`; an unknown one raises, naming the nearest that exists."""
    units = UNITS[dimension]
    if unit in units:
        return units[unit]
    near = near_names(unit, units, f"write it like {_example(dimension)!r}", most=1)
    raise InputError(f"{unit!r} is no unit of {dimension}; {near}")


def _example(dimension: str) -> str:
    return {"bytes": "80 GB", "bytes/s": "25 GB/s", "seconds": "3 us", "flop/s": "312 TFLOP/s"}[dimension]


def _show(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """Three significant digits in the largest unit that leaves at least 1; `units` ends with the smallest."""
    unit, factor = next((one for one in units if abs(value) >= one[1] * 0.9995), units[-1])  # 999.6 prints as 1000
    return f"{float(f'{value / factor:.3g}'):g} {unit}"


def show_seconds(seconds: float) -> str:
    """Seconds for people: three significant digits, with s, ms, us or ns."""
    return _show(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def show_bytes(nbytes: float) -> str:
    """Bytes for people: three significant digits, with B, kB, MB ..., powers of 1000."""
    return _show(nbytes, (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def bytes_above(nbytes: float) -> str:
    """Bytes for people, rounded up: the text, read back, is at least `nbytes`."""
    text = show_bytes(nbytes)
    if parse_quantity(text, "bytes") >= nbytes:
        return text
    return show_bytes(nbytes + 10.0 ** (math.floor(math.log10(nbytes)) - 2))  # one more in the third digit


def show_rate(rate: float, what: str = "B") -> str:
    """A rate per second for people: of bytes, or with `what="FLOP"` of operations."""
    return f"{show_bytes(rate).removesuffix('B')}{what}/s"


def format_quantity(value: float, dimension: str) -> str:
    """The shortest text with a unit that parses to exactly `value`; in base units where a larger one would round it."""
    shown = {"bytes": show_bytes(value), "bytes/s": show_rate(value), "seconds": show_seconds(value),
             "flop/s": show_rate(value, "FLOP")}
    base = next(unit for unit, factor in UNITS[dimension].items() if factor == 1.0)
    text = shown[dimension]
    return text if parse_quantity(text, dimension) == value else f"{value!r} {base}"
