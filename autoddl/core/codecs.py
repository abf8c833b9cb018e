"""Codecs: how a collective of parameters sends fewer bytes than its values have, for an error that the user allows.

    bfloat16, float16    every value cast                                      2 bytes a value
    int8, int4           q = round(x / s) over blocks of BLOCK values with     bits/8 bytes a value, 4 bytes a block
                         s = max(max |x| / (2^(bits-1) - 1), 2^-126)

A coded step sends bytes. Its ranks exchange coded pieces in one collective, and each adds up what it decoded:

    reduce-scatter    an all-to-all of the pieces, each coded once; sums are of decoded values, in float32
    all-gather        an all-gather of every rank's piece, coded once

An all-reduce is not coded: it would code again at every hop. A reduce-scatter and an all-gather are in its place, both
coded. So a value is coded twice, however many ranks there are (quantised gradients of ZeRO++, Wang et al. 2023).

    error of a decoded value    cast: 2^-8 or 2^-11 of it           block: s / 2

A block with a value that is not finite decodes to values that are not. A float16 cast of more than 65504 is infinite.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoddl.core.errors import InputError

__all__ = ["BLOCK", "CLASSES", "CODECS", "Codec", "codec_of", "coded_bytes", "coded_kind", "parse_codecs",
           "part_in_flight"]

BLOCK = 1024
"""Values that share a scale."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to write values in fewer bits.

        bits       of a value
        scaled     whether blocks of values have a scale
        passes     times that the memory of the values, as float32, is read or written to encode, and to decode
    """

    bits: int
    scaled: bool
    passes: tuple[float, float]

    def row_bytes(self, elements: int) -> int:
        """Bytes of so many values that are coded together, with the scales of their blocks."""
        return -(-elements * self.bits // 8) + self.scaled * 4 * -(-elements // BLOCK)


CODECS: Mapping[str, Codec] = MappingProxyType({
    "bfloat16": Codec(16, False, (2.5, 2.5)), "float16": Codec(16, False, (2.5, 2.5)),
    "int8": Codec(8, True, (10.0, 6.0)), "int4": Codec(4, True, (15.0, 12.0))})
"""All codecs by name; the passes are those of `collectives.coding`."""

CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "gradients": ("reduce-scatter", "all-gather"), "weights": ("all-gather",)})
"""Messages that may be coded, with the collectives that are: gradients on the way to the optimizer, weights to use."""


def coded_kind(kind: str) -> str:
    """The collective that sends what a step of `kind` codes."""
    return "all-to-all" if kind == "reduce-scatter" else kind


def coded_bytes(name: str, ranks: int, nbytes: float, itemsize: int) -> int:
    """Bytes of the full buffer of a coded step among `ranks`, whose values take `nbytes` of elements of `itemsize`."""
    return ranks * CODECS[name].row_bytes(-(-int(nbytes) // (itemsize * ranks)))


def codec_of(words: Iterable[str], messages: str) -> str:
    """The codec that `messages` may be sent as, by the words of `parse_codecs`; empty where there is none."""
    return next((word.partition("=")[2] for word in words if word.startswith(f"{messages}=")), "")


def part_in_flight(words: Iterable[str], messages: str, itemsize: int) -> float:
    """The least part of a tensor's bytes that a rank has of it at any moment, where `messages` may be coded.

    While a coded step is under way there is no more than what was coded, which is at least one whole buffer of it.
    """
    codec = codec_of(words, messages)
    return min(1.0, CODECS[codec].bits / (8 * itemsize)) if codec else 1.0


def parse_codecs(texts: str | Iterable[str]) -> tuple[str, ...]:
    """The words of `--compress`, like `gradients=int8`, in order; commas part several in one text.

    Raises InputError for an unknown class or codec, and for a class that is named twice.
    """
    words = [word.strip() for text in ((texts,) if isinstance(texts, str) else texts) for word in text.split(",")]
    found = dict[str, str]()
    for word in filter(None, words):
        name, equals, codec = word.partition("=")
        if not equals or name not in CLASSES or codec not in CODECS:
            raise InputError(f"{word!r} compresses nothing: write MESSAGES=CODEC, with messages of "
                             f"{', '.join(CLASSES)} and codecs {', '.join(CODECS)}, like 'gradients=int8'")
        if name in found:
            raise InputError(f"{name} are compressed as {found[name]} and as {codec}: name one codec for them")
        found[name] = codec
    return tuple(f"{name}={found[name]}" for name in CLASSES if name in found)
