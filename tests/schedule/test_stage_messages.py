"""A tensor goes whole from any layout on one mesh to any layout on another, and no element twice to a receiver."""

from itertools import product
from math import prod

import pytest
import torch

from autoddl.core.layout import Layout, Mesh, extents
from autoddl.schedule.stage_messages import busiest, messages

MESHES = ("one=1", "a=2", "a=3", "a=2,b=2", "a=4")
SHAPES = ((6, 4), (5, 3), (1, 2), ())


def layouts(mesh: Mesh, dims: int) -> list[Layout]:
    states = ["B", *(f"S({d})" for d in range(dims))]
    return [Layout.parse(" ".join(one)) for one in product(states, repeat=len(mesh.axes))]


def cut(whole: torch.Tensor, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    for dim, (start, size) in enumerate(box):
        whole = whole.narrow(dim, start, size)
    return whole


@pytest.mark.parametrize("shape", SHAPES)
def test_every_receiver_gets_its_piece_from_what_senders_have(shape: tuple[int, ...]) -> None:
    whole = torch.arange(1.0, prod(shape) + 1).reshape(shape)
    for one, other in product(map(Mesh.parse, MESHES), repeat=2):
        for source, target in product(layouts(one, len(shape)), layouts(other, len(shape))):
            got, times = ([torch.zeros(shape) for _ in range(other.size)] for _ in range(2))
            for sent in messages(shape, source, one, target, other):
                held = extents(shape, source, one, one.coordinate(sent.sender))
                assert all(a <= start and start + n <= a + size
                           for (a, size), (start, n) in zip(held, sent.box, strict=True)), "sends what it has"
                cut(got[sent.receiver], sent.box).copy_(cut(whole, sent.box))
                cut(times[sent.receiver], sent.box).add_(1)
            for rank in range(other.size):
                wanted = extents(shape, target, other, other.coordinate(rank))
                assert torch.equal(cut(got[rank], wanted), cut(whole, wanted))
                assert times[rank].sum() == cut(whole, wanted).numel() and times[rank].max() <= 1


def test_equal_layouts_on_equal_meshes_are_one_message_to_the_same_place() -> None:
    mesh = Mesh.parse("a=2,b=2")
    for layout in layouts(mesh, 2):
        found = messages((6, 4), layout, mesh, layout, mesh)
        assert [(sent.sender, sent.receiver) for sent in found] == [(rank, rank) for rank in range(4)]


def test_replicas_share_the_sending() -> None:
    one, four = Mesh.parse("a=2"), Mesh.parse("a=4")
    assert busiest((8, 2), Layout.parse("B"), one, Layout.parse("S(0)"), four) == 8
