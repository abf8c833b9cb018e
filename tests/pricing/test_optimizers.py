"""The bytes that an optimizer keeps and moves, and the seconds of its update: a part of the step."""

from dataclasses import replace

import pytest
import tiny
from planmaker import cluster_of

import autoddl
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.layout import Layout, Mesh
from autoddl.cost_models import load_cluster
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.price import Pricing, update_seconds

WEIGHT = Tensor("w", (4096, 4096), "float32", Kind.PARAMETER, "w", (), True)


@pytest.mark.parametrize(("text", "state", "moved"), [
    ("sgd", 0, 12), ("sgd-momentum", 4, 20), ("adamw", 8, 28), ("12 B", 12, 36), ("muon", 4, 20),
    ("adafactor", 8 / 4096, 12 + 16 / 4096)])
def test_bytes_of_an_element(text: str, state: float, moved: float) -> None:
    """Parameter and gradient are read, the parameter is written; state is read and written."""
    device, made = load_cluster("examples/clusters/h100-8x8.yaml").device, optimizer_of(text)
    assert made.copies(WEIGHT) * 4 == state
    reached = device.elementwise_efficiency or device.memory_efficiency
    assert made.seconds(device, WEIGHT, 8e9) == pytest.approx(8e9 * moved / (device.bandwidth * reached))


@pytest.mark.parametrize("text", ["lion", "-3 B", "12 GB/s"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not known; known are sgd"):
        optimizer_of(text)


def test_state_of_what_is_no_matrix() -> None:
    """Muon leaves it to AdamW, Adafactor keeps all of it; of a stack it keeps rows and columns of each matrix."""
    vector, stack = (replace(WEIGHT, shape=shape) for shape in ((4096,), (8, 16, 32)))
    assert [optimizer_of(name).copies(vector) for name in ("muon", "adafactor")] == [2, 1]
    assert optimizer_of("adafactor").copies(stack) == pytest.approx(8 * (16 + 32) / (8 * 16 * 32))
    assert optimizer_of("muon").products(vector) == ()


def test_muon_computes_products() -> None:
    """Five iterations of X X^T, A A and B X, counted by hand for 3 x 5; cut among ranks, and then gathered."""
    matrix = replace(WEIGHT, shape=(5, 3))
    assert sum(flops for flops, _ in optimizer_of("muon").products(matrix)) == 5 * (2 * 45 + 2 * 27 + 2 * 45)
    place = cluster_of("net=2,node=4")
    pricing = Pricing(Graph((WEIGHT,), (), ()), Mesh.parse("net=2,node=4"), place, optimizer="muon")
    plain = replace(pricing, optimizer="sgd-momentum")
    alone, split = (update_seconds(pricing, WEIGHT, Layout.parse(t)) - update_seconds(plain, WEIGHT, Layout.parse(t))
                    for t in ("B B", "S(0) S(1)"))
    flops = sum(flops for flops, _ in optimizer_of("muon").products(WEIGHT))
    reached = place.device.peak("bfloat16") * place.device.efficiency
    assert alone == pytest.approx(flops / reached, rel=1e-3)
    assert split > flops / 8 / reached > 0.999 * split


def test_a_rank_updates_what_it_stores() -> None:
    place = cluster_of("net=2,node=4")
    pricing = Pricing(Graph((WEIGHT,), (), ()), Mesh.parse("net=2,node=4"), place)
    whole, split = (update_seconds(pricing, WEIGHT, Layout.parse(text)) for text in ("B B", "S(0) S(1)"))
    assert whole == pytest.approx(8 * split) and split > 0
    frozen = Tensor("w", (4096, 4096), "float32", Kind.PARAMETER, "w", (), False)
    assert update_seconds(pricing, frozen, Layout.parse("B B")) == 0


def test_the_update_is_a_part_of_the_step() -> None:
    model, place = tiny.tiny(1), cluster_of("net=2,node=2")
    small, large = (autoddl.plan(model, place, mesh="net=2,node=2", optimizer=name) for name in ("sgd", "adamw"))
    assert small.predicted.update > 0 and small.predicted.seconds < large.predicted.seconds
    assert large.bound == pytest.approx(large.predicted.seconds)
