"""Captures the model with one of several microbatches of a batch, as seldom as possible.

The first two numbers of microbatches that are asked for are captured. The graphs of other numbers are derived from
these (`batch_scaling`), which is enough for searching. The number that is planned for is captured too, and its graph
must equal the derived one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.planner.batch_scaling import scaled_sample, stretched

__all__ = ["Variant", "Variants"]


@dataclass(frozen=True, slots=True)
class Variant:
    """The model captured with one microbatch: its planned graph with hubs, the captured one, the sample's shapes.

    `notes` are lines on what is around the module and not in the graph.
    """

    graph: Graph
    original: Graph
    spec: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Variants:
    """The variants of a model by number of microbatches, each made once; `part` captures one."""

    part: Callable[[int], Variant]
    captured: dict[int, Variant] = field(default_factory=dict)
    guessed: dict[int, Variant] = field(default_factory=dict)

    def has(self, microbatches: int) -> bool:
        """Whether the variant is known without capturing."""
        return self._guess(microbatches) is not None

    def __call__(self, microbatches: int) -> Variant:
        return self._guess(microbatches) or self.confirmed(microbatches)

    def confirmed(self, microbatches: int) -> Variant:
        """The captured variant. Raises InputError if the derived one, which was searched, is another."""
        if microbatches not in self.captured:
            self.captured[microbatches] = self.part(microbatches)
        found, guess = self.captured[microbatches], self.guessed.get(microbatches)
        if guess is not None and guess.original != found.original:
            raise InputError(f"the model with {microbatches} microbatches is not its smaller self with other sizes; "
                             f"plan with microbatches={microbatches} alone")
        return found

    def _guess(self, microbatches: int) -> Variant | None:
        if microbatches in self.captured:
            return self.captured[microbatches]
        if microbatches not in self.guessed and len(self.captured) > 1:
            (m1, first), (m2, second) = sorted(self.captured.items())[:2]
            graph = stretched(first.original, m1, second.original, m2, microbatches)
            if graph is not None:
                spec = scaled_sample(first.spec, m1, microbatches)
                self.guessed[microbatches] = Variant(add_hubs(graph), graph, spec)
        return self.guessed.get(microbatches)
