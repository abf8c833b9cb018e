"""`verify` of plans that split an image among ranks: gradients are those of one process, bytes those planned."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from planmaker import cluster_of
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.nn import functional as F
from verified import planned, verified

from autoddl.api import plan
from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.core.graph import Graph, Op
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan
from autoddl.explain.rings import places_text
from autoddl.operators.windows import HALO, ROLL, WINDOWED
from autoddl.planner.question import rebuild
from autoddl.pricing.space import variables
from autoddl.schedule.traffic import PlannedCollective, traffic
from autoddl.schedule.uplink_bytes import _leaving

UNET = str(Path(zoo.__file__).parents[2] / "examples" / "unet.py")
def rows(*names: str) -> tuple[str, ...]:
    """Pins of rows over both axes, for ops of these names."""
    return tuple(f"{name}: {axis}=S(2)" for name in names for axis in ("machine", "pair"))


ROWS = rows("conv2d*", "*pool*")
BLOCKS = ("conv2d*: machine=S(2)", "conv2d*: pair=S(3)", "*norm*: machine=S(2)")


def split_image(file: str, name: str, pins: tuple[str, ...], **sizes: int | str) -> tuple[Plan, Factory, Graph]:
    """A plan, what it is of, and its graph."""
    made = Factory(file, name, dict(sizes))
    return planned(made, pins=pins), made, add_hubs(capture(*made.build()).graph)


def halos(plan: Plan, graph: Graph, rank: int = 0) -> list[PlannedCollective]:
    """The halos that a rank sends in a step."""
    return [one for one in traffic(plan, graph, plan.mesh.coordinate(rank)) if one.kind == HALO]


@pytest.mark.ranks
@parametrize_or_slow("pins,sizes", [(rows("conv2d*", "conv_transpose2d*"), {"B": 1, "side": 42, "up": "transposed"})],
                     [(ROWS, {"B": 1, "side": 42}), (BLOCKS, {"B": 1}), (BLOCKS, {"B": 3, "side": 38}),
                      (ROWS, {"B": 2}), *((rows("conv2d*", "upsample*"), {"B": 1, "side": 42, "up": up})
                                          for up in ("bilinear", "bicubic", "aligned"))])
def test_split_images_compute_what_one_process_does_and_send_what_is_planned(pins: tuple[str, ...],
                                                                             sizes: dict[str, int | str]) -> None:
    plan, made, graph = split_image(zoo.__file__, "segmenter", pins, **sizes)
    assert rebuild(plan).problem.cost(rebuild(plan).choice) == pytest.approx(plan.predicted.seconds, rel=1e-12)
    said = "height over machine and width over pair" if pins is BLOCKS else "height over machine+pair"
    assert places_text(plan).startswith(f"{said} in ")
    if pins is ROWS:  # rank 1 has neighbours on either side, of which rank 2 is in the other machine
        left = [(one.nbytes, *(_leaving(plan, graph, one, (0, 1, 2, 3), 1)(range(*unit)) for unit in ((1, 2), (0, 2))))
                for one in halos(plan, graph, 1)]
        assert all(every == alone >= over for every, alone, over in left) and any(row[1] > row[2] > 0 for row in left)
        assert not any(_leaving(plan, graph, one, (0, 1, 2, 3), 0)(range(2)) for one in halos(plan, graph))
    checked = verified(plan, made)
    least = 8 + 2 * ("up" in sizes)
    assert len(halos(plan, graph)) >= least and checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
def test_the_search_splits_one_large_image() -> None:
    plan, made, graph = split_image(UNET, "unet", (), batch=1, side=128)
    checked = verified(plan, made)
    assert len(halos(plan, graph)) > 10 and checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("pair", ["S(1)", "S(2)"])
def test_windows_of_attention_are_split_and_rolled_over_the_edges_of_pieces(pair: str) -> None:
    """A Swin of one image, whose windows move by half: rows over both axes, and rows and columns."""
    plan, made, graph = split_image(zoo.__file__, "swin", ("roll*: machine=S(1)", f"roll*: pair={pair}"))
    rolls = [one for one in plan.decisions if one.target == ROLL]
    assert len(rolls) == 2 and len(halos(plan, graph)) == 4
    assert rebuild(plan).problem.cost(rebuild(plan).choice) == pytest.approx(plan.predicted.seconds, rel=1e-12)
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


class _Drawn(nn.Module):
    """An image drawn out to twice its sides, which are given, or follow from a factor."""

    def __init__(self, is_sized: bool) -> None:
        super().__init__()
        self.conv, self.is_sized = nn.Conv2d(3, 4, 3, padding=1), is_sized

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        high, wide = x.shape[-2:]
        words: dict[str, Any] = {"size": (2 * high, 2 * wide)} if self.is_sized else {"scale_factor": 2}
        return F.interpolate(x, mode="bilinear", **words).square().mean()


def test_an_image_drawn_to_a_size_takes_what_one_drawn_by_a_factor_does() -> None:
    found = [plan(_Drawn(is_sized), cluster_of("a=4"), torch.randn(1, 3, 10, 10), workers=1,
                  pins=("upsample*: a=S(2)", "conv2d*: a=S(2)")) for is_sized in (True, False)]
    assert found[0].predicted == found[1].predicted
    assert found[0].predicted.seconds == pytest.approx(rebuild(found[0]).problem.cost(rebuild(found[0]).choice))


@pytest.mark.parametrize("batch", [3, 4])
def test_no_image_is_split_where_every_rank_has_one(batch: int) -> None:
    graph = add_hubs(capture(*zoo.segmenter(B=batch, side=16)).graph)
    found = variables(graph, Mesh.parse("x=2,y=2"))
    assert any(choice.inner for one in found for choice in one.choices if isinstance(one.item, Op)
               and one.item.target in WINDOWED) == (batch == 3)
