"""What a choice shows at one place: the layouts that an op writes at an output, or reads at an input.

Thousands of choices show few distinct values, so costs are computed per value and a choice names its value's class.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoddl.problem import Classes
from autoddl.routes import Routes
from autoddl.space import Choice

__all__ = ["Port", "Ports"]


@dataclass(frozen=True, slots=True, eq=False)
class Port:
    """The distinct values of something that choices have, and which of them each choice has."""

    values: tuple[tuple[Any, ...], ...]
    classes: Classes


def _port(choices: tuple[Choice, ...], pick: Callable[[Choice], tuple[Any, ...]]) -> Port:
    found: dict[tuple[Any, ...], int] = {}
    classes = np.array([found.setdefault(pick(choice), len(found)) for choice in choices], dtype=np.intp)
    return Port(tuple(found), classes)


class Ports:
    """Ports of the choices at hand, each found once: variables that are alike share their choices."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], tuple[tuple[Choice, ...], Port]] = {}
        self.back: dict[int, tuple[Routes, NDArray[np.float64]]] = {}
        self.found: dict[tuple[int, int, int], tuple[Port, Routes, Classes]] = {}

    def __call__(self, choices: tuple[Choice, ...], key: Hashable, pick: Callable[[Choice], tuple[Any, ...]]) -> Port:
        at = (id(choices), key)
        if at not in self.known:
            self.known[at] = choices, _port(choices, pick)
        return self.known[at][1]

    def positions(self, port: Port, k: int, table: Routes) -> Classes:
        """Where the routes have the k-th layout of every value."""
        at = (id(port), k, id(table))
        if at not in self.found:
            found = np.array([table.index[value[k]] for value in port.values], dtype=np.intp)
            self.found[at] = port, table, found
        return self.found[at][2]

    def turned(self, table: Routes) -> NDArray[np.float64]:
        """`seconds[j, i]`: the way back."""
        if id(table) not in self.back:
            self.back[id(table)] = table, np.ascontiguousarray(table.seconds.T)
        return self.back[id(table)][1]

    def writes(self, choices: tuple[Choice, ...], port: int) -> Port:
        return self(choices, ("write", port), lambda c: (c.outputs[port], c.wanted[port], c.regather))

    def reads(self, choices: tuple[Choice, ...], slot: int) -> Port:
        return self(choices, ("read", slot), lambda c: (c.inputs[slot], c.gradients[slot]))
