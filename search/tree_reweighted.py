"""Bounds a large problem from below by messages along its edges.

    theta_v(k)   = own costs of option k + messages into v                     an edge e = (u, v) has the table T_e
    M_e->v(k)    = min over j of  g_u * theta_u(j) - M_e->u(j) + T_e(j, k)      g_u = 1 / max(edges on, edges back)

Whatever the messages are, all costs are the sum of the terms left, and at least the sum of their minima:

    left_v(k)    = (1 - g_v * edges back) * theta_v(k)          left_e(j, k) = T_e - M_e->u - M_e->v + g_v * theta_v(k)

Sweeps on and back along the variables raise it (sequential tree-reweighted messages; Kolmogorov, PAMI 2006). A sweep
costs two passes over the tables, an elimination their products.

Blocks of a run share their messages. The sweep goes over three of them, and the terms of the middle one count for all
blocks for which it stands. It also sends the messages between blocks, for the others too. These messages are finite,
because the first or the last block may allow an option that the middle one forbids.

Tables over two variables are in single precision, because a sweep takes as long as reading them does. They are rounded
down, so that their bound is a bound of the problem.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array, Classes, Table, row_blocks
from autoddl.search.limits import Clock
from autoddl.search.relaxations import price_classes
from autoddl.search.repeated_blocks import FoldedProblem

__all__ = ["MessageBound", "Messages", "pass_messages", "reparametrize"]

INNER = 4
"""Sweeps without the first and the last block of every run, before each sweep over all variables."""

LEAST = 0.02
"""The fraction of the distance to the target that an evaluation must win for another one to follow."""

BLOCK = 1 << 16
"""Cells that are computed together."""

LESS, MOST = 1 - 2.0**-22, 3e38
"""The factor that rounds a number down, by more than single precision loses; and the largest number there."""

Rough = NDArray[np.float32]

Messages = dict[tuple[int, int], Array]
"""The message to end 0 or 1 of an edge, over the edge's classes there."""


@dataclass(frozen=True, slots=True, eq=False)
class MessageBound:
    """No choice costs less than `bound`. The lower `beliefs[v][k]`, the more the messages favour option k of v.

    Another call can go on from the messages `sent`.
    """

    bound: float
    beliefs: tuple[Array, ...]
    sent: Messages


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """An edge at one of its variables.

    `classes` has the class of each option, `order` the options by class, and `starts` the first place of each class in
    `order`. One copy of the variable has `times` such edges.
    """

    variable: int
    classes: Classes
    order: Classes
    starts: Classes
    times: int

    def least(self, costs: Array) -> Array:
        """The least of the costs of options in each class."""
        found: Array = np.minimum.reduceat(costs.take(self.order), self.starts)
        return found


Classed = tuple[Classes, Classes, Classes]
"""The class of every option; options by class; where each class begins among them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A table over the classes in use, rounded down, and the classes of its rows and columns."""

    table: Rough
    first: Classed
    second: Classed

    @classmethod
    def of(cls, table: Table, lam: float) -> "_Pair":
        (rows, first), (columns, second) = (_classed(classes) for classes in table.classes)
        rough = _rough(table, lam)
        return cls(rough if rough.shape == (len(rows), len(columns)) else rough[np.ix_(rows, columns)], first, second)

    def turned(self) -> "_Pair":
        """The transposed pair."""
        return _Pair(np.ascontiguousarray(self.table.T), self.second, self.first)


def _rough(table: Table, lam: float) -> Rough:
    """The table seconds + lam * retained in single precision, rounded down."""
    seconds, retained, _ = table.cells
    found = np.empty(table.lengths, dtype=np.float32)
    for rows in row_blocks(table.lengths):
        price = retained.rows(rows) * lam
        price += seconds.rows(rows)
        price *= LESS if price.min() >= 0 else np.where(price < 0, 2 - LESS, LESS)
        if price.max() > MOST:
            np.minimum(price, MOST, out=price, where=np.isfinite(price))
        found[rows] = price
    return found


def _classed(classes: Classes) -> tuple[Classes, Classed]:
    """The classes in use, and the options' classes among them."""
    used, of = np.unique(classes, return_inverse=True)
    order = np.argsort(of, kind="stable")
    return used, (of, order, np.searchsorted(of[order], np.arange(len(used))))


