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

A plan says `net: P->B as top 0.01`: of n elements k = 1 % are sent. Its price has 4 k (P-1)/P words, those of a step
that needs no balance.
"""

from math import ceil

from autoddl.core.errors import InputError

__all__ = ["ENTRY_BYTES", "LEAST", "PASSES", "RENEWED", "SPARSE", "checked_share", "entries", "is_sparse", "share_of",
           "sparse_codec", "word_limit"]

SPARSE = "sparse all-reduce"
"""The collective that a sparse step is; its full buffer has one entry for each of the k."""

ENTRY_BYTES = 8
"""Bytes of a value and its index."""

RENEWED = 32
"""Steps after which thresholds and regions are computed again (Li and Hoefler have 32 to 128)."""

LEAST = 4
"""Entries that are kept of any gradient, for each rank."""

PASSES = (12.0, 3.0)
"""Times that the memory of the values is read or written to select what is sent, and to put in place what came."""


def checked_share(share: float) -> float:
    """The part of the entries that is sent. Raises InputError unless it is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise InputError(f"a sparse share of {share:g} is none: it is the part of a gradient's values that is sent in "
                         "a step, above 0 and at most 1, like 0.01")
    return float(share)


def sparse_codec(share: float) -> str:
    """The name of the codec of a sparse step, like `top 0.01`."""
    return f"top {checked_share(share)!r}"


def is_sparse(codec: str) -> bool:
    """Whether a step with this codec is a sparse sum."""
    return codec.startswith("top ")


def share_of(codec: str) -> float:
    """The share that a codec of `sparse_codec` names. Raises InputError for another text."""
    try:
        return checked_share(float(codec.removeprefix("top ")))
    except ValueError:
        raise InputError(f"{codec!r} is no sparse sum: those are written 'top SHARE', like 'top 0.01'") from None


def entries(share: float, elements: int, ranks: int) -> int:
    """k: how many of so many elements are sent. At least LEAST for each rank, where there are so many."""
    return min(elements, max(ceil(round(share * elements, 6)), LEAST * ranks))


def word_limit(k: int, ranks: int) -> float:
    """Words that a rank sends at most in a step without renewal: 6 k (P-1)/P.

    Where a gradient has fewer elements than LEAST for each rank, counts take 4 words more for each other rank.
    """
    return 6.0 * k * (ranks - 1) / ranks + 4 * (ranks - 1) * (k < LEAST * ranks)
