"""Finds, for every factor of the whole problem, the factor of the short problem that stands for it.

    factor of the whole problem        stood for by the short factor with the same table between
    variables of one block, or of none     the short variables that stand for them
    block j and block j + 1                 blocks 0 and 1, or 1 and 2 at the end of the run

Several factors with one table over the same variables have a different stand-in each.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from autoddl.core.problem import Problem
from autoddl.search.repeated_blocks import Fold, FoldedProblem

__all__ = ["match_factors"]


def match_factors(problem: Problem, short: FoldedProblem) -> list[int]:
    """For each factor of the whole problem, the number of the short factor that stands for it."""
    known: defaultdict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for i, factor in enumerate(short.problem.factors):
        known[factor.table, factor.variables].append(i)
    place = np.argsort(short.variable).tolist()
    of, blocks = short.of.tolist(), {v: fold for fold in short.folds for block in fold.blocks for v in block}
    seen: defaultdict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    found = []
    for factor in problem.factors:
        nth = seen[factor.table, factor.variables]
        seen[factor.table, factor.variables] += 1
        places = [place[v] for v in factor.variables]
        folds = {id(blocks[of[p]]): blocks[of[p]] for p in places if of[p] in blocks}
        short_variables = [of[p] for p in places]
        for fold in folds.values():
            for axis, v in _across(short, fold, places, short_variables):
                short_variables[axis] = v
        found.append(known[factor.table, tuple(short_variables)][nth])
    return found


def _across(short: FoldedProblem, fold: Fold, places: list[int], stand: list[int]) -> Iterator[tuple[int, int]]:
    """The (axis, short variable) of each axis where a factor joins neighbouring blocks of a run."""
    start, last = int(short.position[fold.blocks[0][0]]), fold.times + 1
    block = {axis: (p - start) // fold.period for axis, p in enumerate(places)
             if any(stand[axis] in members for members in fold.blocks)}
    if len(set(block.values())) < 2:
        return
    high = max(block.values())
    for axis, j in block.items():
        at = next(members.index(stand[axis]) for members in fold.blocks if stand[axis] in members)
        later = 2 if high == last else 1
        yield axis, fold.blocks[later if j == high else later - 1][at]
