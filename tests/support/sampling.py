"""A few cases by default and all of them in the slow form (`make test-all`).

    @parametrize_or_slow("name", ["gpt", "t5"], ["bert", "vit"])      the second list is marked slow
    @few_seeds(30, 120)                                               `seeds` is range(30), and range(120) marked slow
"""

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["few_seeds", "parametrize_or_slow"]


def parametrize_or_slow(names: str, usual: Sequence[Any], slow: Sequence[Any]) -> pytest.MarkDecorator:
    """pytest.mark.parametrize over both lists, the cases of `slow` with that mark."""
    several = "," in names
    rest = [pytest.param(*(case if several else (case,)), marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize(names, [*usual, *rest])


def few_seeds(few: int, every: int) -> pytest.MarkDecorator:
    """The argument `seeds`: the first `few`, and marked slow all of `every`."""
    return pytest.mark.parametrize("seeds", [range(few), pytest.param(range(every), marks=pytest.mark.slow)],
                                   ids=["few", "every"])