@dataclass(frozen=True, slots=True, eq=False)
class _Edge:
    """A table between an earlier variable and a later one.

    Its `twin` is the number of the equal edge one block further or before, or -1. For the end `silent`, the twin sends
    the messages; -1 for none.
    """

    table: Rough
    sides: tuple[_Side, _Side]
    twin: int
    silent: int


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """The problem as the messages see it: own costs and copies of every variable, edges, and (edge, end) at each.

    `counts` are the numbers of edges on and back.
    """

    own: tuple[Array, ...]
    copies: tuple[int, ...]
    edges: tuple[_Edge, ...]
    at: tuple[tuple[tuple[int, int], ...], ...]
    counts: tuple[tuple[int, int], ...]

    def belief(self, v: int, sent: Messages) -> Array:
        """The costs theta_v."""
        theta = self.own[v].copy()
        for e, end in self.at[v]:
            side = self.edges[e].sides[end]
            message = sent[e, end].take(side.classes)
            theta += message if side.times == 1 else side.times * message
        return theta

    def given(self, v: int, theta: Array, end: int, sent: Messages) -> Iterator[tuple[int, Array]]:
        """The term g_v * theta_v - M_e->v for every edge e of which v is this end."""
        share = theta / max(*self.counts[v], 1)
        for e, there in self.at[v]:
            if there == end:
                yield e, _less(self.edges[e].sides[end].least(share), sent[e, end])


def pass_messages(short: FoldedProblem, lam: float, target: float, rounds: int, clock: Clock,
                  known: Messages | None = None) -> MessageBound:
    """The bound of seconds + lam * retained, by at most `rounds` of sweeps.

    Stops once the bound reaches `target` or rises too little, or the clock is expired. Factors are over one or two
    variables. Sweeps begin with the messages `known`, if given.
    """
    graph = _graph(short, lam)
    sent = dict(known) if known else {(e, end): np.zeros(edge.table.shape[end])
                                      for e, edge in enumerate(graph.edges) for end in (0, 1)}
    bound = -math.inf
    best = bound, dict(sent)
    ends = {v for fold in short.folds for v in (*fold.blocks[0], *fold.blocks[2])}
    inner, whole = [v for v in range(len(graph.own)) if v not in ends], range(len(graph.own))
    for _ in range(rounds):
        for order in (*[inner] * INNER, whole):
            _sweep(graph, sent, order, 0)
            _sweep(graph, sent, order[::-1], 1)
        before, bound = bound, _bound(graph, sent)
        best = max(best, (bound, dict(sent)), key=lambda found: found[0])
        if clock.expired or bound >= target or bound - before < LEAST * (target - bound):
            break
    return MessageBound(best[0], tuple([graph.belief(v, best[1]) for v in range(len(graph.own))]), best[1])


def reparametrize(short: FoldedProblem, lam: float, sent: Messages) -> dict[int, tuple[Array, Array]]:
    """The costs that each factor of two variables, by number, moves to each of them: left_v and left_e remain.

    Nothing is moved to forbidden options.
    """
    graph, found = _graph(short, lam), dict[int, tuple[Array, Array]]()
    theta = [graph.belief(v, sent) for v in range(len(graph.own))]
    pairs = [i for i, factor in enumerate(short.problem.factors) if len(factor.variables) == 2]
    for e, (i, edge) in enumerate(zip(pairs, graph.edges, strict=True)):
        first, second = (sent[e, end][side.classes] for end, side in enumerate(edge.sides))
        v = edge.sides[1].variable
        second = -_less(theta[v] / max(*graph.counts[v], 1), second)
        first, second = (np.where(np.isfinite(gift), gift, 0.0) for gift in (first, second))
        found[i] = (first, second) if short.problem.factors[i].variables[1] == v else (second, first)
    return found


def _less(costs: Array, sent: Array) -> Array:
    """The difference of costs and a message; forbidden options stay forbidden."""
    return costs - np.where(np.isinf(costs), 0.0, sent)


def _graph(short: FoldedProblem, lam: float) -> _Graph:
    """The graph of a short problem."""
    problem, twins, known = short.problem, _twins(short), dict[int, _Pair]()
    block = {v: j for fold in short.folds for j, members in enumerate(fold.blocks) for v in members}
    times = {v: fold.times for fold in short.folds for v in fold.blocks[1]}
    own = [np.zeros(size) for size in problem.sizes]
    edges, number = list[_Edge](), dict[int, int]()
    for i, factor in enumerate(problem.factors):
        if len(factor.variables) == 1:
            cost = price_classes(problem.tables[factor.table], lam, math.inf)
            own[factor.variables[0]] = own[factor.variables[0]] + cost.core[cost.classes[0]]
            continue
        if factor.table not in known:
            known[factor.table] = _Pair.of(problem.tables[factor.table], lam)
        u, v = factor.variables
        pair = known[factor.table] if u < v else known[factor.table].turned()
        u, v = min(u, v), max(u, v)
        ends = (_Side(u, *pair.first, 1 if u in block else times.get(v, 1)),
                _Side(v, *pair.second, 1 if v in block else times.get(u, 1)))
        silent = -1 if i not in twins else int(block[u] != 0)
        number[i] = len(edges)
        edges.append(_Edge(pair.table, ends, twins.get(i, -1), silent))
    edges = [replace(edge, twin=number.get(edge.twin, -1)) for edge in edges]
    at: list[list[tuple[int, int]]] = [[] for _ in own]
    counts = [[0, 0] for _ in own]
    for e, edge in enumerate(edges):
        for end, side in enumerate(edge.sides):
            at[side.variable].append((e, end))
            counts[side.variable][end] += side.times
    return _Graph(tuple(own), tuple([times.get(v, 1) for v in range(len(own))]), tuple(edges), tuple(map(tuple, at)),
                  tuple([(on, back) for on, back in counts]))


