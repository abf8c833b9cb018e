"""Makes a certificate of a problem: the messages of an elimination, each with the factors that it replaces.

    no budget, or one that does not bind    one piece with lam = 0: its bound is the optimum
    a budget that binds                     pieces for ranges of transients and branches of options (`branch`)
    too large for elimination               costs that factors move to their variables, at the best multiplier found

The difference between the bound and a plan is the duality gap of branches for which no effort was left.
"""

import math

from autoddl.core.problem import Array, Problem
from autoddl.search import elimination_space
from autoddl.search.certify.branch import Branch, branch_until_close, transient_ranges
from autoddl.search.certify.certificate import Certificate, Message, Piece
from autoddl.search.certify.reparametrization import ReparametrizedPiece
from autoddl.search.elimination import messages
from autoddl.search.elimination_order import plan_exact_elimination
from autoddl.search.elimination_program import EliminationProgram
from autoddl.search.large import prove_by_messages
from autoddl.search.relaxations import Space, least_transient, price_options

__all__ = ["NEAR", "program_messages", "prove"]

NEAR = 5e-4
"""The relative gap at which the proof of a large problem is good enough."""


def program_messages(program: EliminationProgram) -> tuple[Message, ...]:
    """The messages of `program`, each with the factors that it replaces; those of one recipe name one table."""
    return tuple(Message(step.sources, step.scope, program.slots[step.outputs[0]] - program.base)
                 for step in program.steps)


def prove(problem: Problem, seconds: float) -> Certificate:
    """A certificate whose bound is as near to `seconds`, the cost of the plan at hand, as multipliers bring it."""
    if elimination_space(problem) is None:
        return Certificate((_reparametrized_piece(problem, seconds),))
    space = Space.of(problem, plan_exact_elimination(problem))
    roots = [Branch(space, low, high, lam, ()) for low, high, lam in transient_ranges(space, seconds)]
    return Certificate(tuple(map(_piece, branch_until_close(problem, roots, seconds))))


def _piece(branch: Branch) -> Piece:
    """The piece of a branch: the messages of its elimination."""
    space, tau = branch.space, branch.tau
    values = messages(space.program, [price_options(table, branch.lam, tau) for table in space.problem.tables])
    return Piece(space.thresholds[branch.low], tau, branch.lam, program_messages(space.program),
                 tuple(values[space.program.base:]), branch.allowed)


def _reparametrized_piece(problem: Problem, seconds: float) -> ReparametrizedPiece:
    """One piece for all transient bytes; factors that move equal costs share one table."""
    lam, made = prove_by_messages(problem, seconds, NEAR)
    tables, number = list[Array](), dict[int, int]()
    for gift in (gift for both in made.values() for gift in both):
        if id(gift) not in number:
            number[id(gift)] = len(tables)
            tables.append(gift)
    every = tuple((i, tuple([number[id(gift)] for gift in both])) for i, both in made.items())
    return ReparametrizedPiece(least_transient(problem), math.inf, lam, every, tuple(tables))
