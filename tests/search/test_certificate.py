"""Certificates: what they prove is true, whatever is in them, and they share no code with the solver."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_problems import blocks, least_bytes, random_problem
from sampling import parametrize_or_slow

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.search import solve
from autoddl.search.certify.certificate import Certificate, Message, Piece, check_certificate
from autoddl.search.certify.prove import prove


def test_the_checker_knows_nothing_of_the_solver() -> None:
    folder, seen, todo = Path(autoddl.__file__).parent, set[str](), ["search.certify.certificate"]
    while todo:
        name = todo.pop()
        seen.add(name)
        tree = ast.parse((folder / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        todo += [m.removeprefix("autoddl.") for m in imports if m.startswith("autoddl.") and
                 m.removeprefix("autoddl.") not in seen]
    assert seen == {"search.certify.certificate", "search.certify.reparametrization", "core.problem", "core.cost_table",
                    "core.errors"}


@parametrize_or_slow("start", [0], range(25, 300, 25))
def test_what_is_proved_is_true(start: int) -> None:
    for seed in range(start, start + 25):
        problem = random_problem(seed)
        try:
            best = solve(problem, "exhaustive").seconds
        except Infeasible:
            best = math.inf
        target = best if math.isfinite(best) else 100.0
        bound = check_certificate(problem, prove(problem, target)).bound
        assert bound <= best + 1e-9, seed
        free = replace(problem, budget=None)
        try:
            least = solve(free, "exhaustive").seconds
        except Infeasible:
            continue
        for asked in (least, 2 * least + 1):
            assert check_certificate(free, prove(free, asked)).bound == pytest.approx(least, rel=1e-12), seed


@parametrize_or_slow("share,depth", [(0.5, 6)], [(0.5, 10), (0.2, 24), (0.5, 24), (0.8, 24)])
def test_a_budget_costs_a_small_gap_only(share: float, depth: int) -> None:
    free = blocks(depth, 12, depth // 2)
    most, least = solve(free).nbytes, least_bytes(free)
    problem = blocks(depth, 12, depth // 2, budget=least + share * (most - least))
    found = solve(problem)
    checked = check_certificate(problem, prove(problem, found.seconds))
    assert found.seconds * (1 - 1e-2) <= checked.bound <= found.seconds * (1 + 1e-12)
    assert max(checked.multipliers) > 0


def test_branches_close_the_gap_of_a_budget() -> None:
    """Small problems under budgets that bind are proved to the last digit; whoever drops a branch proves nothing."""
    branched = 0
    for seed in range(120):
        problem = random_problem(seed)
        try:
            best = solve(problem, "exhaustive").seconds
        except Infeasible:
            continue
        certificate = prove(problem, best)
        assert check_certificate(problem, certificate).bound == pytest.approx(best, rel=1e-8), seed
        narrow = [piece for piece in certificate.pieces if isinstance(piece, Piece) and piece.allowed]
        if narrow and problem.budget is not None and min(piece.low for piece in narrow) < problem.budget:
            branched += 1
            others = tuple(piece for piece in certificate.pieces if piece is not narrow[0])
            with pytest.raises(AssertionError, match="leaves out"):
                check_certificate(problem, Certificate(others))
    assert branched > 5


def test_equal_blocks_are_checked_once() -> None:
    few, many = (check_certificate(p, prove(p, 0.0)) for p in (blocks(16, 8, 6), blocks(256, 8, 6)))
    assert many.inequalities > 15 * few.inequalities
    assert many.distinct <= 2 * few.distinct


def test_a_wrong_certificate_proves_less_not_more() -> None:
    random = np.random.default_rng(0)
    for seed in range(60):
        problem = replace(random_problem(seed), budget=None)
        try:
            best = solve(problem, "exhaustive").seconds
        except Infeasible:
            continue
        (piece,) = prove(problem, best).pieces
        for raised in (0.01, 1.0):
            tables = tuple(table + raised * random.random(table.shape) for table in piece.tables)
            wrong = Certificate((replace(piece, tables=tables),))
            assert check_certificate(problem, wrong).bound <= best + 1e-9, seed


def test_what_cannot_be_a_proof_is_refused() -> None:
    problem = blocks(2, 3, 3)
    (piece,) = prove(problem, 0.0).pieces
    assert isinstance(piece, Piece)
    twice = replace(piece, messages=(*piece.messages, Message((0,), (), len(piece.tables) - 1)))
    with pytest.raises(AssertionError, match="twice"):
        check_certificate(problem, Certificate((twice,)))
    with pytest.raises(AssertionError, match="leaves out"):
        check_certificate(problem, Certificate((replace(piece, low=1.0, high=3.0),)))
    with pytest.raises(AssertionError, match="without a budget"):
        check_certificate(problem, Certificate((replace(piece, lam=0.5),)))
    forbidding = tuple(np.full(table.shape, math.inf) for table in piece.tables)
    with pytest.raises(AssertionError, match="forbids"):
        check_certificate(problem, Certificate((replace(piece, tables=forbidding),)))
