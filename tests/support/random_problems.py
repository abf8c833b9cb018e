"""Random cost networks: small problems, stacks of equal blocks."""

import math
from itertools import pairwise

import numpy as np
import pytest

from autoddl.core.errors import Infeasible
from autoddl.core.problem import Array, Factor, Problem, Table
from autoddl.search import solve


def table(random: np.random.Generator, shape: tuple[int, ...], forbidden: float = 0.1, tied: bool = False) -> Table:
    """Random seconds and bytes; `tied` draws few distinct values, so that many choices are equally good."""
    price: Array = np.asarray(random.integers(1, 4, shape) * 0.25 if tied else random.random(shape), np.float64)
    seconds: Array = np.where(random.random(shape) < forbidden, math.inf, price)
    retained: Array = random.integers(0, 8, shape) * (np.ones(shape) if tied else random.random(shape))
    return Table(seconds, retained, random.choice([0.0, 1.0, 3.0, 6.0, 9.0], shape))


def random_edges(random: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    """A chain, a tree or a chain with residuals, and now and then a factor of three."""
    kind = random.integers(4)
    if kind == 0:
        return list(pairwise(range(count)))
    if kind == 1:
        return [(int(random.integers(i)), i) for i in range(1, count)]
    edges: list[tuple[int, ...]] = [*pairwise(range(count)), *((i, i + 2) for i in range(0, count - 2, 2))]
    return [*edges, (0, 1, count - 1)] if kind == 3 and count > 2 else edges


def random_problem(seed: int) -> Problem:
    """Seven variables or fewer; equal sizes share tables, as repeated blocks do; often a budget that binds."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 8))
    sizes = [int(random.integers(1, 6))] * count if random.random() < 0.5 else random.integers(1, 6, count).tolist()
    shared, tied = random.random() < 0.5, random.random() < 0.3
    pool: dict[tuple[int, ...], int] = {}
    tables: list[Table] = []
    factors = []
    for scope in [*((v,) for v in range(count)), *random_edges(random, count)]:
        order = tuple(random.permutation(scope).tolist())
        shape = tuple(sizes[v] for v in order)
        if not shared or shape not in pool:
            pool[shape] = len(tables)
            tables.append(table(random, shape, tied=tied))
        factors.append(Factor(order, pool[shape]))
    budget = None if random.random() < 0.3 else float(random.random() * 6 * len(factors) + 6)
    names = tuple(f"v{v}" for v in range(count))
    return Problem(names, tuple(sizes), tuple(tables), tuple(factors), budget, 0.5, 2.0)


def blocks(depth: int, width: int, size: int, budget: float | None = None, seed: int = 0) -> Problem:
    """A stack of equal blocks of `width` variables, with a residual over each; the last block is `width` further."""
    random = np.random.default_rng(seed)
    inner = [table(random, (size, size), 0.2) for _ in range(width)]
    tables = (*inner, table(random, (size,), 0.0), table(random, (size, size), 0.0))
    factors = []
    for block in range(depth):
        start = block * width
        factors += [Factor((start + i, start + i + 1), i) for i in range(width)]
        factors += [Factor((start, start + width), width + 1), Factor((start,), width)]
    count = depth * width + 1
    return Problem(tuple(map(str, range(count))), (size,) * count, tables, tuple(factors), budget)


def stack(seed: int, blocks: int, shuffled: float = 0.2) -> Problem:
    """Blocks of one to four variables of various sizes, joined by one to three factors, some of three variables; often
    with something before and behind, with a variable that all blocks know, and with variables in another order, which
    is as often as `shuffled` says."""
    random = np.random.default_rng(seed)
    width, tied = int(random.integers(1, 5)), random.random() < 0.3
    sizes = random.integers(1, 5, width).tolist()
    inside = [(i, int(random.integers(i))) for i in range(1, width)]
    across = [(int(random.integers(width)), width + int(random.integers(width))) for _ in range(random.integers(1, 4))]
    wide = [(0, width - 1, width)] if width > 1 and random.random() < 0.4 else []
    before, behind = (int(n) for n in random.integers(0, 4, 2))
    knows_all = bool(random.random() < 0.3)
    count = before + blocks * width + behind + knows_all
    size = [2] * before + sizes * blocks + [3] * behind + [3] * knows_all
    patterns = [(i,) for i in range(width)] + inside + across + wide
    tables = [table(random, tuple(sizes[i % width] for i in p), 0.05, tied) for p in patterns]
    factors = [Factor(tuple(before + b * width + i for i in p), t) for b in range(blocks)
               for t, p in enumerate(patterns) if b < blocks - 1 or max(p) < width]
    ends = [(v, v + 1) for v in range(before)] + [(v - 1, v) for v in range(before + blocks * width, count - knows_all)]
    for scope in ends:
        tables.append(table(random, tuple(size[v] for v in scope), 0.05, tied))
        factors.append(Factor(scope, len(tables) - 1))
    if knows_all:
        tables.append(table(random, (3, sizes[0]), 0.05, tied))
        factors += [Factor((count - 1, before + b * width), len(tables) - 1) for b in range(blocks)]
    moved = random.permutation(count) if random.random() < shuffled else np.arange(count)
    laid = tuple(Factor(tuple(int(moved[v]) for v in f.variables), f.table) for f in factors)
    shape = np.empty(count, dtype=int)
    shape[moved] = size
    return Problem(tuple(map(str, range(count))), tuple(shape.tolist()), tuple(tables), laid, None, 0.5, 2.0)


def least_bytes(problem: Problem) -> float:
    starved = Problem(problem.names, problem.sizes, problem.tables, problem.factors, -1.0)
    with pytest.raises(Infeasible) as caught:
        solve(starved)
    return caught.value.needed
