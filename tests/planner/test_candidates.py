"""Policies of recomputation as candidates of the outer search."""

import pytest

from autoddl.core.layout import Mesh
from autoddl.core.recompute import SEARCH
from autoddl.planner.candidates import policies_on


@pytest.mark.parametrize(("mesh", "policy", "expected"), [
    ("a=2,b=2,c=2", SEARCH, (SEARCH,)), ("a=2,b=2,c=2,d=2", SEARCH, ("none", "selective", "full")),
    ("a=2,b=2,c=2,d=2", "first-2", ("first-2",))])
def test_on_many_axes_a_search_tries_one_level_for_all_blocks(mesh: str, policy: str, expected: tuple[str, ...]
                                                              ) -> None:
    assert policies_on(Mesh.parse(mesh), policy) == expected
