"""A bound of a problem by a linear program, which shares nothing with the solvers: OR-Tools' simplex finds multipliers,
and what they prove is added up here in float64.

    x[v, k], z[f, c], t >= 0     options, cells of a factor over its classes, transient bytes
    sum over k of x[v, k] = 1    sum of z[f, c] over the cells of a class = sum of x over its options
    with a budget                sum of retained(c) z[f, c] + t <= room,   t >= sum over c of transient(c) z[f, c]
    any y, of the right sign     least >= b y + sum over columns of min(0, cost - A' y) * (most that the column can be)

So a wrong y, or a simplex that is wrong, only weakens the bound.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder

from autoddl.core.problem import Factor, Problem

__all__ = ["linear_bound"]


@dataclass
class _Program:
    """Rows (sense, right side), columns (cost, most), and entries (row, column, value)."""

    rows: list[tuple[str, float]] = field(default_factory=list)
    columns: list[tuple[float, float]] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)

    def row(self, sense: str, right: float) -> int:
        self.rows.append((sense, right))
        return len(self.rows) - 1

    def column(self, cost: float, most: float = 1.0) -> int:
        self.columns.append((cost, most))
        return len(self.columns) - 1

    def text(self) -> str:
        """As MPS."""
        of = [[f" c{j} cost {cost!r}"] for j, (cost, _) in enumerate(self.columns)]
        for i, j, value in self.entries:
            of[j].append(f" c{j} r{i} {value!r}")
        return "\n".join([
            "NAME p", "ROWS", " N cost", *(f" {sense} r{i}" for i, (sense, _) in enumerate(self.rows)),
            "COLUMNS", *(line for column in of for line in column),
            "RHS", *(f" b r{i} {right!r}" for i, (_, right) in enumerate(self.rows) if right),
            "BOUNDS", *(f" UP u c{j} {most!r}" for j, (_, most) in enumerate(self.columns)), "ENDATA", ""])

    def multipliers(self, limit: float) -> NDArray[np.float64]:
        model: Any = model_builder.Model()  # type: ignore[no-untyped-call]
        solver = model_builder.Solver("GLOP")
        assert model.import_from_mps_string(self.text())
        assert model.num_constraints == len(self.rows) and model.num_variables == len(self.columns)
        solver.set_time_limit_in_seconds(limit)
        if solver.solve(model) != model_builder.SolveStatus.OPTIMAL:
            return np.zeros(len(self.rows))
        return np.array([solver.dual_value(c) for c in model.get_linear_constraints()])

    def proved(self, y: NDArray[np.float64]) -> float:
        """What multipliers prove, whatever they are."""
        senses, right = (np.array(part) for part in zip(*self.rows, strict=True))
        y = np.where(senses == "L", np.minimum(y, 0.0), np.where(senses == "G", np.maximum(y, 0.0), y))
        i, j, value = (np.array(part) for part in zip(*self.entries, strict=True))
        cost, most = (np.array(part) for part in zip(*self.columns, strict=True))
        reduced = cost - np.bincount(j, value * y[i], len(cost))
        return math.fsum([*(right * y), *(np.minimum(reduced, 0.0) * most)])


def linear_bound(problem: Problem, seconds: float, limit: float = 60.0) -> float:
    """No choice takes less; `seconds`, about the least, is the unit."""
    program = _Program()
    options = [[program.column(0.0) for _ in range(size)] for size in problem.sizes]
    for row in options:
        whole = program.row("E", 1.0)
        program.entries += [(whole, x, 1.0) for x in row]
    bytes_ = None
    if problem.budget is not None:
        room = problem.budget - problem.fixed_bytes
        total, most = program.row("L", 1.0), program.column(0.0)
        program.entries.append((total, most, 1.0))
        bytes_ = room, total, most
    for factor in problem.factors:
        _lay(program, problem, factor, options, seconds, bytes_)
    return problem.fixed_seconds + seconds * program.proved(program.multipliers(limit))


def _lay(program: _Program, problem: Problem, factor: Factor, options: list[list[int]], seconds: float,
         bytes_: tuple[float, int, int] | None) -> None:
    """The columns of one factor."""
    table = problem.tables[factor.table]
    sums = [[program.row("E", 0.0) for _ in range(n)] for n in table.core[0].shape]
    for axis, v in enumerate(factor.variables):
        program.entries += [(sums[axis][c], x, -1.0)
                            for x, c in zip(options[v], table.classes[axis].tolist(), strict=True)]
    moment = program.row("G", 0.0) if bytes_ and table.core[2].any() else None
    if bytes_ and moment is not None:
        program.entries.append((moment, bytes_[2], 1.0))
    for cell in np.argwhere(np.isfinite(table.core[0])).tolist():
        cost, retained, transient = (float(part[tuple(cell)]) for part in table.core)
        z = program.column(cost / seconds)
        program.entries += [(sums[axis][c], z, 1.0) for axis, c in enumerate(cell)]
        if bytes_ and retained:
            program.entries.append((bytes_[1], z, retained / bytes_[0]))
        if bytes_ and moment is not None and transient:
            program.entries.append((moment, z, -transient / bytes_[0]))
