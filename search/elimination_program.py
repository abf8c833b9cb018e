"""Describes an elimination as a value: its messages, their order, and the variables behind each of them.

    slot      where a table lives: 0..base-1 the problem's tables, then one per distinct message
    recipe    tables added with their axes lined up, and the minimum taken over local variable 0
    factor    a table laid over variables, by id: the problem's first, then the outputs of the steps
    ids       of a factor: the positions of the variables eliminated to make it, its own first, then those behind each
              message among its recipe's parts, in their order. Equal slots have them in equal order.

Equal recipes share one slot; a step is one occurrence. A choice is read from the tops, the messages with an empty
scope: each slot's options in the order of `ids`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Elimination", "EliminationProgram", "Ids", "MessageRecipe", "RecipePart", "Top"]

Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True, order=True)
class RecipePart:
    """A table of a recipe: its slot, and for each axis the local variable (0: eliminated, 1..: the scope)."""

    slot: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MessageRecipe:
    """The tables that are added; `shape` is the size of the eliminated variable, then those of the scope."""

    parts: tuple[RecipePart, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Elimination:
    """The elimination of one variable: `recipe` adds its factors, the ids `sources`; `outputs` are the new factors."""

    variable: int
    scope: tuple[int, ...]
    recipe: int
    sources: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Top:
    """A message with an empty scope: its slot, and the positions of the variables behind it."""

    slot: int
    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class EliminationProgram:
    """All eliminations of a problem.

        base        slots 0..base-1 are the problem's tables
        recipes     the distinct recipes
        computed    slot base + i is the message of recipe computed[i]
        steps       the elimination of each variable; empty for a folded problem
        slots       the slot of each factor; empty for a folded problem
        roots       the factors with an empty scope; empty for a folded problem
        exact       whether no message was too large and had to be split
        tops        the messages with an empty scope
        count       number of positions
    """

    base: int
    recipes: tuple[MessageRecipe, ...]
    computed: tuple[int, ...]
    steps: tuple[Elimination, ...]
    slots: tuple[int, ...]
    roots: tuple[int, ...]
    exact: bool
    tops: tuple[Top, ...]
    count: int

    def messages(self) -> list[tuple[int, MessageRecipe]]:
        """Every distinct message in the order of computation, with its slot."""
        return [(self.base + i, self.recipes[r]) for i, r in enumerate(self.computed)]

    def recipe_of(self, slot: int) -> MessageRecipe:
        """The recipe of a message."""
        return self.recipes[self.computed[slot - self.base]]

    def parts(self, slot: int, cell: tuple[int, ...], k: int) -> list[tuple[int, tuple[int, ...]]]:
        """The messages among the parts of a message, each with its cell, where the eliminated variable takes k."""
        return [(p.slot, tuple([cell[a - 1] if a else k for a in p.axes]))
                for p in self.recipe_of(slot).parts if p.slot >= self.base]
