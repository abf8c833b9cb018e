"""Computes min-marginals: the cost of the best whole plan with each option of a variable pinned.

    marginal(v)[k] = min over x with x_v = k of cost(x)

Elimination leaves a tree of messages: every step adds its sources and passes their minimum over one variable upward.
Downward messages have the cost of the rest of the tree:

    rest(root)     = sum of the other roots
    rest(message)  = min over variables outside the message of   rest(output of its user) + the user's other sources
    marginal(v)    = min over the scope of v's step of           rest(output of the step) + the step's sources

They are made along the path from the root when they are asked for, and kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoddl.core.problem import Array, Problem
from autoddl.search.certify.certificate import align_axes
from autoddl.search.elimination import messages
from autoddl.search.elimination_order import plan_exact_elimination
from autoddl.search.elimination_program import Elimination, EliminationProgram
from autoddl.search.relaxations import price_options

__all__ = ["Beliefs", "compute_beliefs", "minimise_out"]

Scope = tuple[int, ...]
Laid = tuple[Scope, Array]
CELLS = 1 << 21


def minimise_out(factors: Sequence[Laid], keep: Scope) -> Array:
    """The minimum over all variables but `keep` of the factors' sum, cheapest variable first."""
    pool, sizes = list(factors), {v: n for scope, table in factors for v, n in zip(scope, table.shape, strict=True)}
    while rest := sorted({v for scope, _ in pool for v in scope} - set(keep)):
        met = {v: tuple(dict.fromkeys(u for scope, _ in pool if v in scope for u in scope if u != v)) for v in rest}
        v = min(rest, key=lambda v: math.prod(sizes[u] for u in met[v]))
        out = _without(v, met[v], [f for f in pool if v in f[0]], sizes)
        pool = [f for f in pool if v not in f[0]] + [(met[v], out)]
    total = np.zeros([sizes[v] for v in keep])
    for scope, table in pool:
        total = total + align_axes(table, scope, keep)
    return total


def _without(v: int, scope: Scope, factors: Sequence[Laid], sizes: dict[int, int]) -> Array:
    """The minimum over v of the factors' sum, computed in blocks of options of v."""
    parts = [align_axes(table, s, (v, *scope)) for s, table in factors]
    out = np.full([sizes[u] for u in scope], math.inf)
    rows = max(1, CELLS // max(1, out.size))
    for start in range(0, sizes[v], rows):
        total = sum((part[start:start + rows] for part in parts), np.zeros(()))
        np.minimum(out, total.min(axis=0), out=out)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Beliefs:
    """An elimination of a problem at one multiplier, with downward messages as they are asked for.

        program    the elimination
        values     the table of each slot
        scopes     the scope of each factor and message
        step_of    variable -> its elimination
        user       message -> the elimination that uses it
        offset     seconds of every choice besides the factors
        rest       downward messages so far
    """

    program: EliminationProgram
    values: list[Array]
    scopes: tuple[Scope, ...]
    step_of: dict[int, Elimination]
    user: dict[int, Elimination]
    offset: float
    rest: dict[int, Array] = field(default_factory=dict)

    def marginal(self, v: int) -> Array:
        """The seconds of the best choice with each option of v pinned."""
        step = self.step_of[v]
        (output,) = step.outputs
        above = self.scopes[output], self._rest(output)
        return minimise_out([*map(self._factor, step.sources), above], (v,)) + self.offset

    def _factor(self, i: int) -> Laid:
        return self.scopes[i], self.values[self.program.slots[i]]

    def _rest(self, output: int) -> Array:
        """The downward message to `output`, computed from the root down."""
        path = [output]
        while path[-1] not in self.rest and path[-1] in self.user:
            path.append(self.user[path[-1]].outputs[0])
        for i in reversed(path):
            if i in self.rest:
                continue
            if i not in self.user:
                self.rest[i] = np.array(math.fsum(self._factor(r)[1].item() for r in self.program.roots if r != i))
                continue
            step = self.user[i]
            above = step.outputs[0]
            others = [self._factor(j) for j in step.sources if j != i]
            self.rest[i] = minimise_out([*others, (self.scopes[above], self.rest[above])], self.scopes[i])
        return self.rest[output]


def compute_beliefs(problem: Problem, lam: float = 0.0, tau: float = math.inf) -> Beliefs:
    """The beliefs of seconds + lam * retained bytes, on cells of at most `tau` transient bytes."""
    program = plan_exact_elimination(problem)
    values = messages(program, [price_options(table, lam, tau) for table in problem.tables])
    scopes = tuple(f.variables for f in problem.factors) + tuple(step.scope for step in program.steps)
    user = {i: step for step in program.steps for i in step.sources if i >= len(problem.factors)}
    step_of = {step.variable: step for step in program.steps}
    return Beliefs(program, values, scopes, step_of, user, problem.fixed_seconds)
