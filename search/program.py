"""An elimination as a value: what is computed, in which order, and which variable each step removes.

    slot      where a table lives: 0..base-1 the problem's tables, then one per distinct message
    recipe    tables added with their axes lined up, and the minimum taken over local variable 0
    factor    a table laid over variables, by id: the problem's first, then the outputs of the steps

Equal recipes share one slot; a step is one occurrence, needed to walk back to a choice.
"""

from dataclasses import dataclass

__all__ = ["Part", "Program", "Recipe", "Step"]


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A table of a recipe: its slot, and for each axis the local variable (0: eliminated, 1..: the scope)."""

    slot: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The tables that are added; `shape` is the size of the eliminated variable, then those of the scope."""

    parts: tuple[Part, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One variable goes: `recipe` adds all its factors, `sources` are their ids, `outputs` the new factors' ids."""

    variable: int
    scope: tuple[int, ...]
    recipe: int
    sources: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Slots 0..base-1 are the problem's tables, slot base + i is the message of `recipes[computed[i]]`."""

    base: int
    recipes: tuple[Recipe, ...]
    computed: tuple[int, ...]
    steps: tuple[Step, ...]
    slots: tuple[int, ...]
    roots: tuple[int, ...]
    exact: bool

    def messages(self) -> list[tuple[int, Recipe]]:
        """Every distinct message in the order of computation, with its slot."""
        return [(self.base + i, self.recipes[r]) for i, r in enumerate(self.computed)]
