"""Tabulates the least seconds of paths over the stages and numbers of blocks of a chain (`core.pipeline_cuts`).

    path_tables     the seconds of each stage on some paths, with all that is known of them
    priced_table    the same where stages of a rank are counted together, under a price of its bytes
"""

from collections.abc import Sequence

import numpy as np

from autoddl.core.cost_table import Array
from autoddl.core.pipeline_cuts import CutProblem, Mixture, PathBound, PricedStages

__all__ = ["path_tables", "priced_table"]

TOGETHER = (1, 1, 1, 0, 0, 0)
"""The weights of F + B + W."""

TABLES = 64
"""Paths whose tables are made at once."""

LESS = 1 - 1e-9
"""The part of how often something could count that it does, so that no count that is left is below 0."""


def path_tables(problem: CutProblem, paths: Sequence[PathBound]) -> list[Array]:
    """[stage, blocks] seconds of each path; no blocks, and sizes that a stage cannot have, are 0 and never read.

    What is known of weighted terms counts as often as each of them does. It is applied one after the other, each first
    once, behind it those without weights of messages: the greatest sum holds.
    """
    found = list[Array]()
    for begin in range(0, len(paths), TABLES):
        counts = np.stack([_counts(path) for path in paths[begin:begin + TABLES]])
        found += list(np.pad(_seconds(problem, counts), ((0, 0), (0, 0), (1, 0))))
    return found


def priced_table(problem: CutProblem, path: PathBound, table: Array, cut: Sequence[int]
                 ) -> tuple[Array, float, Mixture]:
    """([stage, blocks] seconds of a priced path, seconds of every cut, its prices): by those that say most at a cut.

    `table` is that of the path. There are no prices where none says more at the cut. Then the table is the path's.
    """
    counts, found, more, prices = _counts(path), np.array(table), 0.0, list[tuple[int, float]]()
    for group in dict.fromkeys(one.stages for one in problem.priced):
        best, at = 0.0, list(group)
        for k, one in enumerate(problem.priced):
            times = LESS * _times(one, counts) if one.stages == group else 0.0
            if times > 0:
                rows = np.maximum(table[at, 1:], _priced_rows(problem, one, counts, times))
                less = times * one.price * one.budget
                gain = sum(float(row[cut[s] - 1] - table[s, cut[s]]) for s, row in zip(at, rows, strict=True)) - less
                if gain > best:
                    best, chosen = gain, (k, times, rows, less)
        if best > 0:
            k, times, rows, less = chosen
            found[at, 1:] = rows
            more -= less
            prices.append((k, times))
    return found, more, tuple(prices)


def _times(one: PricedStages, counts: Array) -> float:
    """How often the counts of a path hold those of stages of a rank."""
    weights = _weights(one)
    return float((counts[list(one.stages)][weights > 0] / weights[weights > 0]).min())


def _weights(one: PricedStages) -> Array:
    """[stage of the rank, term], with those of messages, which may be left out where they are 0."""
    return np.array([(*row, 0.0, 0.0)[:8] for row in one.weights])


def _priced_rows(problem: CutProblem, one: PricedStages, counts: Array, times: float) -> Array:
    """[stage of the rank, blocks] seconds and bytes' price, with what is known of the counts that are left."""
    left = np.zeros_like(counts)
    at = list(one.stages)
    left[at] = counts[at] - times * _weights(one)
    found: Array = times * one.values + _seconds(problem, left[None])[0, at]
    return found


def _counts(path: PathBound) -> Array:
    """[stage, term] how often the terms of a stage count, and last those of the messages before and behind it."""
    sent = np.array([0.0, *path.transfers, 0.0])
    return np.concatenate([np.array(path.stages, dtype=float), sent[:-1, None], sent[1:, None]], axis=1)


def _seconds(problem: CutProblem, left: Array) -> Array:
    """[path, stage, blocks - 1] seconds whose terms count so often, [path, stage, term], by all that is known."""
    known = [*problem.known, *([(TOGETHER, problem.whole)] if problem.whole is not None else [])]
    terms = np.nan_to_num(problem.seconds, posinf=0.0)
    least: Array = (left[:, :, None, :6] * terms).sum(axis=3)
    seconds = np.array(least)
    for k, (weights, values) in enumerate(known):
        order = [known[k], *(one for j, one in enumerate(known) if j != k and len(one[0]) == 6)]
        s, n = np.nonzero(np.nan_to_num(values, posinf=0.0) > (np.array(weights[:6]) * terms).sum(axis=2))
        more = _more(terms[s, n], left[:, s], [(each, array[s, n]) for each, array in order])
        seconds[:, s, n] = np.maximum(seconds[:, s, n], least[:, s, n] + more)
    return seconds


def _more(terms: Array, left: Array, known: Sequence[tuple[tuple[float, ...], Array]]) -> Array:
    """[path, cell] seconds that paths take above those of their [path, cell, term], by what is known, in this order.

    `terms` are the [cell, term] seconds.
    """
    seconds: Array = np.zeros(left.shape[:2])
    for weights, values in known:
        each = np.array((*weights, *(0.0,) * (8 - len(weights))), dtype=float)
        more = np.nan_to_num(values, posinf=0.0) - (each[:6] * terms).sum(axis=1)
        times = np.where(more > 0, (left[:, :, each > 0] / each[each > 0]).min(axis=2), 0.0)
        seconds = seconds + times * np.maximum(more, 0.0)
        left = left - times[:, :, None] * each
    return seconds
