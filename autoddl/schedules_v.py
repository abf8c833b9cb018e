"""Schedules in the shape of a V: rank r of D has stage r on the way there and stage 2D-1-r on the way back.

A rank's list is a word of letters, capitals for the way there and small ones for the way back:

    F f  forward          B b  whole backward          I i  backward of the input alone
    W w  weight gradient of the oldest I (i) that lacks it          +  the same of the oldest of both ways

Every letter takes the next microbatch of its way. Words, with n = max(N, 2D-1):

    zb-v        F^(2(D-r)-1) (fF)^r (fiw)^(D-r) (FIWfiw)^(n-2D+r+1) (IWfiw)^(D-r-1) (Ii)^r (IW)^(D-r) w^r W^r
                Qi et al. 2024, arXiv 2401.10241 section 6: no bubble if F = B = W, memory of 1F1B
    dualpipe-v  F^2(D-r-1) (Ff)^(r+1) (iwf)^(D-r-1) (FbfB)^(N-2D+r+1) (bfB)^(D-r-1) end (+I)^(D-r-1) +^(r+1)
                end = (bB)^h (iI)^h if r+1 = 2h, else (bB)^h bI (iI)^h with r = 2h
                DeepSeek-AI 2025, DualPipe, its "cut-in-half" form for N >= 2D; here the F and the B that go together
                run one after the other
"""

from collections import Counter

from autoddl.errors import InputError
from autoddl.schedule import Action, Kind, Schedule

__all__ = ["dualpipe_v", "zb_v"]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """The word above; microbatches beyond N, which only fill the pipe, are left out."""
    n = max(microbatches, 2 * ranks - 1)
    words = [("F" * (2 * (ranks - r) - 1) + "fF" * r + "fiw" * (ranks - r) + "FIWfiw" * (n - 2 * ranks + r + 1)
              + "IWfiw" * (ranks - r - 1) + "Ii" * r + "IW" * (ranks - r) + "w" * r + "W" * r) for r in range(ranks)]
    return _schedule(words, microbatches)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """The word above."""
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
    ranks = len(words)
    rows = (tuple(a for a in _actions(word, rank, 2 * ranks - 1 - rank) if a.microbatch < microbatches)
            for rank, word in enumerate(words))
    return Schedule(((*range(ranks), *reversed(range(ranks))),), tuple(rows), microbatches)


def _actions(word: str, there: int, back: int) -> list[Action]:
    """Read the letters."""
    row: list[Action] = []
    waiting: list[Action] = []
    count: Counter[tuple[int, Kind]] = Counter()
    for letter in word:
        stage = there if letter.isupper() else back
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
