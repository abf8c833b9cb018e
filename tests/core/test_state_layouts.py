"""What is split on every axis: as text, as layouts between the stored one and those of use, as steps."""

import pytest

from autoddl.core.conversion import Step
from autoddl.core.errors import InputError
from autoddl.core.layout import Layout, Mesh
from autoddl.core.state_layouts import divide_steps, kept_layout, parse_depths, show_depths, summed_layout

MESH = Mesh.parse("net=2,node=4")


def layout(text: str) -> Layout:
    return Layout.parse(text)


def test_depths_are_text() -> None:
    stored = layout("S(1) S(0) B")
    for text, depths in (("OGW O -", (2, 0, 0)), ("OG OGW -", (1, 2, 0))):
        assert show_depths(stored, depths) == text and parse_depths(text) == depths
    with pytest.raises(InputError, match="'OW -' does not say what is split"):
        parse_depths("OW -")


def test_weights_and_gradients_lie_between() -> None:
    stored, used, yielded = layout("S(1) S(0)"), layout("B B"), layout("P P")
    assert kept_layout(stored, used, (0, 2)) == layout("B S(0)")
    assert kept_layout(stored, used, (2, 2)) == stored and kept_layout(stored, used, (1, 0)) == used
    assert summed_layout(stored, yielded, (0, 2)) == layout("P S(0)")
    assert summed_layout(stored, yielded, (0, 0)) == yielded
    assert kept_layout(layout("B S(0)"), used, (0, 2)) == layout("B S(0)")


def test_steps_are_divided_where_they_pass() -> None:
    steps = [Step.parse(text, MESH) for text in ("net: S(1)->B", "node: S(0)->B")]
    first, second = divide_steps(steps, layout("S(1) S(0)"), layout("B S(0)"))
    assert [*first, *second] == steps and len(first) == 1
    assert divide_steps(steps, layout("S(1) S(0)"), layout("S(1) S(0)")) == ((), tuple(steps))
    with pytest.raises(InputError, match="do not pass S\\(1\\) B"):
        divide_steps(steps, layout("S(1) S(0)"), layout("S(1) B"))
