"""Generates schedules of pipelines for D ranks and N microbatches by name: `1f1b`, `interleaved:2`, `chimera:1` ...

A schedule that a user wrote (`Schedule.parse`) has its own actions as its name, on one line. It is for its own numbers
of ranks and microbatches alone:

    4 on 0 1: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    gpipe          all F, then all B                                                     Huang et al. 2019
    1f1b           rank r: D-1-r forwards, then F and B in turn                          Narayanan et al. 2019, 2021
    interleaved:v  v stages per rank, round the ranks; 2(D-1-r) + (v-1)D forwards first  Narayanan et al. 2021
    zb-h1          1f1b with W split off, r microbatches late                            Qi et al. 2024, figure 3
    zb-h2          twice the forwards of 1f1b first, W 2r microbatches late              Qi et al. 2024, section 2.2
    zb-v           two stages per rank, down and back                                    Qi et al. 2024, section 6
    dualpipe-v     that placement, with forwards of one way among backwards of the other DeepSeek-AI 2025
    chimera:f      f pairs of pipes in opposite directions                               Li & Hoefler 2021

Bubbles in seconds per rank. F, B and W are the seconds of one rank for one microbatch; B is without W where W is split
off:

    gpipe, 1f1b      (D-1)(F+B)
    interleaved      (D-1)(F+B)/v
    zb-h2            0 if F = B = W, where ranks start and end one after another
    zb-h1            (D-1)(F+B-W) if W is the shortest, in general (D-1) max(F, B, F+B-W)
    chimera, F = B   (D/2f-1)(F+B), direct concatenation of units; B = 2F and N = D takes D F + (2D-2) B with one pair

In schedules in the shape of a V, rank r of D has stage r on the way down and stage 2D-1-r back. The list of a rank is
written as a word, with capitals for the way down and small letters for the way back:

    F f  forward          B b  whole backward          I i  backward of the input alone
    W w  weight gradient of the oldest I (i) that lacks it          +  weight gradient of the oldest I or i

Each letter takes the next microbatch of its way. The words, with n = max(N, 2D-1):

    zb-v        F^(2(D-r)-1) (fF)^r (fiw)^(D-r) (FIWfiw)^(n-2D+r+1) (IWfiw)^(D-r-1) (Ii)^r (IW)^(D-r) w^r W^r
                Qi et al. 2024, arXiv 2401.10241 section 6: no bubble if F = B = W, memory of 1F1B
    dualpipe-v  F^2(D-r-1) (Ff)^(r+1) (iwf)^(D-r-1) (FbfB)^(N-2D+r+1) (bfB)^(D-r-1) end (+I)^(D-r-1) +^(r+1)
                end = (bB)^h (iI)^h if r+1 = 2h, else (bB)^h bI (iI)^h with r = 2h
                DeepSeek-AI 2025, DualPipe, its "cut-in-half" form for N >= 2D; here an F and a B that overlap there
                run one after the other
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Action, Kind, Schedule, check_copies, check_schedule

__all__ = ["SCHEDULES", "chimera", "chunks_of", "dualpipe_v", "generate", "gpipe", "interleaved", "named_schedule",
           "one_f_one_b", "pipes_of", "schedule_title", "splits_backward", "written_name", "written_numbers",
           "written_places", "zb_h1", "zb_h2", "zb_v"]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return _line(ranks, microbatches, lambda rank: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward and one backward in turn: at most D-r microbatches in flight on rank r."""
    return _line(ranks, microbatches, lambda rank: ranks - 1 - rank)


def _line(ranks: int, microbatches: int, ahead: Callable[[int], int]) -> Schedule:
    """A schedule with one stage per rank, in which rank r runs `ahead(r)` forwards first."""
    rows = (_alternate([Action(rank, "F", m) for m in range(microbatches)],
                       [Action(rank, "B", m) for m in range(microbatches)], ahead(rank)) for rank in range(ranks))
    return Schedule((tuple(range(ranks)),), tuple(rows), microbatches)


