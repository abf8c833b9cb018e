"""Says how a trainer divides its ranks: a degree for each kind of parallelism, as one line of text.

    tp=8,cp=2,dp=4,zero=1,sp,recompute=selective

    tp          ranks that split products (tensor parallel)
    cp          ranks that split the length of the sequences (context parallel)
    dp          ranks that split the batch (data parallel); left out, all that the other degrees leave
    ep          ranks over which experts lie apart (expert parallel): of those of dp where it divides dp, else all of tp
                and cp and as many of dp
    pp          parts of the cluster along a pipeline, each with one stage, or with vp: Megatron's stages
    vp          stages of each of these parts, interleaved: Megatron's chunks of its virtual pipeline
    zero        0 to 3: what is split over dp and cp; the optimizer's state, gradients too, weights too
    shard       of those of dp, the ranks that hold the pieces; the others hold copies of them (HSDP); left out, all
    sp          tp splits the length too, wherever it splits no product (sequence parallel)
    ring        keys and values stay split over cp, and pass round a ring; left out, attention is as it is cheapest
    recompute   none, light, selective or full: what backward computes again of every block

Ranks are numbered as Megatron does: tp innermost, then cp, then ep inside dp, and pp outermost.
"""

import re
from dataclasses import dataclass, fields, replace
from math import prod

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.core.recompute import FULL, LIGHT, NO_RECOMPUTE, SELECTIVE

__all__ = ["Degrees"]

FLAGS = ("sp", "ring")
"""Degrees without a number."""
EXAMPLE = "tp=8,dp=4,zero=1,sp,recompute=full"


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees of a configuration; `dp` and `shard` are 0 where they are left out. Text: `tp=8,dp=4,zero=1`.

    Raises InputError for degrees that contradict each other.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 0
    ep: int = 1
    pp: int = 1
    vp: int = 1
    zero: int = 0
    shard: int = 0
    sp: bool = False
    ring: bool = False
    recompute: str = NO_RECOMPUTE

    def __post_init__(self) -> None:
        if self.zero > 3:
            raise InputError(f"'{self}': zero is 0, 1, 2 or 3, which split nothing, the optimizer's state, gradients "
                             "too, weights too")
        if self.shard and not self.zero:
            raise InputError(f"'{self}': shard says over how many ranks the pieces of ZeRO lie, and zero is 0; give "
                             "zero=3 for HSDP, or leave shard out")
        if self.sp and self.tp == 1:
            raise InputError(f"'{self}': sp splits the length over the ranks of tp, and tp is 1; give tp, or take cp")
        if self.ring and self.cp == 1:
            raise InputError(f"'{self}': ring sends keys and values round the ranks of cp, and cp is 1; give cp")
        if self.vp > 1 == self.pp:
            raise InputError(f"'{self}': vp counts the chunks of the model on each of the pp parts, and pp is 1; give "
                             "pp, or leave vp out")
        if self.recompute not in (NO_RECOMPUTE, LIGHT, SELECTIVE, FULL):
            raise InputError(f"'{self}': recompute is {NO_RECOMPUTE}, {LIGHT}, {SELECTIVE} or {FULL}")
        if self.dp and self.shard and self.dp % self.shard:
            raise InputError(f"'{self}': shard counts ranks among those of dp, so {self.shard} must divide {self.dp}")
        if self.dp and self.dp % self.experts_in_dp:
            inner = f" or, with those of tp and cp, {self.tp * self.cp * self.dp}" if self.tp * self.cp > 1 else ""
            raise InputError(f"'{self}': ep counts ranks among those of dp, so {self.ep} must divide {self.dp}{inner}")

    @property
    def experts_span(self) -> bool:
        """Whether experts lie apart over the ranks of tp and cp too, because ep does not divide dp."""
        return self.dp % self.ep != 0 and self.ep % (self.tp * self.cp) == 0 and self.tp * self.cp > 1

    @property
    def experts_in_dp(self) -> int:
        """The ranks of dp over which experts lie apart."""
        return self.ep // (self.tp * self.cp) if self.experts_span else self.ep

    @classmethod
    def parse(cls, text: str) -> "Degrees":
        """The degrees that `text` says. Raises InputError where it says none."""
        found: dict[str, int | bool | str] = {}
        known = tuple(one.name for one in fields(cls))
        if re.search(r"[;:]|\w\s+\w", text):
            better = ",".join(filter(None, re.split(r"[;:,\s]+", text)))
            raise InputError(f"{text!r}: commas stand between degrees; write '{better}'")
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (word.strip() for word in part.partition("="))
            if name not in known:
                near = near_names(name, known, f"there are {', '.join(known)}, as in '{EXAMPLE}'", most=1)
                raise InputError(f"{text!r}: there is no degree {name!r}; {near}")
            if name in found:
                raise InputError(f"{text!r} gives {name} twice; give it once")
            found[name] = _value(text, name, value if equals else None)
        if not found:
            raise InputError(f"{text!r} says no degree; write them as in '{EXAMPLE}'")
        return cls(**found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        plain, parts = {one.name: one.default for one in fields(self)}, []
        for name, default in plain.items():
            value = getattr(self, name)
            if value != default:
                parts.append(name if name in FLAGS else f"{name}={value}")
        return ",".join(parts) or f"tp={self.tp}"

    def on(self, ranks: int) -> "Degrees":
        """These degrees on so many ranks, with that of dp. Raises InputError where they do not multiply to it."""
        others = self.tp * self.cp * self.pp
        if not self.dp and ranks % others == 0:
            return replace(self, dp=ranks // others).on(ranks)
        if prod((others, self.dp)) != ranks:
            said = " x ".join(f"{name}={n}" for name, n in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp),
                                                            ("pp", self.pp)) if n > 1 or name == "tp")
            raise InputError(f"'{self}': {said} takes {prod((others, max(1, self.dp)))} ranks, and the cluster has "
                             f"{ranks}; the degrees of tp, cp, dp and pp multiply to {ranks}, and dp may be left out")
        return self


def _value(text: str, name: str, value: str | None) -> int | bool | str:
    """The value of one degree. Raises InputError where it has none."""
    if name in FLAGS:
        if value is not None:
            raise InputError(f"{text!r}: {name} has no number: write {name}, or leave it out")
        return True
    if name == "recompute":
        return value or ""
    least = 0 if name == "zero" else 1
    if value is None or not value.isdecimal() or int(value) < least:
        raise InputError(f"{text!r}: {name} is a number of at least {least}, like {name}={max(least, 2)}")
    return int(value)
