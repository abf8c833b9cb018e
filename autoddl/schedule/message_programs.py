"""Collectives as lists of messages: the sends and receives of each rank, in order, as plain values.

The buffer has n chunks, one per member, each cut in pieces; a message is one piece of one chunk. Members are numbered
with the innermost of `ways` fastest, w_1 inside a node, w_2 across nodes, and so on. The ring along level j passes on
the chunks that agree with the member in all levels inside j. X(x) are those of them with digit x at level j:

    reduce-scatter  j = 1, 2, ...   in round s = 0 .. w_j - 2 a member at d sends X(d-s-1) to d+1, adds what d-1 sends
    all-gather      j = ..., 2, 1   in round s = 0 .. w_j - 2 a member at d sends X(d-s) to d+1, keeps what d-1 sends
    all-reduce      reduce-scatter, then all-gather
    all-to-all      in round s = 1 .. n-1 rank r sends chunk r+s to r+s, with one level
    all-to-all      j = 1, 2, ...   with several: a member sends to every other digit x all chunks for ranks with it,
                                    and holds what it gets in their place (`runtime.collectives.message_collectives`)

With one level these are the rings of Patarasuk & Yuan 2009, with several those of Cho et al., BlueConnect 2019. A rank
sends (1/m_j - 1/n) N bytes out of its unit of level j, which has m_j members. For equal units, no algorithm sends less.

A send waits only for the receives that it passes on, so pieces follow each other through the levels. In an all-to-all
nothing is passed on. There a rank sends at most `AHEAD` messages more than it received. So ranks stay in the same
round, in which every one has a receiver of its own.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from math import prod

from autoddl.core.errors import InputError
from autoddl.cost_models import Algorithm, Cluster, Group, collective, ways_of

__all__ = ["MessageProgram", "Receive", "Send", "chosen_ways", "leaving_fraction", "message_program",
           "stage_peers"]

AHEAD = 2
"""Messages that a rank of an all-to-all may have sent more than it received."""


@dataclass(frozen=True, slots=True)
class Send:
    """Piece (chunk, piece) goes to member `to`, as message `number` to it, after this rank's first `after` receives."""

    to: int
    chunk: int
    piece: int
    number: int
    after: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Piece (chunk, piece) comes from member `of`, as message `number` from it.

    It is added to this rank's own if `add`, else kept as it is.
    """

    of: int
    chunk: int
    piece: int
    number: int
    add: bool


@dataclass(frozen=True, slots=True)
class MessageProgram:
    """The messages of one rank: sends in the order of `after`, receives in the order in which it waits for them."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


@dataclass(frozen=True, slots=True)
class _Round:
    """A round, in which chunks `out` go to member `to` and chunks `into` come from member `of`."""

    to: int
    out: tuple[int, ...]
    of: int
    into: tuple[int, ...]
    add: bool


@lru_cache(maxsize=4096)
def message_program(kind: str, ways: tuple[int, ...], rank: int, pieces: int = 1) -> MessageProgram:
    """The messages of `rank` of prod(ways) in a collective, every chunk cut in `pieces`.

    Raises InputError for a kind that is not made of messages.
    """
    if kind == "all-to-all":
        return _all_to_all(prod(ways), rank, pieces)
    if kind not in ("all-reduce", "all-gather", "reduce-scatter"):
        raise InputError(f"{kind!r} is made of no messages; all-reduce, all-gather, reduce-scatter, all-to-all are")
    rounds: list[_Round] = []
    if kind != "all-gather":
        rounds += [one for level in range(len(ways)) for one in _ring(ways, rank, level, add=True)]
    if kind != "reduce-scatter":
        rounds += [one for level in reversed(range(len(ways))) for one in _ring(ways, rank, level, add=False)]
    return _ordered(rounds, pieces)


def _ring(ways: tuple[int, ...], rank: int, level: int, add: bool) -> list[_Round]:
    stride, w, n = prod(ways[:level]), ways[level], prod(ways)
    digit = rank // stride % w
    to, of = (rank + ((digit + by) % w - digit) * stride for by in (1, -1))
    mine = [c for c in range(n) if c % stride == rank % stride]
    sets = [tuple(c for c in mine if c // stride % w == x) for x in range(w)]
    first = digit - 1 if add else digit
    return [_Round(to, sets[(first - s) % w], of, sets[(first - s - 1) % w], add) for s in range(w - 1)]


def _ordered(rounds: list[_Round], pieces: int) -> MessageProgram:
    sends: list[Send] = []
    receives: list[Receive] = []
    last: dict[tuple[int, int], int] = {}
    to: defaultdict[int, count[int]] = defaultdict(count)
    of: defaultdict[int, count[int]] = defaultdict(count)
    for one in rounds:
        sends += [Send(one.to, c, p, next(to[one.to]), last.get((c, p), 0)) for p in range(pieces) for c in one.out]
        for p, c in product(range(pieces), one.into):
            receives.append(Receive(one.of, c, p, next(of[one.of]), one.add))
            last[c, p] = len(receives)
    return MessageProgram(tuple(sorted(sends, key=lambda send: send.after)), tuple(receives))


def _all_to_all(n: int, rank: int, pieces: int) -> MessageProgram:
    turns = [(p, s) for s in range(1, n) for p in range(pieces)]
    return MessageProgram(tuple(Send((rank + s) % n, (rank + s) % n, p, p, max(0, k - AHEAD + 1))
                                for k, (p, s) in enumerate(turns)),
                          tuple(Receive((rank - s) % n, (rank - s) % n, p, p, False) for p, s in turns))


def leaving_fraction(kind: str, ways: tuple[int, ...], rank: int, outside: frozenset[int]) -> float:
    """The fraction of the full buffer that `rank` sends to the members `outside`.

    Of an all-to-all in several levels it sends 1/w_j to each of the others of level j.
    """
    if kind == "all-to-all" and len(ways) > 1:
        return sum(1 / w for level, w in enumerate(ways) for other in stage_peers(ways, rank, level)
                   if other != rank and other in outside)
    return sum(send.to in outside for send in message_program(kind, ways, rank).sends) / prod(ways)


def stage_peers(ways: tuple[int, ...], rank: int, level: int) -> tuple[int, ...]:
    """The members that agree with `rank` in all levels but one, by their digit there; `rank` is among them."""
    stride, w = prod(ways[:level]), ways[level]
    first = rank - rank // stride % w * stride
    return tuple(first + x * stride for x in range(w))


@lru_cache(maxsize=65536)
def chosen_ways(cluster: Cluster, kind: str, group: Group, nbytes: int) -> tuple[int, ...] | None:
    """The `ways` of the messages that the cost model chooses for a full buffer of `nbytes`, innermost level first.

    None where it chooses a collective of the library.
    """
    algorithm = collective(cluster, kind, group, float(nbytes)).algorithm
    if algorithm in (Algorithm.LEVEL_RINGS, Algorithm.STAGES):
        return ways_of(cluster, group)
    return (group.size,) if algorithm is Algorithm.ROUNDS else None