def _alternate(forwards: Sequence[Action], backwards: Iterable[Action], ahead: int) -> tuple[Action, ...]:
    """The first `ahead` forwards, then one forward and one backward in turn, then the backwards left."""
    row = list(forwards[:ahead])
    for step, backward in enumerate(backwards):
        row += [*forwards[ahead + step:ahead + step + 1], backward]
    return tuple(row)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """`chunks` stages per rank, stage s on rank s mod D; a rank runs D microbatches per chunk in turn.

    Raises InputError where the microbatches are no multiple of the ranks.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    if microbatches % ranks:
        raise InputError(f"interleaved: {microbatches} microbatches are no multiple of {ranks} ranks; "
                         f"use {-(-microbatches // ranks) * ranks}")
    rounds = [(chunk, first + m) for first in range(0, microbatches, ranks) for chunk in range(chunks)
              for m in range(ranks)]
    rows = (_alternate([Action(chunk * ranks + rank, "F", m) for chunk, m in rounds],
                       [Action((chunks - 1 - chunk) * ranks + rank, "B", m) for chunk, m in rounds],
                       2 * (ranks - 1 - rank) + (chunks - 1) * ranks) for rank in range(ranks))
    return Schedule((tuple(range(ranks)) * chunks,), tuple(rows), microbatches)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with W split off, r microbatches behind its B: each rank keeps D microbatches live, and W fills the end."""
    return _weights_late(one_f_one_b(ranks, microbatches), 1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """2(D-1-r) forwards first and W 2r microbatches late: no bubble if F = B = W, up to 2D-1 microbatches live."""
    return _weights_late(_line(ranks, microbatches, lambda rank: 2 * (ranks - 1 - rank)), 2)


def _weights_late(schedule: Schedule, turns: int) -> Schedule:
    """`schedule` with W split off: on rank r it follows `turns` r microbatches behind its B."""
    rows = []
    for rank, actions in enumerate(schedule.actions):
        row, weights = [], iter([Action(rank, "W", m) for m in range(schedule.microbatches)])
        for action in actions:
            row.append(action)
            if action.kind == "B" and action.microbatch >= turns * rank:
                row.append(next(weights))
        rows.append((*row, *weights))
    return Schedule(schedule.placement, tuple(rows), schedule.microbatches)


def chimera(ranks: int, microbatches: int, pairs: int) -> Schedule:
    """f pairs of pipes: the i-th down pipe has stage s on rank s + iD/f, its up pipe on rank D-1-s + iD/f (mod D).

    A unit of D microbatches gives each pipe D/2f. With F = B = 1 its k-th passes stage s forward at time s + 2k and
    backward at 2D-1-s + 2k. No two actions of a rank then meet, and units follow each other every 2D (direct
    concatenation). Raises InputError unless 2f divides the ranks and the microbatches.
    """
    if ranks % (2 * pairs) or microbatches % (2 * pairs):
        raise InputError(f"chimera:{pairs}: {ranks} ranks and {microbatches} microbatches; both have to be multiples "
                         f"of {2 * pairs}, the number of pipes")
    turns = [pair * ranks // pairs for pair in range(pairs)]
    placement = tuple(tuple((turn + (s if down else ranks - 1 - s)) % ranks for s in range(ranks))
                      for turn in turns for down in (True, False))
    timed: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        share = min(ranks, microbatches - first) // (2 * pairs)
        for pipe, where in enumerate(placement):
            for k in range(share):
                microbatch, start = first + pipe * share + k, 2 * first + 2 * k
                for s, rank in enumerate(where):
                    timed[rank] += [(start + s, Action(s, "F", microbatch, pipe)),
                                    (start + 2 * ranks - 1 - s, Action(s, "B", microbatch, pipe))]
    return Schedule(placement, tuple(tuple(action for _, action in sorted(row)) for row in timed), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V by its word above. Microbatches beyond N, which only fill the pipe, are left out."""
    n = max(microbatches, 2 * ranks - 1)
    words = [("F" * (2 * (ranks - r) - 1) + "fF" * r + "fiw" * (ranks - r) + "FIWfiw" * (n - 2 * ranks + r + 1)
              + "IWfiw" * (ranks - r - 1) + "Ii" * r + "IW" * (ranks - r) + "w" * r + "W" * r) for r in range(ranks)]
    return _schedule(words, microbatches)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe-V by its word above. Raises InputError for fewer than 2D microbatches."""
    if microbatches < 2 * ranks:
        raise InputError(f"dualpipe-v: {microbatches} microbatches are too few for {ranks} ranks; "
                         f"use {2 * ranks} or more")
    words = []
    for r in range(ranks):
        half = (r + 1) // 2
        end = "bB" * half + "bI" * ((r + 1) % 2) + "iI" * half
        words.append("F" * (2 * (ranks - r - 1)) + "Ff" * (r + 1) + "iwf" * (ranks - r - 1)
                     + "FbfB" * (microbatches - 2 * ranks + r + 1) + "bfB" * (ranks - r - 1) + end
                     + "+I" * (ranks - r - 1) + "+" * (r + 1))
    return _schedule(words, microbatches)


def _schedule(words: list[str], microbatches: int) -> Schedule:
    """The schedule in the shape of a V with one word per rank."""
    ranks = len(words)
    rows = (tuple(a for a in _actions(word, rank, 2 * ranks - 1 - rank) if a.microbatch < microbatches)
            for rank, word in enumerate(words))
    return Schedule(((*range(ranks), *reversed(range(ranks))),), tuple(rows), microbatches)


def _actions(word: str, down: int, back: int) -> list[Action]:
    """The actions of a word; stage `down` is on the way down, stage `back` on the way back."""
    row: list[Action] = []
    waiting: list[Action] = []
    count: Counter[tuple[int, Kind]] = Counter()
    for letter in word:
        stage = down if letter.isupper() else back
        if letter in "+Ww":
            oldest = next(action for action in waiting if letter == "+" or action.stage == stage)
            waiting.remove(oldest)
            row.append(oldest._replace(kind="W"))
            continue
        kind: Kind = "F" if letter in "Ff" else "B"
        row.append(Action(stage, kind, count[stage, kind]))
        count[stage, kind] += 1
        if letter in "Ii":
            waiting.append(row[-1])
    return row


SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = MappingProxyType({
    "gpipe": lambda ranks, microbatches, _: gpipe(ranks, microbatches),
    "1f1b": lambda ranks, microbatches, _: one_f_one_b(ranks, microbatches),
    "interleaved": interleaved,
    "zb-h1": lambda ranks, microbatches, _: zb_h1(ranks, microbatches),
    "zb-h2": lambda ranks, microbatches, _: zb_h2(ranks, microbatches),
    "zb-v": lambda ranks, microbatches, _: zb_v(ranks, microbatches),
    "dualpipe-v": lambda ranks, microbatches, _: dualpipe_v(ranks, microbatches),
    "chimera": chimera,
})
"""Name -> function of (ranks, microbatches, number behind the colon) -> schedule."""


@lru_cache(maxsize=256)
def generate(text: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule called `text`: `1f1b`, `interleaved:2` (chunks per rank), `chimera:1` (pairs of pipes), or written.

    Raises InputError for an unknown name, and where the numbers do not fit the schedule.
    """
    if ranks < 1 or microbatches < 1:
        raise InputError(f"{text} of {microbatches} microbatches on {ranks} ranks: there is at least one of each")
    own = _written(text)
    if own is None:
        name, width = _kind_and_width(text)
        return SCHEDULES[name](ranks, microbatches, width)
    if (len(own.actions), own.microbatches) != (ranks, microbatches):
        raise InputError(f"the {schedule_title(text)} is for these numbers alone, and {ranks} ranks and {microbatches} "
                         "microbatches are asked for")
    return own


def named_schedule(text: str) -> str:
    """The name of a schedule: the text itself, or what the file that it names has in it, as `written_name` says it.

    Raises InputError for an unknown name, a file that cannot be read, and a schedule that cannot run.
    """
    if (own := _written(text)) is not None:
        return written_name(own)
    if not any(letter in text for letter in "./\\"):
        _kind_and_width(text)
        return text
    try:
        written = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the schedule {text!r}: {getattr(error, 'strerror', None) or error}; give a "
                         f"file, or a name: {NAMES}") from None
    try:
        lines = [line for line in written.splitlines() if line.split("#")[0].strip()]
        return written_name(Schedule.parse("\n".join(lines)))
    except InputError as error:
        raise InputError(f"{text}: {error}") from None


def written_name(schedule: Schedule) -> str:
    """A schedule on one line, which is its name. Raises InputError where it cannot run, or not as copies of stages.

    Every rank has equally many stages: a part of the cluster is cut into as many.
    """
    check_schedule(schedule)
    check_copies(schedule)
    each = Counter(rank for pipe in schedule.placement for rank in pipe)
    if len({each[rank] for rank in range(len(schedule.actions))}) > 1:
        raise InputError("ranks have different numbers of stages: give each as many")
    if schedule.stages % len(schedule.actions):
        raise InputError(f"a pipe has {schedule.stages} stages on {len(schedule.actions)} ranks: it has one for each, "
                         "or twice as many, or more")
    where = " / ".join(" ".join(map(str, pipe)) for pipe in schedule.placement)
    rows = " | ".join(" ".join(map(str, row)) for row in schedule.actions)
    return f"{schedule.microbatches} on {where}: {rows}"


@lru_cache(maxsize=256)
def _written(name: str) -> Schedule | None:
    """The schedule that a name of `written_name` says; None for other names."""
    match = re.fullmatch(r"(\d+) on ([\d /]+): (.*)", name)
    if match is None:
        return None
    rows = [f"rank {rank}: {row.strip()}" for rank, row in enumerate(match[3].split("|"))]
    return Schedule.parse("\n".join((f"microbatches {match[1]}, stages on ranks {match[2]}", *rows)))


def written_numbers(name: str) -> tuple[int, int] | None:
    """The ranks and microbatches for which a schedule is that a user wrote; None for those that are for any."""
    own = _written(name)
    return None if own is None else (len(own.actions), own.microbatches)


def written_places(name: str) -> str:
    """Where the stages lie of a schedule that a user wrote; "" for others, where chunks and pipes say it."""
    return name.partition(" on ")[2].partition(":")[0] if _written(name) is not None else ""


def schedule_title(name: str) -> str:
    """A schedule as a person reads it: its name, or what it is if its actions are its name."""
    own = _written(name)
    return name if own is None else \
        f"written schedule of {len(own.actions)} parts and {own.microbatches} microbatches"


def splits_backward(name: str) -> bool:
    """Whether a schedule splits backward into B and W."""
    own = _written(name)
    if own is not None:
        return any(action.kind == "W" for action in own)
    return name.startswith("zb-") or name == "dualpipe-v"


def pipes_of(name: str) -> int:
    """The number of pipes of a schedule. Raises InputError for an unknown name."""
    if (own := _written(name)) is not None:
        return own.pipes
    kind, width = _kind_and_width(name)
    return 2 * width if kind == "chimera" else 1


def chunks_of(name: str) -> int:
    """The number of stages of a pipe for each rank of a schedule. Raises InputError for an unknown name."""
    if (own := _written(name)) is not None:
        return own.stages // len(own.actions)
    kind, width = _kind_and_width(name)
    if kind in ("zb-v", "dualpipe-v"):
        return 2
    return width if kind == "interleaved" else 1


NAMES = "gpipe, 1f1b, interleaved:CHUNKS, zb-h1, zb-h2, zb-v, dualpipe-v or chimera:PAIRS"


def _kind_and_width(text: str) -> tuple[str, int]:
    """The name of the schedule called `text`, and its chunks or pairs, 1 where it counts none.

    Raises InputError for an unknown name. Whether such a schedule is for some ranks, `generate` says.
    """
    name, colon, width = text.partition(":")
    counted = name in ("interleaved", "chimera")
    if text in ("interleaved", "chimera"):
        example = f"{text}:2 for 2 chunks" if text == "interleaved" else f"{text}:1 for one pair of pipes"
        raise InputError(f"{text!r} is no schedule without a number: write {example}")
    if name not in SCHEDULES or bool(colon) != counted or (counted and not (width.isdecimal() and int(width))):
        raise InputError(f"{text!r} is no schedule; write {NAMES}, or the name of a file that has one")
    return name, int(width or 1)