def _twins(short: FoldedProblem) -> dict[int, int]:
    """The twin of each factor between blocks 0 and 1, or between 1 and the last block, by number."""
    found: dict[int, int] = {}
    factors = short.problem.factors
    for fold in short.folds:
        first, middle, last = (frozenset(block) for block in fold.blocks)
        moved = dict(zip((*fold.blocks[0], *fold.blocks[1]), (*fold.blocks[1], *fold.blocks[2]), strict=True))
        later: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for i, factor in enumerate(factors):
            if not middle.isdisjoint(factor.variables) and not last.isdisjoint(factor.variables):
                later[factor.table, factor.variables].append(i)
        for i in sorted(fold.factors):
            if not first.isdisjoint(factors[i].variables):
                j = later[factors[i].table, tuple([moved.get(v, v) for v in factors[i].variables])].pop()
                found |= {i: j, j: i}
    return found


def _sweep(graph: _Graph, sent: Messages, order: Sequence[int], end: int) -> None:
    """Sends messages from these variables, in turn, to later variables (end 0) or earlier ones (end 1)."""
    for v in order:
        for e, given in graph.given(v, _raised(graph.belief(v, sent)), end, sent):
            edge = graph.edges[e]
            if edge.silent != end:
                table = edge.table if end == 0 else edge.table.T
                sent[e, 1 - end] = _raised(_through(table, given.astype(np.float32)))
                if edge.twin >= 0:
                    sent[e, 1 - end] = sent[edge.twin, 1 - end] = _finite(sent[e, 1 - end])


def _raised(costs: Array) -> Array:
    """The costs minus their least, unless all options are forbidden."""
    least = np.minimum.reduce(costs)
    return costs - least if math.isfinite(least) else costs


def _finite(message: Array) -> Array:
    """The message with its largest number in place of inf: between blocks, messages must not forbid an option.

    Another block may allow what the middle one forbids, and any number is a valid message.
    """
    allowed = np.isfinite(message)
    return np.where(allowed, message, message[allowed].max(initial=0.0))


def _through(table: NDArray[Any], given: NDArray[Any]) -> Array:
    """The message min over j of given(j) + T(j, k), for every k."""
    if table.size <= BLOCK:
        on = table.flags.c_contiguous
        whole = table + given[:, None] if on else table.T + given
        found: Array = np.minimum.reduce(whole, axis=0 if on else 1).astype(np.float64)
        return found
    out = np.full(table.shape[1], math.inf, np.result_type(table, given))
    step = max(1, BLOCK // (table.shape[1] if table.flags.c_contiguous else len(given)))
    if table.flags.c_contiguous:
        for i in range(0, len(given), step):
            np.minimum(out, (table[i:i + step] + given[i:i + step, None]).min(axis=0), out=out)
        return out.astype(np.float64)
    for i in range(0, len(out), step):
        out[i:i + step] = (table.T[i:i + step] + given).min(axis=1)
    return out.astype(np.float64)


def _bound(graph: _Graph, sent: Messages) -> float:
    """The sum of the minima of all left_v and left_e, each as often as there are copies."""
    parts = []
    for v, copies in enumerate(graph.copies):
        theta = graph.belief(v, sent)
        on, back = graph.counts[v]
        least = float(theta.min())
        if math.isinf(least):
            return math.inf
        parts.append(copies * least * (1 - back / max(on, back, 1)))
        for e, given in graph.given(v, theta, 1, sent):
            edge = graph.edges[e]
            dead = np.isinf(sent[e, 0])
            rows = np.where(dead, math.inf, -np.where(dead, 0.0, sent[e, 0]))
            parts.append(copies * edge.sides[1].times * float((rows + _through(edge.table.T, given)).min()))
    return math.fsum(parts)
