"""Codecs: how a collective, or a message between stages, sends fewer bytes than its values have.

    bfloat16, float16    every value cast                                      2 bytes a value
    int16, int8, int4    q = round(x / s) over blocks of BLOCK values with     bits/8 bytes a value, 4 bytes a block
                         s = max(max |x| / ((2^(bits-1) - 1) (1 + 2^-22)), 2^-126)
    zfp16, zfp8          blocks of 4 values with one exponent, as     16/8 and 8/8 bytes a value
                         they are or as sums and differences
                         (`collectives.block_transform`)
    lossless             every value as it is but for its exponent: 4 bits     itemsize - 1/2 bytes a value, 1 byte a
                         below the largest of its block, 15 where it is 0      block, 5 bytes for every ROOM values

A coded step sends bytes. Its ranks exchange coded pieces in one collective, and each adds up what it decoded:

    reduce-scatter    an all-to-all of the pieces, each coded once; sums are of decoded values, in float32
    all-gather        an all-gather of every rank's piece, coded once
    all-to-all        an all-to-all of the pieces, each coded once

An all-reduce is not coded: it would code again at every hop. A reduce-scatter and an all-gather are in its place, both
coded. So a value is coded twice, however many ranks there are (quantised gradients of ZeRO++, Wang et al. 2023).

    error of a decoded value    cast: 2^-8 or 2^-11 of it       block: s / 2 and 2^-22 of it        lossless: none
                                zfp16, zfp8: 1/4095 or 1/15 of the largest of its 4 values, and 2^-22

Optimizer state has no codec: every rank updates what it stores with its own part of the state, which no step sends.

A block with a value that is not finite decodes to values that are not. A float16 cast of more than 65504 is infinite,
and a bfloat16 cast of more than 3.39e38. `lossless` brings back every bit of any value.

Exponents of a row that 4 bits do not hold have a list, with room for one in ROOM values. Where they are more, the ranks
exchange all exponents of the row in a second collective (`collectives.redistribute`). No plan has it: how often it
comes is up to the values. A stage that receives could not know of a second message: none is sent lossless.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from operator import lt
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.core.names import near_names

__all__ = [
    "BLOCK",
    "CLASSES",
    "CODECS",
    "CODED",
    "NAMED",
    "ROOM",
    "Codec",
    "checked_codecs",
    "codecs_of",
    "coded_bytes",
    "coded_kind",
    "parse_codecs",
    "part_in_flight",
]

BLOCK = 1024
"""Values that share a scale, or a largest exponent."""

ROOM = 48
"""Values for one of which a row of `lossless` has room to list the exponent."""

ITEMSIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Dtypes of values that are coded, with the bytes of one."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to write values in fewer bits.

        bits       of a value; of the lossless codec those of the exponents that it leaves out, negative
        scaled     whether blocks of values have a scale
        passes     times that the memory of the values, as float32, is read or written to encode, and to decode
        error      most that a value is off, over the largest magnitude of its block; infinite where that has no bound
        group      number of values that are coded as one block of bits
    """

    bits: int
    scaled: bool
    passes: tuple[float, float]
    error: float
    group: int = 1

    @property
    def lossless(self) -> bool:
        """Whether every value comes back as it was."""
        return self.bits < 0

    @property
    def is_cast(self) -> bool:
        """Whether every value is cast by itself."""
        return not (self.lossless or self.scaled or self.group > 1)

    def outdoes(self, other: "Codec") -> bool:
        """Whether it takes less time than another both ways, has as many bits, and has no larger error."""
        return self.bits == other.bits and self.error <= other.error and all(map(lt, self.passes, other.passes))

    def value_bits(self, itemsize: int) -> int:
        """Bits of one value, which has `itemsize` bytes by itself."""
        return self.bits + 8 * itemsize * self.lossless

    def row_bytes(self, elements: int, itemsize: int = 4) -> int:
        """Bytes of so many values of `itemsize` that are coded together, with what their blocks have besides."""
        blocks = -(-elements // BLOCK)
        more = blocks + 5 * -(-elements // ROOM) + 4 if self.lossless and elements else 4 * blocks * self.scaled
        values = -(-elements // self.group) * self.group
        return -(-values * self.value_bits(itemsize) // 8) + more


CODECS: Mapping[str, Codec] = MappingProxyType({
    "bfloat16": Codec(16, False, (2.5, 2.5), 2.0**-8),
    "float16": Codec(16, False, (2.5, 2.5), inf),
    "int16": Codec(16, True, (10.0, 6.0), 0.5 / (2**15 - 1) + 2.0**-22),
    "int8": Codec(8, True, (10.0, 6.0), 0.5 / (2**7 - 1) + 2.0**-22),
    "int4": Codec(4, True, (15.0, 12.0), 0.5 / (2**3 - 1) + 2.0**-22),
    "lossless": Codec(-4, False, (12.0, 16.0), 0.0),
    "zfp16": Codec(16, False, (150.0, 50.0), 1 / 4095 + 2.0**-22, 4),
    "zfp8": Codec(8, False, (150.0, 50.0), 1 / 15 + 2.0**-22, 4)})
"""All codecs by name; the passes are those of `collectives.coding`."""

CLASSES = ("gradients", "weights", "activations", "pipeline")
"""Messages that may be coded: gradients on the way to the optimizer, weights to use, activations and their gradients
between layouts, and what stages send each other."""

CODED = ("reduce-scatter", "all-gather", "all-to-all")
"""The collectives that a coded step may be."""

NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "hybrid": ("gradients=int8", "weights=lossless", "activations=bfloat16/lossless", "pipeline=bfloat16"),
    "lossless": tuple(f"{name}=lossless" for name in CLASSES[:-1])})
"""Names for several words. `hybrid`: gradients of data parallel stand a coarse codec, other messages a mild one (Xu et
al. 2024, "Accelerating large language model training with hybrid GPU-based compression")."""


def coded_kind(kind: str) -> str:
    """The collective that sends what a step of `kind` codes."""
    return "all-to-all" if kind == "reduce-scatter" else kind


def coded_bytes(name: str, ranks: int, nbytes: float, itemsize: int) -> int:
    """Bytes of the full buffer of a coded step among `ranks`, whose values take `nbytes` of elements of `itemsize`."""
    return ranks * CODECS[name].row_bytes(-(-int(nbytes) // (itemsize * ranks)), itemsize)


def codecs_of(words: Iterable[str], messages: str, dtype: str) -> tuple[str, ...]:
    """The codecs that `messages` of values of `dtype` may be sent as, by the words of `parse_codecs`.

    A codec is left out where it makes such values no smaller.
    """
    names = next((word.partition("=")[2] for word in words if word.startswith(f"{messages}=")), "")
    size = ITEMSIZES.get(dtype, 0)
    return tuple(name for name in names.split("/") if name and size and CODECS[name].value_bits(size) < 8 * size
                 and not (CODECS[name].lossless and dtype == "float16"))


def part_in_flight(codecs: Iterable[str], itemsize: int) -> float:
    """The least part of a tensor's bytes that a rank has of it at any moment, where it may be sent as `codecs`.

    While a coded step is under way there is no more than what was coded, which is at least one whole buffer of it.
    """
    return min([1.0, *(CODECS[name].value_bits(itemsize) / (8 * itemsize) for name in codecs)])


def parse_codecs(texts: str | Iterable[str]) -> tuple[str, ...]:
    """The words of `--compress`, like `gradients=int8`, in order; commas part several in one text.

    `gradients=int8/lossless` allows either; a name of `NAMED` stands for its words, but for classes named besides.
    Raises InputError for an unknown class or codec, and for a class that is named twice.
    """
    words = [word.strip() for text in ((texts,) if isinstance(texts, str) else texts) for word in text.split(",")]
    found, named = dict[str, str](), dict[str, str]()
    for word in filter(None, words):
        name, equals, codecs = word.partition("=")
        if word in NAMED:
            named |= dict(one.split("=") for one in NAMED[word])
            continue
        if not equals or name not in CLASSES or not CODECS.keys() >= set(codecs.split("/")):
            raise InputError(f"{word!r} compresses nothing: {_wrong_word(name, equals, codecs)}")
        if name == "pipeline" and "lossless" in codecs.split("/"):
            raise InputError(f"{word!r} compresses nothing: what stages send each other has a fixed size, which "
                             "lossless may exceed; take int16, whose error is 1.5e-5 of the largest of a block")
        if name in found:
            raise InputError(f"{name} are compressed as {found[name]} and as {codecs}: name them once, as "
                             f"'{name}={found[name]}/{codecs}' if either will do")
        found[name] = "/".join(dict.fromkeys(codecs.split("/")))
    found = named | found
    return tuple(f"{name}={found[name]}" for name in CLASSES if name in found)


def _wrong_word(name: str, equals: str, codecs: str) -> str:
    """Says which part of a word of `--compress` is unknown, what is near it, and what there is."""
    rest = (f"write MESSAGES=CODEC, with messages of {', '.join(CLASSES)} and codecs {', '.join(CODECS)}, like "
            f"'gradients=int8'; or {' or '.join(NAMED)}")
    if not equals and name in CLASSES:
        return rest
    if equals and name not in CLASSES:
        return f"there are no messages {name!r}; {near_names(name, CLASSES, rest)}"
    wrong = [codec for codec in (codecs if equals else name).split("/") if codec not in CODECS]
    if not wrong:
        return f"{name} is a codec, and it says of no messages that they are sent so; {rest}"
    return f"there is no codec {wrong[0]!r}; {near_names(wrong[0], (*CODECS, *NAMED), rest)}"


def checked_codecs(words: tuple[str, ...], error: float) -> tuple[str, ...]:
    """The words of `parse_codecs`, held to an `error` relative to the largest magnitude of a block.

    Without words every class may be sent as any codec within it that no other outdoes. int16 and int8 outdo zfp16 and
    zfp8. Raises InputError for a word with a codec that is not.
    """
    if not 0 <= error < 1:
        raise InputError(f"an error of {error:g} is none: it is the part of a block's largest magnitude by which a "
                         "value may be off, at least 0 and below 1, like 1e-3")
    within = [name for name, codec in CODECS.items() if codec.error <= error]
    for word in words:
        for name in word.partition("=")[2].split("/"):
            if name not in within:
                most = CODECS[name].error
                said = f"errs by up to {most:.2g} of the largest value of a block" if most < inf else \
                    "has no bound on its error: it is infinite above 65504"
                raise InputError(f"{word!r} is not within an error of {error:g}: {name} {said}; within it are "
                                 f"{', '.join(within)}")
    best = [name for name in within if not any(CODECS[one].outdoes(CODECS[name]) for one in within)]
    allowed = {name: [codec for codec in best if name != "pipeline" or codec != "lossless"] for name in CLASSES}
    return words or tuple(f"{name}={'/'.join(codecs)}" for name, codecs in allowed.items() if codecs)
