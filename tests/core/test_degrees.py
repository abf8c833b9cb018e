"""Degrees as text: read, written again, filled in for a number of ranks, and refused with the way out."""

import re

import pytest

from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError


@pytest.mark.parametrize("text", ["tp=8,dp=4,zero=1", "dp=4,zero=3,shard=2", "tp=2,sp", "cp=2,ep=2,pp=4", "tp=1",
                                  "cp=4,zero=3,ring", "tp=2,pp=4,vp=2",
                                  "tp=4,cp=2,dp=8,pp=2,zero=1,sp,recompute=selective"])
def test_degrees_round_trip(text: str) -> None:
    assert str(Degrees.parse(text)) == text
    assert Degrees.parse(str(Degrees.parse(text))) == Degrees.parse(text)


def test_the_order_and_spaces_do_not_matter() -> None:
    assert Degrees.parse(" sp , dp = 4, tp=8 ") == Degrees(tp=8, dp=4, sp=True)


def test_dp_is_what_the_others_leave() -> None:
    assert Degrees.parse("tp=4,pp=2").on(32).dp == 4


@pytest.mark.parametrize(("text", "message"), [
    ("", "says no degree"), ("tp", "tp is a number of at least 1"), ("tp=0", "at least 1"), ("zero=4", "zero is 0, 1"),
    ("td=2", "there is no degree 'td'"), ("tp=2,tp=4", "gives tp twice"), ("sp=2,tp=2", "sp has no number"),
    ("sp", "tp is 1"), ("shard=2", "zero is 0"), ("dp=4,ep=3", "3 must divide 4"),
    ("recompute=all", "recompute is none"), ("tp=2,ring", "cp is 1"), ("cp=2,ring=2", "ring has no number"),
    ("tp=2,vp=2", "pp is 1"), ("pp=2,vp=0", "at least 1")])
def test_what_are_no_degrees_says_why(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Degrees.parse(text)


@pytest.mark.parametrize("text", ["tp=3", "tp=2,dp=8", "dp=4"])
def test_degrees_multiply_to_the_ranks(text: str) -> None:
    with pytest.raises(InputError, match="the cluster has 8"):
        Degrees.parse(text).on(8)
