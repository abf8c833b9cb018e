"""Choices as columns of numbers say what they say in words."""

import random

import numpy as np
import pytest
import zoo

from autoddl.capture.capture import capture
from autoddl.core.hubs import planned
from autoddl.core.layout import Mesh, local_shape
from autoddl.core.layout_codes import distinct, layouts_of, legal_layouts, legal_states, number_of, numbers, pieces
from autoddl.pricing.choices import Choices, numbered
from autoddl.pricing.space import variables

MESH = Mesh.parse("a=2,b=3,c=2")


def test_columns_and_words_are_the_same_choices() -> None:
    graph = planned(capture(*zoo.mixture()).graph)
    for choices in {id(v.choices): v.choices for v in variables(graph, MESH)}.values():
        assert isinstance(choices, Choices)
        words = tuple(choices)
        again = numbered(words)
        assert tuple(again) == words and len(words) == len(choices) and len(set(words)) == len(words)
        assert choices[len(words) - 1] == choices[-1] == words[-1] and choices[1:3] == words[1:3]
        assert tuple(choices.only(np.arange(len(words)) % 2 == 0)) == words[::2]
        with pytest.raises(IndexError):
            choices[len(words)]


@pytest.mark.parametrize("shape", [(), (12,), (7, 12), (1, 5, 24)])
def test_pieces_are_what_rank_0_holds(shape: tuple[int, ...]) -> None:
    states, layouts = legal_states(shape, MESH), legal_layouts(shape, MESH)
    assert [number_of(layout) for layout in layouts] == numbers(states).tolist()
    assert layouts_of(numbers(states), 3) == list(layouts)
    assert list(map(tuple, pieces(shape, states, MESH).tolist())) == [local_shape(shape, one, MESH) for one in layouts]


@pytest.mark.parametrize("largest", [1, 9, 2**40])
def test_distinct_rows_come_in_the_order_of_their_first(largest: int) -> None:
    rng = random.Random(largest)
    few = [[rng.randint(-largest, largest) for _ in range(3)] for _ in range(5)]
    rows = [tuple(rng.choice(values) for values in few) for _ in range(200)]
    first, kinds = distinct([np.array(column) for column in zip(*rows, strict=True)])
    every = list(dict.fromkeys(rows))
    assert [rows[i] for i in first] == every and [every[kind] for kind in kinds] == rows
    assert [rows.index(row) for row in every] == first.tolist()
