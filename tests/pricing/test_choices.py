"""Choices as columns of numbers say what they say in words."""

import random

import numpy as np
import pytest
import zoo

from autoddl.capture.capture import capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh, local_shape
from autoddl.core.layout_codes import (
    decode_layouts,
    distinct_rows,
    encode_layout,
    encode_states,
    legal_layouts,
    legal_states,
    local_shapes,
)
from autoddl.pricing.choices import Choices, numbered
from autoddl.pricing.space import variables

MESH = Mesh.parse("a=2,b=3,c=2")


def test_columns_and_words_are_the_same_choices() -> None:
    graph = add_hubs(capture(*zoo.mixture()).graph)
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
    assert [encode_layout(layout) for layout in layouts] == encode_states(states).tolist()
    assert decode_layouts(encode_states(states), 3) == list(layouts)
    shapes = [tuple(row) for row in local_shapes(shape, states, MESH).tolist()]
    assert shapes == [local_shape(shape, one, MESH) for one in layouts]


@pytest.mark.parametrize("largest", [1, 9, 2**40])
def test_distinct_rows_come_in_the_order_of_their_first(largest: int) -> None:
    rng = random.Random(largest)
    few = [[rng.randint(-largest, largest) for _ in range(3)] for _ in range(5)]
    rows = [tuple(rng.choice(values) for values in few) for _ in range(200)]
    first, kinds = distinct_rows([np.array(column) for column in zip(*rows, strict=True)])
    every = list(dict.fromkeys(rows))
    assert [rows[i] for i in first] == every and [every[kind] for kind in kinds] == rows
    assert [rows.index(row) for row in every] == first.tolist()
