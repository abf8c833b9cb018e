"""Decides which variable is eliminated when, on the structure alone, so that equal blocks are computed once.

    message(scope) = min over v of the sum of all factors over v           scope: the other variables of those factors

A message is named by its recipe: which tables are added, how their axes line up, and which variable goes. Two
eliminations with one recipe give one table, so it is computed once. Rounds make recipes meet: each round takes all
variables with the cheapest recipe (least degree, most repeated, fewest operations), no two of them neighbours. A chain
of L equal blocks then needs as many tables as a few blocks, and log2(L) more: every round halves the chain.

A message with more than CAP cells is replaced by messages over parts of its factors (mini-buckets). The minimum of a
sum is at least the sum of the minima. So the result is a lower bound, and `EliminationProgram.exact` is false.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autoddl.core.errors import InputError
from autoddl.core.problem import Problem
from autoddl.search.block_powers import raise_to_power
from autoddl.search.elimination_program import Elimination, EliminationProgram, Ids, MessageRecipe, RecipePart, Top
from autoddl.search.repeated_blocks import FoldedProblem

__all__ = ["CAP", "FactorGraph", "count_folded_cells", "plan_elimination", "plan_exact_elimination",
           "plan_folded_elimination"]

CAP = 30_000_000
WORK = 1e10
NOTHING = np.zeros(0, dtype=np.intp)
TIERS = (3, 9, 21, 53, 109, 257, 1025)
"""How often a recipe must occur to go before rarer ones; between the depths that models usually have."""


def plan_elimination(problem: Problem, cap: int = CAP) -> EliminationProgram:
    """The elimination of all variables of a problem."""
    network = FactorGraph(problem, cap, range(len(problem.sizes)))
    network.finish(range(len(problem.sizes)))
    return network.result(len(problem.sizes))


def plan_exact_elimination(problem: Problem) -> EliminationProgram:
    """The elimination of all variables, where it takes seconds. Raises InputError where it would take minutes."""
    program = plan_elimination(problem)
    work = sum(math.prod(recipe.shape) for _, recipe in program.messages())
    if not program.exact or work > WORK:
        raise InputError(f"this problem is too large for exact answers: they would look at {work:.1g} cells, and "
                         f"{WORK:.0g} are the most; `explain PLAN` without names or with --proof, and `report --quick` "
                         "need none; a mesh of fewer axes has fewer")
    return program


def plan_folded_elimination(short: FoldedProblem, problem: Problem, cap: int = CAP, exact: bool = False
                            ) -> EliminationProgram:
    """The elimination of the whole problem behind a short one, whose reduced form is `problem`.

    The blocks of every run are raised to their power. If it is to be `exact`, raises _TooLarge instead of splitting.
    """
    network = FactorGraph(problem, cap, short.position.tolist(), exact)
    for fold in short.folds:
        raise_to_power(network, fold)
    network.finish(range(len(problem.sizes)))
    return replace(network.result(len(short.of)), steps=(), slots=(), roots=())


class _TooLarge(Exception):
    """A message has too many cells."""


def count_folded_cells(short: FoldedProblem, problem: Problem) -> float:
    """The cells that `plan_folded_elimination` would compute; infinite as soon as one message has more than CAP."""
    try:
        program = plan_folded_elimination(short, problem, exact=True)
    except _TooLarge:
        return math.inf
    return sum(math.prod(recipe.shape) for _, recipe in program.messages())


class FactorGraph:
    """The factors and variables that are left; variables are grouped by the recipe that would eliminate them."""

    def __init__(self, problem: Problem, cap: int, positions: Sequence[int], exact: bool = False) -> None:
        self.sizes, self.cap, self.positions = list(problem.sizes), cap, list(positions)
        self.must_be_exact = exact
        self.ids: list[Ids] = [NOTHING] * len(problem.factors)
        self.base = len(problem.tables)
        self.slots = [f.table for f in problem.factors]
        self.scopes = [f.variables for f in problem.factors]
        self.incident: list[dict[int, None]] = [{} for _ in problem.sizes]
        for i, scope in enumerate(self.scopes):
            for v in scope:
                self.incident[v][i] = None
        self.index: dict[tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[int, ...]], int] = {}
        self.recipes: list[MessageRecipe] = []
        self.computed: dict[int, int] = {}
        self.steps: list[Elimination] = []
        self.roots: list[int] = []
        self.exact = True
        self.gone: set[int] = set()
        self.of: dict[int, int] = {}
        self.known: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self.members: dict[int, dict[int, None]] = {}
        self.heap: list[tuple[tuple[int, int, int, int, int], int]] = []
        self.active: set[int] = set()

    def finish(self, variables: Iterable[int]) -> list[int]:
        """Eliminates these variables, as far as they are left; returns the new factors."""
        first = len(self.slots)
        self.active = {v for v in variables if v not in self.gone}
        self.regroup(sorted(self.active))
        while (chosen := self.cheapest()) is not None:
            self.eliminate(chosen)
        return list(range(first, len(self.slots)))

    def lay(self, slot: int, scope: tuple[int, ...], ids: Ids) -> int:
        """Adds a factor; returns its number."""
        self.slots.append(slot)
        self.scopes.append(scope)
        self.ids.append(ids)
        new = len(self.slots) - 1
        for u in scope:
            self.incident[u][new] = None
        if not scope:
            self.roots.append(new)
        return new

    def lift(self, i: int) -> None:
        """Takes a factor away."""
        for u in self.scopes[i]:
            del self.incident[u][i]
        if not self.scopes[i]:
            self.roots.remove(i)

    def alive(self, i: int) -> bool:
        """Whether a factor is still there."""
        return i in self.incident[self.scopes[i][0]] if self.scopes[i] else i in self.roots

    def add(self, size: int, position: int) -> int:
        """Adds a variable; returns its number."""
        self.sizes.append(size)
        self.positions.append(position)
        self.incident.append({})
        return len(self.sizes) - 1

    def recipe(self, v: int, ids: Sequence[int]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The recipe that eliminates v from these factors, then the scope and the factors in the recipe's order."""
        local = {v: 0}
        for _, _, i in sorted([(self.slots[i], self.scopes[i].index(v), i) for i in ids]):
            for u in self.scopes[i]:
                local.setdefault(u, len(local))
        parts = sorted([(self.slots[i], tuple([local[u] for u in self.scopes[i]]), i) for i in ids])
        key = tuple([(slot, axes) for slot, axes, _ in parts]), tuple([self.sizes[u] for u in local])
        if key not in self.index:
            self.index[key] = len(self.recipes)
            self.recipes.append(MessageRecipe(tuple(RecipePart(*part) for part in key[0]), key[1]))
        return self.index[key], tuple(local)[1:], tuple([i for _, _, i in parts])

    def regroup(self, variables: Sequence[int] | range) -> None:
        """Groups these variables by their present recipes."""
        touched = dict.fromkeys(self.of[v] for v in variables if v in self.of)
        for v in variables:
            if v in self.of:
                del self.members[self.of[v]][v]
            self.known[v] = self.recipe(v, tuple(self.incident[v]))
            self.of[v] = self.known[v][0]
            self.members.setdefault(self.of[v], {})[v] = None
            touched[self.of[v]] = None
        for r in touched:
            if self.members[r]:
                heapq.heappush(self.heap, (self.priority(r), r))

    def priority(self, r: int) -> tuple[int, int, int, int, int]:
        """The sort key of a recipe: least degree (one and two alike), most repeated, fewest operations, fewest cells
        left."""
        shape, count = self.recipes[r].shape, len(self.members[r])
        tier = sum(count >= t for t in TIERS)
        return max(len(shape) - 1, 2), -tier, math.prod(shape), -shape[0], r

    def cheapest(self) -> list[int] | None:
        """The variables of the best recipe, no two of them neighbours; None when all are gone."""
        while self.heap:
            priority, r = heapq.heappop(self.heap)
            if not self.members[r] or priority != self.priority(r):
                continue
            blocked: set[int] = set()
            chosen = []
            for v in sorted(self.members[r]):
                if v not in blocked:
                    chosen.append(v)
                    blocked.update(u for i in self.incident[v] for u in self.scopes[i])
            return chosen
        return None

    def eliminate(self, variables: Sequence[int]) -> None:
        """Replaces the factors of each variable by its message, then regroups the neighbours."""
        dirty: dict[int, None] = {}
        for v in variables:
            r, scope, sources = self.known.pop(v)
            for i in sources:
                for u in self.scopes[i]:
                    del self.incident[u][i]
            buckets = self.buckets(v, sources)
            made = [(r, scope, sources)] if len(buckets) == 1 else [self.recipe(v, bucket) for bucket in buckets]
            outputs = tuple(self.emit(v, *new) for new in made)
            self.steps.append(Elimination(v, scope, r, sources, outputs))
            dirty.update(dict.fromkeys(scope))
            del self.members[self.of.pop(v)][v]
            self.gone.add(v)
            self.requeue(r)
        self.regroup(sorted(self.active & dirty.keys()))

    def requeue(self, r: int) -> None:
        """Queues a recipe again, whose priority changed because it lost a variable."""
        if self.members[r]:
            heapq.heappush(self.heap, (self.priority(r), r))

    def emit(self, v: int, r: int, scope: tuple[int, ...], sources: tuple[int, ...]) -> int:
        """Adds the new factor over a scope, whose table is computed once per recipe; returns its number."""
        slot = self.computed.setdefault(r, self.base + len(self.computed))
        behind = [self.ids[i] for i in sources if self.slots[i] >= self.base]
        return self.lay(slot, scope, np.concatenate([np.array([self.positions[v]], dtype=np.intp), *behind]))

    def buckets(self, v: int, sources: tuple[int, ...]) -> list[list[int]]:
        """The factors of v: all together where their message stays within the cap, else in parts that do."""

        def cells(ids: Sequence[int]) -> int:
            return math.prod(self.sizes[u] for u in {u for i in ids for u in self.scopes[i]} if u != v)

        if cells(sources) <= self.cap:
            return [list(sources)]
        if self.must_be_exact:
            raise _TooLarge
        self.exact = False
        buckets: list[list[int]] = []
        for i in sorted(sources, key=lambda i: -cells([i])):
            home = next((b for b in buckets if cells([*b, i]) <= self.cap), None)
            if home is None:
                buckets.append([i])
            else:
                home.append(i)
        return buckets

    def result(self, count: int) -> EliminationProgram:
        """The program of all eliminations so far, for `count` positions."""
        tops = tuple(Top(self.slots[i], self.ids[i]) for i in self.roots)
        return EliminationProgram(
            self.base,
            tuple(self.recipes),
            tuple(self.computed),
            tuple(self.steps),
            tuple(self.slots),
            tuple(self.roots),
            self.exact,
            tops,
            count,
        )
