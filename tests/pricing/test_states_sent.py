"""Bytes that ranks send for parameters under the published divisions of weights, gradients and optimizer state."""

from collections import Counter

import pytest
import torch
from planmaker import cluster_of
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample, parted
from autoddl.core import graph as graphs
from autoddl.core.graph import Graph, Op
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Layout, Mesh
from autoddl.core.problem import Solution
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.assemble import assemble
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.choices import Choice
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables
from autoddl.search import solve

WIDE, LAYERS = 64, 3
BYTES = 4 * WIDE * WIDE
"""Of one weight."""
GATHERS = 2 * LAYERS - 1
"""Gathers of a microbatch: backward reads all weights but the first."""


SLOW = """name: slow
device: {name: fast, memory: 1 GB, bandwidth: 1 TB/s, peak: {float32: 1e12, bfloat16: 1e12}}
levels:
  - {name: node, size: 4, bandwidth: 10 MB/s, latency: 1 us}
  - {name: net, size: 2, bandwidth: 1 MB/s, latency: 1 us}
"""


THREE = SLOW.replace("size: 4, bandwidth: 10 MB/s", "size: 2, bandwidth: 10 MB/s").replace(
    "levels:", "levels:\n  - {name: pair, size: 2, bandwidth: 50 MB/s, latency: 1 us}")
"""The node's devices in pairs."""


class Layers(nn.Module):
    """Layers whose weights backward reads, all but the first."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def sent(mesh: str, stored: str, depths: tuple[int, ...], parts: int, wide: int = WIDE,
         dtype: torch.dtype = torch.float32, cluster: Cluster | None = None, codecs: tuple[str, ...] = ()
         ) -> Counter[str]:
    """Bytes by axis of the plan that splits the batch everywhere, with every weight stored so."""
    captured = capture(Layers(wide).to(dtype), parted(Sample((torch.zeros(64, wide, dtype=dtype),)), parts))
    graph, made = add_hubs(captured.graph), Mesh.parse(mesh)
    whole, layout = Layout.broadcast(made), Layout.parse(stored)
    rows = Layout.parse(" ".join(["S(0)"] * len(made.axes)))

    def region(_: Graph, item: Op | graphs.Tensor, choice: Choice) -> bool:
        if isinstance(item, graphs.Tensor):
            return choice.outputs[0] == layout and choice.depths == depths
        return item.target != "aten.linear.default" or (choice.inputs[0] == rows and whole in choice.inputs)

    pricing = Pricing(graph, made, cluster or cluster_of(mesh), microbatches=parts, codecs=codecs)
    space = variables(graph, made, region, parts)
    solution: Solution = solve(problem_of(pricing, space, None))
    volume = assemble(pricing, solution, space).predicted.volume
    loss = Counter({axes: nbytes for axes, nbytes in volume.items() if nbytes < 4 * 8 * parts})
    return Counter({axes: round(nbytes) for axes, nbytes in (Counter(volume) - loss).items()})


@pytest.mark.parametrize("parts", [1, 4])
def test_zero_sends_what_its_paper_says(parts: int) -> None:
    """In units of data parallel: ZeRO-1 as much, ZeRO-2 1/2 for weights and for each microbatch's gradients, ZeRO-3
    1/2 for every gather and reduction of every microbatch."""
    parallel = 2 * 3 / 4 * BYTES * LAYERS
    found = {name: sum(sent("a=4", stored, depths, parts).values()) / parallel
             for name, stored, depths in (("data", "B", (0,)), ("zero-1", "S(0)", (0,)), ("zero-3", "S(0)", (2,)))}
    assert found["data"] == pytest.approx(1, rel=1e-3) and found["zero-1"] == pytest.approx(1, rel=1e-3)
    assert found["zero-3"] == pytest.approx(parts * (GATHERS + LAYERS) / (2 * LAYERS), rel=1e-3)
    if parts > 1:
        second = sum(sent("a=4", "S(0)", (1,), parts).values()) / parallel
        assert second == pytest.approx((1 + parts) / 2, rel=1e-3)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_secondary_copy_keeps_gathers_inside_a_node(parts: int) -> None:
    """ZeRO++'s copy: across nodes weights and gradients of a node's share are sent once a step."""
    found = sent("net=2,node=4", "S(1) S(0)", (0, 2), parts)
    assert found["net"] == pytest.approx(2 * 1 / 2 * BYTES / 4 * LAYERS, rel=1e-3)
    assert found["node"] == pytest.approx(parts * (GATHERS + LAYERS) * 3 / 4 * BYTES, rel=1e-3)


@pytest.mark.parametrize(("links", "mesh", "ends"), [(SLOW, "net=2,node=4", "S(0)"),
                                                     (THREE, "net=2,node=2,pair=2", "S(0) S(0)")])
def test_quantised_weights_and_gradients_take_a_quarter_of_three_models_across_nodes(links: str, mesh: str, ends: str
                                                                                    ) -> None:
    """ZeRO++ (Wang et al. 2023): 3 M across nodes become 0.75 M with int8 weights, a copy in each node, and int4
    gradients in two hops; the scales are in it."""
    wide, place = 512, parse_cluster(links, "slow")
    options = {"wide": wide, "dtype": torch.bfloat16, "cluster": place}
    whole = 2 * wide * wide / 4 / 2  # of a weight, what a rank of four in a node sends to the other node
    depths = (2,) * len(ends.split())
    three = sent(mesh, f"S(1) {ends}", (2, *depths), 1, **options)["net"]  # type: ignore[arg-type]
    assert three == pytest.approx((GATHERS + LAYERS) * whole, rel=1e-3)
    plus = sent(mesh, f"S(1) {ends}", (0, *depths), 1, codecs=("gradients=int4", "weights=int8"),
                **options)["net"]  # type: ignore[arg-type]
    assert plus == pytest.approx(0.75 * LAYERS * whole, rel=0.01)


def test_hybrid_shards_reduce_across_nodes_once_a_step() -> None:
    """HSDP: the sums of a node's microbatches are reduced across nodes once."""
    found = sent("net=2,node=4", "B S(0)", (0, 2), 4)
    assert found["net"] == pytest.approx(2 * 1 / 2 * BYTES / 4 * LAYERS, rel=1e-3)
    assert found["node"] == pytest.approx(4 * (GATHERS + LAYERS) * 3 / 4 * BYTES, rel=1e-3)
