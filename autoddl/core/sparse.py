"""Sparse sums: an all-reduce of the k largest entries of a gradient, with error feedback (Ok-Topk).

Each of P ranks has a residual e. In every step it adds its gradient g, and sends what is large:

    a = e + g                          S = the entries of a that are about its k largest
    u = sum over ranks of a on S       on G, about the k largest of these sums; 0 elsewhere
    e = a, but 0 on S and G            so  sum of u + sum of e over ranks = sum of a: nothing is lost

An *entry* is a value and its index, two words of 4 bytes. Every rank owns a region of the indices. A step sends

    split and reduce    every rank its S to the owners            2 k (P-1)/P words where regions are balanced
    balance             owners their part of G, to equal parts    at most 2 k (P-1)/P
    all-gather          equal parts of G to all                   2 k (P-1)/P

so at most 6 k (P-1)/P words a rank, however many ranks there are. Thresholds of S and G, and the bounds of the regions,
are computed exactly in every RENEWED-th step and reused between: these steps send more. The bounds are the mean over
ranks of the quantiles of S, so that every region has about as many entries of S. Source: Li and Hoefler 2022,
"Near-optimal sparse allreduce for distributed deep learning".

Three remedies make up for what is sent late. The first steps, a *warm-up*, add up whole: 2 n (P-1)/P words of n
elements. With *momentum* m a rank adds a velocity v to its residual in place of g, and forgets it where it was sent:

    v = m v + g                        v = 0 on S and G

Without sparse sums that is the momentum of SGD, so the optimizer itself then has none. Behind the warm-up the share may
*fall* to its own, in stairs of equally many steps. They send FIRST of the entries, then one in STAIR of those before,
and so on. Words of a step are then those of its stair, each of which begins with a renewal. Source of both: Lin et al.
2018, "Deep gradient compression".

A plan says `net: P->B as top 0.01,warmup=100,falls=300,momentum=0.9`: of n elements k = 1 % are sent, once 25 %, 6.25 %
and 1.56 % were for 100 steps each. Its price is that of a step behind all these. This has 4 k (P-1)/P words, those of a
step that needs no balance, and one part in RENEWED of a renewal.
"""

from dataclasses import dataclass
from math import ceil

from autoddl.core.errors import InputError

__all__ = ["BINS", "ENTRY_BYTES", "FIRST", "LEAST", "PASSES", "RENEWED", "ROUNDS", "SPARSE", "STAIR", "SparseRule",
           "entries", "is_sparse", "word_limit"]

SPARSE = "sparse all-reduce"
"""The collective that a sparse step is; its full buffer has one entry for each of the k."""

PREFIX = "top "
"""What the codec of a sparse step begins with."""

ENTRY_BYTES = 8
"""Bytes of a value and its index."""

RENEWED = 32
"""Steps after which thresholds and regions are computed again (Li and Hoefler have 32 to 128)."""

ROUNDS, BINS = 4, 256
"""Rounds in which a renewal finds the common threshold, and counts that a rank tells every other in each."""

LEAST = 4
"""Entries that are kept of any gradient, for each rank."""

FIRST, STAIR = 0.25, 4
"""The share from which one falls, and by how much a stair is less than the stair before (Lin et al. have the same)."""

PASSES = (12.0, 3.0)
"""Times that the memory of the values is read or written to select what is sent, and to put in place what came."""


@dataclass(frozen=True, slots=True)
class SparseRule:
    """How gradients add up sparse. Text: `0.01` or `1%`, `0.01,warmup=100`, `0.01,falls=300`, `0.01,momentum=0.9`.

        share       the part of the entries that is sent, above 0 and at most 1
        warmup      first steps, in which sums are whole
        falls       steps behind these, in which the share falls from FIRST in stairs
        momentum    of the velocity that is summed in place of the gradient, at least 0 and below 1

    Raises InputError for values that are none of these.
    """

    share: float
    warmup: int = 0
    falls: int = 0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"a sparse share of {self.share:g} is none: it is the part of a gradient's values that is "
                             "sent in a step, above 0 and at most 1, like 0.01")
        if self.warmup < 0:
            raise InputError(f"a warm-up of {self.warmup} steps is none: it is the number of first steps whose sums "
                             "are whole, 0 or more, like 100")
        if self.falls < 0:
            raise InputError(f"a fall of {self.falls} steps is none: it is the number of steps behind the warm-up in "
                             f"which the share falls from {FIRST:g}, 0 or more, like 300")
        if not 0 <= self.momentum < 1:
            raise InputError(f"a momentum of {self.momentum:g} is none: it is the part of a velocity that a step "
                             "keeps, at least 0 and below 1, like 0.9")

    def __str__(self) -> str:
        more = (("warmup", self.warmup), ("falls", self.falls), ("momentum", self.momentum))
        return ",".join([f"{self.share!r}", *(f"{name}={value!r}" for name, value in more if value)])

    @classmethod
    def parse(cls, text: float | str) -> "SparseRule":
        """The rule that `text`, or a share alone, says. Raises InputError for a text that says none."""
        share, *words = str(text).split(",")
        given = dict(word.partition("=")[::2] for word in words)
        try:
            if len(given) < len(words) or not given.keys() <= {"warmup", "falls", "momentum"}:
                raise ValueError
            part = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
            return cls(part, int(given.get("warmup", "0")), int(given.get("falls", "0")),
                       float(given.get("momentum", "0")))
        except ValueError:
            raise InputError(f"{text!r} is no sparse sum: write SHARE, like 0.01 or 1%, and behind it warmup=STEPS, "
                             "falls=STEPS or momentum=PART if wanted, like '0.01,warmup=100,falls=300'") from None

    @property
    def codec(self) -> str:
        """The name of the codec of a sparse step, like `top 0.01`."""
        return f"{PREFIX}{self}"

    @classmethod
    def of(cls, codec: str) -> "SparseRule":
        """The rule of a step with this codec."""
        return cls.parse(codec.removeprefix(PREFIX))

    @property
    def stairs(self) -> tuple[float, ...]:
        """The shares that come before the rule's own while it falls, each for as many steps; none where it does not."""
        found, part = list[float](), FIRST
        while self.falls and part > self.share:
            found.append(part)
            part /= STAIR
        return tuple(found)

    def share_at(self, step: int) -> float:
        """The share that is sent `step` steps behind the warm-up."""
        stairs = self.stairs
        return stairs[step * len(stairs) // self.falls] if stairs and step < self.falls else self.share

    @property
    def copies(self) -> int:
        """Tensors as large as the gradient that a rank keeps: the residual, and a velocity if there is momentum."""
        return 2 if self.momentum else 1


def is_sparse(codec: str) -> bool:
    """Whether a step with this codec is a sparse sum."""
    return codec.startswith(PREFIX)


def entries(share: float, elements: int, ranks: int) -> int:
    """k: how many of so many elements are sent. At least LEAST for each rank, where there are so many."""
    return min(elements, max(ceil(round(share * elements, 6)), LEAST * ranks))


def word_limit(k: int, ranks: int) -> float:
    """Words that a rank sends at most in a step without renewal: 6 k (P-1)/P.

    Where a gradient has fewer elements than LEAST for each rank, counts take 4 words more for each other rank.
    """
    return 6.0 * k * (ranks - 1) / ranks + 4 * (ranks - 1) * (k < LEAST * ranks)
