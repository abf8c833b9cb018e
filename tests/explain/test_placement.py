"""A plan's mesh axes lie along rows and columns of boards, where their rings share fewer links than anywhere else."""

import random

import pytest
import torch
from torch import nn

import autoddl
from autoddl.core.errors import InputError
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.cost_models.placement import Place, ring_load, row_by_row

TEXT = """name: hammingmesh
device: A100-80GB
levels:
  - {name: board, size: 4, bandwidth: 25 GB/s, latency: 1 us}
  - {name: net, size: 4, bandwidth: 25 GB/s, latency: 1 us}
"""
SIDE = 4


def groups(mesh: Mesh, axes: str) -> list[list[int]]:
    """The ranks of every group along mesh axes like `dp+tp`."""
    which = tuple(mesh.names.index(name) for name in axes.split("+"))
    found = {tuple(sum(c * stride for c, stride in zip(place, mesh.strides, strict=True))
                   for place in mesh.members(which, mesh.coordinate(rank))) for rank in range(mesh.size)}
    return [list(one) for one in sorted(found)]


def load_bytes(plan: Plan, places: tuple[Place, ...], board: int) -> float:
    """Bytes of each axis times the load of its rings, added up: seconds but for the bandwidth of a link."""
    return sum(nbytes * ring_load(groups(plan.mesh, axes), places, board)
               for axes, nbytes in plan.predicted.volume.items())


class Blocks(nn.Module):
    """Four wide products behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(x), x)


@pytest.mark.parametrize("board", [1, 2])
def test_the_placement_of_a_plan_beats_a_random_one(board: int) -> None:
    """Tensor parallelism in rows of four devices, data parallelism in columns: 20 random placements are all worse."""
    plan = autoddl.plan(Blocks(), parse_cluster(TEXT, "test"), (torch.zeros(64, 256),), mine="tp=4,dp=4", workers=1)
    assert {"dp", "tp"} <= set(plan.predicted.volume) and str(plan.mesh) == "dp=4,tp=4"
    own = load_bytes(plan, row_by_row(SIDE, 16), board)
    shuffled = []
    for seed in range(20):
        places = list(row_by_row(SIDE, 16))
        random.Random(seed).shuffle(places)
        shuffled.append(load_bytes(plan, tuple(places), board))
    assert min(shuffled) > own and sorted(shuffled)[10] > 1.5 * own


def test_rings_in_rows_and_columns_share_no_link_and_two_in_one_row_share_ports() -> None:
    rows, columns = groups(Mesh.parse("a=4,b=4"), "b"), groups(Mesh.parse("a=4,b=4"), "a")
    places = row_by_row(4, 16)
    assert ring_load(rows, places, 2) == ring_load(columns, places, 2) == ring_load([*rows, *columns], places, 2) == 1
    apart = [[0, 2], [1, 3]]  # of each board one device in each ring: both leave by ports of their own
    assert ring_load(apart, row_by_row(4, 4), 2) == 1
    assert ring_load([[0, 4], [1, 5]], row_by_row(8, 8), 4) == 2  # 1 leaves its board of four by the port of 0
    assert ring_load([], places, 2) == 0


def test_two_ranks_on_one_device_are_refused() -> None:
    with pytest.raises(InputError, match=r"1 devices for 2 ranks"):
        ring_load([[0, 1]], [(0, 0), (0, 0)], 2)
