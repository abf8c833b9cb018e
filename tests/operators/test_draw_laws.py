"""What is drawn follows from its place alone: pieces are slices of the whole, bit by bit, and laws are as named."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autoddl.core.layout import Mesh
from autoddl.operators.kernels.custom_ops import draw
from autoddl.operators.kernels.draws import LAWS, drawn
from autoddl.operators.rules.table import Option, options
from autoddl.operators.trials.cases import Case, case
from autoddl.operators.trials.trial import check

NUMBERS = {"uniform": (-1.0, 3.0), "normal": (1.0, 2.0), "log_normal": (0.0, 0.5), "exponential": (2.0, 0.0),
           "cauchy": (1.0, 2.0), "geometric": (0.3, 0.0), "kept": (0.8, 0.0), "whole": (-3, 5)}
"""Two numbers for each law."""
N = 1 << 18


def case_of(law: str) -> Case:
    return case("autoddl.draw", [8, 7, 10], law, *NUMBERS[law], torch.float32, key=3)


def splits(one: Case) -> Iterator[tuple[Mesh, Option]]:
    for mesh in (Mesh.parse("a=4"), Mesh.parse("a=2,b=2")):
        yield from ((mesh, option) for option in options(one.op, one.graph, mesh))


@pytest.mark.parametrize("law", LAWS)
def test_every_layout_draws_the_same_bits(law: str) -> None:
    one, tried = case_of(law), 0
    for mesh, option in splits(one):
        assert check(one, option, mesh, tolerance=0.0) == ()
        tried += 1
    assert tried == 4 + 4 * 4  # whole or along one of three dims, on each axis


@pytest.mark.parametrize("law", LAWS)
def test_odd_pieces_are_slices_of_the_whole_bit_by_bit(law: str) -> None:
    whole = drawn((37, 41), law, *NUMBERS[law], torch.float32, key=1, seed=2)
    for row, column, rows, columns in ((0, 0, 37, 40), (3, 1, 1, 1), (5, 7, 9, 13), (36, 40, 1, 1)):
        piece = drawn((rows, columns), law, *NUMBERS[law], torch.float32, key=1, seed=2,
                      index=((row, column), (37, 41)))
        assert torch.equal(piece, whole[row:row + rows, column:column + columns])


@pytest.mark.parametrize("law", LAWS)
def test_a_wider_dtype_draws_the_same(law: str) -> None:
    narrow, wide = (drawn((1000,), law, *NUMBERS[law], dtype, key=1) for dtype in (torch.float32, torch.float64))
    assert torch.equal(narrow.double(), wide)


def quantiles(law: str) -> Tensor:
    """The values below which a tenth, .., nine tenths of a continuous law lie."""
    p = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    a, b = NUMBERS[law]
    every: dict[str, Tensor] = {"uniform": a + (b - a) * p, "normal": a + b * torch.special.ndtri(p),
             "log_normal": (a + b * torch.special.ndtri(p)).exp(), "exponential": -torch.log1p(-p) / a,
             "cauchy": a + b * (math.pi * (p - 0.5)).tan()}
    return every[law]


@pytest.mark.parametrize("law", ["uniform", "normal", "log_normal", "exponential", "cauchy"])
def test_a_law_has_its_quantiles(law: str) -> None:
    values = drawn((N,), law, *NUMBERS[law], torch.float64, key=5)
    below = (values.unsqueeze(1) < quantiles(law)).double().mean(0)
    assert (below - torch.linspace(0.1, 0.9, 9)).abs().max() < 5 * 0.5 / N**0.5
    assert values.isfinite().all()


def test_laws_of_whole_numbers_have_their_shares() -> None:
    for k, share in enumerate(drawn((N,), "whole", -3, 5, torch.int64, key=1).add(3).bincount() / N):
        assert k < 8 and abs(share - 1 / 8) < 5 * 0.5 / N**0.5
    assert abs(drawn((N,), "kept", 0.8, 0.0, torch.float32, key=1).mean() - 0.8) < 5 * 0.4 / N**0.5
    waits = drawn((N,), "geometric", 0.3, 0.0, torch.float32, key=1)
    assert waits.min() == 1 and abs((waits == 1).float().mean() - 0.3) < 5 * 0.5 / N**0.5
    assert drawn((9,), "geometric", 1.0, 0.0, torch.float32).eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    values = drawn((N,), "uniform", 0.0, 1.0, dtype, key=1)
    assert values.min() >= 0 and values.max() < 1


def test_keys_and_seeds_draw_apart() -> None:
    made = [draw([N], "normal", 0.0, 1.0, torch.float64, key=key, seed=seed) for key, seed in ((0, 0), (1, 0), (0, 1))]
    for k, one in enumerate(made):
        for other in made[:k]:
            assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 5 / N**0.5
