"""Layouts: their text, and that the pieces of all ranks make up the tensor exactly once."""

from itertools import product

import numpy as np
import pytest

from autoddl.core.errors import InputError
from autoddl.core.layout import B, Layout, Mesh, P, Split, State, extents, is_legal, local_shape, parse_state
from autoddl.core.layout_codes import legal_layouts

MESHES = ("a=2", "a=3", "a=2,b=2", "a=3,b=2", "a=2,b=2,c=3")
SHAPES = ((4, 6), (7, 5), (12,), (3, 8, 5))


@pytest.mark.parametrize("text", ["dp=4", "net=4,node=2", "net.1=2,net.0=2,node-package=8"])
def test_a_mesh_round_trips(text: str) -> None:
    assert str(Mesh.parse(text)) == text


@pytest.mark.parametrize("text", ["", "dp", "dp:4", "dp=0", "dp=2,dp=2", "4=dp", "dp=-1"])
def test_what_is_no_mesh_says_what_is(text: str) -> None:
    with pytest.raises(InputError, match="mesh"):
        Mesh.parse(text)


@pytest.mark.parametrize("text", ["S(0) B", "P S(1)", "B", "S(12) S(12) P"])
def test_a_layout_round_trips(text: str) -> None:
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["S0", "R", "S(-1)", "S()", "p"])
def test_what_is_no_state_says_what_is(text: str) -> None:
    with pytest.raises(InputError, match="no layout state"):
        parse_state(text)


def test_ranks_count_with_the_last_axis_fastest() -> None:
    mesh = Mesh.parse("a=2,b=3")
    assert mesh.strides == (3, 1)
    assert [mesh.coordinate(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.index("b") == 1
    with pytest.raises(InputError, match="no axis 'c'"):
        mesh.index("c")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pieces_make_up_the_tensor_once(mesh: str, shape: tuple[int, ...]) -> None:
    ranks = Mesh.parse(mesh)
    for layout in legal_layouts(shape, ranks, partial=False):
        copies = 1
        for axis, part in zip(ranks.axes, layout, strict=True):
            copies *= axis.size if part == B else 1
        seen = np.zeros(shape)
        for at in product(*(range(n) for n in ranks.sizes)):
            pieces = extents(shape, layout, ranks, at)
            assert all(size > 0 for _, size in pieces)
            seen[tuple(slice(o, o + n) for o, n in pieces)] += 1
        assert (seen == copies).all(), f"{layout} on {mesh} of {shape}"


def test_the_outer_split_cuts_first_and_rank_0_holds_the_largest() -> None:
    mesh, layout = Mesh.parse("a=2,b=2"), Layout.parse("S(0) S(0)")
    assert [extents((6,), layout, mesh, mesh.coordinate(r))[0] for r in range(4)] == [(0, 2), (2, 1), (3, 2), (5, 1)]
    assert local_shape((6,), layout, mesh) == (2,)
    assert local_shape((6,), layout, mesh, (1, 1)) == (1,)


@pytest.mark.parametrize(("shape", "mesh", "text", "legal"), [
    ((4,), "a=4", "S(0)", True), ((5,), "a=4", "S(0)", False), ((3,), "a=4", "S(0)", False),
    ((7,), "a=4", "S(0)", True),
    ((4, 4), "a=2,b=2", "S(0) S(0)", True), ((3, 4), "a=2,b=2", "S(0) S(0)", False), ((4,), "a=2", "S(1)", False),
    ((4,), "a=1", "S(0)", False), ((4,), "a=1", "B", True), ((4,), "a=1", "P", False)])
def test_legal_is_who_holds_something(shape: tuple[int, ...], mesh: str, text: str, legal: bool) -> None:
    assert is_legal(shape, Layout.parse(text), Mesh.parse(mesh)) is legal


def test_layouts_are_listed_once_and_partial_sums_on_request() -> None:
    mesh = Mesh.parse("a=2,b=2")
    every = legal_layouts((4, 4), mesh)
    assert len(every) == len(set(every)) == 16
    assert len(legal_layouts((4, 4), mesh, partial=False)) == 9
    assert Layout((P, Split(1))) in every


@pytest.mark.parametrize("shape", [(), (1,), (6, 5), (4, 1, 12), (16, 3, 8, 2)])
@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=3", "a=2,b=1,c=2", "a=2,b=2,c=3,d=2"])
@pytest.mark.parametrize("partial", [True, False])
def test_layouts_listed_are_those_that_are_legal_one_by_one(shape: tuple[int, ...], mesh: str, partial: bool) -> None:
    ranks = Mesh.parse(mesh)
    states: list[State] = [*(Split(d) for d in range(len(shape)) if shape[d] > 1), B, *([P] if partial else [])]
    every = (Layout(chosen) for chosen in product(states, repeat=len(ranks.axes)))
    assert legal_layouts(shape, ranks, partial) == tuple(one for one in every if is_legal(shape, one, ranks))


def test_a_tensor_of_more_dims_than_have_numbers_is_one_error() -> None:
    assert len(legal_layouts((2,) * 14, Mesh.parse("a=2"))) == 16
    with pytest.raises(InputError, match="15 dims"):
        legal_layouts((2,) * 15, Mesh.parse("a=2"))
